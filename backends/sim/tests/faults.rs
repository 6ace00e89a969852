//! Tests the tester: every fault that strikes a command of the suite is seen.

use mixfleet_hal::fault::{Fault, FaultPlan};
use mixfleet_hal::{
    Cmd, DType, Device, DeviceInfo, Elapsed, Export, Graph, Health, HostMemory, Limits, OpSig, Queue, Result,
    Role, Scalar, Slice, Support, Ticket,
};
use mixfleet_hwtests::reference::ReferenceDevice;
use mixfleet_hwtests::{Level, Options, Outcome, Report, Verdict, run};
use mixfleet_simulated::FaultyDevice;
use std::sync::Arc;
use std::time::Duration;

const OPERATIONS: [&str; 10] =
    ["embed", "rms_norm", "gemm", "rope", "attn_merge", "silu_mul", "add", "argmax", "copy", "fill"];
const ON_POOLS: [&str; 7] =
    ["kv_write", "kv_scatter", "kv_gather", "attn_prefill", "attn_decode", "partition_by_tokens", "order"];

fn quick(names: &[&str]) -> Options {
    Options { only: names.iter().map(|&name| name.to_owned()).collect(), ..Options::new(Level::Quick) }
}

fn under(plan: FaultPlan, names: &[&str]) -> (Report, u64) {
    let device = FaultyDevice::new(Arc::new(ReferenceDevice::default()), plan);
    let report = run(&device, &quick(names), &mut |_| {});
    (report, device.commands())
}

/// Strikes some eight commands spread over the suite, one per run: it must fail each time. `can_matter`
/// tells by its index whether a command's fault can have an effect.
fn every_strike_is_seen(fault: Fault, names: &[&str], can_matter: fn(u64) -> bool) {
    for name in names {
        let (clean, commands) = under(FaultPlan::default(), &[name]);
        assert_eq!(clean.verdict(), Verdict::Pass, "{clean}");
        let targets: Vec<u64> = (0..commands).filter(|&n| can_matter(n)).collect();
        for &n in targets.iter().step_by((targets.len() / 8).max(1)) {
            let (report, _) = under(FaultPlan::exactly(fault, n, n + 1), &[name]);
            assert_eq!(report.verdict(), Verdict::Fail, "{fault:?} at command {n} of {name} was not seen");
        }
    }
}

/// Operations on a pool run as scatter, operation, gather. A bit may flip in a slot of the pool that
/// nobody reads, so the operations that write pools are struck elsewhere.
#[test]
fn a_flipped_bit_is_seen() {
    every_strike_is_seen(Fault::BitFlip, &OPERATIONS, |_| true);
    every_strike_is_seen(Fault::BitFlip, &["attn_prefill", "kv_gather"], |n| n % 3 != 0);
    every_strike_is_seen(Fault::BitFlip, &["kv_write", "kv_scatter"], |n| n % 3 == 2);
}

#[test]
fn a_dropped_command_is_seen() {
    every_strike_is_seen(Fault::Drop, &OPERATIONS, |_| true);
    every_strike_is_seen(Fault::Drop, &ON_POOLS, |_| true);
}

#[test]
fn a_failed_command_is_seen() {
    every_strike_is_seen(Fault::Fail, &OPERATIONS, |_| true);
    every_strike_is_seen(Fault::Fail, &ON_POOLS, |_| true);
}

#[test]
fn after_a_hang_nothing_more_is_asked() {
    let (report, _) = under(FaultPlan::exactly(Fault::Hang, 10, 11), &["add", "copy"]);
    let failed = report.cases.iter().position(|case| matches!(case.outcome, Outcome::Fail { .. })).unwrap();
    assert!(failed > 0, "{report}");
    assert!(report.cases[..failed].iter().all(|case| case.outcome == Outcome::Pass));
    assert!(report.cases[failed + 1..].iter().all(|case| matches!(case.outcome, Outcome::NotRun { .. })));
    assert_eq!(report.verdict(), Verdict::Fail);
}

/// What a confused device does instead.
type Change = fn(OpSig) -> OpSig;

/// A device with a bug in one place.
struct Buggy {
    inner: ReferenceDevice,
    bug: Bug,
}

#[derive(Clone, Copy)]
enum Bug {
    /// Supports nothing.
    Useless,
    /// Reads give the bytes of before the last write to the device.
    StaleRead,
    /// A write spills one byte past its end.
    Spill,
    /// Cannot put anything into a pool.
    NoScatter,
    /// Computes something slightly else.
    Confused(Change),
}

impl Device for Buggy {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }
    fn limits(&self) -> Limits {
        self.inner.limits()
    }
    fn support(&self, sig: &OpSig) -> Support {
        match self.bug {
            Bug::Useless => Support::No,
            Bug::NoScatter if sig.name() == "kv_scatter" => Support::No,
            _ => self.inner.support(sig),
        }
    }
    fn alloc(&self, bytes: u64, role: Role) -> Result<Slice> {
        self.inner.alloc(bytes, role)
    }
    fn import(&self, memory: Arc<dyn HostMemory>) -> Result<Slice> {
        self.inner.import(memory)
    }
    fn export(&self, slice: &Slice) -> Option<Export> {
        self.inner.export(slice)
    }
    fn write(&self, to: &Slice, data: &[u8]) -> Result<()> {
        self.inner.write(to, data)?;
        let end = to.offset + to.bytes;
        if matches!(self.bug, Bug::Spill) && end < to.buffer.size_bytes() {
            let next = Slice { buffer: to.buffer.clone(), offset: end, bytes: 1 };
            self.inner.write(&next, &[0xEE])?;
        }
        Ok(())
    }
    fn read(&self, from: &Slice, data: &mut [u8]) -> Result<()> {
        if matches!(self.bug, Bug::StaleRead) {
            data.fill(0);
            return Ok(());
        }
        self.inner.read(from, data)
    }
    fn queue(&self) -> Result<Box<dyn Queue>> {
        let inner = self.inner.queue()?;
        Ok(match self.bug {
            Bug::Confused(change) => Box::new(ConfusedQueue { inner, change }),
            _ => inner,
        })
    }
    fn health(&self) -> Health {
        self.inner.health()
    }
}

/// Runs another operation on the same operands.
struct ConfusedQueue {
    inner: Box<dyn Queue>,
    change: Change,
}

impl ConfusedQueue {
    fn changed(&self, cmds: &[Cmd]) -> Vec<Cmd> {
        cmds.iter().map(|cmd| Cmd::new((self.change)(*cmd.sig()), cmd.args()).unwrap()).collect()
    }
}

impl Queue for ConfusedQueue {
    fn submit(&mut self, cmds: &[Cmd]) -> Result<Ticket> {
        self.inner.submit(&self.changed(cmds))
    }
    fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<Elapsed> {
        self.inner.wait(ticket, timeout)
    }
    fn record(&mut self, cmds: &[Cmd]) -> Result<Arc<dyn Graph>> {
        self.inner.record(&self.changed(cmds))
    }
    fn replay(&mut self, graph: &Arc<dyn Graph>) -> Result<Ticket> {
        self.inner.replay(graph)
    }
}

fn verdict_of(bug: Bug, names: &[&str]) -> Verdict {
    let report = run(&Buggy { inner: ReferenceDevice::default(), bug }, &quick(names), &mut |_| {});
    report.verdict()
}

#[test]
fn buggy_devices_do_not_pass() {
    assert_eq!(verdict_of(Bug::Useless, &["add"]), Verdict::Incomplete);
    assert_eq!(verdict_of(Bug::StaleRead, &["memory"]), Verdict::Fail);
    assert_eq!(verdict_of(Bug::StaleRead, &["add"]), Verdict::Fail);
    assert_eq!(verdict_of(Bug::Spill, &["memory"]), Verdict::Fail);
    assert_eq!(verdict_of(Bug::NoScatter, &["attn_decode"]), Verdict::Incomplete);
}

/// Mistakes that kernels have had: each changes a result by little, or only at an edge.
#[test]
fn slightly_wrong_arithmetic_does_not_pass() {
    let mistakes: [(&str, Change); 5] = [
        ("attn_prefill", |mut sig| {
            if let OpSig::AttnPrefill { window: Some(window), .. } = &mut sig {
                *window += 1;
            }
            sig
        }),
        ("rms_norm", |mut sig| {
            if let OpSig::RmsNorm { eps, .. } = &mut sig {
                *eps = Scalar(eps.0 * 0.9);
            }
            sig
        }),
        ("gemm", |mut sig| {
            if let OpSig::Gemm { accumulate, .. } = &mut sig {
                *accumulate = false;
            }
            sig
        }),
        ("gemm", |mut sig| {
            if let OpSig::Gemm { weight, .. } = &mut sig
                && *weight == DType::Bf16
            {
                *weight = DType::F16;
            }
            sig
        }),
        ("fill", |mut sig| {
            if let OpSig::Fill { word, .. } = &mut sig {
                *word ^= 1;
            }
            sig
        }),
    ];
    for (name, change) in mistakes {
        assert_eq!(verdict_of(Bug::Confused(change), &[name]), Verdict::Fail, "{name}");
    }
}

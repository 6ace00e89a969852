//! Tests the tester: every fault that strikes a command of the suite is seen.

use mixfleet_hal::fault::{Fault, FaultPlan};
use mixfleet_hal::memory::{Pinned, SharedMemory};
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{
    BufferUsage, Cmd, DType, Device, Elapsed, Graph, OpSig, Queue, Result, Scalar, Slice, Support, Ticket,
};
use mixfleet_hwtests::reference::ReferenceDevice;
use mixfleet_hwtests::{CheckOutcome, ConformanceReport, SuiteLevel, SuiteOptions, SuiteVerdict, run};
use mixfleet_simulated::FaultyDevice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const OPERATIONS: [&str; 10] =
    ["embed", "rms_norm", "gemm", "rope", "attn_merge", "silu_mul", "add", "copy", "fill", "sample"];
const ON_POOLS: [&str; 7] =
    ["kv_write", "kv_scatter", "kv_gather", "attn_prefill", "attn_decode", "partition_by_tokens", "order"];

fn quick(names: &[&str]) -> SuiteOptions {
    SuiteOptions {
        only: names.iter().map(|&name| name.to_owned()).collect(),
        ..SuiteOptions::new(SuiteLevel::Quick)
    }
}

fn under(plan: FaultPlan, names: &[&str]) -> (ConformanceReport, u64) {
    let device = FaultyDevice::new(Arc::new(ReferenceDevice::default()), plan);
    let report = run(&device, &quick(names), &mut |_| {});
    (report, device.commands())
}

/// Strikes some eight commands spread over the suite, one per run: it must fail each time. `can_matter`
/// tells by its index whether a command's fault can have an effect.
fn every_strike_is_seen(fault: Fault, names: &[&str], can_matter: fn(u64) -> bool) {
    for name in names {
        let (clean, commands) = under(FaultPlan::default(), &[name]);
        assert_eq!(clean.verdict(), SuiteVerdict::Pass, "{clean}");
        let targets: Vec<u64> = (0..commands).filter(|&n| can_matter(n)).collect();
        for &n in targets.iter().step_by((targets.len() / 8).max(1)) {
            let (report, _) = under(FaultPlan::exactly(fault, n, n + 1), &[name]);
            assert_eq!(
                report.verdict(),
                SuiteVerdict::Fail,
                "{fault:?} at command {n} of {name} was not seen"
            );
        }
    }
}

/// Operations on a pool run as scatter, operation, gather. A flipped bit may fall on an unused slot of the
/// pool, so the operations that write pools are tested elsewhere.
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

/// Every input of the suite's commands is written once before it is read, so what it held before is the
/// memory's first content, which no case has as an input.
#[test]
fn a_stale_input_is_seen() {
    for name in OPERATIONS.into_iter().chain(ON_POOLS).filter(|name| *name != "fill") {
        let (_, commands) = under(FaultPlan::default(), &[name]);
        // an odd step meets every place in the groups that the suite submits
        let plans = (0..commands).step_by((commands as usize / 8) | 1);
        let (mut strikes, mut sights) = (0, 0);
        for n in plans {
            let plan = FaultPlan::exactly(Fault::Stale, n, n + 1);
            let device = FaultyDevice::new(Arc::new(ReferenceDevice::default()), plan);
            let report = run(&device, &quick(&[name]), &mut |_| {});
            strikes += device.struck();
            let seen = report.verdict() == SuiteVerdict::Fail;
            sights += u64::from(seen);
            // dead slots of a pool may be stale, and from other logits the same tokens may be drawn
            let can_hide = ON_POOLS.contains(&name) && name != "order" || name == "sample";
            assert!(seen || device.struck() == 0 || can_hide, "stale at command {n} of {name} was not seen");
        }
        assert!(strikes > 0 && 2 * sights >= strikes, "{name}: {sights} of {strikes} were seen");
    }
}

fn copied(device: &FaultyDevice, from: &Slice) -> (Vec<u8>, Elapsed) {
    let to = device.alloc(from.bytes, BufferUsage::Activations).unwrap();
    let mut queue = device.queue().unwrap();
    let copy = Cmd::new(OpSig::Copy { bytes: from.bytes }, &[from.clone(), to.clone()]).unwrap();
    let ticket = queue.submit(&[copy]).unwrap();
    let elapsed = queue.wait(ticket, Duration::from_secs(30)).unwrap();
    let mut got = vec![0; from.bytes as usize];
    device.read(&to, &mut got).unwrap();
    (got, elapsed)
}

#[test]
fn a_stale_command_sees_what_was_there_before_and_leaves_its_input_alone() {
    let device =
        FaultyDevice::new(Arc::new(ReferenceDevice::default()), FaultPlan::exactly(Fault::Stale, 1, 2));
    let from = device.alloc(16, BufferUsage::Activations).unwrap();
    device.write(&from, &[1; 16]).unwrap();
    device.write(&from.range(4, 8), &[2; 8]).unwrap();
    assert_eq!(copied(&device, &from).0[..8], [1, 1, 1, 1, 2, 2, 2, 2], "command 0 is not struck");
    assert_eq!(copied(&device, &from).0, [[1; 16]].concat(), "the second write had not landed");
    assert_eq!(device.struck(), 1);
    assert_eq!(copied(&device, &from).0[..8], [1, 1, 1, 1, 2, 2, 2, 2], "what it read is whole again");
}

#[test]
fn transfers_are_struck_where_asked() {
    let plain = || Arc::new(ReferenceDevice::default());
    let flip = |from| FaultPlan::exactly(Fault::BitFlip, from, from + 1);
    for (index, transfers, differs) in [(0, true, true), (1, true, true), (0, false, false)] {
        let device = FaultyDevice::new(plain(), flip(index));
        let device = if transfers { device.striking_transfers() } else { device };
        let slice = device.alloc(64, BufferUsage::Activations).unwrap();
        device.write(&slice, &[7; 64]).unwrap();
        let mut got = [0; 64];
        device.read(&slice, &mut got).unwrap();
        let bits: u32 = got.iter().map(|byte| (byte ^ 7).count_ones()).sum();
        assert_eq!(bits, u32::from(differs), "operation {index}");
        assert_eq!(device.struck(), u64::from(differs));
    }
}

/// A device whose every batch takes a microsecond per command.
struct Metronome(ReferenceDevice);
struct MetronomeQueue {
    inner: Box<dyn Queue>,
    commands: Vec<(Ticket, usize)>,
}

impl Queue for MetronomeQueue {
    fn submit(&mut self, cmds: &[Cmd]) -> Result<Ticket> {
        let ticket = self.inner.submit(cmds)?;
        self.commands.push((ticket, cmds.len()));
        Ok(ticket)
    }
    fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<Elapsed> {
        let clock = self.inner.wait(ticket, timeout)?.clock;
        let commands = self.commands.iter().find(|(t, _)| *t == ticket).unwrap().1;
        Ok(Elapsed { time: Seconds(commands as f64 * 1e-6), clock })
    }
    fn record(&mut self, cmds: &[Cmd]) -> Result<Arc<dyn Graph>> {
        self.inner.record(cmds)
    }
    fn replay(&mut self, graph: &Arc<dyn Graph>) -> Result<Ticket> {
        self.inner.replay(graph)
    }
}

impl Device for Metronome {
    mixfleet_hal::forward_device!(self => self.0;
        info, limits, support, alloc, import, reaches, write, read, pin, memory_free, health);

    fn queue(&self) -> Result<Box<dyn Queue>> {
        Ok(Box::new(MetronomeQueue { inner: self.0.queue()?, commands: Vec::new() }))
    }
}

#[test]
fn a_slow_command_lengthens_its_batch_and_no_other() {
    let plan = FaultPlan::exactly(Fault::Slow { times: 5 }, 3, 4);
    let device = FaultyDevice::new(Arc::new(Metronome(ReferenceDevice::default())), plan);
    let slice = device.alloc(64, BufferUsage::Activations).unwrap();
    let fill = Cmd::new(OpSig::Fill { bytes: 64, word: 3 }, std::slice::from_ref(&slice)).unwrap();
    let mut queue = device.queue().unwrap();
    let batch = [fill.clone(), fill];
    let tickets: Vec<Ticket> = (0..3).map(|_| queue.submit(&batch).unwrap()).collect();
    let times: Vec<f64> = tickets
        .iter()
        .map(|&ticket| (queue.wait(ticket, Duration::from_secs(30)).unwrap().time.0 * 1e6).round())
        .collect();
    assert_eq!(times, [2.0, 6.0, 2.0]);
    assert_eq!((device.commands(), device.struck()), (6, 1));
}

#[test]
fn after_a_hang_nothing_more_is_asked() {
    let (report, _) = under(FaultPlan::exactly(Fault::Hang, 10, 11), &["add", "copy"]);
    let failed =
        report.cases.iter().position(|case| matches!(case.outcome, CheckOutcome::Timeout { .. })).unwrap();
    assert!(failed > 0, "{report}");
    assert!(report.cases[..failed].iter().all(|case| case.outcome == CheckOutcome::Pass));
    assert!(
        report.cases[failed + 1..].iter().all(|case| matches!(case.outcome, CheckOutcome::NotRun { .. }))
    );
    assert_eq!(report.verdict(), SuiteVerdict::Fail);
}

/// What a confused device does instead.
type Change = fn(OpSig) -> OpSig;

/// A device with a bug in one place.
struct Buggy {
    inner: ReferenceDevice,
    bug: Bug,
    pinned: AtomicBool,
}

#[derive(Clone, Copy)]
enum Bug {
    /// Supports nothing.
    Useless,
    /// Reads give the bytes of before the last write to the device.
    StaleRead,
    /// A write spills one byte past its end.
    Spill,
    /// Reads into pinned memory leave the last byte.
    ShortPinned,
    /// Cannot put anything into a pool.
    NoScatter,
    /// Computes something slightly else.
    Confused(Change),
}

impl Device for Buggy {
    mixfleet_hal::forward_device!(self => self.inner; info, limits, alloc, import, reaches, memory_free, health);

    fn support(&self, sig: &OpSig) -> Support {
        match self.bug {
            Bug::Useless => Support::No,
            Bug::NoScatter if sig.name() == "kv_scatter" => Support::No,
            _ => self.inner.support(sig),
        }
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
        let kept = data.last().copied();
        self.inner.read(from, data)?;
        if let (Bug::ShortPinned, true) = (self.bug, self.pinned.load(Ordering::Relaxed))
            && let (Some(last), Some(kept)) = (data.last_mut(), kept)
        {
            *last = kept;
        }
        Ok(())
    }
    fn pin(&self, memory: Arc<dyn SharedMemory>) -> Result<Option<Pinned>> {
        self.pinned.store(true, Ordering::Relaxed);
        Ok(Some(Box::new(memory)))
    }
    fn queue(&self) -> Result<Box<dyn Queue>> {
        let inner = self.inner.queue()?;
        Ok(match self.bug {
            Bug::Confused(change) => Box::new(ConfusedQueue { inner, change }),
            _ => inner,
        })
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

fn verdict_of(bug: Bug, names: &[&str]) -> SuiteVerdict {
    let device = Buggy { inner: ReferenceDevice::default(), bug, pinned: AtomicBool::default() };
    let report = run(&device, &quick(names), &mut |_| {});
    report.verdict()
}

#[test]
fn buggy_devices_do_not_pass() {
    assert_eq!(verdict_of(Bug::Useless, &["add"]), SuiteVerdict::Incomplete);
    assert_eq!(verdict_of(Bug::StaleRead, &["memory"]), SuiteVerdict::Fail);
    assert_eq!(verdict_of(Bug::StaleRead, &["add"]), SuiteVerdict::Fail);
    assert_eq!(verdict_of(Bug::Spill, &["memory"]), SuiteVerdict::Fail);
    assert_eq!(verdict_of(Bug::ShortPinned, &["memory"]), SuiteVerdict::Fail);
    assert_eq!(verdict_of(Bug::NoScatter, &["memory"]), SuiteVerdict::Pass);
    assert_eq!(verdict_of(Bug::NoScatter, &["attn_decode"]), SuiteVerdict::Incomplete);
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
        assert_eq!(verdict_of(Bug::Confused(change), &[name]), SuiteVerdict::Fail, "{name}");
    }
}

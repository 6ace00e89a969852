//! Places one operation's operands on a device between guards, runs it, and reads the results.

use crate::scaled::{decoded, encoded};
use mixfleet_hal::cast::{low_u8, to_i64, to_u32, to_usize};
use mixfleet_hal::op::Extent;
use mixfleet_hal::{
    BufferUsage, Cmd, Device, Error, ErrorKind, OpSig, Operand, OperandAccess, Queue, Slice, Support,
};
use std::ops::Range;
use std::time::Duration;

/// Minimum size of the guards before and after every operand.
const GUARD_BYTES: u64 = 256;

/// The reason for a missing result.
#[derive(Debug)]
pub(crate) enum BenchError {
    /// The device does not claim support.
    Unsupported,
    /// The case could not be tried.
    NotRun(String),
    /// The case was tried and went wrong.
    Failed(String),
    /// Results were out of their bounds: how, and the largest error as a share of its bound.
    OutOfBounds(String, f64),
    /// The batch never completed; the device cannot be used any further.
    Hung(String),
    /// The device is gone.
    Lost(String),
}

impl From<Error> for BenchError {
    fn from(error: Error) -> Self {
        match error.kind {
            ErrorKind::OutOfMemory => BenchError::NotRun(format!("out of memory: {error}")),
            ErrorKind::Timeout => BenchError::Hung(error.to_string()),
            ErrorKind::DeviceLost => BenchError::Lost(error.to_string()),
            kind => BenchError::Failed(format!("{kind:?}: {error}")),
        }
    }
}

/// How commands are submitted to the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SubmitMode {
    /// `submit`.
    Submit,
    /// `record`, then `replay`; `submit` where recording is unsupported.
    Replay,
}

/// The operands of a finished operation.
#[derive(Debug)]
pub(crate) struct FinishedOperands {
    /// Decoded operands, in order; paged KV is `[slots, kv_heads, head_dim]`.
    pub(crate) operands: Vec<Vec<f64>>,
    /// Raw bytes of the written operands (paged KV as gathered), for bitwise comparison.
    pub(crate) written: Vec<Vec<u8>>,
}

/// A device under test.
pub(crate) struct ConformanceBench<'a> {
    pub(crate) device: &'a dyn Device,
    pub(crate) timeout: Duration,
}

/// An operand in the middle of a larger allocation whose ends hold a known pattern.
struct Guarded {
    whole: Slice,
    inner: Slice,
    image: Vec<u8>,
}

fn pattern(i: u64) -> u8 {
    low_u8(i.wrapping_mul(31) ^ 0xA5)
}

impl Guarded {
    fn range(&self) -> std::ops::Range<usize> {
        let start = to_usize(self.inner.offset - self.whole.offset);
        start..start + to_usize(self.inner.bytes)
    }

    /// Returns the operand's bytes after checking the guards.
    fn read(&self, device: &dyn Device, operand: &Operand) -> Result<Vec<u8>, BenchError> {
        let mut now = vec![0; self.image.len()];
        device.read(&self.whole, &mut now)?;
        let inner = self.range();
        let touched = (0..now.len()).find(|i| !inner.contains(i) && now[*i] != self.image[*i]);
        if let Some(i) = touched {
            let distance = to_i64(i) - to_i64(inner.start);
            let message = format!(
                "wrote outside operand '{}': byte {distance} of its {}",
                operand.name, self.inner.bytes
            );
            return Err(BenchError::Failed(message));
        }
        if operand.access == OperandAccess::Read
            && let Extent::Exactly(_) = operand.extent
            && now[inner.clone()] != self.image[inner.clone()]
        {
            return Err(BenchError::Failed(format!(
                "changed operand '{}', which is only read",
                operand.name
            )));
        }
        Ok(now[inner].to_vec())
    }
}

/// Returns the slots of logical KV that hold a token, which are those without NaN.
fn live_slots(pool: &[f64], width: usize) -> Vec<f64> {
    (0..pool.len() / width).filter(|slot| !pool[slot * width].is_nan()).map(|slot| slot as f64).collect()
}

/// Everything needed to access the contents of an operation's paged KV.
struct PagedOperands {
    /// Indices of the operands `k_pool` and `v_pool`, if there is one.
    at: Range<usize>,
    /// Number of values per slot.
    width: usize,
    live: Vec<f64>,
    scatter: OpSig,
    gather: OpSig,
}

impl PagedOperands {
    fn of(sig: &OpSig, operands: &[Vec<f64>]) -> Option<PagedOperands> {
        let at = sig.operands().iter().position(|operand| operand.name == "k_pool")?;
        let (kv, wire) = sig.kv().map(|kv| (kv, kv.dtype))?;
        let width = (kv.kv_heads * kv.head_dim) as usize;
        let at = at..at + kv.pools() as usize;
        let live = live_slots(&operands[at.start], width);
        let tokens = to_u32(live.len());
        let (scatter, gather) = (OpSig::KvScatter { tokens, wire, kv }, OpSig::KvGather { tokens, wire, kv });
        Some(PagedOperands { at, width, live, scatter, gather })
    }

    /// Returns the live slots' contents in the wire layout.
    fn wire(&self, operands: &[Vec<f64>]) -> Vec<f64> {
        let mut wire = Vec::with_capacity(self.live.len() * self.at.len() * self.width);
        for &slot in &self.live {
            for pool in self.at.clone() {
                wire.extend_from_slice(&operands[pool][to_usize(slot) * self.width..][..self.width]);
            }
        }
        wire
    }

    /// The operand that a gather writes.
    fn gathered(&self) -> Operand {
        self.gather.operands()[1 + self.at.len()]
    }

    /// Writes gathered contents back into the logical KV.
    fn unwire(&self, wire: &[f64], operands: &mut [Vec<f64>]) {
        for (token, &slot) in wire.chunks(self.at.len() * self.width).zip(&self.live) {
            let at = to_usize(slot) * self.width;
            for (row, pool) in token.chunks(self.width).zip(self.at.clone()) {
                operands[pool][at..][..self.width].copy_from_slice(row);
            }
        }
    }
}

impl ConformanceBench<'_> {
    /// Runs `sig` on `operands` (decoded, paged KV logical) and returns the resulting operands.
    pub(crate) fn execute(
        &self,
        sig: &OpSig,
        operands: &[Vec<f64>],
        way: SubmitMode,
    ) -> Result<FinishedOperands, BenchError> {
        if self.device.support(sig) == Support::No {
            return Err(BenchError::Unsupported);
        }
        let kinds = sig.operands();
        let mut placed = Vec::with_capacity(kinds.len());
        for (operand, values) in kinds.iter().zip(operands) {
            placed.push(self.place(operand, &encoded(sig, operand, values), placed.len() as u64)?);
        }
        let args: Vec<Slice> = placed.iter().map(|p| p.inner.clone()).collect();
        let mut cmds = vec![Cmd::new(*sig, &args)?];
        let pools = PagedOperands::of(sig, operands).filter(|pools| !pools.live.is_empty());
        let mut gathered = None;
        if let Some(pools) = &pools {
            gathered = Some(self.surround(pools, operands, &args, &mut cmds)?);
        }
        self.finish(&cmds, way)?;

        let (mut after, mut written) = (operands.to_vec(), Vec::new());
        for (i, operand) in kinds.iter().enumerate() {
            let bytes = placed[i].read(self.device, operand)?;
            if let (Extent::Exactly(_), true) = (operand.extent, operand.access != OperandAccess::Read) {
                after[i] = decoded(sig, operand, &bytes);
                written.push(bytes);
            }
        }
        if let (Some(pools), Some(gathered)) = (&pools, &gathered) {
            let operand = pools.gathered();
            let bytes = gathered.read(self.device, &operand)?;
            pools.unwire(&decoded(&pools.gather, &operand, &bytes), &mut after);
            written.push(bytes);
        }
        Ok(FinishedOperands { operands: after, written })
    }

    /// Inserts a scatter of the KV contents before the commands and a gather after them, and returns where
    /// the gather writes.
    fn surround(
        &self,
        pools: &PagedOperands,
        operands: &[Vec<f64>],
        args: &[Slice],
        cmds: &mut Vec<Cmd>,
    ) -> Result<Guarded, BenchError> {
        for sig in [&pools.scatter, &pools.gather] {
            if self.device.support(sig) == Support::No {
                return Err(BenchError::NotRun(format!("needs {}, which the device lacks", sig.name())));
            }
        }
        let [wire, slots, ..] = &pools.scatter.operands()[..] else { unreachable!("scatter has 3 operands") };
        let own = &args[pools.at.clone()];
        let wire = self.place(wire, &encoded(&pools.scatter, wire, &pools.wire(operands)), 1)?;
        let slots = self.place(slots, &encoded(&pools.scatter, slots, &pools.live), 2)?;
        let gathered = self.place(&pools.gathered(), &vec![0xFF; to_usize(wire.inner.bytes)], 0)?;
        let scatter = [&[wire.inner, slots.inner.clone()], own].concat();
        let gather = [&[slots.inner], own, std::slice::from_ref(&gathered.inner)].concat();
        cmds.insert(0, Cmd::new(pools.scatter, &scatter)?);
        cmds.push(Cmd::new(pools.gather, &gather)?);
        Ok(gathered)
    }

    /// Allocates an operand between guards, at an offset that varies between operands, and writes `bytes`
    /// into it. Operands that are only written are filled with a NaN pattern that no result has. So is paged
    /// KV, whose contents only operations may access.
    fn place(&self, operand: &Operand, bytes: &[u8], shift: u64) -> Result<Guarded, BenchError> {
        let limits = self.device.limits();
        // alignments and element sizes are powers of two, so the larger is a multiple of the other
        let align = limits.alignment_bytes.max(operand.dtype.size_bytes());
        let before = GUARD_BYTES.next_multiple_of(align) + shift % 3 * align;
        let total = before + bytes.len() as u64 + GUARD_BYTES;
        if total > limits.allocation_bytes_max {
            return Err(BenchError::NotRun(format!("needs an allocation of {total} bytes")));
        }
        let role =
            if let Extent::PagesOf(_) = operand.extent { BufferUsage::Kv } else { BufferUsage::Activations };
        let whole = self.device.alloc(total, role)?;
        let mut image: Vec<u8> = (0..total).map(pattern).collect();
        let inner = &mut image[to_usize(before)..][..bytes.len()];
        match (operand.extent, operand.access) {
            (Extent::PagesOf(_), _) | (_, OperandAccess::Write) => inner.fill(0xFF),
            _ => inner.copy_from_slice(bytes),
        }
        self.device.write(&whole, &image)?;
        Ok(Guarded { inner: whole.range(before, bytes.len() as u64), whole, image })
    }

    /// Runs a batch to completion on a new queue.
    pub(crate) fn finish(&self, cmds: &[Cmd], way: SubmitMode) -> Result<(), BenchError> {
        let mut queue = self.device.queue()?;
        let ticket = match way {
            SubmitMode::Submit => queue.submit(cmds),
            SubmitMode::Replay => match queue.record(cmds) {
                Ok(graph) => queue.replay(&graph),
                Err(error) if error.kind == ErrorKind::Unsupported => queue.submit(cmds),
                Err(error) => Err(error),
            },
        };
        let elapsed = ticket.and_then(|ticket| queue.wait(ticket, self.timeout));
        match elapsed {
            Ok(elapsed) if elapsed.time.0.is_finite() && elapsed.time.0 >= 0.0 => Ok(()),
            Ok(elapsed) => Err(BenchError::Failed(format!("a batch took {} s", elapsed.time.0))),
            Err(error) => Err(abandon(queue, cmds, error)),
        }
    }
}

/// Abandons a failed queue. A hanging one is leaked with its operands, since dropping them might block.
fn abandon(queue: Box<dyn Queue>, cmds: &[Cmd], error: Error) -> BenchError {
    if error.kind == ErrorKind::Timeout {
        std::mem::forget((queue, cmds.to_vec()));
    }
    error.into()
}

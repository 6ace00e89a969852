//! Attention of one query per sequence over a token range, un-normalised.
//!
//! A range is cut into chunks of [`CHUNK`] tokens at fixed positions, and a unit (sequence, KV head) is the
//! sum of its chunks in order, whichever worker computed them. The result is therefore bitwise independent of
//! the number of workers and of the rest of the batch, and long sequences spread over all workers.

use super::{ROWS_MAX, Tile, TileScratch, attend, scalar_exp};
use crate::kernels::kv::PagedKv;
use crate::kernels::simd::{Simd, SimdTask};
use crate::kernels::{KernelWorker, OperandSpan, round_up};
use mixfleet_hal::{DType, Error, Result};
use std::ops::Range;

/// Tokens per chunk: 128 KiB of keys and values for a bf16 head of 64, over 5 us of work.
const CHUNK: usize = 512;

/// Shape and operands of an `AttnDecode`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decode {
    pub(crate) q: OperandSpan,
    pub(crate) range: OperandSpan,
    pub(crate) pages: OperandSpan,
    pub(crate) pools: PagedKv,
    pub(crate) acc: OperandSpan,
    pub(crate) stat: OperandSpan,
    pub(crate) sequences: usize,
    pub(crate) heads: usize,
    pub(crate) pages_max: usize,
    pub(crate) x: DType,
}

/// Destination of the results of some query heads: `[heads, value_dim]` and `[heads, 2]`.
#[derive(Clone, Copy)]
struct HeadOutputs {
    acc: *mut f32,
    stat: *mut f32,
}

impl Decode {
    fn units(&self) -> usize {
        self.sequences * self.pools.kv_heads
    }

    /// Returns the number of chunks in the longest possible range.
    fn chunks_max(&self) -> usize {
        (self.pages_max * self.pools.page_tokens).div_ceil(CHUNK).max(1)
    }

    /// Whether chunks, in two phases, are distributed over `workers` instead of whole units.
    pub(crate) fn is_split(&self, workers: usize) -> bool {
        self.units() < 4 * workers && self.chunks_max() > 1 && workers > 1
    }

    /// Returns the words of shared scratch for the chunks of a split run.
    pub(crate) fn shared_words(&self) -> usize {
        self.chunks_max() * self.sequences * self.heads * (self.pools.value_dim + 2)
    }

    /// Returns the range of a sequence after checking it.
    fn range(&self, sequence: usize) -> Result<Range<usize>> {
        // SAFETY: range holds two elements per sequence.
        let (first, end) = unsafe { (self.range.u32(2 * sequence), self.range.u32(2 * sequence + 1)) };
        let (first, end) = (first as usize, end as usize);
        let room = self.pages_max * self.pools.page_tokens;
        if first < end && end > room {
            let message = format!(
                "attn_decode: range {first}..{end} of sequence {sequence}, but its pages hold {room} tokens"
            );
            return Err(Error::invalid(message));
        }
        Ok(first..end.max(first))
    }

    /// Returns the destination of one unit's final result.
    fn target(&self, sequence: usize, kv_head: usize) -> HeadOutputs {
        let head = sequence * self.heads + kv_head * (self.heads / self.pools.kv_heads);
        HeadOutputs {
            acc: self.acc.at(DType::F32, head * self.pools.value_dim).cast(),
            stat: self.stat.at(DType::F32, head * 2).cast(),
        }
    }

    /// Returns the place of one chunk in shared scratch.
    fn parked(&self, shared: *mut f32, unit: usize, chunk: usize) -> HeadOutputs {
        let group = self.heads / self.pools.kv_heads;
        let acc =
            shared.wrapping_add((unit * self.chunks_max() + chunk) * group * (self.pools.value_dim + 2));
        HeadOutputs { acc, stat: acc.wrapping_add(group * self.pools.value_dim) }
    }

    /// Processes whole units, which workers claim one by one.
    pub(crate) fn run(&self, worker: &mut KernelWorker<'_>) -> Result<()> {
        let group = self.heads / self.pools.kv_heads;
        let words = TileScratch::words(&self.pools);
        let at = worker.scratch.words(words + group * (self.pools.value_dim + 2));
        let spare = at.wrapping_add(words);
        let spare = HeadOutputs { acc: spare, stat: spare.wrapping_add(group * self.pools.value_dim) };
        loop {
            let unit = worker.claim();
            if unit >= self.units() {
                return Ok(());
            }
            let (sequence, kv_head) = (unit / self.pools.kv_heads, unit % self.pools.kv_heads);
            let range = self.range(sequence)?;
            let target = self.target(sequence, kv_head);
            for chunk in 0..chunks(&range) {
                let to = if chunk == 0 { target } else { spare };
                self.chunk(worker, at, sequence, kv_head, cut(&range, chunk), to)?;
                if chunk > 0 {
                    self.add(worker, target, spare);
                }
            }
        }
    }

    /// Phase 1 of a split run: processes all chunks of all units, which workers claim one by one.
    pub(crate) fn run_chunks(&self, worker: &mut KernelWorker<'_>) -> Result<()> {
        let shared = worker.shared;
        let at = worker.scratch.words(TileScratch::words(&self.pools));
        loop {
            let index = worker.claim();
            let (unit, chunk) = (index / self.chunks_max(), index % self.chunks_max());
            if unit >= self.units() {
                return Ok(());
            }
            let (sequence, kv_head) = (unit / self.pools.kv_heads, unit % self.pools.kv_heads);
            let range = self.range(sequence)?;
            if chunk < chunks(&range) {
                let to = self.parked(shared, unit, chunk);
                self.chunk(worker, at, sequence, kv_head, cut(&range, chunk), to)?;
            }
        }
    }

    /// Phase 2 of a split run: sums each unit's chunks in order.
    pub(crate) fn run_sums(&self, worker: &mut KernelWorker<'_>) -> Result<()> {
        let shared = worker.shared;
        let group = self.heads / self.pools.kv_heads;
        for unit in worker.share(self.units()) {
            let (sequence, kv_head) = (unit / self.pools.kv_heads, unit % self.pools.kv_heads);
            let target = self.target(sequence, kv_head);
            for chunk in 0..chunks(&self.range(sequence)?) {
                let from = self.parked(shared, unit, chunk);
                if chunk > 0 {
                    self.add(worker, target, from);
                    continue;
                }
                // SAFETY: both hold the group's heads; this worker alone has the unit.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        from.acc.cast::<u8>(),
                        target.acc.cast(),
                        group * self.pools.value_dim * 4,
                    );
                    std::ptr::copy_nonoverlapping(from.stat.cast::<u8>(), target.stat.cast(), group * 2 * 4);
                }
            }
        }
        Ok(())
    }

    /// Computes the attention of one unit over `range` into `to`.
    fn chunk(
        &self,
        worker: &KernelWorker<'_>,
        at: *mut f32,
        sequence: usize,
        kv_head: usize,
        range: Range<usize>,
        to: HeadOutputs,
    ) -> Result<()> {
        let (group, dim) = (self.heads / self.pools.kv_heads, self.pools.value_dim);
        let rows_max = if worker.isa.lanes() == 16 { 12 } else { 6 };
        let row_bytes = self.pages_max * 4;
        let table =
            OperandSpan { start: self.pages.start.wrapping_add(sequence * row_bytes), bytes: row_bytes };
        for first in (0..group).step_by(rows_max) {
            let rows = (group - first).min(rows_max);
            let ranges = [(range.start, range.end); ROWS_MAX];
            let mut queries = [std::ptr::null(); ROWS_MAX];
            for (i, query) in queries[..rows].iter_mut().enumerate() {
                let head = sequence * self.heads + kv_head * group + first + i;
                *query = self.q.at(self.x, head * self.pools.head_dim).cast_const();
            }
            let tile = Tile {
                pools: &self.pools,
                table,
                kv_head,
                ranges: &ranges[..rows],
                x: self.x,
                queries: &queries[..rows],
                prefetch: true,
                round_weights: false,
            };
            let to =
                HeadOutputs { acc: to.acc.wrapping_add(first * dim), stat: to.stat.wrapping_add(first * 2) };
            let room = TileScratch::new(at, &self.pools);
            // SAFETY: the heads are inside q and the target; the table is the sequence's row. Copied as
            // bytes because operands may be unaligned.
            unsafe {
                let stats = attend(worker.isa, &tile, room)?;
                for row in 0..rows {
                    let from = room.out.add(row * round_up(dim, worker.isa.lanes())).cast::<u8>();
                    std::ptr::copy_nonoverlapping(from, to.acc.wrapping_add(row * dim).cast(), dim * 4);
                    let stat = to.stat.wrapping_add(2 * row);
                    stat.write_unaligned(stats.max[row]);
                    stat.wrapping_add(1).write_unaligned(stats.sum[row]);
                }
            }
        }
        Ok(())
    }

    /// Adds one partial result of a unit to another.
    fn add(&self, worker: &KernelWorker<'_>, to: HeadOutputs, from: HeadOutputs) {
        let (group, dim) = (self.heads / self.pools.kv_heads, self.pools.value_dim);
        // SAFETY: both hold the group's heads, and this worker alone has the unit.
        unsafe { worker.isa.run(AddPartial { group, dim, to, from }) };
    }
}

/// Returns the number of chunks in a range; an empty range has one empty chunk.
fn chunks(range: &Range<usize>) -> usize {
    range.len().div_ceil(CHUNK).max(1)
}

/// Returns the tokens of chunk `chunk` of a range.
fn cut(range: &Range<usize>, chunk: usize) -> Range<usize> {
    let from = range.start + chunk * CHUNK;
    from..range.end.min(from + CHUNK)
}

/// `to += from` for partial results of the same heads.
struct AddPartial {
    group: usize,
    dim: usize,
    to: HeadOutputs,
    from: HeadOutputs,
}

impl SimdTask for AddPartial {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for row in 0..self.group {
            // SAFETY: the maker's promise: `group` rows on both sides.
            unsafe {
                let (a, b) = (self.to.stat.wrapping_add(2 * row), self.from.stat.wrapping_add(2 * row));
                let (max_a, max_b) = (a.read_unaligned(), b.read_unaligned());
                let max = max_a.max(max_b);
                let base = if max == f32::NEG_INFINITY { 0.0 } else { max };
                let (scale_a, scale_b) = (scalar_exp::<S>(max_a - base), scalar_exp::<S>(max_b - base));
                let (sum_a, sum_b) = (a.wrapping_add(1), b.wrapping_add(1));
                let sum = sum_a.read_unaligned() * scale_a + sum_b.read_unaligned() * scale_b;
                a.write_unaligned(max);
                sum_a.write_unaligned(sum);
                for d in 0..self.dim {
                    let to = self.to.acc.wrapping_add(row * self.dim + d);
                    let from = self.from.acc.wrapping_add(row * self.dim + d);
                    to.write_unaligned(to.read_unaligned() * scale_a + from.read_unaligned() * scale_b);
                }
            }
        }
    }
}

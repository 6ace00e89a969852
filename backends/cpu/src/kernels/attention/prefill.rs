//! Causal attention of many new tokens per sequence.

use super::{ROWS_MAX, SoftmaxStats, Tile, TileScratch, attend, scalar_exp};
use crate::isa::Isa;
use crate::kernels::convert::{store, store_part};
use crate::kernels::kv::PagedKv;
use crate::kernels::simd::{Simd, SimdTask};
use crate::kernels::{KernelWorker, OperandSpan, round_up};
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::{DType, Error, Result};

/// Shape and operands of an `AttnPrefill`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PrefillKernel {
    pub(crate) q: OperandSpan,
    pub(crate) query_start: OperandSpan,
    pub(crate) context: OperandSpan,
    pub(crate) pages: OperandSpan,
    pub(crate) pools: PagedKv,
    /// The sink of each head.
    pub(crate) sinks: Option<OperandSpan>,
    pub(crate) out: OperandSpan,
    pub(crate) tokens: usize,
    pub(crate) sequences: usize,
    pub(crate) heads: usize,
    pub(crate) pages_max: usize,
    pub(crate) window: Option<usize>,
    pub(crate) x: DType,
}

/// One checked sequence of the step.
#[derive(Clone, Copy, Debug)]
struct PrefillSequence {
    index: usize,
    first_row: usize,
    queries: usize,
    context: usize,
    /// Number of tiles per KV head.
    tiles: usize,
}

impl PrefillKernel {
    /// Returns the number of heads that share a KV head.
    fn group(&self) -> usize {
        self.heads / self.pools.kv_heads
    }

    /// Reads and checks the sequences.
    fn sequences(&self, tile_rows: usize) -> Result<Vec<PrefillSequence>> {
        let mut sequences = Vec::with_capacity(self.sequences);
        let mut expected = 0;
        for index in 0..self.sequences {
            // SAFETY: query_start holds sequences + 1 elements, context one per sequence.
            let (start, end, context) = unsafe {
                (self.query_start.u32(index), self.query_start.u32(index + 1), self.context.u32(index))
            };
            let (start, end, context) = (start as usize, end as usize, context as usize);
            if start != expected || end < start || end > self.tokens {
                let message = format!(
                    "attn_prefill: query_start of sequence {index} is {start}..{end}, expected to begin at {expected} and to end at {} at most",
                    self.tokens
                );
                return Err(Error::invalid(message));
            }
            if context < end - start {
                let message = format!(
                    "attn_prefill: sequence {index} has {} queries but a context of {context}",
                    end - start
                );
                return Err(Error::invalid(message));
            }
            let tiles = ((end - start) * self.group()).div_ceil(tile_rows);
            sequences.push(PrefillSequence { index, first_row: start, queries: end - start, context, tiles });
            expected = end;
        }
        if expected != self.tokens {
            let message = format!("attn_prefill: query_start ends at {expected}, expected {}", self.tokens);
            return Err(Error::invalid(message));
        }
        Ok(sequences)
    }

    /// Runs this worker's share; tiles are claimed one by one, those with the most keys first.
    pub(crate) fn run(&self, worker: &mut KernelWorker<'_>) -> Result<()> {
        let tile_rows = if worker.isa.lanes() == 16 { 12 } else { 6 };
        let sequences = self.sequences(tile_rows)?;
        let total: usize = sequences.iter().map(|s| s.tiles * self.pools.kv_heads).sum();
        let room = TileScratch::new(worker.scratch.words(TileScratch::words(&self.pools)), &self.pools);
        loop {
            let mut index = worker.claim();
            if index >= total {
                return Ok(());
            }
            for sequence in &sequences {
                let units = sequence.tiles * self.pools.kv_heads;
                if index < units {
                    let (kv_head, tile) =
                        (index / sequence.tiles, sequence.tiles - 1 - index % sequence.tiles);
                    self.tile(worker.isa, sequence, kv_head, tile * tile_rows, tile_rows, room)?;
                    break;
                }
                index -= units;
            }
        }
    }

    /// Rows `first ..` of one sequence and KV head; row `r` is query `r / group`, head `r % group`.
    fn tile(
        &self,
        isa: Isa,
        sequence: &PrefillSequence,
        kv_head: usize,
        first: usize,
        rows: usize,
        room: TileScratch,
    ) -> Result<()> {
        let group = self.group();
        let rows = rows.min(sequence.queries * group - first);
        let mut ranges = [(0, 0); ROWS_MAX];
        let mut queries = [std::ptr::null(); ROWS_MAX];
        let mut outputs = [std::ptr::null_mut(); ROWS_MAX];
        let mut sinks = [f32::NEG_INFINITY; ROWS_MAX];
        for i in 0..rows {
            let (query, head) = ((first + i) / group, kv_head * group + (first + i) % group);
            let end = sequence.context - sequence.queries + query + 1;
            ranges[i] = (self.window.map_or(0, |w| end.saturating_sub(w)), end);
            let row = (sequence.first_row + query) * self.heads + head;
            queries[i] = self.q.at(self.x, row * self.pools.head_dim).cast_const();
            outputs[i] = self.out.at(self.x, row * self.pools.value_dim);
            if let Some(all) = self.sinks {
                // SAFETY: sinks hold an element for each head.
                sinks[i] = unsafe { all.at(DType::F32, head).cast::<f32>().read_unaligned() };
            }
        }
        let row_bytes = self.pages_max * 4;
        let table = OperandSpan {
            start: self.pages.start.wrapping_add(sequence.index * row_bytes),
            bytes: row_bytes,
        };
        let tile = Tile {
            pools: &self.pools,
            table,
            kv_head,
            ranges: &ranges[..rows],
            x: self.x,
            queries: &queries[..rows],
            prefetch: false,
            round_weights: true,
        };
        // SAFETY: rows and sequences are inside their operands, as `sequences` checked.
        unsafe {
            let stats = attend(isa, &tile, room)?;
            let (dim, dtype) = (self.pools.value_dim, self.x);
            isa.run(Normalise { stats: &stats, sinks: &sinks, room, dim, dtype, outputs: &outputs[..rows] });
        }
        Ok(())
    }
}

/// Writes a tile's rows, divided by their sums.
struct Normalise<'a> {
    stats: &'a SoftmaxStats,
    sinks: &'a [f32],
    room: TileScratch,
    dim: usize,
    dtype: DType,
    outputs: &'a [*mut u8],
}

impl SimdTask for Normalise<'_> {
    type Out = ();
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let (dim, dtype, size) = (self.dim, self.dtype, to_usize(self.dtype.size_bytes()));
        for (row, &out) in self.outputs.iter().enumerate() {
            let (sum, max, sink) = (self.stats.sum[row], self.stats.max[row], self.sinks[row]);
            // SAFETY: the maker's promise: outputs hold `dim` elements, the room's rows whole vectors.
            unsafe {
                let inverse = S::splat(match (sum, sink) {
                    (0.0, _) => 0.0,
                    (_, f32::NEG_INFINITY) => 1.0 / sum,
                    _ => {
                        let keep = scalar_exp::<S>(max - max.max(sink));
                        keep / (sum * keep + scalar_exp::<S>(sink - max.max(sink)))
                    }
                });
                let from = self.room.out.add(row * round_up(dim, S::LANES));
                let mut d = 0;
                while d < dim {
                    let v = S::mul(S::load(from.add(d)), inverse);
                    if dim - d >= S::LANES {
                        store::<S>(dtype, out.add(d * size), v);
                    } else {
                        store_part::<S>(dtype, out.add(d * size), v, dim - d);
                    }
                    d += S::LANES;
                }
            }
        }
    }
}

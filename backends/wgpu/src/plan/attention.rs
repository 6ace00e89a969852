//! Plans attention: the shape of a workgroup's work, and the recombination of parts.

use super::kv::{KvPageRange, both};
use super::{MergeShape, Merged, Planner, TensorView};
use crate::kernels::{Kernel, ShaderFile};
use mixfleet_hal::cast::{to_f32, to_u32};
use mixfleet_hal::{DType, KvShape, OpSig, Result, Scalar};

/// Threads per workgroup.
const GROUP: u32 = 128;
/// Keys per block in decode. This is also the part of a sequence that a workgroup processes, unless that
/// makes more parts than scratch memory can bind. It is fixed so that a sequence's result does not depend on
/// the rest of the batch.
const DECODE_KEYS: u32 = 256;
/// Query rows of a workgroup without tiles; more heads per KV head take several workgroups.
const DECODE_ROWS_MAX: u32 = 8;
/// Elements of the queries, and of the keys, that a prefill workgroup keeps in shared memory: 8 KiB each.
const TILE_ELEMENTS: u32 = 2048;
const PREFILL_ROWS_MAX: u32 = 16;
/// Rows below which a tile keeps too few threads busy: prefill loads keys as decode does then.
const TILE_ROWS_MIN: u32 = 8;

/// Returns the largest power of two up to `n`.
fn power_below(n: u32) -> u32 {
    1 << n.max(1).ilog2()
}

/// The head configuration common to both kinds of attention.
struct WgpuHeads {
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    /// Elements of a value.
    value_dim: u32,
    page_tokens: u32,
    pages_max: u32,
    window: u32,
    /// What scores are multiplied by.
    scale: f32,
    /// Soft cap of scores.
    cap: Option<Scalar>,
    /// Elements of a page.
    page: u64,
}

/// A bound run of queries.
struct Queries<'a> {
    /// q, query_start or range, context (decode: range again), pages.
    inputs: [&'a TensorView; 4],
    sequences: u32,
    /// Index of the first query, and one past the last.
    range: (u32, u32),
    /// Number of workgroups per KV head and part, and of parts per sequence.
    blocks: u64,
    parts: u32,
    part_keys: u32,
}

impl WgpuHeads {
    fn new(heads: u32, kv: KvShape, pages_max: u32, window: u32, cap: Option<Scalar>) -> Self {
        let KvShape { kv_heads, head_dim, page_tokens, .. } = kv;
        WgpuHeads {
            heads,
            kv_heads,
            head_dim,
            value_dim: kv.value_dim(),
            page_tokens,
            pages_max,
            window,
            scale: to_f32(kv.scale()),
            cap,
            page: u64::from(page_tokens) * kv.row(),
        }
    }

    fn ratio(&self) -> u32 {
        self.heads / self.kv_heads
    }

    /// Returns the number of threads that share a key's value: one for each pair of dimensions.
    fn lanes(&self) -> u32 {
        self.value_dim.div_ceil(2).next_power_of_two().min(GROUP)
    }

    /// Returns the number of elements in a query's heads.
    fn row(&self) -> u64 {
        u64::from(self.heads) * u64::from(self.head_dim)
    }

    /// Returns the number of elements in what a query's heads attended to.
    fn value_row(&self) -> u64 {
        u64::from(self.heads) * u64::from(self.value_dim)
    }

    /// Returns rows and keys of prefill's tiles, or none where heads are too long for them.
    fn tile(&self) -> Option<(u32, u32)> {
        let side = power_below(TILE_ELEMENTS / self.head_dim.max(1)).min(PREFILL_ROWS_MAX);
        (side >= TILE_ROWS_MIN).then_some((side, side))
    }

    fn kernel(&self, prefill: bool, rows: u32, keys: u32, x: DType, pool: &TensorView) -> Kernel {
        let is_aligned = self.head_dim.is_multiple_of(8) && pool.window.offset.is_multiple_of(16);
        let wide = is_aligned && !pool.dtype.is_scaled();
        Kernel::new(ShaderFile::Attention, "attention", GROUP)
            .flag("PREFILL", prefill)
            .flag("TILED", prefill && self.tile().is_some())
            .flag("WIDE", wide)
            .flag("CAPPED", self.cap.is_some())
            .number("HEAD_DIM", self.head_dim)
            .number("VALUE_DIM", self.value_dim)
            .number("ROWS", rows)
            .number("KEYS", keys)
            .number("LANES", self.lanes())
            .dtype("D0", x)
            .dtype("D4", pool.dtype)
            .dtype("D5", pool.dtype)
    }

    /// Returns `Shape` of attention.wgsl.
    fn shape(&self, queries: &Queries<'_>, part: &KvPageRange, number: u32) -> [u32; 17] {
        [
            queries.sequences,
            self.heads,
            self.kv_heads,
            self.page_tokens,
            self.pages_max,
            part.first,
            part.end,
            to_u32(queries.blocks),
            self.window,
            queries.range.0,
            queries.range.1,
            queries.parts,
            number * queries.parts,
            self.scale.to_bits(),
            queries.part_keys,
            GROUP / self.lanes(),
            self.cap.map_or(0, |cap| cap.0.to_bits()),
        ]
    }
}

impl Planner {
    pub(super) fn attention(&mut self, sig: &OpSig, operands: &[TensorView]) -> Result<()> {
        match (*sig, operands) {
            (
                OpSig::AttnPrefill { heads, pages_max, window, cap, kv, .. },
                [q, query_start, context, pages, rest @ .., out],
            ) => {
                let (pools, sinks) = rest.split_at_checked(kv.pools() as usize).unwrap_or((rest, &[]));
                let heads = WgpuHeads::new(heads, kv, pages_max, window.unwrap_or(u32::MAX), cap);
                self.prefill(
                    sig,
                    &heads,
                    [q, query_start, context, pages],
                    both(sig, pools)?,
                    sinks.first(),
                    out,
                )
            }
            (
                OpSig::AttnDecode { heads, pages_max, cap, kv, .. },
                [q, range, pages, pools @ .., acc, stat],
            ) => {
                let heads = WgpuHeads::new(heads, kv, pages_max, u32::MAX, cap);
                self.decode(sig, &heads, [q, range, pages], both(sig, pools)?, [acc, stat])
            }
            _ => Ok(()),
        }
    }

    fn prefill(
        &mut self,
        sig: &OpSig,
        heads: &WgpuHeads,
        [q, query_start, context, pages]: [&TensorView; 4],
        pools: [&TensorView; 2],
        sinks: Option<&TensorView>,
        out: &TensorView,
    ) -> Result<()> {
        let OpSig::AttnPrefill { tokens, sequences, .. } = *sig else { return Ok(()) };
        let (parts, _) = self.parts(sig, pools, heads.page)?;
        let (rows, keys) = heads.tile().unwrap_or((DECODE_ROWS_MAX, DECODE_KEYS));
        // sinks join where parts are merged
        let whole = parts.len() == 1 && sinks.is_none();
        // each of several parts leaves f32 results for all queries
        let row_bytes =
            if whole { heads.row() * q.dtype.size_bytes() } else { heads.row() * 4 * parts.len() as u64 };
        for (first, count) in self.runs(sig, tokens.into(), row_bytes)? {
            self.scratch_used = 0;
            let q = q.part(first * heads.row(), count * heads.row());
            let out = out.part(first * heads.value_row(), count * heads.value_row());
            let lines = count * u64::from(heads.heads);
            let blocks = (count * u64::from(heads.ratio())).div_ceil(rows.into()) + u64::from(sequences);
            let queries = Queries {
                inputs: [&q, query_start, context, pages],
                sequences,
                range: (to_u32(first), to_u32(first + count)),
                blocks,
                parts: 1,
                part_keys: u32::MAX,
            };
            let partials = parts.len() as u64 * lines;
            let partial = (!whole)
                .then(|| [partials * u64::from(heads.value_dim), partials * 2].map(|n| self.scratch(n)));
            // a normalising kernel never writes its second output, which must be bound anyway
            let target = partial.as_ref().map_or([&out, &out], |[acc, stat]| [acc, stat]);
            for (number, part) in parts.iter().enumerate() {
                let kernel = heads.kernel(true, rows, keys, q.dtype, &part.pools[0]);
                let kernel = kernel.flag("NORMALISED", whole).dtype("OUT", target[0].dtype);
                self.attend(heads, &kernel, &queries, part, to_u32(number), target);
            }
            if let Some([acc, stat]) = &partial {
                let (parts, rows) = (to_u32(parts.len()), to_u32(lines));
                let merged = MergeShape { parts, rows, dim: heads.value_dim };
                let how = sinks.map_or(Merged::Normalised, |sinks| Merged::Joined(sinks, heads.heads));
                self.merge(sig, merged, [acc, stat], &out, how)?;
            }
        }
        Ok(())
    }

    fn decode(
        &mut self,
        sig: &OpSig,
        heads: &WgpuHeads,
        [q, range, pages]: [&TensorView; 3],
        pools: [&TensorView; 2],
        [acc, stat]: [&TensorView; 2],
    ) -> Result<()> {
        let OpSig::AttnDecode { sequences, .. } = *sig else { return Ok(()) };
        let (parts, _) = self.parts(sig, pools, heads.page)?;
        let keys_max = u64::from(heads.pages_max) * u64::from(heads.page_tokens);
        let cuts_of = |keys: u32| keys_max.div_ceil(keys.into()).max(1);
        let partials_of = |keys: u32| cuts_of(keys) * parts.len() as u64;
        let mut part_keys = DECODE_KEYS;
        while cuts_of(part_keys) > 1 && heads.row() * 4 * partials_of(part_keys) > self.window_bytes() {
            part_keys = part_keys.saturating_mul(2);
        }
        let (cuts, partials) = (cuts_of(part_keys), partials_of(part_keys));
        let rows = heads.ratio().next_power_of_two().min(DECODE_ROWS_MAX);
        let row_bytes = (heads.row() * 4 * partials).max(u64::from(heads.pages_max) * 4);
        for (first, count) in self.runs(sig, sequences.into(), row_bytes)? {
            self.scratch_used = 0;
            let of_row = |operand: &TensorView, row: u64| operand.part(first * row, count * row);
            let (q, acc) = (of_row(q, heads.row()), of_row(acc, heads.value_row()));
            let (range, stat) = (of_row(range, 2), of_row(stat, 2 * u64::from(heads.heads)));
            let pages = of_row(pages, heads.pages_max.into());
            let lines = count * u64::from(heads.heads);
            let queries = Queries {
                inputs: [&q, &range, &range, &pages],
                sequences: to_u32(count),
                range: (0, to_u32(count)),
                blocks: count * u64::from(heads.ratio().div_ceil(rows)),
                parts: to_u32(cuts),
                part_keys,
            };
            let whole = partials == 1;
            let partial = (!whole).then(|| {
                [partials * lines * u64::from(heads.value_dim), partials * lines * 2].map(|n| self.scratch(n))
            });
            let target = partial.as_ref().map_or([&acc, &stat], |[acc, stat]| [acc, stat]);
            for (number, part) in parts.iter().enumerate() {
                let kernel = heads.kernel(false, rows, DECODE_KEYS, q.dtype, &part.pools[0]);
                let kernel = kernel.flag("NORMALISED", false).dtype("OUT", DType::F32);
                self.attend(heads, &kernel, &queries, part, to_u32(number), target);
            }
            if let Some([acc_parts, stat_parts]) = &partial {
                let (parts, rows) = (to_u32(partials), to_u32(lines));
                let merged = MergeShape { parts, rows, dim: heads.value_dim };
                self.merge(sig, merged, [acc_parts, stat_parts], &acc, Merged::Part(&stat))?;
            }
        }
        Ok(())
    }

    /// Adds one dispatch: these queries over a part of the KV.
    fn attend(
        &mut self,
        heads: &WgpuHeads,
        kernel: &Kernel,
        queries: &Queries<'_>,
        part: &KvPageRange,
        number: u32,
        outputs: [&TensorView; 2],
    ) {
        let [k_pool, v_pool] = &part.pools;
        let [q, starts, context, pages] = queries.inputs;
        let groups = queries.blocks * u64::from(heads.kv_heads) * u64::from(queries.parts);
        let shape = heads.shape(queries, part, number);
        self.dispatch(kernel, &[q, starts, context, pages, k_pool, v_pool], &outputs, &shape, groups);
    }
}

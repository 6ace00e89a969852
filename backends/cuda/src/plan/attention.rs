//! Selects the attention kernel, and how decode attention is split into parts.

use super::latent::LatentBlock;
use super::{DeviceRange, KernelArg, PlanStep, PlanTarget, PlannedOp, VEC_BYTES, apart, arguments, launch};
use crate::kernels::{KernelProgram, KernelSource, Macro};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{DType, KvShape, LatentKv, OpSig, Result, Scalar, Support};

/// Threads per block: both decode kernels and `attn_prefill_mma` have 4 warps.
const THREADS: u32 = 128;
/// Threads per block in the portable `attn_prefill`.
const PORTABLE_THREADS: u32 = 64;
/// Blocks resident on a multiprocessor, as limited by the registers of `attn_decode_mma`.
const RESIDENT: u64 = 3;
/// Granularity of a part in keys: a multiple of 64 (4 warps of 16 keys). Smaller parts cost more in partial
/// results and block starts than they gain once all multiprocessors are busy.
const CHUNK_STEP: u64 = 64;
const CHUNK_FULL: u64 = 512;
/// Where the sinks are among the arguments of prefill: behind the pools and the number of their pages.
const SINKS_AT: usize = 7;
/// Query heads per block.
const HEADS_MAX: u32 = 8;
/// Maximum number of blocks that may be idle, at about a nanosecond each.
const IDLE_BLOCKS_MAX: u64 = 1024;

fn aligned(operands: &[DeviceRange]) -> bool {
    operands.iter().all(|place| place.address.is_multiple_of(VEC_BYTES))
}

fn on_tensor_cores(x: DType, kv: DType, target: &PlanTarget) -> bool {
    target.capability >= 80 && x == kv && matches!(kv, DType::Bf16 | DType::F16)
}

/// Whether `attn_decode_mma` takes heads like these.
fn decode_heads(kv: &KvShape) -> bool {
    kv.latent.is_none() && matches!(kv.head_dim, 64 | 128)
}

/// Whether `attn_prefill_mma` takes heads of this length: whole steps of 16, whose sums fit the registers.
fn prefill_heads(head_dim: u32) -> bool {
    head_dim.is_multiple_of(16) && (64..=256).contains(&head_dim)
}

/// A block of `attn_prefill_mma`.
struct PrefillBlock {
    /// Keys per tile: fewer where heads are long, so that two blocks fit a multiprocessor of Hopper, and one
    /// those with 99 KiB of shared memory for a block.
    tile: u32,
    rows: u32,
    /// Dynamic shared memory: the queries, and two tiles each of keys and values.
    shared_bytes: u32,
}

impl PrefillBlock {
    fn new(row_tiles: u32, head_dim: u32) -> PrefillBlock {
        let (rows, tile) = (64 * row_tiles, if head_dim > 128 { 32 } else { 64 });
        PrefillBlock { tile, rows, shared_bytes: (rows + 4 * tile) * head_dim.next_multiple_of(64) * 2 }
    }

    /// Whether it fits beside a block's static shared memory.
    fn fits(&self, target: &PlanTarget) -> bool {
        self.shared_bytes + 1024 <= target.shared_bytes_max
    }
}

/// Threads per block in `attn_prefill_wgmma`: two warpgroups that compute, and one that copies.
const WGMMA_THREADS: u32 = 384;
/// Rows that a block of `attn_prefill_wgmma` takes at a time, and keys per tile.
const WGMMA_ROWS: u32 = 128;
/// Buffers each of keys and values in `attn_prefill_wgmma`.
const WGMMA_STAGES: u32 = 3;

/// Dynamic shared memory of a block of `attn_prefill_wgmma`: queries, keys, values, from a multiple of 1024.
fn wgmma_shared_bytes(head_dim: u32) -> u32 {
    (WGMMA_ROWS + 2 * WGMMA_STAGES * WGMMA_ROWS) * head_dim * 2 + 1024
}

/// Whether `attn_prefill_wgmma` takes heads of this length, of whose rows there are `tiles` tiles: fewer
/// would leave multiprocessors idle that the smaller blocks of `attn_prefill_mma` use.
fn on_warpgroups(head_dim: u32, tiles: u64, target: &PlanTarget) -> bool {
    let fits = wgmma_shared_bytes(head_dim) + 1024 <= target.shared_bytes_max;
    target.wgmma && matches!(head_dim, 64 | 128) && fits && 2 * tiles >= u64::from(target.multiprocessors)
}

/// An aligned operand list, for queries before operands exist.
const ALIGNED: &[DeviceRange] = &[];

pub(super) fn prefill_support(sig: &OpSig, target: &PlanTarget) -> Support {
    if slow_prefill(sig, ALIGNED, target).is_none() { Support::Native } else { Support::Emulated }
}

/// Says why prefill attention is slow, if it is.
pub(super) fn slow_prefill(
    sig: &OpSig,
    operands: &[DeviceRange],
    target: &PlanTarget,
) -> Option<&'static str> {
    let OpSig::AttnPrefill { heads, cap, x, kv: shape, .. } = *sig else { return None };
    let KvShape { head_dim, dtype: kv, latent, .. } = shape;
    match () {
        () if cap.is_some() => Some("tensor cores take no soft cap of scores"),
        () if latent.is_some() => match LatentBlock::of(heads, x, &shape, operands, target) {
            Some(_) => None,
            None => Some(
                "tensor cores need latents of queries' 16-bit dtype, in vectors, and their shared memory",
            ),
        },
        () if !on_tensor_cores(x, kv, target) => Some("tensor cores need queries and KV of one 16-bit dtype"),
        () if !prefill_heads(head_dim) => Some("tensor cores need heads of 64, 80, .. 256 elements"),
        () if !PrefillBlock::new(1, head_dim).fits(target) => Some("a block has too little shared memory"),
        () if !aligned(operands) => Some("an operand is not aligned to 16 bytes"),
        () => None,
    }
}

/// A launch of a kernel over latents in blocks on tensor cores.
fn latent_launch(
    kernel: &'static str,
    block: LatentBlock,
    kv: &KvShape,
    common: &[(&'static str, &dyn Macro)],
    grid: [u64; 3],
    args: Vec<KernelArg>,
) -> Result<PlanStep> {
    let (value_dim, heads) = (kv.value_dim(), block.heads());
    let mut macros = common.to_vec();
    macros.extend(latent_macros(kv, &value_dim));
    let of_block: [(&'static str, &dyn Macro); 2] = [("HEADS", &heads), ("ROW_TILES", &block.row_tiles)];
    macros.extend(of_block);
    let mut step = launch(KernelProgram::new(KernelSource::LatentMma, &macros), kernel, grid, THREADS, args)?;
    if let PlanStep::Launch(launch) = &mut step {
        launch.shared_bytes = block.shared_bytes;
    }
    Ok(step)
}

/// What tells a kernel that scores have a soft cap, if they do.
fn cap_macro(cap: Option<&Scalar>) -> Option<(&'static str, &dyn Macro)> {
    cap.map(|cap| ("SOFT_CAP", cap as &dyn Macro))
}

/// What tells a kernel that keys contain their values, if they do.
fn latent_macros<'a>(kv: &'a KvShape, value_dim: &'a u32) -> Vec<(&'static str, &'a dyn Macro)> {
    let latent = kv.latent.as_ref();
    let macros = |latent: &'a LatentKv| -> [(&'static str, &'a dyn Macro); 2] {
        [("VALUE_DIM", value_dim), ("SCALE", &latent.scale)]
    };
    latent.map(macros).into_iter().flatten().collect()
}

pub(super) fn prefill(
    sig: &OpSig,
    operands: &[DeviceRange],
    mut args: Vec<KernelArg>,
    target: &PlanTarget,
) -> Result<PlanStep> {
    let OpSig::AttnPrefill { tokens, sequences, heads, pages_max, window, sinks, cap, x, kv: shape, .. } =
        *sig
    else {
        unreachable!("called for attn_prefill")
    };
    let KvShape { kv_heads, head_dim, page_tokens, dtype: kv, .. } = shape;
    if !sinks {
        args.insert(SINKS_AT, args[0]); // never read
    }
    args.extend([sequences, heads, kv_heads, page_tokens, pages_max].map(KernelArg::U32));
    args.extend([tokens, window.unwrap_or(u32::MAX), sinks.into()].map(KernelArg::U32));
    let macros: [(&'static str, &dyn Macro); 3] = [("X", &x), ("KV", &kv), ("HEAD_DIM", &head_dim)];
    let of_latents = LatentBlock::of(heads, x, &shape, operands, target);
    if let Some(block) = of_latents.filter(|_| cap.is_none()) {
        let grid = [heads.div_ceil(block.heads()).into(), tokens.into(), 1];
        return latent_launch("attn_prefill_latent", block, &shape, &macros, grid, args);
    }
    let rows = u64::from(tokens) * u64::from(heads / kv_heads.max(1));
    // smaller blocks if larger ones would leave multiprocessors idle, or their sums the registers
    let large = PrefillBlock::new(2, head_dim);
    let blocks = rows.div_ceil(large.rows.into()) * u64::from(kv_heads);
    let fills = blocks >= 2 * u64::from(target.multiprocessors) && head_dim <= 128 && large.fits(target);
    let (row_tiles, block) = if fills { (2u32, large) } else { (1, PrefillBlock::new(1, head_dim)) };
    // a sequence's last block may be short, so each has one more at most
    let tiles =
        |rows_of: u32| if rows == 0 { 0 } else { rows.div_ceil(rows_of.into()) + u64::from(sequences) };
    let tensor_cores = slow_prefill(sig, operands, target).is_none();
    let full_tiles = rows / u64::from(WGMMA_ROWS) * u64::from(kv_heads);
    if tensor_cores && on_warpgroups(head_dim, full_tiles.max(1), target) {
        let stages: (&'static str, &dyn Macro) = ("STAGES", &WGMMA_STAGES);
        let program = KernelProgram::new(KernelSource::PrefillWgmma, &[&macros[..], &[stages]].concat());
        // a block for each multiprocessor, which goes through the tiles
        let blocks = (tiles(WGMMA_ROWS) * u64::from(kv_heads)).min(target.multiprocessors.into());
        let mut step = launch(program, "attn_prefill_wgmma", [blocks, 1, 1], WGMMA_THREADS, args)?;
        if let PlanStep::Launch(launch) = &mut step {
            launch.shared_bytes = wgmma_shared_bytes(head_dim);
        }
        return Ok(step);
    }
    if tensor_cores {
        let program = KernelProgram::new(
            KernelSource::PrefillMma,
            &[&macros[..], &[("ROW_TILES", &row_tiles), ("TILE", &block.tile)]].concat(),
        );
        let mut step =
            launch(program, "attn_prefill_mma", [tiles(block.rows), kv_heads.into(), 1], THREADS, args)?;
        if let PlanStep::Launch(launch) = &mut step {
            launch.shared_bytes = block.shared_bytes;
        }
        return Ok(step);
    }
    let value_dim = shape.value_dim();
    let mut macros = [&macros[..], &[("GROUP", &PORTABLE_THREADS)]].concat();
    macros.extend(latent_macros(&shape, &value_dim));
    macros.extend(cap_macro(cap.as_ref()));
    let program = KernelProgram::new(KernelSource::Attention, &macros);
    launch(program, "attn_prefill", [heads.into(), tokens.into(), 1], PORTABLE_THREADS, args)
}

/// How many parts a sequence may have, and keys of a part.
///
/// Enough parts for one wave of blocks over the device; from `CHUNK_FULL` keys a part on, up to eight waves,
/// so that the last wave costs little. Sizes are those that the host expects; a kernel makes parts longer if
/// a sequence has more keys than `parts` of them hold.
fn cut(sig: &OpSig, blocks_per_part: u64, target: &PlanTarget) -> (u64, u64) {
    let OpSig::AttnDecode { sequences, kv_tokens, heads, pages_max, kv, .. } = *sig else {
        unreachable!("called for attn_decode")
    };
    let wave = u64::from(target.multiprocessors) * RESIDENT;
    let fill = (kv_tokens * blocks_per_part).div_ceil(wave.max(1));
    let wanted = if fill < CHUNK_FULL { fill } else { (fill / 8).max(CHUNK_FULL) };
    let chunk = wanted.max(1).next_multiple_of(CHUNK_STEP);
    let longest = u64::from(pages_max) * u64::from(kv.page_tokens);
    let average = kv_tokens.div_ceil(u64::from(sequences).max(1)).div_ceil(chunk);
    let rows = u64::from(sequences) * blocks_per_part;
    let part_bytes = u64::from(sequences) * u64::from(heads) * (u64::from(kv.value_dim()) + 2) * 4;
    let parts = longest
        .div_ceil(chunk)
        .min((4 * average).max(IDLE_BLOCKS_MAX / rows.max(1)))
        .min(target.scratch.bytes / part_bytes.max(1));
    (parts.max(1), chunk)
}

/// Returns the elements of a value per lane in `attn_decode`: the fewest with which 32 lanes span it, or else
/// a divisor, also of the keys that it may be in.
fn lane_elements(head_dim: u32, value_dim: u32) -> u32 {
    let divides = |width: &u32| head_dim.is_multiple_of(*width) && value_dim.is_multiple_of(*width);
    let spans = [1, 2, 4].into_iter().filter(divides).find(|width| value_dim / width <= 32);
    spans.or_else(|| [4, 2, 1].into_iter().find(divides)).unwrap_or(1)
}

/// Plans decode attention in several parts with its merge, if `merge` is that and there are several.
pub(super) fn decode_merged(
    decode_op: &PlannedOp,
    merge_op: &PlannedOp,
    target: &PlanTarget,
) -> Result<Option<Vec<PlanStep>>> {
    let ((sig, operands), (merge, merged)) = (decode_op, merge_op);
    let OpSig::AttnDecode { sequences, heads, kv, .. } = *sig else { return Ok(None) };
    let OpSig::AttnMerge { parts: 1, rows, head_dim: merged_dim, sinks: 0, out } = *merge else {
        return Ok(None);
    };
    let whole = u64::from(rows) == u64::from(sequences) * u64::from(heads) && merged_dim == kv.value_dim();
    let of_it = operands.ends_with(&merged[..2]);
    if !whole || !of_it || !operands.iter().all(|place| apart(place, &merged[2])) {
        return Ok(None);
    }
    let steps = decode(sig, operands, arguments(sig, operands), Some((out, merged[2])), target)?;
    Ok((steps.len() == 2).then_some(steps))
}

/// Query heads per block of `attn_decode`, as bounded by the registers for their sums, and by what shared
/// memory holds of each. That is the query, sums of each warp, weights of 32 keys, maxima and sums of
/// weights.
fn portable_heads_max(kv: &KvShape) -> u32 {
    const WARPS: u32 = THREADS / 32;
    const SHARED_BYTES: u32 = (48 << 10) - WARPS * 32 * 4;
    let head_bytes = 4 * (kv.head_dim + WARPS * (kv.value_dim() + 32 + 2));
    HEADS_MAX.min(2048 / kv.value_dim()).min(SHARED_BYTES / head_bytes).max(1)
}

/// Plans decode attention, with its merge into `merged` where there are several parts.
pub(super) fn decode(
    sig: &OpSig,
    operands: &[DeviceRange],
    mut args: Vec<KernelArg>,
    merged: Option<(DType, DeviceRange)>,
    target: &PlanTarget,
) -> Result<Vec<PlanStep>> {
    let OpSig::AttnDecode { sequences, heads, pages_max, cap, x, kv: shape, .. } = *sig else {
        unreachable!("called for attn_decode")
    };
    let KvShape { kv_heads, head_dim, page_tokens, dtype: kv, .. } = shape;
    let value_dim = shape.value_dim();
    let ratio = heads / kv_heads.max(1);
    let exact = on_tensor_cores(x, kv, target);
    let split = on_tensor_cores(kv, kv, target) && x == DType::F32 && kv == DType::Bf16;
    let tensor_cores = (exact || split) && decode_heads(&shape) && aligned(operands) && cap.is_none();
    let of_latents = LatentBlock::of(heads, x, &shape, operands, target).filter(|_| cap.is_none());
    // equal shares of the heads that share a KV head
    let heads_max = match of_latents {
        Some(block) => block.heads(),
        None if tensor_cores => HEADS_MAX,
        None => portable_heads_max(&shape),
    };
    let groups = ratio.div_ceil(heads_max).max(1);
    let block_heads = ratio.div_ceil(groups).max(1);
    let blocks_per_part = u64::from(kv_heads) * u64::from(groups);
    let (parts, chunk) = cut(sig, blocks_per_part, target);
    let (parts, chunk) = (to_u32(parts), u32::try_from(chunk).unwrap_or(u32::MAX / 2).next_multiple_of(64));
    let part_acc = target.scratch.address;
    let part_stat =
        part_acc + u64::from(sequences) * u64::from(heads) * u64::from(parts) * u64::from(value_dim) * 4;

    let last = operands.len() - 1;
    let [range, acc, stat] = [1, last - 1, last].map(|i| KernelArg::Address(operands[i].address));
    let scratch = [KernelArg::Address(part_acc), KernelArg::Address(part_stat)];
    args.extend([sequences, heads, kv_heads, page_tokens, pages_max].map(KernelArg::U32));
    args.extend(scratch);
    args.extend([parts, chunk].map(KernelArg::U32));
    let macros: [(&'static str, &dyn Macro); 4] =
        [("X", &x), ("KV", &kv), ("HEAD_DIM", &head_dim), ("HEADS", &block_heads)];
    let grid = [parts.into(), blocks_per_part, sequences.into()];
    let first = if let Some(block) = of_latents {
        latent_launch("attn_decode_latent", block, &shape, &macros[..3], grid, args)?
    } else if tensor_cores {
        let split = if split { 3u32 } else { 1 };
        let program =
            KernelProgram::new(KernelSource::DecodeMma, &[&macros[..], &[("SPLIT", &split)]].concat());
        launch(program, "attn_decode_mma", grid, THREADS, args)?
    } else {
        // codes and scales of an odd number of tokens end at half a vector of codes
        let pages_aligned = !kv.is_scaled() || page_tokens.is_multiple_of(2);
        let vectors = head_dim.is_multiple_of(8) && aligned(operands) && pages_aligned;
        let key_elements = if vectors { 8u32 } else { 1 };
        let value_elements = if aligned(operands) { lane_elements(head_dim, value_dim) } else { 1 };
        let mut macros = [&macros[..], &[("KW", &key_elements), ("VD", &value_elements)]].concat();
        macros.extend(latent_macros(&shape, &value_dim));
        macros.extend(cap_macro(cap.as_ref()));
        launch(KernelProgram::new(KernelSource::Decode, &macros), "attn_decode", grid, THREADS, args)?
    };
    let mut steps = vec![first];
    if parts > 1 {
        let [acc_part, stat_part] = scratch;
        let mut args = vec![range, acc, stat, acc_part, stat_part];
        args.extend(merged.map(|(_, place)| KernelArg::Address(place.address)));
        args.extend([heads, page_tokens, pages_max, parts, chunk].map(KernelArg::U32));
        let mut macros: Vec<(&'static str, &dyn Macro)> =
            vec![("X", &DType::F32), ("KV", &DType::F32), ("HEAD_DIM", &value_dim), ("HEADS", &1u32)];
        macros.extend(merged.as_ref().map(|(out, _)| ("OUT", out as &dyn Macro)));
        let program = KernelProgram::new(KernelSource::Combine, &macros);
        let rows = u64::from(sequences) * u64::from(heads);
        steps.push(launch(program, "attn_combine", [rows, 1, 1], THREADS, args)?);
    }
    Ok(steps)
}

#[cfg(test)]
mod tests {
    use super::super::tests::HOPPER;
    use super::*;

    const TARGET: PlanTarget = PlanTarget { scratch: DeviceRange { address: 0, bytes: 64 << 20 }, ..HOPPER };

    fn sig(sequences: u32, context: u32) -> OpSig {
        OpSig::AttnDecode {
            sequences,
            kv_tokens: u64::from(sequences) * u64::from(context),
            heads: 32,
            pages_max: context.div_ceil(16),
            x: DType::Bf16,
            kv: KvShape { kv_heads: 8, head_dim: 128, page_tokens: 16, dtype: DType::Bf16, latent: None },
            cap: None,
        }
    }

    fn prefill_sig(kv: KvShape, x: DType) -> OpSig {
        let (tokens, sequences, pairs, kv_tokens, heads, pages_max) = (2048, 1, 0, 2048, 8, 128);
        OpSig::AttnPrefill {
            tokens,
            sequences,
            pairs,
            kv_tokens,
            heads,
            pages_max,
            window: None,
            sinks: false,
            x,
            kv,
            cap: None,
        }
    }

    #[test]
    fn parts_cover_every_context_and_fill_the_device() {
        for (sequences, context) in [(1, 1), (1, 1000), (1, 131_072), (8, 4096), (64, 2048), (256, 32_768)] {
            let sig = sig(sequences, context);
            let (parts, chunk) = cut(&sig, 8, &TARGET);
            assert!(parts * chunk >= u64::from(context), "{sequences} x {context}: {parts} of {chunk}");
            let bytes = parts * u64::from(sequences) * 32 * 130 * 4;
            assert!(bytes <= TARGET.scratch.bytes, "{sequences} x {context}: {bytes} bytes of scratch");
            let blocks = parts * 8 * u64::from(sequences);
            let work = u64::from(sequences) * u64::from(context) * 8;
            if work > 132 * 64 * RESIDENT {
                assert!(blocks >= 132, "{sequences} x {context}: {blocks} blocks");
            }
        }
    }

    #[test]
    fn prefill_is_on_tensor_cores_for_heads_of_64_to_256_elements() {
        let parts_with_99_kib = PlanTarget { shared_bytes_max: 101_376, ..TARGET };
        for head_dim in [64, 80, 96, 128, 192, 256] {
            for target in [TARGET, parts_with_99_kib] {
                for row_tiles in [1, 2] {
                    let block = PrefillBlock::new(row_tiles, head_dim);
                    assert!(block.fits(&target) || row_tiles == 2, "{head_dim}: {}", block.shared_bytes);
                }
                let kv = KvShape { kv_heads: 8, head_dim, page_tokens: 16, dtype: DType::Bf16, latent: None };
                let sig = prefill_sig(kv, DType::Bf16);
                assert_eq!(prefill_support(&sig, &target), Support::Native);
                let slow = |kv, x| slow_prefill(&prefill_sig(kv, x), ALIGNED, &target);
                let odd = KvShape { head_dim: head_dim + 8, ..kv };
                assert!(slow(odd, DType::Bf16).unwrap().contains("heads"));
                assert!(slow(kv, DType::F32).unwrap().contains("dtype"));
            }
        }
    }

    #[test]
    fn lanes_span_heads() {
        for (head_dim, elements) in [(16, 1), (33, 1), (64, 2), (80, 4), (96, 4), (128, 4), (256, 4)] {
            assert_eq!(lane_elements(head_dim, head_dim), elements, "{head_dim}");
        }
        // values in keys that they do not divide
        assert_eq!([(576, 512), (34, 32), (17, 9)].map(|(key, value)| lane_elements(key, value)), [4, 1, 1]);
    }
}

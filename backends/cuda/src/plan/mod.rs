//! Plans commands as launches: which kernel with which macros, grid and arguments.
//!
//! Planning is pure: it knows addresses, shapes and the target's size, and calls nothing. The queue runs a
//! plan on a GPU, and a test runs the same plan on a CPU.

mod attention;
mod experts;
mod few_rows;
mod gemm;
mod latent;
mod quantised;

use crate::kernels::{KernelProgram, KernelSource, Macro};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::op::Extent;
use mixfleet_hal::{DType, Error, KvShape, MatrixKind, OpSig, OperandAccess, Result, RotaryPart, Support};

/// A range of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceRange {
    /// Address of its first byte.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// The properties of a device that plans depend on.
#[derive(Clone, Copy, Debug)]
pub struct PlanTarget {
    /// Compute capability, times ten: 90 for 9.0.
    pub capability: u32,
    /// Whether kernels are compiled with Hopper's products of warpgroups (wgmma).
    pub wgmma: bool,
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// Maximum shared memory of a block in bytes.
    pub shared_bytes_max: u32,
    /// Whether cuBLASLt is available.
    pub blas: bool,
    /// Scratch memory of the queue for intermediate results.
    pub scratch: DeviceRange,
}

/// One kernel argument.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KernelArg {
    /// An operand's address.
    Address(u64),
    /// A 32-bit integer.
    U32(u32),
    /// A 64-bit integer.
    U64(u64),
    /// A 32-bit float.
    F32(f32),
    /// Whether no command before this one in its batch writes this range, as 1 or 0, which
    /// [`BatchWrites::settle`] answers.
    Settled(DeviceRange),
}

impl KernelArg {
    /// An address that is `bytes` further; other arguments stay as they are.
    fn further(self, bytes: u64) -> KernelArg {
        match self {
            KernelArg::Address(address) => KernelArg::Address(address + bytes),
            other => other,
        }
    }
}

/// A kernel launch over a grid.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelLaunch {
    /// The program that contains the kernel.
    pub program: KernelProgram,
    /// Name of the kernel.
    pub kernel: &'static str,
    /// Number of blocks in each dimension.
    pub grid: [u32; 3],
    /// Threads per block.
    pub threads: u32,
    /// Dynamic shared memory per block, in bytes.
    pub shared_bytes: u32,
    /// Arguments in the kernel's order.
    pub args: Vec<KernelArg>,
}

/// A matrix product with cuBLASLt: `out [m, n] = x [m, k] . weight [n, k]^T (+ bias [n]) (+ out)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matmul {
    /// Rows, columns and inner dimension.
    pub shape: (u32, u32, u32),
    /// Dtype of `x` and `weight`.
    pub dtype: DType,
    /// Dtype of `out` and `bias`.
    pub out_dtype: DType,
    /// Address of `x`.
    pub x: u64,
    /// Address of `weight`.
    pub weight: u64,
    /// Address of the bias, if any.
    pub bias: Option<u64>,
    /// Address of `out`.
    pub out: u64,
    /// Columns of a row of the matrix that `out` is in.
    pub out_columns: u32,
    /// Whether the result is added to `out`.
    pub accumulate: bool,
}

/// One step of a planned command.
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "almost every step is a launch")]
pub enum PlanStep {
    /// A launch of one of our kernels.
    Launch(KernelLaunch),
    /// A matrix product with cuBLASLt.
    Matmul(Matmul),
    /// A copy by the driver: source, destination, bytes.
    Copy(u64, u64, u64),
    /// A fill by the driver: destination, number of 32-bit words, the word.
    Fill(u64, u64, u32),
}

/// Workspace size that NVIDIA recommends for Hopper; it occupies the start of a queue's scratch.
pub(crate) const WORKSPACE_BYTES: u64 = 32 << 20;
/// Alignment of every operand's offset, for vectors of 16 bytes and cuBLASLt's fastest kernels.
pub const ALIGNMENT_BYTES: u64 = 256;
/// KV page size: one tile of decode attention, so that a warp's 16 keys lie in one page.
pub const KV_PAGE_TOKENS: u32 = 16;

/// Default number of threads per block.
const THREADS: u32 = 256;
/// Elements per vector in the portable kernels, and the alignment that it requires.
const VEC: u64 = 8;
const VEC_BYTES: u64 = 16;
/// Limit of a grid's second and third dimension.
const GRID_MAX: u64 = 65_535;

/// Returns the elements per thread over rows of `n`: a vector if rows and operands are aligned to it.
fn vector(n: u64, operands: &[DeviceRange]) -> u64 {
    let aligned = operands.iter().all(|place| place.address.is_multiple_of(VEC_BYTES));
    if n.is_multiple_of(VEC) && aligned { VEC } else { 1 }
}

/// Returns the operands as arguments, in order; the number of pages follows a `k_pool`, which stands for
/// `v_pool` too where keys contain their values.
fn arguments(sig: &OpSig, operands: &[DeviceRange]) -> Vec<KernelArg> {
    let kinds = sig.operands();
    let mut args = Vec::new();
    for (kind, place) in kinds.iter().zip(operands) {
        args.push(KernelArg::Address(place.address));
        if let (Extent::PagesOf(page), "k_pool") = (kind.extent, kind.name) {
            // keys and values share their indices, so the smaller one bounds them
            let v_pool = kinds.iter().position(|kind| kind.name == "v_pool");
            let bytes = v_pool.map_or(place.bytes, |i| operands[i].bytes.min(place.bytes));
            let pages = bytes / (page * kind.dtype.size_bytes()).max(1);
            args.push(KernelArg::U32(u32::try_from(pages).unwrap_or(u32::MAX)));
            args.extend(v_pool.is_none().then_some(KernelArg::Address(place.address)));
        }
    }
    args
}

fn launch(
    program: KernelProgram,
    kernel: &'static str,
    grid: [u64; 3],
    threads: u32,
    args: Vec<KernelArg>,
) -> Result<PlanStep> {
    let fits = grid[0] <= i32::MAX as u64 && grid[1] <= GRID_MAX && grid[2] <= GRID_MAX;
    if !fits {
        let message = format!("cuda: {kernel} over a grid of {grid:?} blocks; split the batch");
        return Err(Error::unsupported(message));
    }
    let grid = grid.map(|blocks| to_u32(blocks));
    Ok(PlanStep::Launch(KernelLaunch { program, kernel, grid, threads, shared_bytes: 0, args }))
}

/// Launches one thread for each of `count`.
fn launch_each(
    program: KernelProgram,
    kernel: &'static str,
    count: u64,
    args: Vec<KernelArg>,
) -> Result<PlanStep> {
    launch(program, kernel, [count.div_ceil(THREADS.into()), 1, 1], THREADS, args)
}

/// Plans `sig` on `operands` as steps in order; empty if there is nothing to do.
///
/// # Errors
/// `Unsupported` if the target cannot run it.
pub fn plan(sig: &OpSig, operands: &[DeviceRange], target: &PlanTarget) -> Result<Vec<PlanStep>> {
    if support(sig, target) == Support::No {
        return Err(Error::unsupported(format!("cuda: this device cannot run {sig:?}")));
    }
    let args = arguments(sig, operands);
    let steps = match *sig {
        OpSig::Copy { bytes } => vec![PlanStep::Copy(operands[0].address, operands[1].address, bytes)],
        OpSig::Fill { bytes, word } => vec![PlanStep::Fill(operands[0].address, bytes / 4, word)],
        OpSig::Gemm { .. } => gemm::plan(sig, operands, args, target)?,
        OpSig::Route { .. } => experts::route(sig, &args)?,
        OpSig::GroupedGemm { .. } => vec![experts::grouped(sig, operands, args)?],
        OpSig::QuantisedGemm { .. } | OpSig::QuantisedEmbed { .. } => {
            quantised::plan(sig, operands, args, target)?
        }
        OpSig::AttnPrefill { .. } => vec![attention::prefill(sig, operands, args, target)?],
        OpSig::AttnDecode { .. } => attention::decode(sig, operands, args, None, target)?,
        _ => vec![simple(sig, operands, args)?],
    };
    let empty = |step: &PlanStep| match step {
        PlanStep::Launch(launch) => launch.grid.contains(&0),
        PlanStep::Matmul(matmul) => matmul.shape.0 == 0 || matmul.shape.1 == 0,
        PlanStep::Copy(.., bytes) => *bytes == 0,
        PlanStep::Fill(_, words, _) => *words == 0,
    };
    Ok(steps.into_iter().filter(|step| !empty(step)).collect())
}

/// A command as plans see it: the operation, and where its operands are.
pub type PlannedOp = (OpSig, Vec<DeviceRange>);

/// Whether two ranges share no byte.
fn apart(a: &DeviceRange, b: &DeviceRange) -> bool {
    a.address + a.bytes <= b.address || b.address + b.bytes <= a.address
}

/// The writes of a batch's commands, up to one of them.
#[derive(Debug, Default)]
pub struct BatchWrites(Vec<DeviceRange>);

impl BatchWrites {
    /// Adds what `ops` write.
    pub fn add(&mut self, ops: &[PlannedOp]) {
        for (sig, places) in ops {
            for (operand, place) in sig.operands().iter().zip(places) {
                if operand.access != OperandAccess::Read && !self.0.contains(place) {
                    self.0.push(*place);
                }
            }
        }
    }

    /// Resolves the [`KernelArg::Settled`] of `steps`, which come after the commands added so far.
    pub fn settle(&self, steps: &mut [PlanStep]) {
        for step in steps {
            let PlanStep::Launch(launch) = step else { continue };
            for arg in &mut launch.args {
                if let KernelArg::Settled(range) = arg {
                    *arg = KernelArg::U32(self.0.iter().all(|written| apart(written, range)).into());
                }
            }
        }
    }
}

/// Plans the front of a batch in fewer launches than one by one, with the same bits, and returns how many
/// operations these cover. They are products of few rows of one `x`, also with their gating; rope of queries
/// and keys with the write of those keys; decode attention in parts with its merge.
///
/// # Errors
/// As [`plan`].
pub fn fused(ops: &[PlannedOp], target: &PlanTarget) -> Result<Option<(usize, Vec<PlanStep>)>> {
    let fused = match ops {
        [(OpSig::Gemm { .. }, _), ..] => {
            few_rows::together(ops, target)?.map(|(count, step)| (count, vec![step]))
        }
        [queries, keys, write, ..] if matches!(queries.0, OpSig::Rope { .. }) => {
            rope_kv(queries, keys, write)?.map(|step| (3, vec![step]))
        }
        [decode, merge, ..] if matches!(decode.0, OpSig::AttnDecode { .. }) => {
            attention::decode_merged(decode, merge, target)?.map(|steps| (2, steps))
        }
        _ => None,
    };
    Ok(fused)
}

/// Plans rope of queries and of keys, and the write of those keys with their values, as one launch, if the
/// operations are these.
fn rope_kv(queries: &PlannedOp, keys: &PlannedOp, write: &PlannedOp) -> Result<Option<PlanStep>> {
    let (OpSig::Rope { tokens, heads, head_dim, part: None, x }, [q, cos_sin]) = (queries.0, &queries.1[..])
    else {
        return Ok(None);
    };
    let (OpSig::KvWrite { kv, .. }, [k, v, slots, k_pool, v_pool]) = (write.0, &write.1[..]) else {
        return Ok(None);
    };
    let of_keys = (OpSig::Rope { tokens, heads: kv.kv_heads, head_dim, part: None, x }, vec![*k, *cos_sin]);
    let same = *keys == of_keys && write.0 == OpSig::KvWrite { tokens, x, kv } && kv.head_dim == head_dim;
    let all = [q, k, v, cos_sin, slots, k_pool, v_pool];
    let written = [q, k, k_pool, v_pool];
    let alone = |one: &&DeviceRange| all.iter().all(|other| std::ptr::eq(*one, *other) || apart(one, other));
    if !same || tokens == 0 || kv.dtype.is_scaled() || !written.iter().all(alone) {
        return Ok(None);
    }
    let (half, places) = (head_dim / 2, all.map(|place| *place));
    let vec = vector(half.into(), &places);
    let count = u64::from(tokens) * u64::from(heads + 2 * kv.kv_heads) * (u64::from(half) / vec);
    let mut args = vec![KernelArg::Address(q.address)];
    let of_write = arguments(&write.0, &write.1);
    args.extend_from_slice(&of_write[..2]);
    args.push(KernelArg::Address(cos_sin.address));
    args.extend_from_slice(&of_write[2..]);
    args.extend([heads, kv.kv_heads, half, kv.page_tokens].map(KernelArg::U32));
    args.push(KernelArg::U64(count));
    let macros: [(&'static str, &dyn Macro); 4] =
        [("X", &x), ("KV", &kv.dtype), ("VEC", &vec), ("GROUP", &THREADS)];
    launch_each(KernelProgram::new(KernelSource::RopeKv, &macros), "rope_kv", count, args).map(Some)
}

/// Plans the operations that map to one portable kernel.
#[expect(clippy::too_many_lines, reason = "one arm for each kind of operation")]
fn simple(sig: &OpSig, operands: &[DeviceRange], mut args: Vec<KernelArg>) -> Result<PlanStep> {
    match *sig {
        OpSig::Add { elements, x } | OpSig::SiluMul { elements, x } | OpSig::GeluMul { elements, x } => {
            let vec = vector(elements, operands);
            args.push(KernelArg::U64(elements / vec));
            let program = elements_program(x, x, vec);
            launch_each(program, sig.name(), elements / vec, args)
        }
        OpSig::ClampedSwiglu { elements, alpha, limit, x } => {
            let vec = vector(elements, operands);
            args.extend([KernelArg::F32(alpha.0), KernelArg::F32(limit.0), KernelArg::U64(elements / vec)]);
            launch_each(elements_program(x, x, vec), "clamped_swiglu", elements / vec, args)
        }
        OpSig::SoftCap { elements, cap } => {
            let vec = vector(elements, operands);
            args.extend([KernelArg::F32(cap.0), KernelArg::U64(elements / vec)]);
            launch_each(elements_program(DType::F32, DType::F32, vec), "soft_cap", elements / vec, args)
        }
        OpSig::Combine { tokens, active, cols, x, accumulate } => {
            let vec = vector(cols.into(), &[operands[0], operands[2]]);
            let count = u64::from(tokens) * u64::from(cols) / vec;
            args.extend([active, cols, accumulate.into()].map(KernelArg::U32));
            args.push(KernelArg::U64(count));
            launch_each(elements_program(x, x, vec), "combine", count, args)
        }
        OpSig::Rope { tokens, heads, head_dim, part: Some(part), x } => {
            let RotaryPart { first, length, interleaved } = part;
            let count = u64::from(tokens) * u64::from(heads) * u64::from(length / 2);
            args.extend([heads, head_dim, first, length / 2, interleaved.into()].map(KernelArg::U32));
            args.push(KernelArg::U64(count));
            launch_each(elements_program(x, x, 1), "rope_part", count, args)
        }
        OpSig::CopyColumns { rows, cols, from, to, x } => {
            let count = u64::from(rows) * u64::from(cols);
            args.extend([cols, from.row, from.first, to.row, to.first].map(KernelArg::U32));
            args.push(KernelArg::U64(count));
            launch_each(elements_program(x, x, 1), "copy_columns", count, args)
        }
        OpSig::Rope { tokens, heads, head_dim, part: None, x } => {
            let half = u64::from(head_dim / 2);
            let vec = vector(half, operands);
            let count = u64::from(tokens) * u64::from(heads) * half / vec;
            args.extend([KernelArg::U32(heads), KernelArg::U32(head_dim / 2), KernelArg::U64(count)]);
            launch_each(elements_program(x, x, vec), "rope", count, args)
        }
        OpSig::Embed { tokens, vocab, hidden, table, out } => {
            let vec = vector(hidden.into(), &operands[1..]);
            let count = u64::from(tokens) * u64::from(hidden) / vec;
            args.extend([KernelArg::U32(vocab), KernelArg::U32(hidden), KernelArg::U64(count)]);
            launch_each(elements_program(out, table, vec), "embed", count, args)
        }
        OpSig::RmsNorm { rows, cols, eps, x, weight, out } => {
            args.extend([KernelArg::U32(rows), KernelArg::U32(cols), KernelArg::F32(eps.0)]);
            let vec = vector(cols.into(), operands);
            rms_norm(x, weight, out, rows, cols, vec, args)
        }
        OpSig::Sample { .. } => sample(sig, operands, args),
        OpSig::KvWrite { tokens, x: other, kv: shape }
        | OpSig::KvGather { tokens, wire: other, kv: shape }
        | OpSig::KvScatter { tokens, wire: other, kv: shape } => {
            let KvShape { kv_heads, head_dim, page_tokens, dtype: kv, latent } = shape;
            if latent.is_some() && matches!(sig, OpSig::KvWrite { .. }) {
                args.insert(1, args[0]); // never read
            }
            let heads = u64::from(tokens) * u64::from(kv_heads);
            let vec = vector(head_dim.into(), operands);
            let (source, count) = match kv.is_scaled() || other.is_scaled() {
                true => (KernelSource::KvScaled, heads),
                false => (KernelSource::Kv, heads * u64::from(head_dim) / vec),
            };
            args.extend([
                KernelArg::U32(page_tokens),
                KernelArg::U32(kv_heads),
                KernelArg::U32(head_dim),
                KernelArg::U64(count),
            ]);
            let rows = shape.pools();
            let macros: [(&'static str, &dyn Macro); 5] =
                [("X", &other), ("KV", &kv), ("VEC", &vec), ("GROUP", &THREADS), ("KV_ROWS", &rows)];
            launch_each(KernelProgram::new(source, &macros), sig.name(), count, args)
        }
        OpSig::AttnMerge { parts, rows, head_dim, sinks, out } => {
            if sinks == 0 {
                args.insert(2, args[1]); // never read
            }
            let vec = vector(head_dim.into(), operands);
            let count = u64::from(rows) * u64::from(head_dim) / vec;
            args.extend([parts, head_dim, sinks].map(KernelArg::U32));
            args.push(KernelArg::U64(count));
            let program =
                KernelProgram::new(KernelSource::Merge, &[("OUT", &out), ("VEC", &vec), ("GROUP", &THREADS)]);
            launch_each(program, "attn_merge", count, args)
        }
        _ => Err(Error::unsupported(format!("cuda: {} is not one kernel", sig.name()))),
    }
}

fn elements_program(x: DType, table: DType, vec: u64) -> KernelProgram {
    KernelProgram::new(
        KernelSource::Elements,
        &[("X", &x), ("TABLE", &table), ("VEC", &vec), ("GROUP", &THREADS)],
    )
}

/// Launches one block of `rms_norm` per row, as large as the row can use.
fn rms_norm(
    x: DType,
    weight: DType,
    out: DType,
    rows: u32,
    cols: u32,
    vec: u64,
    args: Vec<KernelArg>,
) -> Result<PlanStep> {
    let threads = to_u32(u64::from(cols).div_ceil(vec).next_power_of_two().clamp(32, 512));
    let macros: [(&'static str, &dyn Macro); 5] =
        [("X", &x), ("WEIGHT", &weight), ("OUT", &out), ("VEC", &vec), ("GROUP", &threads)];
    launch(KernelProgram::new(KernelSource::Rows, &macros), "rms_norm", [rows.into(), 1, 1], threads, args)
}

/// Plans a draw with one block per row, as large as the row can use.
fn sample(sig: &OpSig, operands: &[DeviceRange], mut args: Vec<KernelArg>) -> Result<PlanStep> {
    let OpSig::Sample { rows, cols, history, tops } = *sig else {
        return Err(Error::unsupported(format!("cuda: {} draws nothing", sig.name())));
    };
    // absent operands are not used
    if history == 0 {
        args.splice(2..2, [args[1], args[0]]);
    }
    if tops == 0 {
        args.push(args[4]);
    }
    args.extend([rows, cols, history, tops].map(KernelArg::U32));
    let vec = vector(cols.into(), &operands[..1]);
    let threads = to_u32(u64::from(cols).div_ceil(vec).next_power_of_two().clamp(32, 1024));
    let program = KernelProgram::new(KernelSource::Sample, &[("VEC", &vec), ("GROUP", &threads)]);
    launch(program, "sample", [rows.into(), 1, 1], threads, args)
}

/// Says why `sig` is slow on these operands, if it is: it runs on a kernel that does not use what the part is
/// made for.
pub fn slow(sig: &OpSig, operands: &[DeviceRange], target: &PlanTarget) -> Option<&'static str> {
    match sig {
        OpSig::Gemm { .. } => gemm::slow(sig, operands, target),
        OpSig::QuantisedGemm { m, .. } if *m > 16 && !quantised::is_fast(sig, operands, target) => {
            Some("quantised weights, without tensor cores")
        }
        OpSig::AttnPrefill { .. } => attention::slow_prefill(sig, operands, target),
        _ => None,
    }
}

/// Returns whether and how well `target` can run `sig`.
pub fn support(sig: &OpSig, target: &PlanTarget) -> Support {
    // shared memory holds a head of q and a value of sums for each warp of a block
    const HEAD_DIM_MAX: u32 = 1024;
    const VALUE_DIM_MAX: u32 = 512;
    const EXPERTS_MAX: u32 = 4096;
    let eight_bits = |operand: &mixfleet_hal::Operand| operand.dtype.is_scaled() && !sig.has_scales(operand);
    match *sig {
        _ if sig.check().is_err() => Support::No,
        // a token's list of experts is in shared memory
        OpSig::Route { routing, .. } if routing.experts > EXPERTS_MAX => Support::No,
        OpSig::Gemm { x, weight, out, .. } => {
            let integers = [DType::U32, DType::I8];
            if out == DType::F8E4m3 || [x, weight, out].iter().any(|dtype| integers.contains(dtype)) {
                return Support::No;
            }
            gemm::support(sig, target)
        }
        // it does not use what the part is made for
        OpSig::QuantisedGemm { m, .. } if m > 16 && !quantised::is_fast(sig, &[], target) => {
            Support::Emulated
        }
        OpSig::QuantisedGemm { .. } | OpSig::QuantisedEmbed { .. } => Support::Native,
        OpSig::GroupedGemm { n, weight: MatrixKind::Quantised(kind), .. } => {
            // groups of rows end with matrices
            if n.is_multiple_of(kind.group_rows) { Support::Emulated } else { Support::No }
        }
        _ if sig.operands().iter().any(eight_bits) => Support::No,
        OpSig::AttnPrefill { kv, .. } | OpSig::AttnDecode { kv, .. }
            if kv.head_dim > HEAD_DIM_MAX || kv.value_dim() > VALUE_DIM_MAX || kv.head_dim == 0 =>
        {
            Support::No
        }
        OpSig::AttnPrefill { .. } => attention::prefill_support(sig, target),
        _ => Support::Native,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An H100 or H200 without scratch.
    pub(super) const HOPPER: PlanTarget = PlanTarget {
        capability: 90,
        wgmma: true,
        multiprocessors: 132,
        shared_bytes_max: 232_448,
        blas: true,
        scratch: DeviceRange { address: 0, bytes: 0 },
    };

    #[test]
    fn weights_are_settled_unless_the_batch_writes_them_before() {
        let (m, n, k, x) = (4, 64, 64, DType::Bf16);
        let sig = OpSig::Gemm { m, n, k, x, weight: x, out: x, bias: false, accumulate: false };
        let range = |address: u64, bytes: u64| DeviceRange { address, bytes };
        let product = (sig, vec![range(0, 512), range(0x1000, 0x2000), range(0x4000, 512)]);
        let settled = |before: &[PlannedOp]| {
            let mut written = BatchWrites::default();
            written.add(before);
            let mut steps = plan(&product.0, &product.1, &HOPPER).unwrap();
            written.settle(&mut steps);
            let PlanStep::Launch(launch) = &steps[0] else { panic!("{steps:?}") };
            *launch.args.last().unwrap()
        };
        let copy_to =
            |address: u64| (OpSig::Copy { bytes: 0x100 }, vec![range(0x1800, 0x100), range(address, 0x100)]);
        assert_eq!(settled(&[]), KernelArg::U32(1));
        // buffers beside them, or read-only ones
        assert_eq!(settled(&[copy_to(0xF00), copy_to(0x3000), product.clone()]), KernelArg::U32(1));
        for address in [0xF01, 0x1000, 0x2FFF] {
            assert_eq!(settled(&[copy_to(address), copy_to(0x8000)]), KernelArg::U32(0), "{address:#x}");
        }
    }
}

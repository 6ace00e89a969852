//! From a command to launches: which kernel with which macros, on which grid, with which arguments.
//!
//! Pure: it knows addresses, shapes and the target's size, and calls nothing. The queue runs what it says on a
//! GPU, and a test runs the same on a CPU.

mod attention;
mod gemm;

use crate::kernels::{KernelProgram, KernelSource};
use mixfleet_hal::op::Extent;
use mixfleet_hal::{DType, Error, OpSig, Result, Support};

/// A range of the device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceRange {
    /// Of its first byte.
    pub address: u64,
    /// Its length.
    pub bytes: u64,
}

/// What plans depend on.
#[derive(Clone, Copy, Debug)]
pub struct PlanTarget {
    /// Compute capability, times ten: 90 for 9.0.
    pub capability: u32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Shared memory that a block may have, in bytes.
    pub shared_bytes_max: u32,
    /// cuBLASLt is there.
    pub blas: bool,
    /// Memory of the queue for what kernels leave to each other.
    pub scratch: DeviceRange,
}

/// One kernel argument.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KernelArg {
    /// An operand's address.
    Address(u64),
    /// A number.
    U32(u32),
    /// A number.
    U64(u64),
    /// A number.
    F32(f32),
}

/// A kernel over a grid.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelLaunch {
    /// The program that it is in.
    pub program: KernelProgram,
    /// Its name.
    pub kernel: &'static str,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// In the kernel's order.
    pub args: Vec<KernelArg>,
}

/// A product by cuBLASLt: `out [m, n] = x [m, k] . weight [n, k]^T (+ bias [n]) (+ out)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matmul {
    /// Rows, columns and common length.
    pub shape: (u32, u32, u32),
    /// Of `x` and `weight`.
    pub dtype: DType,
    /// Of `out`, and of `bias`.
    pub out_dtype: DType,
    /// Address of `x`.
    pub x: u64,
    /// Address of `weight`.
    pub weight: u64,
    /// Address of the bias, if any.
    pub bias: Option<u64>,
    /// Address of `out`.
    pub out: u64,
    /// Adds to `out`.
    pub accumulate: bool,
}

/// A part of what a command becomes.
#[derive(Clone, Debug, PartialEq)]
pub enum PlanStep {
    /// A kernel of ours.
    Launch(KernelLaunch),
    /// A kernel of cuBLASLt.
    Matmul(Matmul),
    /// A copy by the driver: from, to, bytes.
    Copy(u64, u64, u64),
    /// A fill by the driver: to, how many 32-bit words, the word.
    Fill(u64, u64, u32),
}

/// Every operand's offset must be a multiple of this: vectors of 16 bytes, and what cuBLASLt likes best.
pub const ALIGNMENT_BYTES: u64 = 256;
/// One tile of decode attention: a warp's 16 keys then lie in one page.
pub const KV_PAGE_TOKENS: u32 = 16;

/// Threads of a block where nothing else decides.
const THREADS: u32 = 256;
/// Elements of a vector in the portable kernels, and the alignment that it needs.
const VEC: u64 = 8;
const VEC_BYTES: u64 = 16;
/// The limit of a grid's second and third dimension.
const GRID_MAX: u64 = 65_535;

/// Elements of a thread over rows of `n`: a vector where rows and operands are aligned to it.
fn vector(n: u64, operands: &[DeviceRange]) -> u64 {
    let aligned = operands.iter().all(|place| place.address.is_multiple_of(VEC_BYTES));
    if n.is_multiple_of(VEC) && aligned { VEC } else { 1 }
}

/// The operands as arguments, in order; the number of pages follows a `k_pool`.
fn arguments(sig: &OpSig, operands: &[DeviceRange]) -> Vec<KernelArg> {
    let kinds = sig.operands();
    let mut args = Vec::new();
    for (kind, place) in kinds.iter().zip(operands) {
        args.push(KernelArg::Address(place.address));
        if let (Extent::PagesOf(page), "k_pool") = (kind.extent, kind.name) {
            // both pools are indexed alike: the smaller one bounds them
            let v_pool = kinds.iter().position(|kind| kind.name == "v_pool");
            let bytes = v_pool.map_or(place.bytes, |i| operands[i].bytes.min(place.bytes));
            let pages = bytes / (page * kind.dtype.size_bytes()).max(1);
            args.push(KernelArg::U32(u32::try_from(pages).unwrap_or(u32::MAX)));
        }
    }
    args
}

fn launch(
    program: KernelProgram,
    kernel: &'static str,
    (grid, threads): ([u64; 3], u32),
    args: Vec<KernelArg>,
) -> Result<PlanStep> {
    let fits = grid[0] <= i32::MAX as u64 && grid[1] <= GRID_MAX && grid[2] <= GRID_MAX;
    if !fits {
        let message = format!("cuda: {kernel} over a grid of {grid:?} blocks; split the batch");
        return Err(Error::unsupported(message));
    }
    let grid = grid.map(|blocks| blocks as u32);
    Ok(PlanStep::Launch(KernelLaunch { program, kernel, grid, threads, shared_bytes: 0, args }))
}

/// One thread for each of `count`.
fn each(count: u64) -> ([u64; 3], u32) {
    ([count.div_ceil(THREADS.into()), 1, 1], THREADS)
}

/// What `sig` on `operands` becomes, in order; nothing when there is nothing to do.
///
/// # Errors
/// `Unsupported` when the target cannot run it.
pub fn plan(sig: &OpSig, operands: &[DeviceRange], target: &PlanTarget) -> Result<Vec<PlanStep>> {
    if support(sig, target) == Support::No {
        return Err(Error::unsupported(format!("cuda: this device cannot run {sig:?}")));
    }
    let args = arguments(sig, operands);
    let steps = match *sig {
        OpSig::Copy { bytes } => vec![PlanStep::Copy(operands[0].address, operands[1].address, bytes)],
        OpSig::Fill { bytes, word } => vec![PlanStep::Fill(operands[0].address, bytes / 4, word)],
        OpSig::Gemm { .. } => gemm::plan(sig, operands, args, target)?,
        OpSig::AttnPrefill { .. } => vec![attention::prefill(sig, operands, args, target)?],
        OpSig::AttnDecode { .. } => attention::decode(sig, operands, args, target)?,
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

/// Operations of one portable kernel.
fn simple(sig: &OpSig, operands: &[DeviceRange], mut args: Vec<KernelArg>) -> Result<PlanStep> {
    match *sig {
        OpSig::Add { elements, x } | OpSig::SiluMul { elements, x } => {
            let vec = vector(elements, operands);
            args.push(KernelArg::U64(elements / vec));
            let program = elements_program(x, x, vec);
            launch(program, sig.name(), each(elements / vec), args)
        }
        OpSig::Rope { tokens, heads, head_dim, x } => {
            let half = u64::from(head_dim / 2);
            let vec = vector(half, operands);
            let count = u64::from(tokens) * u64::from(heads) * half / vec;
            args.extend([KernelArg::U32(heads), KernelArg::U32(head_dim / 2), KernelArg::U64(count)]);
            launch(elements_program(x, x, vec), "rope", each(count), args)
        }
        OpSig::Embed { tokens, vocab, hidden, table, out } => {
            let vec = vector(hidden.into(), &operands[1..]);
            let count = u64::from(tokens) * u64::from(hidden) / vec;
            args.extend([KernelArg::U32(vocab), KernelArg::U32(hidden), KernelArg::U64(count)]);
            launch(elements_program(out, table, vec), "embed", each(count), args)
        }
        OpSig::RmsNorm { rows, cols, eps, x, weight, out } => {
            args.extend([KernelArg::U32(rows), KernelArg::U32(cols), KernelArg::F32(eps.0)]);
            let vec = vector(cols.into(), operands);
            rows_launch("rms_norm", (x, weight, out), (rows, cols), vec, 512, args)
        }
        OpSig::Argmax { rows, cols } => {
            args.extend([KernelArg::U32(rows), KernelArg::U32(cols)]);
            let vec = vector(cols.into(), &operands[..1]);
            rows_launch("argmax", (DType::F32, DType::F32, DType::F32), (rows, cols), vec, 1024, args)
        }
        OpSig::KvWrite { tokens, kv_heads, head_dim, page_tokens, kv, x: other }
        | OpSig::KvGather { tokens, kv_heads, head_dim, page_tokens, kv, wire: other }
        | OpSig::KvScatter { tokens, kv_heads, head_dim, page_tokens, kv, wire: other } => {
            let vec = vector(head_dim.into(), operands);
            let count = u64::from(tokens) * u64::from(kv_heads) * u64::from(head_dim) / vec;
            args.extend([
                KernelArg::U32(page_tokens),
                KernelArg::U32(kv_heads),
                KernelArg::U32(head_dim),
                KernelArg::U64(count),
            ]);
            let macros: [(&str, &dyn std::fmt::Display); 4] =
                [("X", &other), ("KV", &kv), ("VEC", &vec), ("GROUP", &THREADS)];
            launch(KernelProgram::new(KernelSource::Kv, &macros), sig.name(), each(count), args)
        }
        OpSig::AttnMerge { parts, rows, head_dim, out } => {
            let vec = vector(head_dim.into(), operands);
            let count = u64::from(rows) * u64::from(head_dim) / vec;
            args.extend([KernelArg::U32(parts), KernelArg::U32(head_dim), KernelArg::U64(count)]);
            let program =
                KernelProgram::new(KernelSource::Merge, &[("OUT", &out), ("VEC", &vec), ("GROUP", &THREADS)]);
            launch(program, "attn_merge", each(count), args)
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

/// One block per row, as large as the row can use.
fn rows_launch(
    kernel: &'static str,
    (x, weight, out): (DType, DType, DType),
    (rows, cols): (u32, u32),
    vec: u64,
    threads_max: u64,
    args: Vec<KernelArg>,
) -> Result<PlanStep> {
    let threads = u64::from(cols).div_ceil(vec).next_power_of_two().clamp(32, threads_max) as u32;
    let macros: [(&str, &dyn std::fmt::Display); 5] =
        [("X", &x), ("WEIGHT", &weight), ("OUT", &out), ("VEC", &vec), ("GROUP", &threads)];
    launch(KernelProgram::new(KernelSource::Rows, &macros), kernel, ([rows.into(), 1, 1], threads), args)
}

/// Whether `target` can run `sig`, and how well.
pub fn support(sig: &OpSig, target: &PlanTarget) -> Support {
    // a block holds a head of q and one of sums for each of its warps in shared memory
    const HEAD_DIM_MAX: u32 = 512;
    let eight_bits = |operand: &mixfleet_hal::Operand| operand.dtype == DType::F8E4m3;
    match *sig {
        _ if sig.check().is_err() => Support::No,
        OpSig::Gemm { x, weight, out, .. } => {
            if out == DType::F8E4m3 || [x, weight, out].contains(&DType::U32) {
                return Support::No;
            }
            gemm::support(sig, target)
        }
        _ if sig.operands().iter().any(eight_bits) => Support::No,
        OpSig::AttnPrefill { head_dim, .. } | OpSig::AttnDecode { head_dim, .. }
            if head_dim > HEAD_DIM_MAX || head_dim == 0 =>
        {
            Support::No
        }
        OpSig::AttnPrefill { .. } => attention::prefill_support(sig, target),
        _ => Support::Native,
    }
}

//! From a command to a kernel: which program with which macros, its arguments and its threads.

use crate::device::Tuning;
use mixfleet_hal::op::Extent;
use mixfleet_hal::{Cmd, DType, OpSig, Slice};

/// Threads of a group, in kernels with and without barriers; `common.cl` has the former too.
const GROUP: usize = 64;
/// Columns of a thread in `gemm`, and rows of one in `gemv_group`, as in `gemm.cl`.
const COLS: u32 = 4;
const ROWS: u32 = 4;
/// Columns of a thread in `gemv`.
const STRIP: u32 = 16;
/// Rows that share a second-level cache in `gemm`: 32 rows of 4096 f32 are 512 KiB.
const BAND: u32 = 32;
/// Edge of a tile in `gemm_group`, and its threads.
const TILE: u32 = 64;
const TILE_THREADS: usize = 256;
/// Up to here, reading the weights once per four rows is faster than a tile that is mostly empty.
const GEMV_ROWS_MAX: u32 = 16;

const COMMON: &str = include_str!("kernels/common.cl");

/// A program: a source file with its macros. The key of the caches.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ProgramKey {
    pub(crate) file: &'static str,
    pub(crate) options: String,
}

impl ProgramKey {
    /// The whole source text.
    pub(crate) fn source(&self) -> String {
        let body = match self.file {
            "elements" => include_str!("kernels/elements.cl"),
            "rows" => include_str!("kernels/rows.cl"),
            "kv" => include_str!("kernels/kv.cl"),
            "gemm" => include_str!("kernels/gemm.cl"),
            "attention" => include_str!("kernels/attention.cl"),
            _ => include_str!("kernels/merge.cl"),
        };
        format!("{COMMON}\n{body}")
    }
}

/// One kernel argument.
#[derive(Clone, Debug)]
pub(crate) enum Arg {
    /// A buffer and the offset of its first element: two arguments.
    Elements(Slice, u64),
    U32(u32),
    U64(u64),
    F32(f32),
}

/// What a command becomes.
#[derive(Clone, Debug)]
pub(crate) enum Work {
    /// A kernel over a grid.
    Launch {
        program: ProgramKey,
        kernel: &'static str,
        args: Vec<Arg>,
        global: [usize; 3],
        local: [usize; 3],
    },
    /// A copy by the driver.
    Copy { from: Slice, to: Slice },
    /// A fill by the driver.
    Fill { to: Slice, word: u32 },
}

/// The widest vector that divides rows of `n` elements.
fn width(n: u32) -> u32 {
    [16, 8].into_iter().find(|&w| n.is_multiple_of(w)).unwrap_or(1)
}

fn options(macros: &[(&str, &dyn std::fmt::Display)]) -> String {
    macros.iter().map(|(name, value)| format!("-D {name}={value} ")).collect()
}

/// The operands as arguments, in order; the number of pages follows a `k_pool`.
fn operands(cmd: &Cmd) -> Vec<Arg> {
    let mut args = Vec::new();
    for (operand, slice) in cmd.sig().operands().iter().zip(cmd.args()) {
        let element = operand.dtype.size_bytes();
        args.push(Arg::Elements(slice.clone(), slice.offset / element));
        if let (Extent::PagesOf(page), "k_pool") = (operand.extent, operand.name) {
            // both pools are indexed alike: the smaller one bounds them
            let v_pool = cmd.sig().operands().iter().position(|o| o.name == "v_pool");
            let bytes = v_pool.map_or(slice.bytes, |i| cmd.args()[i].bytes.min(slice.bytes));
            let pages = bytes / (page * element).max(1);
            args.push(Arg::U32(u32::try_from(pages).unwrap_or(u32::MAX)));
        }
    }
    args
}

fn launch(
    file: &'static str,
    kernel: &'static str,
    options: String,
    args: Vec<Arg>,
    grid: ([usize; 3], [usize; 3]),
) -> Work {
    let (global, local) = grid;
    Work::Launch { program: ProgramKey { file, options }, kernel, args, global, local }
}

/// One thread per element.
fn each(count: u64) -> ([usize; 3], [usize; 3]) {
    ([(count as usize).next_multiple_of(GROUP), 1, 1], [GROUP, 1, 1])
}

/// What `cmd` becomes on a device of this tuning; `None` when there is nothing to do.
pub(crate) fn plan(cmd: &Cmd, tuning: Tuning) -> Option<Work> {
    let mut args = operands(cmd);
    let work = match *cmd.sig() {
        OpSig::Copy { .. } => Work::Copy { from: cmd.args()[0].clone(), to: cmd.args()[1].clone() },
        OpSig::Fill { word, .. } => Work::Fill { to: cmd.args()[0].clone(), word },
        OpSig::Add { elements, x } | OpSig::SiluMul { elements, x } => {
            args.push(Arg::U64(elements));
            launch("elements", cmd.sig().name(), element_options(x, x), args, each(elements))
        }
        OpSig::Rope { tokens, heads, head_dim, x } => {
            let count = u64::from(tokens) * u64::from(heads) * u64::from(head_dim / 2);
            args.extend([Arg::U32(heads), Arg::U32(head_dim / 2), Arg::U64(count)]);
            launch("elements", "rope", element_options(x, x), args, each(count))
        }
        OpSig::Embed { tokens, vocab, hidden, table, out } => {
            let count = u64::from(tokens) * u64::from(hidden);
            args.extend([Arg::U32(vocab), Arg::U32(hidden), Arg::U64(count)]);
            launch("elements", "embed", element_options(out, table), args, each(count))
        }
        OpSig::RmsNorm { rows, cols, eps, x, weight, out } => {
            args.extend([Arg::U32(rows), Arg::U32(cols), Arg::F32(eps.0)]);
            let kernel = if tuning == Tuning::Cpu { "rms_norm" } else { "rms_norm_group" };
            launch("rows", kernel, row_options(x, weight, out), args, row_grid(rows, tuning))
        }
        OpSig::Argmax { rows, cols } => {
            args.extend([Arg::U32(rows), Arg::U32(cols)]);
            let kernel = if tuning == Tuning::Cpu { "argmax" } else { "argmax_group" };
            launch(
                "rows",
                kernel,
                row_options(DType::F32, DType::F32, DType::F32),
                args,
                row_grid(rows, tuning),
            )
        }
        OpSig::KvWrite { tokens, kv_heads, head_dim, page_tokens, kv, x: other }
        | OpSig::KvGather { tokens, kv_heads, head_dim, page_tokens, kv, wire: other }
        | OpSig::KvScatter { tokens, kv_heads, head_dim, page_tokens, kv, wire: other } => {
            let count = u64::from(tokens) * u64::from(kv_heads) * u64::from(head_dim);
            args.extend([Arg::U32(page_tokens), Arg::U32(kv_heads), Arg::U32(head_dim), Arg::U64(count)]);
            launch("kv", cmd.sig().name(), options(&[("X", &other), ("KV", &kv)]), args, each(count))
        }
        OpSig::AttnMerge { parts, rows, head_dim, out } => {
            let count = u64::from(rows) * u64::from(head_dim);
            args.extend([Arg::U32(parts), Arg::U32(head_dim), Arg::U64(count)]);
            launch("merge", "attn_merge", options(&[("OUT", &out)]), args, each(count))
        }
        OpSig::Gemm { .. } => gemm(cmd.sig(), args, tuning),
        OpSig::AttnPrefill { .. } | OpSig::AttnDecode { .. } => attention(cmd.sig(), args, tuning),
    };
    let empty = match &work {
        Work::Launch { global, .. } => global.contains(&0),
        Work::Copy { to, .. } | Work::Fill { to, .. } => to.bytes == 0,
    };
    (!empty).then_some(work)
}

fn element_options(x: DType, table: DType) -> String {
    options(&[("X", &x), ("TABLE", &table)])
}

fn row_options(x: DType, weight: DType, out: DType) -> String {
    options(&[("X", &x), ("WEIGHT", &weight), ("OUT", &out)])
}

/// One thread per row, or one group.
fn row_grid(rows: u32, tuning: Tuning) -> ([usize; 3], [usize; 3]) {
    match tuning {
        Tuning::Cpu => ([rows as usize, 1, 1], [1, 1, 1]),
        Tuning::Gpu => ([rows as usize * GROUP, 1, 1], [GROUP, 1, 1]),
    }
}

fn gemm(sig: &OpSig, mut args: Vec<Arg>, tuning: Tuning) -> Work {
    let OpSig::Gemm { m, n, k, x, weight, out, bias, accumulate } = *sig else {
        unreachable!("called for gemm")
    };
    if !bias {
        args.insert(2, args[1].clone()); // never read
    }
    args.extend([m, n, k, u32::from(bias), u32::from(accumulate)].map(Arg::U32));
    let (kernel, grid) = match tuning {
        Tuning::Cpu if m == 1 => ("gemv", ([n.div_ceil(STRIP) as usize, 1, 1], [1, 1, 1])),
        Tuning::Cpu => ("gemm", ([n.div_ceil(COLS) as usize, m.div_ceil(BAND) as usize, 1], [1, 1, 1])),
        Tuning::Gpu if m <= GEMV_ROWS_MAX => {
            ("gemv_group", ([n as usize * GROUP, m.div_ceil(ROWS) as usize, 1], [GROUP, 1, 1]))
        }
        Tuning::Gpu => {
            let (across, down) = (n.div_ceil(TILE) as usize, m.div_ceil(TILE) as usize);
            ("gemm_group", ([across * TILE_THREADS, down, 1], [TILE_THREADS, 1, 1]))
        }
    };
    let macros =
        options(&[("X", &x), ("WEIGHT", &weight), ("OUT", &out), ("BAND", &BAND), ("STRIP", &STRIP)]);
    launch("gemm", kernel, macros, args, grid)
}

fn attention(sig: &OpSig, mut args: Vec<Arg>, tuning: Tuning) -> Work {
    let (kernels, rows, heads, head_dim, x, kv) = match *sig {
        OpSig::AttnPrefill {
            tokens,
            sequences,
            heads,
            kv_heads,
            head_dim,
            page_tokens,
            pages_max,
            window,
            x,
            kv,
            ..
        } => {
            args.extend([sequences, heads, kv_heads, page_tokens, pages_max].map(Arg::U32));
            args.extend([tokens, window.unwrap_or(u32::MAX)].map(Arg::U32));
            (["attn_prefill", "attn_prefill_group"], tokens, heads, head_dim, x, kv)
        }
        OpSig::AttnDecode { sequences, heads, kv_heads, head_dim, page_tokens, pages_max, x, kv, .. } => {
            args.extend([sequences, heads, kv_heads, page_tokens, pages_max].map(Arg::U32));
            (["attn_decode", "attn_decode_group"], sequences, heads, head_dim, x, kv)
        }
        _ => unreachable!("called for attention"),
    };
    let macros = options(&[("X", &x), ("KV", &kv), ("HEAD_DIM", &head_dim), ("W", &width(head_dim))]);
    let (heads, rows) = (heads as usize, rows as usize);
    match tuning {
        Tuning::Cpu => launch("attention", kernels[0], macros, args, ([heads, rows, 1], [1, 1, 1])),
        Tuning::Gpu => {
            launch("attention", kernels[1], macros, args, ([heads * GROUP, rows, 1], [GROUP, 1, 1]))
        }
    }
}

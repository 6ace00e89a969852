//! Plans a command as a kernel: which program with which macros, arguments and threads.

use crate::device::KernelTuning;
use mixfleet_hal::cast::{to_f32, to_usize};
use mixfleet_hal::op::Extent;
use mixfleet_hal::{Cmd, CodeKind, DType, KvShape, OpSig, Quantised, RotaryPart, Scoring, Slice, ZeroKind};

/// Threads per group, in kernels with and without barriers; `common.h` repeats the former.
const GROUP: usize = 64;
/// Columns per thread in the CPU's `gemm`, and rows per group in `grouped_few`, as in `gemm.cl` and
/// `grouped.c`.
const COLS: u32 = 4;
const ROWS: u32 = 4;
/// Columns per thread in the CPU's `gemv`.
const STRIP: u32 = 16;
/// Rows that share a second-level cache in the CPU's `gemm`: 32 rows of 4096 f32 are 512 KiB.
const BAND: u32 = 32;
/// Edge length of a tile in the GPU's `gemm`, and its threads.
const TILE: u32 = 64;
const TILE_THREADS: usize = 256;
/// Maximum number of rows that one group handles all together, so that it reads its column of the weights
/// once.
const GEMV_ROWS_MAX: u32 = 16;
/// Where the sinks are among the arguments of prefill: behind the pools and the number of their pages.
const SINKS_AT: usize = 7;
/// Elements per vector in the portable kernels.
const VEC: u32 = 8;

/// A program: a source file with its macros, which is the key of the caches.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ProgramKey {
    pub(crate) file: &'static str,
    pub(crate) options: String,
}

/// Includes a source that several kinds of GPU share.
macro_rules! portable {
    ($file:literal) => {
        include_str!(concat!("../portable/", $file))
    };
}

impl ProgramKey {
    /// Returns the whole source text.
    pub(crate) fn source(&self) -> String {
        let body: &[&str] = match self.file {
            "elements.c" => &[portable!("rotate.h"), portable!("elements.c")],
            "kv.c" => &[portable!("kv.c")],
            KV_SCALED => &[portable!("scaled.h"), portable!("kv_scaled.c")],
            "merge.c" => &[portable!("merge.c")],
            "rows.c" => &[portable!("rows.c")],
            "sample.c" => &[portable!("sample.c")],
            "quantised.c" => &[portable!("gemm.h"), portable!("codes.h"), portable!("quantised.c")],
            "rows.cl" => &[WIDE, include_str!("kernels/rows.cl")],
            "route.c" => &[portable!("route.c")],
            "grouped.c" => &[portable!("grouped.h"), portable!("tiles.h"), portable!("grouped.c")],
            GROUPED_CODES => {
                &[portable!("codes.h"), portable!("grouped.h"), portable!("tiles.h"), portable!("grouped.c")]
            }
            "grouped.cl" => &[WIDE, portable!("grouped.h"), include_str!("kernels/grouped.cl")],
            "gemm.c" => &[portable!("gemm.h"), portable!("tiles.h"), portable!("gemm.c")],
            "gemm.cl" => &[WIDE, portable!("gemm.h"), include_str!("kernels/gemm.cl")],
            "attention.c" => &[portable!("scaled.h"), portable!("keys.h"), portable!("attention.c")],
            _ => &[WIDE, portable!("scaled.h"), portable!("keys.h"), include_str!("kernels/attention.cl")],
        };
        [&[portable!("opencl.h"), portable!("common.h")], body].concat().join("\n")
    }
}

/// The name of grouped.c with quantised weights.
const GROUPED_CODES: &str = "grouped.c, codes.h";

/// The file that converts KV when one side has eight bits.
const KV_SCALED: &str = "kv_scaled.c";

const WIDE: &str = include_str!("kernels/wide.cl");

/// One kernel argument.
#[derive(Clone, Debug)]
pub(crate) enum Arg {
    /// A buffer and the offset of its first element, which become two arguments.
    Elements(Slice, u64),
    U32(u32),
    U64(u64),
    F32(f32),
}

/// The work that a command becomes.
#[derive(Clone, Debug)]
pub(crate) enum OpenclStep {
    /// A kernel launch over a grid.
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

/// Returns the widest vector that divides rows of `n` elements.
fn width(n: u32) -> u32 {
    [16, 8].into_iter().find(|&w| n.is_multiple_of(w)).unwrap_or(1)
}

/// Returns the elements per thread in the portable kernels over rows of `n`; CPU drivers vectorise over
/// threads.
fn vector(n: u64, tuning: KernelTuning) -> u64 {
    if tuning == KernelTuning::Gpu && n.is_multiple_of(VEC.into()) { VEC.into() } else { 1 }
}

fn options(macros: &[(&str, &dyn std::fmt::Display)]) -> String {
    macros.iter().map(|(name, value)| format!("-D {name}={value} ")).collect()
}

/// Returns the operands as arguments, in order; the number of pages follows a `k_pool`.
fn operands(cmd: &Cmd) -> Vec<Arg> {
    let mut args = Vec::new();
    for (operand, slice) in cmd.sig().operands().iter().zip(cmd.args()) {
        let element = operand.dtype.size_bytes();
        args.push(Arg::Elements(slice.clone(), slice.offset / element));
        if let (Extent::PagesOf(page), "k_pool") = (operand.extent, operand.name) {
            // keys and values share their indices, so the smaller one bounds them
            let v_pool = cmd.sig().operands().iter().position(|o| o.name == "v_pool");
            let bytes = v_pool.map_or(slice.bytes, |i| cmd.args()[i].bytes.min(slice.bytes));
            let pages = bytes / (page * element).max(1);
            args.push(Arg::U32(u32::try_from(pages).unwrap_or(u32::MAX)));
            // kernels have a pool of values, which may be that of keys
            if v_pool.is_none() {
                args.push(Arg::Elements(slice.clone(), slice.offset / element));
            }
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
) -> OpenclStep {
    let (global, local) = grid;
    OpenclStep::Launch { program: ProgramKey { file, options }, kernel, args, global, local }
}

/// Returns a grid of one thread per element.
fn each(count: u64) -> ([usize; 3], [usize; 3]) {
    ([to_usize(count).next_multiple_of(GROUP), 1, 1], [GROUP, 1, 1])
}

/// Plans `cmd` for a device with this tuning, as work in order; nothing if there is nothing to do.
pub(crate) fn plan(cmd: &Cmd, tuning: KernelTuning) -> Vec<OpenclStep> {
    let works = match cmd.sig() {
        OpSig::Route { .. } => route(cmd.sig(), &operands(cmd), tuning).into(),
        _ => vec![single(cmd, tuning)],
    };
    let is_empty = |work: &OpenclStep| match work {
        OpenclStep::Launch { global, .. } => global.contains(&0),
        OpenclStep::Copy { to, .. } | OpenclStep::Fill { to, .. } => to.bytes == 0,
    };
    works.into_iter().filter(|work| !is_empty(work)).collect()
}

/// Plans an operation that is one kernel.
#[expect(clippy::too_many_lines, reason = "one arm for each kind of operation")]
fn single(cmd: &Cmd, tuning: KernelTuning) -> OpenclStep {
    let mut args = operands(cmd);
    match *cmd.sig() {
        OpSig::Sample { rows, cols, history, tops } => {
            // absent operands are not used
            if history == 0 {
                args.splice(2..2, [args[1].clone(), args[0].clone()]);
            }
            if tops == 0 {
                args.push(args[4].clone());
            }
            args.extend([rows, cols, history, tops].map(Arg::U32));
            // one thread per row: PoCL takes minutes to compile this many barriers
            let macros = options(&[("VEC", &vector(cols.into(), tuning)), ("GROUP", &1)]);
            launch("sample.c", "sample", macros, args, ([rows as usize, 1, 1], [1, 1, 1]))
        }
        OpSig::Copy { .. } => OpenclStep::Copy { from: cmd.args()[0].clone(), to: cmd.args()[1].clone() },
        OpSig::Fill { word, .. } => OpenclStep::Fill { to: cmd.args()[0].clone(), word },
        OpSig::Add { elements, x } | OpSig::SiluMul { elements, x } | OpSig::GeluMul { elements, x } => {
            let vec = vector(elements, tuning);
            args.push(Arg::U64(elements / vec));
            launch("elements.c", cmd.sig().name(), element_options(x, x, vec), args, each(elements / vec))
        }
        OpSig::ClampedSwiglu { elements, alpha, limit, x } => {
            let vec = vector(elements, tuning);
            args.extend([Arg::F32(alpha.0), Arg::F32(limit.0), Arg::U64(elements / vec)]);
            launch("elements.c", "clamped_swiglu", element_options(x, x, vec), args, each(elements / vec))
        }
        OpSig::SoftCap { elements, cap } => {
            let vec = vector(elements, tuning);
            args.extend([Arg::F32(cap.0), Arg::U64(elements / vec)]);
            let macros = element_options(DType::F32, DType::F32, vec);
            launch("elements.c", "soft_cap", macros, args, each(elements / vec))
        }
        OpSig::Combine { tokens, active, cols, x, accumulate } => {
            let vec = vector(cols.into(), tuning);
            let count = u64::from(tokens) * u64::from(cols) / vec;
            args.extend([active, cols, accumulate.into()].map(Arg::U32));
            args.push(Arg::U64(count));
            launch("elements.c", "combine", element_options(x, x, vec), args, each(count))
        }
        OpSig::Rope { tokens, heads, head_dim, part: Some(RotaryPart { first, length, interleaved }), x } => {
            let count = u64::from(tokens) * u64::from(heads) * u64::from(length / 2);
            args.extend([heads, head_dim, first, length / 2, interleaved.into()].map(Arg::U32));
            args.push(Arg::U64(count));
            launch("elements.c", "rope_part", element_options(x, x, 1), args, each(count))
        }
        OpSig::CopyColumns { rows, cols, from, to, x } => {
            let count = u64::from(rows) * u64::from(cols);
            args.extend([cols, from.row, from.first, to.row, to.first].map(Arg::U32));
            args.push(Arg::U64(count));
            launch("elements.c", "copy_columns", element_options(x, x, 1), args, each(count))
        }
        OpSig::Rope { tokens, heads, head_dim, part: None, x } => {
            let vec = vector(u64::from(head_dim / 2), tuning);
            let count = u64::from(tokens) * u64::from(heads) * u64::from(head_dim / 2) / vec;
            args.extend([Arg::U32(heads), Arg::U32(head_dim / 2), Arg::U64(count)]);
            launch("elements.c", "rope", element_options(x, x, vec), args, each(count))
        }
        OpSig::Embed { tokens, vocab, hidden, table, out } => {
            let vec = vector(hidden.into(), tuning);
            let count = u64::from(tokens) * u64::from(hidden) / vec;
            args.extend([Arg::U32(vocab), Arg::U32(hidden), Arg::U64(count)]);
            launch("elements.c", "embed", element_options(out, table, vec), args, each(count))
        }
        OpSig::RmsNorm { rows, cols, eps, x, weight, out } => {
            args.extend([Arg::U32(rows), Arg::U32(cols), Arg::F32(eps.0)]);
            rms_norm(x, weight, out, rows, cols, args, tuning)
        }
        OpSig::KvWrite { tokens, x: other, kv: shape }
        | OpSig::KvGather { tokens, wire: other, kv: shape }
        | OpSig::KvScatter { tokens, wire: other, kv: shape } => {
            let KvShape { kv_heads, head_dim, page_tokens, dtype: kv, latent } = shape;
            if latent.is_some() && matches!(cmd.sig(), OpSig::KvWrite { .. }) {
                args.insert(1, args[0].clone()); // never read
            }
            let heads = u64::from(tokens) * u64::from(kv_heads);
            let vec = vector(head_dim.into(), tuning);
            let (file, count) = match kv.is_scaled() || other.is_scaled() {
                true => (KV_SCALED, heads),
                false => ("kv.c", heads * u64::from(head_dim) / vec),
            };
            args.extend([Arg::U32(page_tokens), Arg::U32(kv_heads), Arg::U32(head_dim), Arg::U64(count)]);
            let macros = options(&[("X", &other), ("KV", &kv), ("VEC", &vec), ("KV_ROWS", &shape.pools())]);
            launch(file, cmd.sig().name(), macros, args, each(count))
        }
        OpSig::AttnMerge { parts, rows, head_dim, sinks, out } => {
            if sinks == 0 {
                args.insert(2, args[1].clone()); // never read
            }
            let vec = vector(head_dim.into(), tuning);
            let count = u64::from(rows) * u64::from(head_dim) / vec;
            args.extend([parts, head_dim, sinks].map(Arg::U32));
            args.push(Arg::U64(count));
            launch("merge.c", "attn_merge", options(&[("OUT", &out), ("VEC", &vec)]), args, each(count))
        }
        OpSig::Gemm { .. } => gemm(cmd.sig(), args, tuning),
        OpSig::GroupedGemm { .. } => grouped(cmd.sig(), args, tuning),
        OpSig::QuantisedGemm { .. } | OpSig::QuantisedEmbed { .. } => quantised(cmd.sig(), args),
        OpSig::AttnPrefill { .. } | OpSig::AttnDecode { .. } => attention(cmd.sig(), args, tuning),
        OpSig::Route { .. } => unreachable!("planned as two kernels"),
    }
}

/// Returns the choice, one group per token, and its order by expert.
fn route(sig: &OpSig, args: &[Arg], tuning: KernelTuning) -> [OpenclStep; 2] {
    let OpSig::Route { tokens, bias, routing } = *sig else { unreachable!("called for route") };
    let at = 1 + usize::from(bias);
    let [chosen, weights, order, starts] = [0, 1, 2, 3].map(|i| args[at + i].clone());
    // a bias that is absent is not read
    let correction = args[usize::from(bias)].clone();
    let mut choice = vec![args[0].clone(), correction, chosen.clone(), weights];
    let by_sigmoid = u32::from(routing.scoring == Scoring::Sigmoid);
    let flags =
        [bias.into(), by_sigmoid, routing.groups_active, routing.group_best, routing.normalise.into()];
    choice.extend(flags.map(Arg::U32));
    choice.push(Arg::F32(routing.scale.0));
    let work = |kernel, group: usize, groups: u32, args| {
        let macros = options(&[
            ("EXPERTS", &routing.experts),
            ("ACTIVE", &routing.active),
            ("GROUPS", &routing.groups),
            ("GROUP", &group),
        ]);
        launch("route.c", kernel, macros, args, ([groups as usize * group, 1, 1], [group, 1, 1]))
    };
    let (few, many) = if tuning == KernelTuning::Cpu { (1, 1) } else { (GROUP, TILE_THREADS) };
    let choices = Arg::U32(tokens * routing.active);
    let groups = tokens.min(1);
    [
        work("route", few, tokens, choice),
        work("route_order", many, groups, vec![chosen, order, starts, choices]),
    ]
}

fn grouped(sig: &OpSig, mut args: Vec<Arg>, tuning: KernelTuning) -> OpenclStep {
    let OpSig::GroupedGemm { grouped, n, k, x, weight, out, bias } = *sig else {
        unreachable!("called for grouped_gemm")
    };
    let quantised = weight.quantised();
    if let Some(quantised) = &quantised {
        all_parts(quantised, k, &mut args);
    }
    let matrices = if quantised.is_some() { ALL_PARTS } else { 1 };
    if !bias {
        args.insert(1 + matrices, args[0].clone()); // never read
    }
    let choices = grouped.choices;
    args.extend([choices, grouped.fan, grouped.experts, n, k, u32::from(bias)].map(Arg::U32));
    args.extend(quantised.iter().flat_map(|q| [q.group_rows, q.group_columns]).map(Arg::U32));
    let few = grouped.own() <= GEMV_ROWS_MAX.saturating_mul(grouped.touched);
    // while experts have a row each, a group has one too
    let rows = if grouped.own() <= 2 * grouped.touched { 1 } else { ROWS };
    let (file, kernel, grid) = match tuning {
        KernelTuning::Cpu if quantised.is_none() => {
            let (across, down) = (n.div_ceil(COLS) as usize, choices.div_ceil(BAND) as usize);
            ("grouped.cl", "grouped", ([across, down, 1], [1, 1, 1]))
        }
        _ if few => {
            let down = choices.div_ceil(rows) as usize;
            ("grouped.c", "grouped_few", ([n as usize * GROUP, down, 1], [GROUP, 1, 1]))
        }
        _ => {
            let tiles = (choices / TILE + grouped.experts.min(choices)) as usize;
            let across = n.div_ceil(TILE) as usize;
            ("grouped.c", "grouped_many", ([across * TILE_THREADS, tiles, 1], [TILE_THREADS, 1, 1]))
        }
    };
    let shape = match (tuning, &quantised) {
        (_, Some(format)) => {
            let vec = vector(k.into(), KernelTuning::Gpu);
            let own = options(&[("X", &x), ("OUT", &out), ("VEC", &vec), ("ROWS", &rows)]);
            return launch(GROUPED_CODES, kernel, own + &quantised_options(format), args, grid);
        }
        (KernelTuning::Cpu, None) => options(&[("BAND", &BAND)]),
        (KernelTuning::Gpu, None) => options(&[("VEC", &vector(k.into(), tuning)), ("ROWS", &rows)]),
    };
    let dtypes = options(&[("X", &x), ("WEIGHT", &weight), ("OUT", &out)]);
    launch(file, kernel, dtypes + &shape, args, grid)
}

fn element_options(x: DType, table: DType, vec: u64) -> String {
    options(&[("X", &x), ("TABLE", &table), ("VEC", &vec)])
}

/// Launches one thread, or one group, of `rms_norm` per row.
fn rms_norm(
    x: DType,
    weight: DType,
    out: DType,
    rows: u32,
    cols: u32,
    args: Vec<Arg>,
    tuning: KernelTuning,
) -> OpenclStep {
    let vec = vector(cols.into(), tuning);
    let macros = options(&[("X", &x), ("WEIGHT", &weight), ("OUT", &out), ("VEC", &vec)]);
    match tuning {
        KernelTuning::Cpu => launch("rows.cl", "rms_norm", macros, args, ([rows as usize, 1, 1], [1, 1, 1])),
        KernelTuning::Gpu => {
            launch("rows.c", "rms_norm", macros, args, ([rows as usize * GROUP, 1, 1], [GROUP, 1, 1]))
        }
    }
}

fn gemm(sig: &OpSig, mut args: Vec<Arg>, tuning: KernelTuning) -> OpenclStep {
    let OpSig::Gemm { m, n, k, x, weight, out, bias, accumulate } = *sig else {
        unreachable!("called for gemm")
    };
    if !bias {
        args.insert(2, args[1].clone()); // never read
    }
    args.extend([m, n, k, u32::from(bias), u32::from(accumulate)].map(Arg::U32));
    let (file, kernel, grid) = match tuning {
        KernelTuning::Cpu if m == 1 => ("gemm.cl", "gemv", ([n.div_ceil(STRIP) as usize, 1, 1], [1, 1, 1])),
        KernelTuning::Cpu => {
            ("gemm.cl", "gemm", ([n.div_ceil(COLS) as usize, m.div_ceil(BAND) as usize, 1], [1, 1, 1]))
        }
        KernelTuning::Gpu if m <= GEMV_ROWS_MAX => ("gemm.c", "gemv", few_rows_grid(m, n)),
        KernelTuning::Gpu => {
            let (across, down) = (n.div_ceil(TILE) as usize, m.div_ceil(TILE) as usize);
            ("gemm.c", "gemm", ([across * TILE_THREADS, down, 1], [TILE_THREADS, 1, 1]))
        }
    };
    let dtypes = options(&[("X", &x), ("WEIGHT", &weight), ("OUT", &out)]);
    let shape = match tuning {
        KernelTuning::Cpu => options(&[("BAND", &BAND), ("STRIP", &STRIP)]),
        KernelTuning::Gpu => options(&[("VEC", &vector(k.into(), tuning)), ("ROWS", &rows_per_group(m))]),
    };
    launch(file, kernel, dtypes + &shape, args, grid)
}

/// Rows that a group of `gemv` and `quantised_gemm` works on: up to 16 in as few programs as leave no more
/// than half of them, or three, empty.
fn rows_per_group(m: u32) -> u32 {
    if m == 1 { 1 } else { m.next_power_of_two().clamp(4, GEMV_ROWS_MAX) }
}

fn few_rows_grid(m: u32, n: u32) -> ([usize; 3], [usize; 3]) {
    ([n as usize * GROUP, m.div_ceil(rows_per_group(m)) as usize, 1], [GROUP, 1, 1])
}

/// Arrays of weights in a kernel's arguments.
const ALL_PARTS: usize = 6;

/// The operands of quantised weights as the kernels take them: of each kind one, repeated where the format
/// has none.
fn all_parts(quantised: &Quantised, columns: u32, args: &mut Vec<Arg>) {
    let there: Vec<&str> = quantised.parts(1, 1, columns).iter().map(|part| part.name).collect();
    let names: [&str; ALL_PARTS] = ["codes", "high", "scales", "zeros", "supers", "outer"];
    let mut given = args.splice(1..=there.len(), []).collect::<Vec<_>>().into_iter();
    let first = args[0].clone();
    let all = names.map(|name| there.contains(&name).then(|| given.next()).flatten());
    let all = all.map(|arg| arg.unwrap_or_else(|| first.clone()));
    args.splice(1..1, all);
}

fn quantised_options(quantised: &Quantised) -> String {
    let code = CodeKind::ALL.iter().position(|code| *code == quantised.code).unwrap_or_default();
    let scale = quantised.scale.dtype().unwrap_or(DType::U32);
    let zero = match quantised.zero {
        ZeroKind::Middle => 0,
        ZeroKind::Points => 1,
        ZeroKind::Minima => 2,
    };
    let (supers, outer) = (quantised.supers(), u32::from(quantised.outer));
    let macros: [(&str, &dyn std::fmt::Display); 6] = [
        ("CODE", &code),
        ("SCALE", &scale),
        ("ZERO", &zero),
        ("SUPERS", &supers),
        ("OUTER", &outer),
        ("WEIGHT", &DType::F32),
    ];
    options(&macros)
}

fn quantised(sig: &OpSig, mut args: Vec<Arg>) -> OpenclStep {
    match *sig {
        OpSig::QuantisedGemm { m, n, k, x, weight, out, bias, accumulate } => {
            all_parts(&weight, k, &mut args);
            if !bias {
                args.insert(7, args[0].clone()); // never read
            }
            args.extend([m, n, k, u32::from(bias), u32::from(accumulate)].map(Arg::U32));
            args.extend([weight.group_rows, weight.group_columns].map(Arg::U32));
            let own = options(&[("X", &x), ("OUT", &out), ("ROWS", &rows_per_group(m))]);
            let macros = own + &quantised_options(&weight);
            launch("quantised.c", "quantised_gemm", macros, args, few_rows_grid(m, n))
        }
        OpSig::QuantisedEmbed { tokens, vocab, hidden, table, out } => {
            all_parts(&table, hidden, &mut args);
            let count = u64::from(tokens) * u64::from(hidden);
            args.extend([Arg::U32(vocab), Arg::U32(hidden), Arg::U64(count)]);
            args.extend([table.group_rows, table.group_columns].map(Arg::U32));
            let macros = options(&[("X", &DType::F32), ("OUT", &out)]) + &quantised_options(&table);
            launch("quantised.c", "quantised_embed", macros, args, each(count))
        }
        _ => unreachable!("called for quantised weights"),
    }
}

fn attention(sig: &OpSig, mut args: Vec<Arg>, tuning: KernelTuning) -> OpenclStep {
    let (kernel, rows, heads, cap, x, kv) = match *sig {
        OpSig::AttnPrefill { tokens, sequences, heads, pages_max, window, sinks, cap, x, kv, .. } => {
            if !sinks {
                args.insert(SINKS_AT, args[0].clone()); // never read
            }
            args.extend([sequences, heads, kv.kv_heads, kv.page_tokens, pages_max].map(Arg::U32));
            args.extend([tokens, window.unwrap_or(u32::MAX), sinks.into()].map(Arg::U32));
            ("attn_prefill", tokens, heads, cap, x, kv)
        }
        OpSig::AttnDecode { sequences, heads, pages_max, cap, x, kv, .. } => {
            args.extend([sequences, heads, kv.kv_heads, kv.page_tokens, pages_max].map(Arg::U32));
            ("attn_decode", sequences, heads, cap, x, kv)
        }
        _ => unreachable!("called for attention"),
    };
    let (head_dim, value_dim) = (kv.head_dim, kv.value_dim());
    let vectors = width(head_dim).min(width(value_dim));
    let mut macros = options(&[("X", &x), ("KV", &kv.dtype), ("HEAD_DIM", &head_dim), ("W", &vectors)]);
    if kv.latent.is_some() {
        let scale = format!("{:?}f", to_f32(kv.scale()));
        macros += &options(&[("VALUE_DIM", &value_dim), ("SCALE", &scale)]);
    }
    if let Some(cap) = cap {
        macros += &options(&[("SOFT_CAP", &format!("{:?}f", cap.0))]);
    }
    let (heads, rows) = (heads as usize, rows as usize);
    match tuning {
        KernelTuning::Cpu => launch("attention.cl", kernel, macros, args, ([heads, rows, 1], [1, 1, 1])),
        KernelTuning::Gpu => {
            launch("attention.c", kernel, macros, args, ([heads * GROUP, rows, 1], [GROUP, 1, 1]))
        }
    }
}

//! Runs one step of a batch, or a worker's share of it.

pub(crate) mod attention;
pub(crate) mod convert;
pub(crate) mod elementwise;
pub(crate) mod experts;
pub(crate) mod gemm;
mod grouped;
pub(crate) mod kv;
pub(crate) mod panel;
pub(crate) mod quantised;
pub(crate) mod sample;
pub(crate) mod simd;
pub(crate) mod span;

pub(crate) use span::{AlignedScratch, OperandSpan};

use crate::isa::Isa;
use attention::decode::Decode;
use attention::merge::AttnMergeRows;
use attention::prefill::PrefillKernel;
use elementwise::{Binary, BinaryKernel, ClampedSwiglu, RmsNorm, RopeKernel, SoftCap};
use experts::{Combine, ExpertChoice};
use gemm::packed::{PackX, PanelOut};
use gemm::quantised::QuantisedFewRows;
use gemm::rows::GemmRows;
#[cfg(target_arch = "x86_64")]
use gemm::tiles::{self, TilePanel, TileX};
use gemm::{GemmShape, Operands, PackedForm};
use grouped::GroupedGemm;
use kv::{Dense, PagedKv};
use mixfleet_hal::cast::{to_f32, to_usize};
use mixfleet_hal::{ColumnsOf, DType, KvShape, OpSig, Result, RotaryPart};
use quantised::QuantisedRows;
use sample::SampleKernel;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Arithmetic of a `Route` below which one worker does all of it.
const ROUTE_ALONE_FLOPS: f64 = 100e3;

/// Bytes of weights that a worker claims at a time where they stream through it once.
const PIECE_BYTES: usize = 512 << 10;

/// Rounds `n` up to a multiple of `to`.
#[inline(always)]
pub(crate) const fn round_up(n: usize, to: usize) -> usize {
    n.div_ceil(to) * to
}

/// The worker that runs a kernel, as the kernel sees it.
pub(crate) struct KernelWorker<'a> {
    /// Index of the worker within the step.
    pub(crate) index: usize,
    /// Number of workers that run the step.
    pub(crate) count: usize,
    pub(crate) isa: Isa,
    /// Scratch memory of the worker.
    pub(crate) scratch: &'a mut AlignedScratch,
    /// Scratch memory shared by all workers of the device.
    pub(crate) shared: *mut f32,
    /// Counter of the step's claimed pieces.
    pub(crate) claims: &'a AtomicUsize,
}

impl KernelWorker<'_> {
    /// Returns this worker's even, contiguous share of `items`.
    pub(crate) fn share(&self, items: usize) -> Range<usize> {
        items * self.index / self.count..items * (self.index + 1) / self.count
    }

    /// Returns a share as [`KernelWorker::share`] does, but split only at multiples of `unit`.
    fn share_in(&self, items: usize, unit: usize) -> Range<usize> {
        let units = self.share(items.div_ceil(unit));
        (units.start * unit).min(items)..(units.end * unit).min(items)
    }

    /// Claims the next piece of the step.
    pub(crate) fn claim(&self) -> usize {
        self.claims.fetch_add(1, Ordering::Relaxed)
    }

    /// Claims the next piece of a step in which each worker begins with the piece of its index.
    fn claim_after_first(&self) -> usize {
        self.count + self.claim()
    }
}

/// The part of an operation that a step executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KernelPhase {
    /// The whole operation.
    Whole,
    /// Packing a Gemm's `x` into shared scratch.
    PackX,
    /// Multiplication with packed `x`.
    MultiplyPacked,
    /// Choosing experts.
    Choose,
    /// Sorting choices by expert.
    Sort,
    /// Attention over chunks, into shared scratch.
    Chunks,
    /// Summation of the chunks.
    Sums,
}

/// Runs this worker's share of one step.
///
/// # Safety
/// `args` are the operands of `sig` in order, of the sizes that [`OpSig::operands`] says, locked for
/// their access; `shared` holds what `shared_words` says; steps that conflict are separated by a barrier.
#[expect(clippy::too_many_lines, reason = "one arm for each kind of operation")]
pub(crate) unsafe fn run(
    sig: &OpSig,
    args: &[OperandSpan],
    phase: KernelPhase,
    worker: &mut KernelWorker<'_>,
) -> Result<()> {
    let isa = worker.isa;
    match *sig {
        OpSig::Embed { tokens, vocab, hidden, table, out } => {
            return elementwise::embed(worker, args, tokens as usize, vocab, hidden as usize, table, out);
        }
        OpSig::RmsNorm { rows, cols, eps, x, weight, out } => {
            let (cols, rows) = (cols as usize, worker.share(rows as usize));
            let scratch = worker.scratch.words(2 * round_up(cols, 16));
            let args = [args[0], args[1], args[2]];
            let task = RmsNorm { args, rows, cols, eps: eps.0, dtypes: [x, weight, out], scratch };
            // SAFETY: the caller's promise.
            unsafe { isa.run(task) };
        }
        OpSig::QuantisedEmbed { tokens, vocab, hidden, table, out } => {
            return quantised::embed(worker, args, tokens as usize, vocab, hidden as usize, table, out);
        }
        OpSig::Gemm { .. } | OpSig::QuantisedGemm { .. } => {
            let (shape, operands, weights) = gemm_parts(sig, args);
            // SAFETY: the caller's promise.
            unsafe { run_gemm(shape, operands, weights, phase, worker) };
        }
        OpSig::Rope { tokens, heads, head_dim, part, x: dtype } => {
            let part = part.unwrap_or(RotaryPart { first: 0, length: head_dim, interleaved: false });
            let (heads, head_dim, tokens) =
                (heads as usize, head_dim as usize, worker.share(tokens as usize));
            // SAFETY: the caller's promise.
            unsafe {
                isa.run(RopeKernel { x: args[0], cos_sin: args[1], tokens, heads, head_dim, part, dtype })
            };
        }
        OpSig::CopyColumns { rows, cols, from, to, x } => {
            let of = |span: OperandSpan, of: ColumnsOf, row: usize| {
                span.at(x, row * of.row as usize + of.first as usize)
            };
            let bytes = cols as usize * to_usize(x.size_bytes());
            for row in worker.share(rows as usize) {
                // SAFETY: the caller's promise; columns are inside rows, and `Cmd::new` refuses overlap.
                unsafe { std::ptr::copy_nonoverlapping(of(args[0], from, row), of(args[1], to, row), bytes) };
            }
        }
        OpSig::AttnPrefill { .. } => return prefill(sig, args).run(worker),
        OpSig::AttnDecode { .. } => {
            let decode = decode(sig, args);
            return match phase {
                KernelPhase::Chunks => decode.run_chunks(worker),
                KernelPhase::Sums => decode.run_sums(worker),
                _ => decode.run(worker),
            };
        }
        OpSig::AttnMerge { parts, rows, head_dim, sinks, out: dtype } => {
            let (sinks, heads) = ((sinks > 0).then(|| args[2]), sinks as usize);
            let (parts, rows, head_dim) = (parts as usize, rows as usize, head_dim as usize);
            let range = worker.share(rows);
            let (acc, stat, out) = (args[0], args[1], args[2 + usize::from(sinks.is_some())]);
            let sinks = sinks.map(|sinks| (sinks, heads));
            // SAFETY: the caller's promise.
            unsafe { isa.run(AttnMergeRows { acc, stat, sinks, out, parts, rows, range, head_dim, dtype }) };
        }
        OpSig::SiluMul { elements, x } => elements_of(Binary::SiluMul, args, elements, x, worker),
        OpSig::GeluMul { elements, x } => elements_of(Binary::GeluMul, args, elements, x, worker),
        OpSig::ClampedSwiglu { elements, alpha, limit, x: dtype } => {
            let range = worker.share_in(to_usize(elements), 1024);
            let (gate_up, out, alpha, limit) = (args[0], args[1], alpha.0, limit.0);
            // SAFETY: the caller's promise.
            unsafe { isa.run(ClampedSwiglu { gate_up, out, range, alpha, limit, dtype }) };
        }
        OpSig::SoftCap { elements, cap } => {
            let range = worker.share_in(to_usize(elements), 1024);
            // SAFETY: the caller's promise.
            unsafe { isa.run(SoftCap { x: args[0], range, cap: cap.0 }) };
        }
        OpSig::Route { .. } => {
            let route = route(sig, args);
            // SAFETY: the caller's promise; one worker sorts, after a barrier.
            unsafe {
                if phase != KernelPhase::Sort {
                    route.choose(worker);
                }
                if phase != KernelPhase::Choose && worker.index == 0 {
                    route.sort();
                }
            }
        }
        // SAFETY: the caller's promise.
        OpSig::GroupedGemm { .. } => return unsafe { grouped_gemm(sig, args).run(phase, worker) },
        OpSig::Combine { tokens, active, cols, x: dtype, accumulate } => {
            let (tokens, active, cols) = (worker.share(tokens as usize), active as usize, cols as usize);
            let args = [args[0], args[1], args[2]];
            // SAFETY: the caller's promise.
            unsafe { isa.run(Combine { args, tokens, active, cols, dtype, accumulate }) };
        }
        OpSig::Add { elements, x } => elements_of(Binary::Add, args, elements, x, worker),
        OpSig::Sample { .. } => return sample(sig, args).run(worker),
        OpSig::Copy { bytes } => {
            let range = worker.share_in(to_usize(bytes), 4096);
            let (from, to) =
                (args[0].start.wrapping_add(range.start), args[1].start.wrapping_add(range.start));
            // SAFETY: the caller's promise; `Cmd::new` refuses overlap.
            unsafe { std::ptr::copy_nonoverlapping(from, to, range.len()) };
        }
        OpSig::Fill { bytes, word } => {
            for i in worker.share_in(to_usize(bytes) / 4, 1024) {
                // SAFETY: the caller's promise.
                unsafe { args[0].at(DType::U32, i).cast::<u32>().write_unaligned(word) };
            }
        }
        OpSig::KvWrite { .. } | OpSig::KvGather { .. } | OpSig::KvScatter { .. } => {
            return move_kv(sig, args, worker);
        }
    }
    Ok(())
}

fn elements_of(
    function: Binary,
    args: &[OperandSpan],
    elements: u64,
    dtype: DType,
    worker: &KernelWorker<'_>,
) {
    let range = worker.share_in(to_usize(elements), 1024);
    let args = [args[0], args[1], args[2]];
    // SAFETY: the promise of `run`'s caller.
    unsafe { worker.isa.run(BinaryKernel { function, args, range, dtype }) };
}

/// The shape of a product.
pub(crate) fn gemm_shape(sig: &OpSig) -> Option<GemmShape> {
    let (m, n, k, x, out, bias, accumulate, weight, is_quantised) = match *sig {
        OpSig::Gemm { m, n, k, x, weight, out, bias, accumulate } => {
            (m, n, k, x, out, bias, accumulate, weight, false)
        }
        OpSig::QuantisedGemm { m, n, k, x, out, bias, accumulate, .. } => {
            (m, n, k, x, out, bias, accumulate, DType::F32, true)
        }
        _ => return None,
    };
    let (m, n, k) = (m as usize, n as usize, k as usize);
    Some(GemmShape { m, n, k, x, weight, is_quantised, out, bias, accumulate })
}

/// Shape and operands of a product, and its weights if they are quantised.
fn gemm_parts(sig: &OpSig, args: &[OperandSpan]) -> (GemmShape, Operands, Option<QuantisedRows>) {
    let Some(shape) = gemm_shape(sig) else { unreachable!("only called for a product") };
    let OpSig::QuantisedGemm { weight, .. } = *sig else {
        return (shape, Operands::new(&shape, args), None);
    };
    let (weights, rest) = QuantisedRows::of(weight, shape.k, &args[1..]);
    (shape, Operands::quantised(&shape, args[0], rest), Some(weights))
}

/// Weight rows of `n` that a worker claims at a time: enough that starting a stream costs next to nothing,
/// and few enough that no worker waits long for a preempted one. All workers get the same number of pieces.
fn rows_of_a_piece(n: usize, row_bytes: usize, workers: usize) -> usize {
    let share = n.div_ceil(workers);
    let pieces = (share * row_bytes).div_ceil(PIECE_BYTES).max(1);
    round_up(share.div_ceil(pieces).max(1), 8)
}

/// Bytes of the codes or elements of a weight row.
fn weight_row_bytes(shape: &GemmShape, quantised: Option<&QuantisedRows>) -> usize {
    match quantised {
        Some(weights) => 4 * weights.row_words(),
        None => shape.k * to_usize(shape.weight.size_bytes()),
    }
}

/// # Safety
/// As for [`run`].
#[expect(clippy::too_many_lines, reason = "one arm for each pair of dtypes")]
unsafe fn run_gemm(
    shape: GemmShape,
    operands: Operands,
    quantised: Option<QuantisedRows>,
    phase: KernelPhase,
    worker: &mut KernelWorker<'_>,
) {
    let (isa, packed, dtype) = (worker.isa, worker.shared, shape.word_dtype(worker.isa));
    // SAFETY: the caller's promise, and scratch is as large as each task says.
    unsafe {
        match phase {
            #[cfg(target_arch = "x86_64")]
            KernelPhase::PackX if shape.packed_form(isa) == Some(PackedForm::Tiles) => {
                let scratch = worker.scratch.words(TileX::SCRATCH_WORDS);
                let tiles = worker.share(tiles::x_tiles(shape.m));
                isa.run(TileX { shape, operands, tiles, packed, scratch });
            }
            #[cfg(target_arch = "x86_64")]
            KernelPhase::MultiplyPacked if shape.packed_form(isa) == Some(PackedForm::Tiles) => {
                let rows = tiles::panel_rows(&shape, worker.count);
                let scratch = worker.scratch.words(TilePanel::scratch_words(&shape, rows));
                let mut column = worker.index * rows;
                while column < shape.n {
                    let columns = column..(column + rows).min(shape.n);
                    let next = worker.claim_after_first() * rows;
                    let out_rows = None;
                    isa.run(TilePanel {
                        shape,
                        operands,
                        quantised,
                        columns,
                        next,
                        out_rows,
                        packed,
                        scratch,
                    });
                    column = next;
                }
            }
            KernelPhase::PackX => {
                let scratch = worker.scratch.words(PackX::SCRATCH_WORDS);
                let tiles = worker.share(gemm::packed::tiles(shape.m, isa.lanes()));
                isa.run(PackX { shape, operands, dtype, tiles, packed, scratch });
            }
            KernelPhase::MultiplyPacked => {
                let scratch = worker.scratch.words(PanelOut::scratch_words(&shape, dtype));
                let panels = shape.n.div_ceil(2 * isa.lanes());
                loop {
                    let panel = worker.claim();
                    if panel >= panels {
                        break;
                    }
                    isa.run(PanelOut { shape, operands, dtype, panel, quantised, packed, scratch });
                }
            }
            _ => {
                let words = match &quantised {
                    Some(weights) => QuantisedFewRows::scratch_words(&shape, weights),
                    None => GemmRows::scratch_words(&shape),
                };
                let scratch = worker.scratch.words(words);
                let row_bytes = weight_row_bytes(&shape, quantised.as_ref());
                let rows = rows_of_a_piece(shape.n, row_bytes, worker.count);
                let mut first = worker.index * rows;
                while first < shape.n {
                    let columns = first..(first + rows).min(shape.n);
                    let next = worker.claim_after_first() * rows;
                    match quantised {
                        Some(weights) => {
                            let is_ordered = columns.start != worker.index * rows;
                            isa.run(QuantisedFewRows {
                                shape,
                                operands,
                                weights,
                                columns,
                                is_ordered,
                                scratch,
                            });
                        }
                        None => isa.run(GemmRows { shape, operands, columns, scratch }),
                    }
                    first = next;
                }
            }
        }
    }
}

/// The pools of such KV, which are the first of `args`, and the operands behind them.
fn pools(args: &[OperandSpan], shape: KvShape) -> (PagedKv, &[OperandSpan]) {
    let KvShape { kv_heads, head_dim, page_tokens, dtype, latent } = shape;
    let (page_tokens, kv_heads, head_dim) = (page_tokens as usize, kv_heads as usize, head_dim as usize);
    let (pools, rest) = args.split_at(shape.pools() as usize);
    let (k, v) = (pools[0], pools[pools.len() - 1]);
    let (value_dim, scale) = (shape.value_dim() as usize, to_f32(shape.scale()));
    (
        PagedKv {
            k,
            v,
            dtype,
            page_tokens,
            kv_heads,
            head_dim,
            value_dim,
            latent: latent.is_some(),
            scale,
            cap: None,
        },
        rest,
    )
}

fn prefill(sig: &OpSig, args: &[OperandSpan]) -> PrefillKernel {
    let OpSig::AttnPrefill { tokens, sequences, heads, pages_max, window, sinks, cap, x, kv, .. } = *sig
    else {
        unreachable!("only called for AttnPrefill");
    };
    let (pools, rest) = pools(&args[4..], kv);
    PrefillKernel {
        q: args[0],
        query_start: args[1],
        context: args[2],
        pages: args[3],
        pools: PagedKv { cap: cap.map(|cap| cap.0), ..pools },
        sinks: sinks.then(|| rest[0]),
        out: rest[usize::from(sinks)],
        tokens: tokens as usize,
        sequences: sequences as usize,
        heads: heads as usize,
        pages_max: pages_max as usize,
        window: window.map(|w| w as usize),
        x,
    }
}

fn decode(sig: &OpSig, args: &[OperandSpan]) -> Decode {
    let OpSig::AttnDecode { sequences, heads, pages_max, cap, x, kv, .. } = *sig else {
        unreachable!("only called for AttnDecode");
    };
    let (pools, rest) = pools(&args[3..], kv);
    Decode {
        q: args[0],
        range: args[1],
        pages: args[2],
        pools: PagedKv { cap: cap.map(|cap| cap.0), ..pools },
        acc: rest[0],
        stat: rest[1],
        sequences: sequences as usize,
        heads: heads as usize,
        pages_max: pages_max as usize,
        x,
    }
}

fn sample(sig: &OpSig, args: &[OperandSpan]) -> SampleKernel {
    let OpSig::Sample { rows, cols, history, tops } = *sig else {
        unreachable!("only called for Sample");
    };
    let out = if history > 0 { 4 } else { 2 };
    SampleKernel {
        logits: args[0],
        parameters: args[1],
        history: (history > 0).then(|| [args[2], args[3]]),
        out: args[out],
        top: (tops > 0).then(|| args[out + 1]),
        rows: rows as usize,
        cols: cols as usize,
        entries: history as usize,
        tops: tops as usize,
    }
}

fn route(sig: &OpSig, args: &[OperandSpan]) -> ExpertChoice {
    let OpSig::Route { tokens, bias, routing } = *sig else { unreachable!("only called for Route") };
    let at = 1 + usize::from(bias);
    ExpertChoice {
        logits: args[0],
        bias: bias.then(|| args[1]),
        chosen: args[at],
        weights: args[at + 1],
        order: args[at + 2],
        starts: args[at + 3],
        tokens: tokens as usize,
        routing,
    }
}

fn grouped_gemm(sig: &OpSig, args: &[OperandSpan]) -> GroupedGemm {
    let OpSig::GroupedGemm { grouped, n, k, x, weight, out, bias } = *sig else {
        unreachable!("only called for GroupedGemm");
    };
    let (m, n, k) = (grouped.choices as usize, n as usize, k as usize);
    let first = 1 + weight.part_count();
    let at = first + usize::from(bias);
    let quantised = weight.quantised().map(|kind| QuantisedRows::of(kind, k, &args[1..]).0);
    let is_quantised = quantised.is_some();
    GroupedGemm {
        shape: GemmShape { m, n, k, x, weight: weight.bias(), is_quantised, out, bias, accumulate: false },
        x: args[0],
        weight: args[1],
        quantised,
        bias: bias.then(|| args[first]),
        order: args[at],
        starts: args[at + 1],
        out: args[at + 2],
        fan: grouped.fan as usize,
        experts: grouped.experts as usize,
    }
}

fn move_kv(sig: &OpSig, args: &[OperandSpan], worker: &mut KernelWorker<'_>) -> Result<()> {
    match *sig {
        OpSig::KvWrite { tokens, x, kv } => {
            let at = kv.pools() as usize;
            let (pools, _) = pools(&args[at + 1..], kv);
            let (k, v, per_token) = (args[0], args[at - 1], kv.kv_heads as usize);
            let dense = Dense { k, v, dtype: x, per_token, v_first: 0 };
            kv::store(worker, &pools, &dense, args[at], tokens as usize)
        }
        OpSig::KvScatter { tokens, wire, kv } => {
            let (pools, _) = pools(&args[2..], kv);
            kv::store(worker, &pools, &wire_rows(args[0], wire, kv), args[1], tokens as usize)
        }
        OpSig::KvGather { tokens, wire, kv } => {
            let (pools, rest) = pools(&args[1..], kv);
            kv::gather(worker, &pools, &wire_rows(rest[0], wire, kv), args[0], tokens as usize)
        }
        _ => unreachable!("only called for KV moves"),
    }
}

/// Describes the wire layout: per token all keys, then all values.
fn wire_rows(wire: OperandSpan, dtype: DType, kv: KvShape) -> Dense {
    let kv_heads = kv.kv_heads as usize;
    Dense { k: wire, v: wire, dtype, per_token: kv.pools() as usize * kv_heads, v_first: kv_heads }
}

/// Returns the phases of an operation in order, and the words of shared scratch that they need.
pub(crate) fn phases(
    sig: &OpSig,
    args: &[OperandSpan],
    isa: Isa,
    workers: usize,
) -> (&'static [KernelPhase], usize) {
    match sig {
        OpSig::Gemm { .. } | OpSig::QuantisedGemm { .. } => {
            let Some(shape) = gemm_shape(sig) else { unreachable!("it is a product") };
            if let Some(form) = shape.packed_form(isa) {
                let words = match form {
                    PackedForm::Words(dtype) => gemm::packed::packed_words(&shape, dtype),
                    #[cfg(target_arch = "x86_64")]
                    PackedForm::Tiles => tiles::packed_words(&shape),
                    #[cfg(not(target_arch = "x86_64"))]
                    PackedForm::Tiles => unreachable!("only a level with tiles"),
                };
                return (&[KernelPhase::PackX, KernelPhase::MultiplyPacked], words);
            }
        }
        #[cfg(target_arch = "x86_64")]
        OpSig::GroupedGemm { grouped, .. } => {
            let GroupedGemm { shape, .. } = grouped_gemm(sig, args);
            if shape.packed_form(isa) == Some(PackedForm::Tiles) {
                let words = tiles::packed_words_of_experts(&shape, grouped.experts as usize);
                return (&[KernelPhase::PackX, KernelPhase::MultiplyPacked], words);
            }
        }
        OpSig::Route { .. } if workers > 1 && sig.flops() > ROUTE_ALONE_FLOPS => {
            return (&[KernelPhase::Choose, KernelPhase::Sort], 0);
        }
        OpSig::AttnDecode { .. } => {
            let decode = decode(sig, args);
            if decode.is_split(workers) {
                return (&[KernelPhase::Chunks, KernelPhase::Sums], decode.shared_words());
            }
        }
        _ => {}
    }
    (&[KernelPhase::Whole], 0)
}

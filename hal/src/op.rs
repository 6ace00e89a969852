//! The operations of a decoder-only transformer, as plain values.
//!
//! An [`OpSig`] is an operation's kind, shape and dtypes. It determines everything about a command except the
//! addresses: which operands it takes (their order, access, dtype and size: [`OpSig::operands`]), how many
//! floating-point operations it does and how many bytes it must move.
//!
//! Conventions. Matrices are row-major and dense. `tokens` counts the new tokens of a step over all its
//! sequences, laid end to end. Shapes stand in the comment after each operand below.
//!
//! **Paged KV.** One layer's keys (or values) are an array of pages; a page holds `page_tokens` tokens of all
//! `kv_heads`. A *slot* is `page * page_tokens + offset in the page`. The layout inside a page is private to
//! the backend, because only operations touch it. What crosses a link is the *wire layout* of
//! `KvGather`/`KvScatter`, `[tokens, 2 (K, V), kv_heads, head_dim]`, which is the same everywhere, so that
//! devices with different page sizes or dtypes can exchange KV. KV of eight bits has a scale behind each
//! head's codes ([`scaled`](crate::scaled)). Keys that contain their values ([`LatentKv`]) have no pool of
//! values and no place in the wire layout for them: operations lack `v` and `v_pool`, and the wire is
//! `[tokens, head_dim]`.
//!
//! **Attention.** Scores are scaled by `1/sqrt(head_dim)`, or as [`LatentKv`] says. `value_dim` is
//! `head_dim`, or the length of such values. With `cap = Some(c)` a scaled score s becomes `c tanh(s / c)`
//! (Gemma 2). With `window = Some(w)` a query at position p sees keys p-w+1
//! ..= p. `AttnDecode` covers any token range of a sequence and returns un-normalised output with
//! its running maximum and sum, so that attention over any partition of the KV (by head, by request, by
//! token range) recombines exactly in `AttnMerge`: flash-decoding and attention offload are the same
//! operator. A *sink* (gpt-oss) is a logit that a head learned: a key of this score, with a value of zero,
//! that every query sees once. Where attention is normalised, `exp(sink - max)` joins the sum of a row's
//! weights.

pub use crate::mixture::{ExpertRouting, GroupedRows, Scoring};
use crate::operand::product;
pub use crate::operand::{ColumnsOf, Extent, KvShape, LatentKv, Operand, OperandAccess, RotaryPart};
use crate::quantised::{MatrixKind, QuantisedPart};
use crate::sample::{DRAWN_WORDS, PARAMETER_WORDS};
pub use crate::scalar::Scalar;
use crate::{DType, Quantised};
use serde::{Deserialize, Serialize};

/// An operation: its kind, shape and dtypes. The [module](self) documentation lists the conventions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum OpSig {
    /// Gathers rows of a table by index, for token embeddings and for selecting rows of activations. `ids
    /// [tokens]`, `table [vocab, hidden]`, `out [tokens, hidden]`.
    Embed {
        /// Number of rows to fetch.
        tokens: u32,
        /// Number of rows in the table; an id at or above it is an error.
        vocab: u32,
        /// Row length.
        hidden: u32,
        /// Dtype of the table.
        table: DType,
        /// Dtype of the result.
        out: DType,
    },
    /// `out = x / sqrt(mean(x^2) + eps) * weight`, row by row (Zhang & Sennrich 2019).
    /// `x [rows, cols]`, `weight [cols]`, `out [rows, cols]`.
    RmsNorm {
        /// Number of rows.
        rows: u32,
        /// Row length.
        cols: u32,
        /// The constant added to the mean square.
        eps: Scalar,
        /// Dtype of `x`.
        x: DType,
        /// Dtype of `weight`.
        weight: DType,
        /// Dtype of `out`.
        out: DType,
    },
    /// `out = x . weight^T (+ bias) (+ out)`, accumulated in f32.
    /// `x [m, k]`, `weight [n, k]`, with `bias`: `bias [n]`, `out [m, n]`.
    Gemm {
        /// Rows of `x`: tokens.
        m: u32,
        /// Rows of `weight`: output features.
        n: u32,
        /// Inner dimension: input features.
        k: u32,
        /// Dtype of `x`.
        x: DType,
        /// Dtype of `weight` and `bias`.
        weight: DType,
        /// Dtype of `out`.
        out: DType,
        /// Whether a bias operand follows the weight.
        bias: bool,
        /// Whether the result is added to `out` (the residual stream) instead of overwriting it.
        accumulate: bool,
    },
    /// `Embed` from a quantised table: `ids [tokens]`, the arrays of [`Quantised::parts`] of a matrix
    /// `[vocab, hidden]`, `out [tokens, hidden]`.
    QuantisedEmbed {
        /// Number of rows to fetch.
        tokens: u32,
        /// Number of rows in the table; an id at or above it is an error.
        vocab: u32,
        /// Row length.
        hidden: u32,
        /// How the table is quantised.
        table: Quantised,
        /// Dtype of the result.
        out: DType,
    },
    /// `Gemm` with quantised weights: `x [m, k]`, the arrays of [`Quantised::parts`] of a matrix `[n, k]`,
    /// with `bias`: `bias [n]` f32, `out [m, n]`. A device with activations of 16 bits may round a weight to
    /// their dtype.
    QuantisedGemm {
        /// Rows of `x`: tokens.
        m: u32,
        /// Rows of the weights: output features.
        n: u32,
        /// Inner dimension: input features.
        k: u32,
        /// Dtype of `x`.
        x: DType,
        /// How the weights are quantised.
        weight: Quantised,
        /// Dtype of `out`.
        out: DType,
        /// Whether a bias operand follows the weights.
        bias: bool,
        /// Whether the result is added to `out` (the residual stream) instead of overwriting it.
        accumulate: bool,
    },
    /// Rotates pairs (i, i + head_dim/2) of every head in place: `(a cos - b sin, b cos + a sin)`. `x
    /// [tokens, heads, head_dim]`, `cos_sin [tokens, head_dim]` f32: head_dim/2 cosines, then head_dim/2
    /// sines, already scaled, so that every RoPE variant is just another table. With `part` only these
    /// numbers of a head are rotated, and a row of the table is as long as they are.
    Rope {
        /// New tokens.
        tokens: u32,
        /// Heads of `x`.
        heads: u32,
        /// Length of a head; even if all of it is rotated.
        head_dim: u32,
        /// The rotated part of a head, if not all of it is rotated.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        part: Option<RotaryPart>,
        /// Dtype of `x`.
        x: DType,
    },
    /// Copies columns of each row into columns of another matrix, whose others stay: `from [rows, from.row]`,
    /// `to [rows, to.row]`. It cuts rows apart and joins them.
    CopyColumns {
        /// Rows of both.
        rows: u32,
        /// Columns to copy.
        cols: u32,
        /// Which ones they are in `from`.
        from: ColumnsOf,
        /// Which ones they become in `to`.
        to: ColumnsOf,
        /// Dtype of both.
        x: DType,
    },
    /// Stores new keys and values at their slots.
    /// `k [tokens, kv_heads, head_dim]`, `v` likewise, `slots [tokens]`, `k_pool`, `v_pool`.
    KvWrite {
        /// New tokens.
        tokens: u32,
        /// Dtype of `k` and `v`.
        x: DType,
        /// The paged KV.
        #[serde(flatten)]
        kv: KvShape,
    },
    /// Causal attention of many new tokens per sequence over their sequences' pages. `q [tokens, heads,
    /// head_dim]`, `query_start [sequences + 1]` (row of each sequence's first query; the last entry is
    /// `tokens`), `context [sequences]` (keys visible to the *last* query, itself included; the KV of the new
    /// tokens is already written), `pages [sequences, pages_max]`, `k_pool`, `v_pool`, with `sinks`: `sinks
    /// [heads]` f32, `out [tokens, heads, value_dim]`.
    AttnPrefill {
        /// New tokens over all sequences.
        tokens: u32,
        /// Sequences.
        sequences: u32,
        /// Query-key pairs that are visible, over all sequences; the arithmetic is proportional to it.
        pairs: u64,
        /// Sum of the sequences' contexts, i.e. the number of keys that must be read at least once.
        kv_tokens: u64,
        /// Query heads.
        heads: u32,
        /// Row length of the page table.
        pages_max: u32,
        /// The sliding window in tokens, if the layer has one.
        window: Option<u32>,
        /// Whether a sink of each head joins the sum of its weights.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        sinks: bool,
        /// Soft cap of scores.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cap: Option<Scalar>,
        /// Dtype of `q` and `out`.
        x: DType,
        /// The paged KV.
        #[serde(flatten)]
        kv: KvShape,
    },
    /// Attention of one query per sequence over a token range of its pages, un-normalised. `q [sequences,
    /// heads, head_dim]`, `range [sequences, 2]` (first and one-past-last key; may be empty), `pages
    /// [sequences, pages_max]` (of the whole sequence, from its token 0), `k_pool`, `v_pool`, `acc
    /// [sequences, heads, value_dim]` f32 = sum of exp(score - max) * v, `stat [sequences, heads, 2]` f32 =
    /// (max, sum); an empty range gives acc 0, max -inf, sum 0. A sliding window is expressed by the range.
    AttnDecode {
        /// Sequences.
        sequences: u32,
        /// Keys over all ranges.
        kv_tokens: u64,
        /// Query heads.
        heads: u32,
        /// Row length of the page table.
        pages_max: u32,
        /// Soft cap of scores.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cap: Option<Scalar>,
        /// Dtype of `q`.
        x: DType,
        /// The paged KV.
        #[serde(flatten)]
        kv: KvShape,
    },
    /// Recombines the parts of `AttnDecode` (Dao et al. 2023, flash-decoding) and normalises.
    /// `acc [parts, rows, head_dim]` f32, `stat [parts, rows, 2]` f32, with `sinks`: `sinks [sinks]` f32,
    /// `out [rows, head_dim]`. A row whose parts are all empty gives 0.
    AttnMerge {
        /// Number of parts that the KV was split into.
        parts: u32,
        /// Sequences times heads.
        rows: u32,
        /// Length of a head.
        head_dim: u32,
        /// Heads with an attention sink: the sink adds its exponential to the row's sum and nothing to the
        /// output; 0 without sinks.
        #[serde(default, skip_serializing_if = "is_zero")]
        sinks: u32,
        /// Dtype of `out`.
        out: DType,
    },
    /// `out = gate / (1 + exp(-gate)) * up`. `gate`, `up`, `out [elements]`.
    SiluMul {
        /// Elements.
        elements: u64,
        /// Dtype of all three.
        x: DType,
    },
    /// `out = gate * up / (1 + exp(-2 z))` with `z = sqrt(2 / pi) (gate + 0.044715 gate^3)`: GELU in the form
    /// with tanh (Hendrycks & Gimpel 2016; Gemma). `gate`, `up`, `out [elements]`.
    GeluMul {
        /// Elements.
        elements: u64,
        /// Dtype of all three.
        x: DType,
    },
    /// `out = (min(max(up, -limit), limit) + 1) * g / (1 + exp(-alpha g))` with `g = min(gate, limit)`
    /// (gpt-oss). `gate_up [elements, 2]`: each gate before its up; `out [elements]`.
    ClampedSwiglu {
        /// Elements of `out`.
        elements: u64,
        /// Factor of the gate in the sigmoid.
        alpha: Scalar,
        /// Largest gate and largest magnitude of up.
        limit: Scalar,
        /// Dtype of both.
        x: DType,
    },
    /// Bounds values smoothly, in place: `x = cap tanh(x / cap)` (the logits of Gemma 2). `x [elements]` f32.
    SoftCap {
        /// Elements.
        elements: u64,
        /// Bound of magnitudes.
        cap: Scalar,
    },
    /// Chooses experts for each token ([`ExpertRouting`] says how), and sorts the choices by expert.
    /// `logits [tokens, experts]` f32, with `bias`: `bias [experts]` f32, which is added to scores for the
    /// choice alone; `chosen [tokens, active]` u32, best first; `weights [tokens, active]` f32; `order
    /// [tokens * active]` u32: the choices, as token * active + its place, by expert and then by their
    /// number; `starts [experts + 1]` u32: where each expert's choices begin in `order`.
    Route {
        /// Tokens.
        tokens: u32,
        /// Whether a correction bias follows the logits.
        bias: bool,
        /// How experts are chosen.
        #[serde(flatten)]
        routing: ExpertRouting,
    },
    /// Each choice's product with the matrix of its expert, accumulated in f32: `out[c] = x[c / fan] .
    /// weight[e]^T (+ bias[e])` for every choice c in `order[starts[e] .. starts[e + 1]]`, and nothing for
    /// other choices ([`GroupedRows::others`]). `x [choices / fan, k]`, `weight [experts, n, k]` or the
    /// arrays of [`Quantised::parts`], with `bias`: `bias [experts, n]`, f32 if the weights are quantised,
    /// `order [choices]` u32, `starts [experts + 1]` u32, `out [choices, n]`.
    GroupedGemm {
        /// Rows, and how experts share them.
        #[serde(flatten)]
        grouped: GroupedRows,
        /// Rows of an expert's matrix: output features.
        n: u32,
        /// Inner dimension: input features.
        k: u32,
        /// Dtype of `x`.
        x: DType,
        /// How the weights are stored.
        weight: MatrixKind,
        /// Dtype of `out`.
        out: DType,
        /// Whether a bias operand follows the weights.
        bias: bool,
    },
    /// Sums the experts' outputs for each token, in the order of its choices, in f32: `out[t] (+)= sum of
    /// weights[t, i] * x[t, i]`. `x [tokens, active, cols]`, `weights [tokens, active]` f32, `out [tokens,
    /// cols]` f32.
    Combine {
        /// Tokens.
        tokens: u32,
        /// Choices of a token.
        active: u32,
        /// Row length.
        cols: u32,
        /// Dtype of `x`.
        x: DType,
        /// Whether the result is added to `out` (the residual stream) instead of overwriting it.
        accumulate: bool,
    },
    /// `out = a + b`. `a`, `b`, `out [elements]`.
    Add {
        /// Elements.
        elements: u64,
        /// Dtype of all three.
        x: DType,
    },
    /// Draws a token of each row of logits, by [`sample`](crate::sample). `logits [rows, cols]` f32, which
    /// penalties change in place, `parameters [rows, 8]` u32; with `history`: `history_start [rows + 1]` u32,
    /// `history [history, 2]` u32, an id that no other entry of the row has, and the f32 that lowers its
    /// logit, in whose place the logit before penalties is left; `out [rows, 4]` u32; with `tops`: `top
    /// [rows, tops, 2]` u32, the best tokens of a row that wants log-probabilities, best first, and the f32
    /// of their logit minus the best one, or [`NO_TOKEN`](crate::sample::NO_TOKEN) and -infinity. An id of
    /// the history that has no logit is passed over.
    #[serde(alias = "argmax")] // which older profiles measured: a greedy draw
    Sample {
        /// Number of rows.
        rows: u32,
        /// Row length: the vocabulary.
        cols: u32,
        /// Entries that the history has room for; rows use any part of it.
        #[serde(default)]
        history: u32,
        /// Number of best tokens to list.
        #[serde(default)]
        tops: u32,
    },
    /// Copies `from [bytes]` to `to [bytes]`, which must not overlap; sizes are counted in `U32` elements.
    Copy {
        /// Number of bytes, a multiple of 4.
        bytes: u64,
    },
    /// Sets every 32-bit value of `to [bytes]`.
    Fill {
        /// Number of bytes, a multiple of 4.
        bytes: u64,
        /// The 32-bit pattern.
        word: u32,
    },
    /// Reads slots into the wire layout.
    /// `slots [tokens]`, `k_pool`, `v_pool`, `out [tokens, 2, kv_heads, head_dim]`.
    KvGather {
        /// Slots to read.
        tokens: u32,
        /// The paged KV.
        #[serde(flatten)]
        kv: KvShape,
        /// Dtype of `out`.
        wire: DType,
    },
    /// Writes the wire layout to slots.
    /// `wire [tokens, 2, kv_heads, head_dim]`, `slots [tokens]`, `k_pool`, `v_pool`.
    KvScatter {
        /// Slots to write.
        tokens: u32,
        /// The paged KV.
        #[serde(flatten)]
        kv: KvShape,
        /// Dtype of the input.
        wire: DType,
    },
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
const fn is_zero(count: &u32) -> bool {
    *count == 0
}

impl OpSig {
    /// Returns the operands in the order in which a command carries them. This is the contract that every
    /// backend implements and [`crate::Cmd::new`] enforces.
    #[expect(clippy::too_many_lines, reason = "one arm for each kind of operation")]
    pub fn operands(&self) -> Vec<Operand> {
        use DType::{F32, U32};
        use OperandAccess::{Read, ReadWrite, Write};
        let exactly = |name, access, dtype, elements| Operand {
            name,
            access,
            dtype,
            extent: Extent::Exactly(elements),
        };
        let pools = |access, kv: KvShape| {
            let extent = Extent::PagesOf(kv.row().saturating_mul(kv.page_tokens.into()));
            let names = ["k_pool", "v_pool"].into_iter().take(kv.pools() as usize);
            names.map(move |name| Operand { name, access, dtype: kv.dtype, extent })
        };
        let part = |part: &QuantisedPart| exactly(part.name, Read, part.dtype, part.elements());
        match *self {
            OpSig::Embed { tokens, vocab, hidden, table, out } => vec![
                exactly("ids", Read, U32, u64::from(tokens)),
                exactly("table", Read, table, product(&[vocab, hidden])),
                exactly("out", Write, out, product(&[tokens, hidden])),
            ],
            OpSig::RmsNorm { rows, cols, x, weight, out, .. } => vec![
                exactly("x", Read, x, product(&[rows, cols])),
                exactly("weight", Read, weight, u64::from(cols)),
                exactly("out", Write, out, product(&[rows, cols])),
            ],
            OpSig::Gemm { m, n, k, x, weight, out, bias, accumulate } => {
                let mut operands = vec![
                    exactly("x", Read, x, product(&[m, k])),
                    exactly("weight", Read, weight, product(&[n, k])),
                ];
                if bias {
                    operands.push(exactly("bias", Read, weight, u64::from(n)));
                }
                let access = if accumulate { ReadWrite } else { Write };
                operands.push(exactly("out", access, out, product(&[m, n])));
                operands
            }
            OpSig::QuantisedEmbed { tokens, vocab, hidden, table, out } => {
                let mut operands = vec![exactly("ids", Read, U32, u64::from(tokens))];
                operands.extend(table.parts(1, vocab, hidden).iter().map(part));
                operands.push(exactly("out", Write, out, product(&[tokens, hidden])));
                operands
            }
            OpSig::QuantisedGemm { m, n, k, x, weight, out, bias, accumulate } => {
                let mut operands = vec![exactly("x", Read, x, product(&[m, k]))];
                operands.extend(weight.parts(1, n, k).iter().map(part));
                if bias {
                    operands.push(exactly("bias", Read, F32, u64::from(n)));
                }
                let access = if accumulate { ReadWrite } else { Write };
                operands.push(exactly("out", access, out, product(&[m, n])));
                operands
            }
            OpSig::Rope { tokens, heads, head_dim, part, x } => {
                let rotated = part.map_or(head_dim, |part| part.length);
                vec![
                    exactly("x", ReadWrite, x, product(&[tokens, heads, head_dim])),
                    exactly("cos_sin", Read, F32, product(&[tokens, rotated])),
                ]
            }
            OpSig::CopyColumns { rows, from, to, x, .. } => vec![
                exactly("from", Read, x, product(&[rows, from.row])),
                exactly("to", ReadWrite, x, product(&[rows, to.row])),
            ],
            OpSig::KvWrite { tokens, x, kv } => {
                let rows = ["k", "v"].into_iter().take(kv.pools() as usize);
                let row = product(&[tokens, kv.kv_heads, kv.head_dim]);
                let mut operands: Vec<Operand> = rows.map(|name| exactly(name, Read, x, row)).collect();
                operands.push(exactly("slots", Read, U32, u64::from(tokens)));
                operands.extend(pools(ReadWrite, kv));
                operands
            }
            OpSig::AttnPrefill { tokens, sequences, heads, pages_max, sinks, x, kv, .. } => {
                let mut operands = vec![
                    exactly("q", Read, x, product(&[tokens, heads, kv.head_dim])),
                    exactly("query_start", Read, U32, u64::from(sequences) + 1),
                    exactly("context", Read, U32, u64::from(sequences)),
                    exactly("pages", Read, U32, product(&[sequences, pages_max])),
                ];
                operands.extend(pools(Read, kv));
                if sinks {
                    operands.push(exactly("sinks", Read, F32, u64::from(heads)));
                }
                operands.push(exactly("out", Write, x, product(&[tokens, heads, kv.value_dim()])));
                operands
            }
            OpSig::AttnDecode { sequences, heads, pages_max, x, kv, .. } => {
                let mut operands = vec![
                    exactly("q", Read, x, product(&[sequences, heads, kv.head_dim])),
                    exactly("range", Read, U32, product(&[sequences, 2])),
                    exactly("pages", Read, U32, product(&[sequences, pages_max])),
                ];
                operands.extend(pools(Read, kv));
                operands.push(exactly("acc", Write, F32, product(&[sequences, heads, kv.value_dim()])));
                operands.push(exactly("stat", Write, F32, product(&[sequences, heads, 2])));
                operands
            }
            OpSig::AttnMerge { parts, rows, head_dim, sinks, out } => {
                let mut operands = vec![
                    exactly("acc", Read, F32, product(&[parts, rows, head_dim])),
                    exactly("stat", Read, F32, product(&[parts, rows, 2])),
                ];
                if sinks > 0 {
                    operands.push(exactly("sinks", Read, F32, u64::from(sinks)));
                }
                operands.push(exactly("out", Write, out, product(&[rows, head_dim])));
                operands
            }
            OpSig::SiluMul { elements, x } | OpSig::GeluMul { elements, x } => vec![
                exactly("gate", Read, x, elements),
                exactly("up", Read, x, elements),
                exactly("out", Write, x, elements),
            ],
            OpSig::ClampedSwiglu { elements, x, .. } => vec![
                exactly("gate_up", Read, x, elements.saturating_mul(2)),
                exactly("out", Write, x, elements),
            ],
            OpSig::SoftCap { elements, .. } => vec![exactly("x", ReadWrite, F32, elements)],
            OpSig::Route { tokens, bias, routing } => routing.operands(tokens, bias),
            OpSig::GroupedGemm { grouped, n, k, x, weight, out, bias } => {
                grouped.operands([n, k], x, weight, out, bias)
            }
            OpSig::Combine { tokens, active, cols, x, accumulate } => vec![
                exactly("x", Read, x, product(&[tokens, active, cols])),
                exactly("weights", Read, F32, product(&[tokens, active])),
                exactly("out", if accumulate { ReadWrite } else { Write }, F32, product(&[tokens, cols])),
            ],
            OpSig::Add { elements, x } => vec![
                exactly("a", Read, x, elements),
                exactly("b", Read, x, elements),
                exactly("out", Write, x, elements),
            ],
            OpSig::Sample { rows, cols, history, tops } => {
                let mut operands = vec![
                    exactly("logits", ReadWrite, F32, product(&[rows, cols])),
                    exactly("parameters", Read, U32, product(&[rows, PARAMETER_WORDS])),
                ];
                if history > 0 {
                    operands.push(exactly("history_start", Read, U32, u64::from(rows) + 1));
                    operands.push(exactly("history", ReadWrite, U32, product(&[history, 2])));
                }
                operands.push(exactly("out", Write, U32, product(&[rows, DRAWN_WORDS])));
                if tops > 0 {
                    operands.push(exactly("top", Write, U32, product(&[rows, tops, 2])));
                }
                operands
            }
            OpSig::Copy { bytes } => {
                vec![exactly("from", Read, U32, bytes / 4), exactly("to", Write, U32, bytes / 4)]
            }
            OpSig::Fill { bytes, .. } => vec![exactly("to", Write, U32, bytes / 4)],
            OpSig::KvGather { tokens, kv, wire } => {
                let mut operands = vec![exactly("slots", Read, U32, u64::from(tokens))];
                operands.extend(pools(Read, kv));
                operands.push(exactly("out", Write, wire, kv.wire_elements(tokens, wire)));
                operands
            }
            OpSig::KvScatter { tokens, kv, wire } => {
                let wire = exactly("wire", Read, wire, kv.wire_elements(tokens, wire));
                let mut operands = vec![wire, exactly("slots", Read, U32, u64::from(tokens))];
                operands.extend(pools(ReadWrite, kv));
                operands
            }
        }
    }

    /// The paged KV that it reads or writes; none for other operations.
    pub fn kv(&self) -> Option<KvShape> {
        match *self {
            OpSig::KvWrite { kv, .. }
            | OpSig::AttnPrefill { kv, .. }
            | OpSig::AttnDecode { kv, .. }
            | OpSig::KvGather { kv, .. }
            | OpSig::KvScatter { kv, .. } => Some(kv),
            _ => None,
        }
    }
}

#[cfg(test)]
#[path = "op_tests.rs"]
mod tests;

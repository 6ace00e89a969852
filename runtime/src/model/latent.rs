//! Multi-head latent attention (MLA; DeepSeek-AI 2024, arXiv 2405.04434): a token's keys and values are one
//! latent vector that all heads share, and a rotated part of the key.
//!
//! KV is the latent and the rotated part. Decodes attend to these themselves: the matrix that would make a
//! head's key of a latent is multiplied with the query instead (it *lifts* the query to the latent's length),
//! and the one that would make a value with what was attended to (it *lowers* that). Both are the rows of
//! `kv_b_proj` of a head, which are taken apart when they are placed. So do prompts of few tokens; of longer
//! ones keys and values are made as they are defined, which is less arithmetic (`expanded.rs`).

use super::arena::rows_of;
use super::attention::AttentionArena;
use super::config::ModelConfig;
use super::error::Result as ModelResult;
use super::expanded::ExpandedArena;
use super::fields::Fields;
use super::product::{Out, gemm, product};
use super::rope;
use super::step::StepShape;
use super::{LatentWeights, Tensor};
use mixfleet_hal::cast::{to_f32, to_u32};
use mixfleet_hal::{
    BufferUsage, Cmd, ColumnsOf, DType, Device, GroupedRows, OpSig, Result, RotaryPart, Scalar, Slice,
};
use mixfleet_scheduler::cost::LatentAttention;
use std::sync::atomic::{AtomicU32, Ordering};

/// Bound well above any real model.
const LENGTH_MAX: u32 = 1 << 14;

/// The latent attention of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct LatentHeads {
    /// Lengths of a head's parts and of latents.
    pub lengths: LatentAttention,
    /// What scores are multiplied by.
    pub scale: Scalar,
}

/// The matrices that up-projections are taken apart into, in the places of `kv_b_proj`.
pub(super) const UP: &str = "self_attn.kv_b_proj.weight";
pub(super) const LIFT: &str = "self_attn.kv_b_proj.lift";
pub(super) const LOWER: &str = "self_attn.kv_b_proj.lower";
pub(super) const KEYS: &str = "self_attn.kv_b_proj.keys";

impl LatentHeads {
    /// Reads it from the configuration of a family that has it.
    ///
    /// # Errors
    /// The error names the field.
    pub(super) fn parse(fields: &Fields, context_max: u32) -> ModelResult<Self> {
        let q_rank = fields.count("q_lora_rank", LENGTH_MAX)?.unwrap_or(0);
        let lengths = LatentAttention {
            q_rank,
            kv_rank: fields.count_required("kv_lora_rank", LENGTH_MAX)?,
            nope: fields.count_required("qk_nope_head_dim", LENGTH_MAX)?,
            rope: fields.count_required("qk_rope_head_dim", LENGTH_MAX)?,
            v: fields.count_required("v_head_dim", LENGTH_MAX)?,
            expanded_tokens: 0,
        };
        let lengths = lengths.expanding(context_max);
        if !lengths.rope.is_multiple_of(2) {
            let problem = format!("{}, expected an even number: rope turns pairs", lengths.rope);
            return Err(fields.error("qk_rope_head_dim", problem));
        }
        if fields.flag("attention_bias", false)? {
            return Err(
                fields.error("attention_bias", "true is not supported with latents; supported: false")
            );
        }
        if !fields.flag("rope_interleave", true)? {
            return Err(fields.error("rope_interleave", "false is not supported; supported: true"));
        }
        let scale = rope::score_scale(fields)? / f64::from(lengths.nope + lengths.rope).sqrt();
        Ok(LatentHeads { lengths, scale: Scalar(to_f32(scale)) })
    }

    /// Name and shape of the tensors of a layer's attention but its output.
    pub(super) fn shapes(&self, (hidden, heads): (u64, u64), add: &mut dyn FnMut(&str, &[u64])) {
        let LatentAttention { q_rank, kv_rank, nope, rope, v, .. } = self.lengths;
        let [q_rank, kv_rank, nope, rope, v] = [q_rank, kv_rank, nope, rope, v].map(u64::from);
        if q_rank > 0 {
            add("self_attn.q_a_proj.weight", &[q_rank, hidden]);
            add("self_attn.q_a_layernorm.weight", &[q_rank]);
            add("self_attn.q_b_proj.weight", &[heads * (nope + rope), q_rank]);
        } else {
            add("self_attn.q_proj.weight", &[heads * (nope + rope), hidden]);
        }
        add("self_attn.kv_a_proj_with_mqa.weight", &[kv_rank + rope, hidden]);
        add("self_attn.kv_a_layernorm.weight", &[kv_rank]);
        add(UP, &[heads * (nope + v), kv_rank]);
    }

    /// Takes up-projections `[heads, nope + v, kv_rank]` apart: into `[heads, kv_rank, nope]`, which lifts
    /// queries, and `[heads, v, kv_rank]`, which lowers what was attended to.
    pub(super) fn apart(&self, up: &[f64]) -> [Vec<f64>; 2] {
        let LatentAttention { kv_rank, nope, v, .. } = self.lengths;
        let [rank, nope, v] = [kv_rank, nope, v].map(|length| length as usize);
        let (mut lift, mut lower) = (Vec::with_capacity(up.len()), Vec::with_capacity(up.len()));
        for head in up.chunks_exact((nope + v) * rank) {
            let (keys, values) = head.split_at(nope * rank);
            lift.extend((0..rank).flat_map(|column| (0..nope).map(move |row| keys[row * rank + column])));
            lower.extend_from_slice(values);
        }
        [lift, lower]
    }

    /// The matrix `[heads, nope + rope, kv_rank + rope]` of up-projections that makes keys of what is stored:
    /// its rotated part goes to every head's key as it is.
    pub(super) fn keys(&self, up: &[f64]) -> Vec<f64> {
        let LatentAttention { kv_rank, nope, rope, v, .. } = self.lengths;
        let [rank, nope, rope, v] = [kv_rank, nope, rope, v].map(|length| length as usize);
        let mut all = Vec::new();
        for head in up.chunks_exact((nope + v) * rank) {
            for row in head[..nope * rank].chunks_exact(rank) {
                all.extend_from_slice(row);
                all.resize(all.len() + rope, 0.0);
            }
            for row in 0..rope {
                all.resize(all.len() + rank, 0.0);
                all.extend((0..rope).map(|column| if column == row { 1.0 } else { 0.0 }));
            }
        }
        all
    }

    /// The matrices of up-projections, by the names that they are placed under.
    pub(super) fn made(&self, up: &[f64]) -> Vec<(&'static str, Vec<f64>)> {
        let [lift, lower] = self.apart(up);
        let keys = (self.lengths.expanded_tokens > 0).then(|| (KEYS, self.keys(up)));
        [(LIFT, lift), (LOWER, lower)].into_iter().chain(keys).collect()
    }

    /// The elements of these for so many heads.
    pub(super) fn made_lengths(&self, heads: u32) -> Vec<(&'static str, u64)> {
        let LatentAttention { kv_rank, nope, v, .. } = self.lengths;
        let of = |length: u32| u64::from(heads) * u64::from(length) * u64::from(kv_rank);
        let keys = (self.lengths.expanded_tokens > 0).then(|| (KEYS, self.lengths.key_elements(heads)));
        [(LIFT, of(nope)), (LOWER, of(v))].into_iter().chain(keys).collect()
    }

    /// The elements of all of them, of up-projections of so many.
    pub(super) fn made_elements(&self, up: usize) -> u64 {
        let LatentAttention { kv_rank, nope, v, .. } = self.lengths;
        let of_head = (u64::from(nope) + u64::from(v)) * u64::from(kv_rank);
        let heads = to_u32(up as u64 / of_head.max(1));
        self.made_lengths(heads).iter().map(|(_, elements)| elements).sum()
    }

    /// The rotated part of a query's head, and of a key.
    fn rotated(&self) -> [RotaryPart; 2] {
        let LatentAttention { kv_rank, nope, rope: length, .. } = self.lengths;
        [nope, kv_rank].map(|first| RotaryPart { first, length, interleaved: true })
    }
}

impl LatentHeads {
    /// Operations of one row that a device must have for it, beside attention.
    pub(crate) fn operations(
        &self,
        (q, w): (&Tensor, &LatentWeights),
        (hidden, heads): (u32, u32),
        x: DType,
    ) -> Vec<OpSig> {
        let LatentAttention { q_rank, kv_rank, nope, rope, v, .. } = self.lengths;
        let gemm = |weight: &Tensor, shape| product(1, shape, (x, weight.kind(), x), false, false);
        let query = nope + rope;
        let mut all = match &w.q_down {
            Some((down, _)) => vec![gemm(down, (q_rank, hidden)), gemm(q, (heads * query, q_rank))],
            None => vec![gemm(q, (heads * query, hidden))],
        };
        all.push(gemm(&w.kv_down, (self.lengths.stored(), hidden)));
        let eps = Scalar(1e-6);
        all.push(OpSig::RmsNorm { rows: 1, cols: kv_rank, eps, x, weight: w.kv_norm.dtype, out: x });
        let [of_query, of_key] = self.rotated();
        for (head_dim, part) in [(query, of_query), (self.lengths.stored(), of_key)] {
            all.push(OpSig::Rope { tokens: 1, heads: 1, head_dim, part: Some(part), x });
        }
        let [from, to] = [(query, nope), (self.lengths.stored(), kv_rank)];
        let of = |(row, first): (u32, u32)| ColumnsOf { row, first };
        all.push(OpSig::CopyColumns { rows: 1, cols: rope, from: of(from), to: of(to), x });
        let grouped = GroupedRows { choices: heads, fan: 1, experts: heads, touched: heads, others: 0 };
        for (weight, [n, k]) in [(&w.lift, [kv_rank, nope]), (&w.lower, [v, kv_rank])] {
            all.push(OpSig::GroupedGemm { grouped, n, k, x, weight: weight.kind(), out: x, bias: false });
        }
        all
    }
}

/// What a step needs beside the memory of any attention.
#[derive(Debug)]
pub(super) struct LatentArena {
    q_low: Slice,  // [tokens, q_rank]
    q_norm: Slice, // [tokens, q_rank]
    latent: Slice, // [tokens, kv_rank] before its norm
    parts: Slice,  // [tokens, heads, nope], or v instead
    lifted: Slice, // [tokens, heads, kv_rank]
    order: Slice,  // [heads, tokens] u32: rows of all tokens, by head
    starts: Slice, // [heads + 1] u32
    /// Tokens of the step that `order` and `starts` are of.
    ordered: AtomicU32,
    /// None where prompts attend to latents.
    pub(super) expanded: Option<ExpandedArena>,
}

impl LatentArena {
    /// For steps of up to so many tokens.
    pub(super) fn new(
        device: &dyn Device,
        c: &ModelConfig,
        latent: &LatentHeads,
        shape: &StepShape,
        alloc: &dyn Fn(u64) -> Result<Slice>,
    ) -> Result<Self> {
        let LatentAttention { q_rank, kv_rank, nope, v, .. } = latent.lengths;
        let (tokens, x) = (u64::from(shape.tokens_max), shape.activations.size_bytes());
        let of = |columns: u64| alloc(tokens * columns * x);
        let heads = u64::from(c.heads);
        let q_low = of(q_rank.into())?;
        Ok(LatentArena {
            q_norm: if q_rank > 0 { of(q_rank.into())? } else { q_low.clone() },
            q_low,
            latent: of(kv_rank.into())?,
            parts: of(heads * u64::from(nope.max(v)))?,
            lifted: of(heads * u64::from(kv_rank))?,
            order: alloc(tokens * heads * 4)?,
            starts: alloc((heads + 1) * 4)?,
            ordered: AtomicU32::new(0),
            expanded: ExpandedArena::new(device, (c.heads, latent), shape, alloc)?,
        })
    }

    /// Writes the order of a step's rows by head, unless the last step had as many. No step may run that
    /// reads it.
    pub(super) fn order(&self, device: &dyn Device, heads: u32, tokens: u32) -> Result<()> {
        if self.ordered.load(Ordering::Relaxed) == tokens {
            return Ok(());
        }
        let order: Vec<u32> =
            (0..heads).flat_map(|head| (0..tokens).map(move |token| token * heads + head)).collect();
        let starts: Vec<u32> = (0..=heads).map(|head| head * tokens).collect();
        device.write(&rows_of(&self.order, tokens * heads, 1, DType::U32), bytemuck::cast_slice(&order))?;
        device.write(&rows_of(&self.starts, heads + 1, 1, DType::U32), bytemuck::cast_slice(&starts))?;
        self.ordered.store(tokens, Ordering::Relaxed);
        Ok(())
    }
}

/// A step's rows on their way to and from latents.
pub(super) struct LatentStep<'a> {
    pub(super) config: &'a ModelConfig,
    pub(super) latent: &'a LatentHeads,
    pub(super) attention: &'a AttentionArena,
    pub(super) arena: &'a LatentArena,
    pub(super) tokens: u32,
    /// The first so many of them attend to latents, the others to keys that are made of these.
    pub(super) lifted: u32,
    /// Dtype of activations.
    pub(super) x: DType,
}

impl LatentStep<'_> {
    fn rows(&self, slice: &Slice, columns: u32) -> Slice {
        rows_of(slice, self.tokens, columns, self.x)
    }

    /// The rows of those that attend to latents.
    fn lifted_rows(&self, slice: &Slice, columns: u32) -> Slice {
        rows_of(slice, self.lifted, columns, self.x)
    }

    fn norm(&self, cols: u32, from: &Slice, weight: &Tensor, to: &Slice) -> Result<Cmd> {
        let (rows, x, eps) = (self.tokens, self.x, Scalar(self.config.norm_eps));
        let sig = OpSig::RmsNorm { rows, cols, eps, x, weight: weight.dtype, out: x };
        Cmd::new(sig, &[from.clone(), weight.slice.clone(), to.clone()])
    }

    pub(super) fn copy(
        &self,
        (rows, cols): (u32, u32),
        (from, from_columns): (&Slice, [u32; 2]),
        (to, to_columns): (&Slice, [u32; 2]),
    ) -> Result<Cmd> {
        let of = |[row, first]: [u32; 2]| ColumnsOf { row, first };
        let sig = OpSig::CopyColumns { rows, cols, from: of(from_columns), to: of(to_columns), x: self.x };
        Cmd::new(sig, &[from.clone(), to.clone()])
    }

    /// The product of each head's rows with its matrix `[n, k]`.
    fn by_head(&self, from: &Slice, weight: &Tensor, [n, k]: [u32; 2], to: &Slice) -> Result<Cmd> {
        let heads = self.config.heads;
        let choices = self.lifted * heads;
        let grouped = GroupedRows { choices, fan: 1, experts: heads, touched: heads, others: 0 };
        let (x, weight_kind) = (self.x, weight.kind());
        let sig = OpSig::GroupedGemm { grouped, n, k, x, weight: weight_kind, out: x, bias: false };
        let order = rows_of(&self.arena.order, choices, 1, DType::U32);
        let starts = rows_of(&self.arena.starts, heads + 1, 1, DType::U32);
        Cmd::new(sig, &[from.clone(), weight.slice.clone(), order, starts, to.clone()])
    }

    /// Appends the commands from normed rows `[tokens, hidden]` to queries and keys over latents.
    pub(super) fn inputs(
        &self,
        (w, q_weight): (&LatentWeights, &Tensor),
        normed: &Slice,
        cos_sin: &Slice,
        list: &mut Vec<Cmd>,
    ) -> Result<()> {
        let LatentStep { config: c, latent, attention, arena, tokens, x, .. } = *self;
        let LatentAttention { q_rank, kv_rank, nope, rope, .. } = latent.lengths;
        let (query, stored, rows) = (nope + rope, kv_rank + rope, self.lifted * c.heads);
        // queries are whole where what they attend to comes later
        let q = self.rows(&attention.attended, c.heads * query);
        if let Some((down, norm)) = &w.q_down {
            let [low, low_normed] = [&arena.q_low, &arena.q_norm].map(|slice| self.rows(slice, q_rank));
            list.push(gemm(tokens, normed, x, down, None, q_rank, c.hidden, Out::Set(&low, x))?);
            list.push(self.norm(q_rank, &low, norm, &low_normed)?);
            let out = Out::Set(&q, x);
            list.push(gemm(tokens, &low_normed, x, q_weight, None, c.heads * query, q_rank, out)?);
        } else {
            list.push(gemm(tokens, normed, x, q_weight, None, c.heads * query, c.hidden, Out::Set(&q, x))?);
        }
        let key = self.rows(&attention.k, stored);
        list.push(gemm(tokens, normed, x, &w.kv_down, None, stored, c.hidden, Out::Set(&key, x))?);
        let [of_query, of_key] = latent.rotated().map(Some);
        for (slice, heads, head_dim, part) in [(&q, c.heads, query, of_query), (&key, 1, stored, of_key)] {
            let sig = OpSig::Rope { tokens, heads, head_dim, part, x };
            list.push(Cmd::new(sig, &[slice.clone(), cos_sin.clone()])?);
        }
        let (raw, latents) = (self.rows(&arena.latent, kv_rank), self.rows(&attention.v, kv_rank));
        list.push(self.copy((tokens, kv_rank), (&key, [stored, 0]), (&raw, [kv_rank, 0]))?);
        list.push(self.norm(kv_rank, &raw, &w.kv_norm, &latents)?);
        list.push(self.copy((tokens, kv_rank), (&latents, [kv_rank, 0]), (&key, [stored, 0]))?);

        if self.lifted < tokens {
            self.move_queries(list)?;
        }
        if self.lifted == 0 {
            return Ok(());
        }
        let q = self.lifted_rows(&attention.attended, c.heads * query);
        let parts = self.lifted_rows(&arena.parts, c.heads * nope);
        let lifted = self.lifted_rows(&arena.lifted, c.heads * kv_rank);
        let queries = self.lifted_rows(&attention.q, c.heads * stored);
        list.push(self.copy((rows, nope), (&q, [query, 0]), (&parts, [nope, 0]))?);
        list.push(self.by_head(&parts, &w.lift, [kv_rank, nope], &lifted)?);
        list.push(self.copy((rows, kv_rank), (&lifted, [kv_rank, 0]), (&queries, [stored, 0]))?);
        list.push(self.copy((rows, rope), (&q, [query, nope]), (&queries, [stored, kv_rank]))?);
        Ok(())
    }

    /// Appends the commands from what was attended to, to values `[tokens, heads, v]`, which it returns.
    pub(super) fn values(&self, w: &LatentWeights, list: &mut Vec<Cmd>) -> Result<Slice> {
        let LatentAttention { kv_rank, v, .. } = self.latent.lengths;
        let heads = self.config.heads;
        if self.lifted > 0 {
            let attended = self.lifted_rows(&self.attention.attended, heads * kv_rank);
            let values = self.lifted_rows(&self.arena.parts, heads * v);
            list.push(self.by_head(&attended, &w.lower, [v, kv_rank], &values)?);
        }
        if self.lifted < self.tokens {
            self.cut_values(&self.arena.parts, list)?;
        }
        Ok(self.rows(&self.arena.parts, heads * v))
    }
}

/// Puts a matrix that was made here on a device.
pub(super) fn upload(device: &dyn Device, values: &[f64], dtype: DType) -> Result<Tensor> {
    let mut bytes = Vec::with_capacity(values.len() * mixfleet_hal::cast::to_usize(dtype.size_bytes()));
    values.iter().for_each(|value| dtype.encode(*value, &mut bytes));
    let slice = device.alloc(bytes.len() as u64, BufferUsage::Weights)?;
    device.write(&slice, &bytes)?;
    Ok(Tensor::plain(slice, dtype))
}

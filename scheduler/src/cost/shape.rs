//! A model's shape, and the operations of a step.

use super::{Experts, LatentAttention, LinearAttention, Prefill};
use crate::kv::parts::LayerPages;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hal::{DType, KvShape, OpSig, RotaryPart, Scalar, StoredAs, WeightFormat};
use serde::{Deserialize, Serialize};

/// The properties of a decoder-only transformer that determine its cost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelShape {
    /// Length of the residual stream.
    pub hidden: u32,
    /// Length of the MLP's inner layer.
    pub intermediate: u32,
    /// Query heads.
    pub heads: u32,
    /// KV heads; divides `heads`. Has no meaning with latent attention.
    pub kv_heads: u32,
    /// Length of a head.
    pub head_dim: u32,
    /// Rows of the embedding and of the LM head.
    pub vocab: u32,
    /// Sliding window of each layer; one entry per layer.
    pub windows: Vec<Option<u32>>,
    /// Dtype of the weights.
    pub weight: DType,
    /// Dtype of the activations.
    pub activation: DType,
    /// Dtype of the KV pools.
    pub kv: DType,
    /// Tokens in a KV page.
    pub page_tokens: u32,
    /// Whether q, k and v have biases (Qwen2).
    #[serde(default)]
    pub qkv_bias: bool,
    /// Whether the attention output has a bias.
    #[serde(default)]
    pub o_bias: bool,
    /// Whether the MLP's projections have biases.
    #[serde(default)]
    pub mlp_bias: bool,
    /// Whether q and k are normalised per head before rope (Qwen3).
    #[serde(default)]
    pub qk_norm: bool,
    /// The part of each head that is rotated, unless it is all of it (GLM-4-MoE).
    #[serde(default)]
    pub rotary: Option<RotaryPart>,
    /// Whether each head of attention has a sink (gpt-oss).
    #[serde(default)]
    pub sinks: bool,
    /// The format of the layers' matrices, if they are not stored in `weight`.
    #[serde(default)]
    pub format: Option<WeightFormat>,
    /// Experts, if some layers have them instead of an MLP.
    #[serde(default)]
    pub experts: Option<Experts>,
    /// The lengths of latent attention, if that is what layers have.
    #[serde(default)]
    pub latent: Option<LatentAttention>,
    /// Linear attention, if some layers have it.
    #[serde(default)]
    pub linear: Option<LinearAttention>,
}

/// The epsilon of norms, which affects no cost.
const EPS: Scalar = Scalar(1e-6);

/// Operations of one step and how often each runs; equal ones are merged.
pub type OpCounts = Vec<(OpSig, u64)>;

/// Operations of the layers, apart by what their weights are stored in.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct LayerWork {
    /// Operations whose weights, if any, are stored in their own dtype.
    pub(super) plain: OpCounts,
    /// Matrix products whose weights are stored in the model's format, if it has one.
    pub(super) stored: OpCounts,
    /// Whether the engine joins projections of the same rows into one product.
    pub(super) fused: bool,
}

impl LayerWork {
    /// All operations in one list.
    pub(super) fn merged(self) -> OpCounts {
        let mut ops = self.plain;
        self.stored.into_iter().for_each(|(sig, count)| push(&mut ops, sig, count));
        ops
    }
}

impl ModelShape {
    /// Number of decoder layers.
    pub fn layers(&self) -> u32 {
        to_u32(self.windows.len())
    }

    /// Its KV.
    pub fn kv_shape(&self) -> KvShape {
        let ModelShape { kv_heads, head_dim, page_tokens, kv: dtype, .. } = *self;
        self.latent.map_or(KvShape { kv_heads, head_dim, page_tokens, dtype, latent: None }, |latent| {
            self.latent_kv(&latent)
        })
    }

    fn kv_bytes_per_layer(&self) -> u64 {
        self.kv_shape().wire_token_bytes(self.kv)
    }

    /// KV bytes of one token over all layers that keep KV.
    pub fn kv_bytes_per_token(&self) -> u64 {
        u64::from(self.full_layers()) * self.kv_bytes_per_layer()
    }

    /// The model on a device: one that has f16 units but no bf16 units runs it in f16.
    pub fn on(&self, profile: &DeviceProfile) -> ModelShape {
        let has = |dtype| profile.compute.iter().any(|(known, _)| *known == dtype);
        let f16_instead = !has(DType::Bf16) && has(DType::F16);
        let on = |dtype| if f16_instead && dtype == DType::Bf16 { DType::F16 } else { dtype };
        ModelShape {
            weight: on(self.weight),
            activation: on(self.activation),
            kv: on(self.kv),
            ..self.clone()
        }
    }

    /// The pages that its layers' KV is in where layers with a window give back what no token reads.
    pub fn window_pages(&self) -> LayerPages {
        let full = self.full_layers() as usize;
        LayerPages::of(self.windows.get(..full).unwrap_or(&self.windows), u32::MAX)
    }

    /// Bytes that a sequence of `tokens` tokens holds, in whole pages, where layers with a window give back
    /// what no token reads.
    pub fn sequence_bytes(&self, tokens: u32) -> u64 {
        self.sequence_bytes_in(&self.window_pages(), tokens)
    }

    /// The same where no page is given back before the sequence ends.
    pub fn whole_sequence_bytes(&self, tokens: u32) -> u64 {
        self.sequence_bytes_in(&LayerPages::whole(self.full_layers()), tokens)
    }

    /// Bytes that are sent of a sequence of `tokens` tokens to an instance that goes on with it and whose
    /// layers keep their window alone.
    pub fn sent_bytes(&self, tokens: u32) -> u64 {
        let held = self.window_pages().layer_tokens_held(tokens.into(), self.page_tokens);
        held * self.kv_bytes_per_layer() + self.state_bytes()
    }

    /// The same as [`ModelShape::sequence_bytes`] with its layers' KV in these pages.
    pub fn sequence_bytes_in(&self, pages: &LayerPages, tokens: u32) -> u64 {
        let held = pages.parts.pages_held(tokens.into(), self.page_tokens);
        held * pages.page_layer_tokens(self.page_tokens) * self.kv_bytes_per_layer() + self.state_bytes()
    }

    /// Copies of the KV among `devices` that share the model: a device has at least one KV head, all heads
    /// share the latents, and with whole experts on each device the sequences are divided.
    pub fn kv_copies(&self, devices: u32) -> f64 {
        if self.spread() > 1 {
            return 1.0;
        }
        (f64::from(devices) / f64::from(self.kv_shape().kv_heads)).max(1.0)
    }

    /// The same model with its layers' matrices in a format.
    pub fn stored_as(self, format: Option<WeightFormat>) -> Self {
        ModelShape { format, ..self }
    }

    /// How its layers' matrices are stored.
    pub fn stored(&self) -> StoredAs {
        self.format.map_or(StoredAs::Plain(self.weight), StoredAs::Quantised)
    }

    /// The same model with K and V in `kv`.
    pub fn with_kv(self, kv: DType) -> Self {
        ModelShape { kv, ..self }
    }

    /// Bytes that the activations of a step of up to `tokens` tokens and `sequences` sequences take, as the
    /// runtime lays them out (a test there compares it).
    pub fn activation_bytes(&self, tokens: u32, sequences: u32) -> u64 {
        let n = u64::from;
        let (q_cols, kv_cols) = (n(self.heads) * n(self.head_dim), n(self.kv_heads) * n(self.head_dim));
        let x = self.activation.size_bytes();
        let k_raw = if self.qk_norm { kv_cols } else { 0 };
        // columns of a row on its way through attention, and of what it attended to; numbers in f32
        let (columns, q_cols, in_f32, order) = match &self.latent {
            Some(latent) => {
                let rank = n(self.heads) * n(latent.kv_rank);
                (
                    latent.activations(self.heads),
                    rank,
                    n(latent.rope) + n(self.heads),
                    4 * (n(self.heads) + 1),
                )
            }
            None => {
                let rotated = self.rotary.map_or(self.head_dim, |part| part.length);
                (2 * q_cols + 2 * kv_cols + k_raw, q_cols, n(rotated), 0)
            }
        };
        let of_token =
            x * (n(self.hidden) + columns + 3 * self.inner_length()) + 4 * (n(self.hidden) + in_f32);
        let of_token = of_token + self.experts.map_or(0, |experts| self.expert_activation_bytes(&experts));
        let of_sequence = 4 * (q_cols + 2 * n(self.heads) + n(self.hidden) + n(self.vocab));
        let starts = self.experts.map_or(0, |experts| 4 * (n(experts.count) + 1));
        let expanded = |latent: LatentAttention| {
            if latent.expanded_tokens == 0 {
                return 0;
            }
            latent.expanded_bytes(self.heads, self.page_tokens, self.activation)
        };
        n(tokens) * of_token + n(sequences) * of_sequence + starts + order + self.latent.map_or(0, expanded)
    }

    /// Operations of one chunk of a prompt: `new_tokens` of one sequence after `context_before`. With `head`,
    /// the last row also goes through the LM head, which only a prompt's last chunk needs.
    pub fn prefill_ops(&self, context_before: u32, new_tokens: u32, head: bool) -> OpCounts {
        self.step_ops(&[Prefill { context: context_before, tokens: new_tokens, last: head }], 0, 0)
    }

    /// Operations of a decode step: one token for each of `batch` sequences with `kv_tokens` keys in total.
    pub fn decode_ops(&self, batch: u32, kv_tokens: u64) -> OpCounts {
        self.step_ops(&[], batch, kv_tokens)
    }

    /// Operations of a mixed step: chunks of prompts and one token for each of `batch` sequences with
    /// `kv_tokens` keys in total. All rows go through the dense operations together.
    pub fn step_ops(&self, parts: &[Prefill], batch: u32, kv_tokens: u64) -> OpCounts {
        self.stage_ops((true, true), parts, batch, kv_tokens)
    }

    /// The same of layers of which the first ones are a model's first or not, and the last ones its last.
    pub(super) fn stage_ops(
        &self,
        (embeds, has_head): (bool, bool),
        parts: &[Prefill],
        batch: u32,
        kv_tokens: u64,
    ) -> OpCounts {
        let rows = parts.iter().map(|part| part.tokens).sum::<u32>() + batch;
        let drawn = to_u32(parts.iter().filter(|part| part.last).count()) + batch;
        let mut ops = self.dense_ops(rows, false).merged();
        if !embeds {
            ops.remove(0);
        }
        let mut attention = self.attention_ops(parts, batch, kv_tokens, false).merged();
        attention.extend(self.lift_ops(parts, batch));
        let head = if has_head { self.head_ops(drawn, rows) } else { OpCounts::new() };
        for (sig, count) in head.into_iter().chain(attention) {
            push(&mut ops, sig, count);
        }
        ops
    }

    /// What latent attention does to the queries that attend to latents; nothing in other attention.
    pub(super) fn lift_ops(&self, parts: &[Prefill], batch: u32) -> OpCounts {
        let Some(latent) = &self.latent else { return OpCounts::new() };
        let prompts = parts.iter().map(|part| part.tokens).sum::<u32>();
        let lifted = if latent.expands(parts, self.page_tokens) { 0 } else { prompts };
        self.latent_lifts(latent, lifted + batch)
    }

    /// The attention operations of a mixed step but [`ModelShape::lift_ops`]; `fused` as of
    /// [`ModelShape::dense_ops`].
    pub(super) fn attention_ops(
        &self,
        parts: &[Prefill],
        batch: u32,
        kv_tokens: u64,
        fused: bool,
    ) -> LayerWork {
        let mut work = LayerWork { fused, ..LayerWork::default() };
        if !parts.is_empty() {
            match &self.latent {
                Some(latent) => self.latent_prefill(&mut work, latent, parts),
                None => self.prefill_attention(&mut work.plain, parts),
            }
            if let Some(linear) = &self.linear {
                self.linear_prefill(&mut work, linear, parts);
            }
        }
        if batch > 0 {
            match &self.latent {
                Some(latent) => self.latent_decode(&mut work, latent, batch, kv_tokens),
                None => self.decode_attention(&mut work.plain, batch, kv_tokens),
            }
            if let Some(linear) = &self.linear {
                self.linear_states(&mut work, linear, batch);
            }
        }
        work
    }

    /// The share of one of `devices` in tensor parallelism (Megatron-LM, arXiv 1909.08053): heads, MLP and
    /// vocabulary are split, and each expert or their number; a device has at least one KV head, so with more
    /// than `kv_heads` devices KV is stored several times. With whole experts on each device everything else
    /// is whole too.
    pub fn split(&self, devices: u32) -> ModelShape {
        if self.spread() > 1 {
            return self.clone();
        }
        ModelShape {
            heads: self.heads / devices,
            kv_heads: (self.kv_heads / devices).max(1),
            intermediate: self.intermediate / devices,
            vocab: self.vocab.div_ceil(devices),
            experts: self.experts.map(|experts| experts.split(devices)),
            linear: self.linear.map(|linear| linear.split(devices)),
            ..self.clone()
        }
    }

    /// Checks that [`ModelShape::split`] is even; the error names what is not.
    pub fn check_split(&self, devices: u32) -> Result<(), String> {
        let even = |name: &str, count: u32| {
            if devices > 0 && count.is_multiple_of(devices) {
                return Ok(());
            }
            Err(format!("{count} {name} do not divide over {devices} devices"))
        };
        if let Some(experts) = self.experts.filter(|experts| experts.spread > 1) {
            return even("experts", experts.count);
        }
        even("heads", self.heads)?;
        even("rows of the MLP", self.intermediate)?;
        if let Some(experts) = self.experts {
            match experts.by_member {
                true => even("experts", experts.count)?,
                false => even("rows of an expert", experts.intermediate)?,
            }
            even("rows of the shared experts", experts.shared)?;
        }
        if let Some(linear) = self.linear {
            even("key heads of linear attention", linear.key_heads)?;
        }
        if self.latent.is_some() {
            return Ok(());
        }
        if devices.is_multiple_of(self.kv_heads.max(1)) { Ok(()) } else { even("KV heads", self.kv_heads) }
    }

    fn prefill_attention(&self, ops: &mut OpCounts, parts: &[Prefill]) {
        for (window, layers) in self.window_groups() {
            push(ops, self.prefill_sig(parts, window, self.kv_shape()), layers);
        }
    }

    /// Attention of chunks of prompts in one layer, over KV of this shape.
    pub(super) fn prefill_sig(&self, parts: &[Prefill], window: Option<u32>, kv: KvShape) -> OpSig {
        let context = |part: &Prefill| u64::from(part.context) + u64::from(part.tokens);
        let reach = |part: &Prefill| {
            let most = window.map(|w| u64::from(w) + u64::from(part.tokens).saturating_sub(1));
            most.map_or(context(part), |most| most.min(context(part)))
        };
        OpSig::AttnPrefill {
            tokens: parts.iter().map(|part| part.tokens).sum(),
            sequences: to_u32(parts.len()),
            pairs: parts.iter().map(|part| visible_pairs(part.context, part.tokens, window)).sum(),
            sinks: self.sinks,
            kv_tokens: parts.iter().map(reach).sum(),
            heads: self.heads,
            pages_max: parts.iter().map(|part| self.pages(context(part))).max().unwrap_or(0),
            window,
            x: self.activation,
            kv,
        }
    }

    /// Heads that have a sink.
    fn sink_heads(&self) -> u32 {
        if self.sinks { self.heads } else { 0 }
    }

    fn decode_attention(&self, ops: &mut OpCounts, batch: u32, kv_tokens: u64) {
        let longest = kv_tokens.div_ceil(u64::from(batch));
        for (window, layers) in self.window_groups() {
            let reach = window.map_or(kv_tokens, |w| u64::from(w) * u64::from(batch));
            let sig = OpSig::AttnDecode {
                sequences: batch,
                kv_tokens: kv_tokens.min(reach),
                heads: self.heads,
                pages_max: self.pages(longest),
                x: self.activation,
                kv: self.kv_shape(),
            };
            push(ops, sig, layers);
            let rows = batch * self.heads;
            let (head_dim, sinks, out) = (self.head_dim, self.sink_heads(), self.activation);
            let merge = OpSig::AttnMerge { parts: 1, rows, head_dim, sinks, out };
            push(ops, merge, layers);
        }
    }

    /// All operations but attention, its lifts and head: `tokens` rows through the layers. The residual
    /// stream is f32, as in the runtime's forward pass, with whose commands a test there compares these. With
    /// `fused`, projections of the same rows are one product, as in other engines: q, k and v, and gate and
    /// up.
    pub(super) fn dense_ops(&self, tokens: u32, fused: bool) -> LayerWork {
        let mut work = LayerWork { fused, ..LayerWork::default() };
        // the embedding comes first: see `stage_ops`
        push(&mut work.plain, self.pick(tokens, self.vocab, self.weight), 1);
        let rotated = self.rotary.map_or(self.head_dim, |part| part.length);
        let rotated = self.latent.map_or(rotated, |latent| latent.rope);
        let (vocab, hidden, table, out) = (tokens, rotated, DType::F32, DType::F32);
        push(&mut work.plain, OpSig::Embed { tokens, vocab, hidden, table, out }, 1); // rows of the rope table
        push(&mut work.plain, self.norm(tokens), 2 * u64::from(self.layers()));
        match &self.latent {
            Some(latent) => self.latent_rows(&mut work, latent, tokens),
            None => self.attention_rows(&mut work, tokens),
        }
        if let Some(linear) = &self.linear {
            self.linear_rows(&mut work, linear, tokens);
        }
        self.mlp(&mut work, tokens);
        work
    }

    /// Everything in grouped-query attention that is done row by row.
    fn attention_rows(&self, work: &mut LayerWork, tokens: u32) {
        let (x, layers) = (self.activation, u64::from(self.full_layers()));
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let gates = u32::from(self.linear.is_some_and(|linear| linear.gated));
        if work.fused {
            let all = (1 + gates) * q + 2 * kv;
            self.product(work, [tokens, all, self.hidden], self.qkv_bias, layers);
        } else {
            self.product(work, [tokens, q, self.hidden], self.qkv_bias, u64::from(1 + gates) * layers);
            self.product(work, [tokens, kv, self.hidden], self.qkv_bias, 2 * layers);
        }
        let rope = |heads| OpSig::Rope { tokens, heads, head_dim: self.head_dim, part: self.rotary, x };
        for heads in [self.heads, self.kv_heads] {
            if self.qk_norm {
                push(&mut work.plain, self.inner_norm(tokens * heads, self.head_dim), layers);
            }
            push(&mut work.plain, rope(heads), layers);
        }
        push(&mut work.plain, OpSig::KvWrite { tokens, x, kv: self.kv_shape() }, layers);
        self.sum(work, [tokens, self.hidden, q], self.o_bias, layers);
    }

    /// A product with a matrix of the layers, of `[rows, columns, inner length]`.
    pub(super) fn product(&self, work: &mut LayerWork, [m, n, k]: [u32; 3], bias: bool, count: u64) {
        let (x, weight) = (self.activation, self.weight);
        let sig = OpSig::Gemm { m, n, k, x, weight, out: x, bias, accumulate: false };
        push(self.storage(work), sig, count);
    }

    /// A product with a matrix of the layers that is added to the residual stream.
    pub(super) fn sum(&self, work: &mut LayerWork, [m, n, k]: [u32; 3], bias: bool, count: u64) {
        let (x, weight) = (self.activation, self.weight);
        let sig = OpSig::Gemm { m, n, k, x, weight, out: DType::F32, bias, accumulate: true };
        push(self.storage(work), sig, count);
    }

    /// Where products that are not of routed experts belong.
    fn storage<'a>(&self, work: &'a mut LayerWork) -> &'a mut OpCounts {
        let apart = self.experts.is_some_and(|experts| experts.quantised_alone);
        if apart { &mut work.plain } else { &mut work.stored }
    }

    /// The last norm and the LM head over `rows` rows, which are first selected from `tokens` if these are
    /// more.
    pub(super) fn head_ops(&self, rows: u32, tokens: u32) -> OpCounts {
        let mut ops = Vec::new();
        if rows == 0 {
            return ops;
        }
        if rows < tokens {
            push(&mut ops, self.pick(rows, tokens, DType::F32), 1);
        }
        push(&mut ops, self.norm(rows), 1);
        let (m, n, k, out) = (rows, self.vocab, self.hidden, DType::F32);
        let (x, weight) = (self.activation, self.weight);
        push(&mut ops, OpSig::Gemm { m, n, k, x, weight, out, bias: false, accumulate: false }, 1);
        push(&mut ops, OpSig::Sample { rows, cols: self.vocab, history: 0, tops: 0 }, 1);
        ops
    }

    /// A norm of activations inside a layer.
    pub(super) fn inner_norm(&self, rows: u32, cols: u32) -> OpSig {
        let (x, weight) = (self.activation, self.weight);
        OpSig::RmsNorm { rows, cols, eps: EPS, x, weight, out: x }
    }

    fn norm(&self, rows: u32) -> OpSig {
        let (cols, weight, out) = (self.hidden, self.weight, self.activation);
        OpSig::RmsNorm { rows, cols, eps: EPS, x: DType::F32, weight, out }
    }

    fn pick(&self, tokens: u32, vocab: u32, table: DType) -> OpSig {
        OpSig::Embed { tokens, vocab, hidden: self.hidden, table, out: DType::F32 }
    }

    pub(super) fn pages(&self, tokens: u64) -> u32 {
        to_u32(tokens.div_ceil(u64::from(self.page_tokens.max(1))))
    }

    /// The windows of the layers that keep KV, and how many layers have each.
    fn window_groups(&self) -> Vec<(Option<u32>, u64)> {
        let mut groups: Vec<(Option<u32>, u64)> = Vec::new();
        for &window in self.windows.iter().take(self.full_layers() as usize) {
            match groups.iter_mut().find(|(w, _)| *w == window) {
                Some((_, layers)) => *layers += 1,
                None => groups.push((window, 1)),
            }
        }
        groups
    }
}

/// Adds `count` runs of `sig` to `ops`.
pub(super) fn push(ops: &mut OpCounts, sig: OpSig, count: u64) {
    match ops.iter_mut().find(|(known, _)| *known == sig) {
        Some((_, runs)) => *runs += count,
        None => ops.push((sig, count)),
    }
}

/// Query-key pairs of a causal chunk: the query at position p attends to min(p + 1, window) keys.
fn visible_pairs(context_before: u32, new_tokens: u32, window: Option<u32>) -> u64 {
    let (before, new) = (u64::from(context_before), u64::from(new_tokens));
    // The sum of p + 1 over the positions below the window's length, plus `window` for each further position.
    let window = window.map_or(u64::MAX, u64::from);
    let growing = window.saturating_sub(before).min(new);
    let pairs = growing * before + growing * (growing + 1) / 2;
    if growing == new { pairs } else { pairs + (new - growing) * window }
}

#[cfg(test)]
#[path = "shape_tests.rs"]
pub(crate) mod tests;

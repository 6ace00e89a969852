//! A model's shape, and the operations of a step.

use super::Prefill;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{DType, KvShape, OpSig, Scalar};
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
    /// KV heads; divides `heads`.
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
}

/// The epsilon of norms, which affects no cost.
const EPS: Scalar = Scalar(1e-6);

/// Operations of one step and how often each runs; equal ones are merged.
pub type OpCounts = Vec<(OpSig, u64)>;

impl ModelShape {
    /// Number of decoder layers.
    pub fn layers(&self) -> u32 {
        to_u32(self.windows.len())
    }

    /// Its KV.
    pub fn kv_shape(&self) -> KvShape {
        let ModelShape { kv_heads, head_dim, page_tokens, kv: dtype, .. } = *self;
        KvShape { kv_heads, head_dim, page_tokens, dtype }
    }

    /// KV bytes of one token over all layers: K and V.
    pub fn kv_bytes_per_token(&self) -> u64 {
        let elements = u64::from(self.kv_heads) * u64::from(self.head_dim);
        2 * u64::from(self.layers()) * elements * self.kv.size_bytes()
    }

    /// Bytes that the activations of a step of up to `tokens` tokens and `sequences` sequences take, as the
    /// runtime lays them out (a test there compares it).
    pub fn activation_bytes(&self, tokens: u32, sequences: u32) -> u64 {
        let n = u64::from;
        let (q_cols, kv_cols) = (n(self.heads) * n(self.head_dim), n(self.kv_heads) * n(self.head_dim));
        let x = self.activation.size_bytes();
        let k_raw = if self.qk_norm { kv_cols } else { 0 };
        let of_token = x * (n(self.hidden) + 2 * q_cols + 2 * kv_cols + k_raw + 3 * n(self.intermediate))
            + 4 * (n(self.hidden) + n(self.head_dim));
        let of_sequence = 4 * (q_cols + 2 * n(self.heads) + n(self.hidden) + n(self.vocab));
        n(tokens) * of_token + n(sequences) * of_sequence
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
        self.engine_ops(false, parts, batch, kv_tokens)
    }

    /// [`ModelShape::step_ops`] in an engine that may fuse projections of the same rows into one product.
    pub(super) fn engine_ops(&self, fused: bool, parts: &[Prefill], batch: u32, kv_tokens: u64) -> OpCounts {
        let rows = parts.iter().map(|part| part.tokens).sum::<u32>() + batch;
        let drawn = to_u32(parts.iter().filter(|part| part.last).count()) + batch;
        let mut ops = self.dense_ops(rows, fused);
        for (sig, count) in
            self.head_ops(drawn, rows).into_iter().chain(self.attention_ops(parts, batch, kv_tokens))
        {
            push(&mut ops, sig, count);
        }
        ops
    }

    /// The attention operations of a mixed step.
    pub(super) fn attention_ops(&self, parts: &[Prefill], batch: u32, kv_tokens: u64) -> OpCounts {
        let mut ops = Vec::new();
        if !parts.is_empty() {
            self.prefill_attention(&mut ops, parts);
        }
        if batch > 0 {
            self.decode_attention(&mut ops, batch, kv_tokens);
        }
        ops
    }

    /// The share of one of `devices` in tensor parallelism (Megatron-LM, arXiv 1909.08053): heads, MLP and
    /// vocabulary are split; a device has at least one KV head, so with more than `kv_heads` devices KV is
    /// stored several times.
    pub fn split(&self, devices: u32) -> ModelShape {
        ModelShape {
            heads: self.heads / devices,
            kv_heads: (self.kv_heads / devices).max(1),
            intermediate: self.intermediate / devices,
            vocab: self.vocab.div_ceil(devices),
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
        even("heads", self.heads)?;
        even("rows of the MLP", self.intermediate)?;
        if devices.is_multiple_of(self.kv_heads.max(1)) { Ok(()) } else { even("KV heads", self.kv_heads) }
    }

    fn prefill_attention(&self, ops: &mut OpCounts, parts: &[Prefill]) {
        let context = |part: &Prefill| u64::from(part.context) + u64::from(part.tokens);
        for (window, layers) in self.window_groups() {
            let reach = |part: &Prefill| {
                let most = window.map(|w| u64::from(w) + u64::from(part.tokens).saturating_sub(1));
                most.map_or(context(part), |most| most.min(context(part)))
            };
            let sig = OpSig::AttnPrefill {
                tokens: parts.iter().map(|part| part.tokens).sum(),
                sequences: to_u32(parts.len()),
                pairs: parts.iter().map(|part| visible_pairs(part.context, part.tokens, window)).sum(),
                kv_tokens: parts.iter().map(reach).sum(),
                heads: self.heads,
                pages_max: parts.iter().map(|part| self.pages(context(part))).max().unwrap_or(0),
                window,
                x: self.activation,
                kv: self.kv_shape(),
            };
            push(ops, sig, layers);
        }
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
            let merge = OpSig::AttnMerge { parts: 1, rows, head_dim: self.head_dim, out: self.activation };
            push(ops, merge, layers);
        }
    }

    /// All operations but attention and head: `tokens` rows through the layers. The residual stream is f32,
    /// as in the runtime's forward pass, with whose commands a test there compares these. With `fused`, q, k
    /// and v are one product, and gate and up are another.
    pub(super) fn dense_ops(&self, tokens: u32, fused: bool) -> OpCounts {
        let weight = self.weight;
        let (x, layers) = (self.activation, u64::from(self.layers()));
        let head_norm =
            |heads| OpSig::RmsNorm { rows: tokens * heads, cols: self.head_dim, eps: EPS, x, weight, out: x };
        let gemm = |n, k, bias| {
            let (m, x, out, accumulate) = (tokens, self.product_input(), self.activation, false);
            OpSig::Gemm { m, n, k, x, weight, out, bias, accumulate }
        };
        let add = |n, k, bias| {
            let (m, x, out, accumulate) = (tokens, self.product_input(), DType::F32, true);
            OpSig::Gemm { m, n, k, x, weight, out, bias, accumulate }
        };
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let rope = |heads| OpSig::Rope { tokens, heads, head_dim: self.head_dim, x };

        let mut ops = Vec::new();
        push(&mut ops, self.pick(tokens, self.vocab, weight), 1);
        let (vocab, hidden, table, out) = (tokens, self.head_dim, DType::F32, DType::F32);
        push(&mut ops, OpSig::Embed { tokens, vocab, hidden, table, out }, 1); // rows of the rope table
        push(&mut ops, self.norm(tokens), 2 * layers);
        if fused {
            push(&mut ops, gemm(q + 2 * kv, self.hidden, self.qkv_bias), layers);
        } else {
            push(&mut ops, gemm(q, self.hidden, self.qkv_bias), layers);
            push(&mut ops, gemm(kv, self.hidden, self.qkv_bias), 2 * layers);
        }
        if self.qk_norm {
            push(&mut ops, head_norm(self.heads), layers);
            push(&mut ops, head_norm(self.kv_heads), layers);
        }
        push(&mut ops, rope(self.heads), layers);
        push(&mut ops, rope(self.kv_heads), layers);
        push(&mut ops, OpSig::KvWrite { tokens, x, kv: self.kv_shape() }, layers);
        push(&mut ops, add(self.hidden, q, self.o_bias), layers);
        let (cols, times) = if fused { (2 * self.intermediate, 1) } else { (self.intermediate, 2) };
        push(&mut ops, gemm(cols, self.hidden, self.mlp_bias), times * layers);
        let elements = u64::from(tokens) * u64::from(self.intermediate);
        push(&mut ops, OpSig::SiluMul { elements, x }, layers);
        push(&mut ops, add(self.hidden, self.intermediate, self.mlp_bias), layers);
        ops
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
        // Checkpoints with 8-bit weights keep the head in 16 bits.
        let (x, weight) = (self.activation, if self.is_8_bit() { self.activation } else { self.weight });
        push(&mut ops, OpSig::Gemm { m, n, k, x, weight, out, bias: false, accumulate: false }, 1);
        push(&mut ops, OpSig::Sample { rows, cols: self.vocab, history: 0, tops: 0 }, 1);
        ops
    }

    /// Whether the weights of products are 8-bit floats.
    fn is_8_bit(&self) -> bool {
        self.weight == DType::F8E4m3
    }

    /// Dtype of the rows that products read: engines quantise them to 8 bits for weights of 8 bits.
    fn product_input(&self) -> DType {
        if self.is_8_bit() { self.weight } else { self.activation }
    }

    fn norm(&self, rows: u32) -> OpSig {
        let (cols, weight, out) = (self.hidden, self.weight, self.activation);
        OpSig::RmsNorm { rows, cols, eps: EPS, x: DType::F32, weight, out }
    }

    fn pick(&self, tokens: u32, vocab: u32, table: DType) -> OpSig {
        OpSig::Embed { tokens, vocab, hidden: self.hidden, table, out: DType::F32 }
    }

    fn pages(&self, tokens: u64) -> u32 {
        to_u32(tokens.div_ceil(u64::from(self.page_tokens.max(1))))
    }

    fn window_groups(&self) -> Vec<(Option<u32>, u64)> {
        let mut groups: Vec<(Option<u32>, u64)> = Vec::new();
        for &window in &self.windows {
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
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn small() -> ModelShape {
        ModelShape {
            hidden: 64,
            intermediate: 160,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            vocab: 1000,
            windows: vec![None; 3],
            weight: DType::Bf16,
            activation: DType::F32,
            kv: DType::Bf16,
            page_tokens: 16,
            qkv_bias: false,
            o_bias: false,
            mlp_bias: false,
            qk_norm: false,
        }
    }

    fn gemm_flops(ops: &OpCounts) -> f64 {
        let gemms = ops.iter().filter(|(sig, _)| matches!(sig, OpSig::Gemm { .. }));
        gemms.map(|(sig, count)| sig.flops() * *count as f64).sum()
    }

    #[test]
    fn matrix_flops_are_twice_the_parameters_per_token() {
        let shape = small();
        let per_layer = 64 * (4 * 16) * 2 + 64 * (2 * 16) * 2 + 64 * 160 * 3;
        let head = 64 * 1000;
        let prefill = gemm_flops(&shape.prefill_ops(0, 10, true));
        assert_eq!(prefill, f64::from(2 * (10 * 3 * per_layer + head)));
        assert_eq!(gemm_flops(&shape.prefill_ops(0, 10, false)), f64::from(2 * 10 * 3 * per_layer));
        let decode = gemm_flops(&shape.decode_ops(7, 700));
        assert_eq!(decode, f64::from(2 * 7 * (3 * per_layer + head)));
    }

    #[test]
    fn kv_bytes_of_llama_3_70b_are_the_published_327680() {
        let shape = ModelShape { windows: vec![None; 80], kv_heads: 8, head_dim: 128, ..small() };
        assert_eq!(shape.kv_bytes_per_token(), 327_680);
    }

    #[test]
    fn a_window_bounds_what_decode_reads_in_its_layers_only() {
        let shape = ModelShape { windows: vec![Some(8), None, Some(8)], ..small() };
        let ops = shape.decode_ops(2, 100);
        let reads: Vec<(u64, u64)> = ops
            .iter()
            .filter_map(|(sig, count)| match sig {
                OpSig::AttnDecode { kv_tokens, .. } => Some((*kv_tokens, *count)),
                _ => None,
            })
            .collect();
        assert_eq!(reads, [(16, 2), (100, 1)]);
    }

    #[test]
    fn a_mixed_step_has_the_rows_of_both_and_the_attention_of_each() {
        let shape = small();
        let part = |context, tokens, last| Prefill { context, tokens, last };
        let mixed = shape.step_ops(&[part(5, 10, false), part(0, 3, true)], 7, 700);
        let per_layer = 64 * (4 * 16) * 2 + 64 * (2 * 16) * 2 + 64 * 160 * 3;
        assert_eq!(gemm_flops(&mixed), f64::from(2 * (20 * 3 * per_layer + 8 * 64 * 1000)));
        let attention = |ops: OpCounts| {
            let is = |sig: &OpSig| matches!(sig, OpSig::AttnPrefill { .. } | OpSig::AttnDecode { .. });
            ops.iter().filter(|(sig, _)| is(sig)).map(|(s, c)| s.flops() * *c as f64).sum::<f64>()
        };
        let apart =
            [shape.prefill_ops(5, 10, false), shape.prefill_ops(0, 3, true), shape.decode_ops(7, 700)];
        assert_eq!(attention(mixed), apart.into_iter().map(attention).sum::<f64>());
    }

    #[test]
    fn a_split_model_has_a_share_of_each_matrix_and_whole_kv_heads() {
        let shape = ModelShape { heads: 64, kv_heads: 8, intermediate: 28672, ..small() };
        assert_eq!(shape.check_split(8), Ok(()));
        let flops = |shape: &ModelShape| gemm_flops(&shape.prefill_ops(0, 16, true));
        assert_eq!(flops(&shape.split(8)) * 8.0, flops(&shape));
        assert_eq!(shape.split(16).kv_heads, 1);
        assert!(shape.check_split(3).unwrap_err().contains("64 heads"));
        assert!(ModelShape { kv_heads: 6, ..shape }.check_split(4).unwrap_err().contains("6 KV heads"));
    }

    proptest! {
        #[test]
        fn pairs_are_counted_right(before in 0u32..50, new in 0u32..50, window in proptest::option::of(1u32..60)) {
            let naive: u64 = (before..before + new).map(|p| u64::from((p + 1).min(window.unwrap_or(u32::MAX)))).sum();
            prop_assert_eq!(visible_pairs(before, new, window), naive);
        }

        #[test]
        fn every_operation_is_well_formed(before in 0u32..500, new in 1u32..300, batch in 1u32..40) {
            for (sig, count) in small().prefill_ops(before, new, true).into_iter().chain(small().decode_ops(batch, u64::from(before))) {
                prop_assert!(count > 0);
                prop_assert_eq!(sig.check(), Ok(()));
                prop_assert!(sig.bytes() >= 0.0);
            }
        }
    }
}

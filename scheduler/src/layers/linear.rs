//! Linear attention: layers that keep a state of fixed size for a sequence instead of its KV (gated delta
//! rule, arXiv 2412.06464).
//!
//! Decode reads and writes a sequence's state, an f32 matrix `[key_dim, value_dim]` for each value head; its
//! arithmetic is under one operation per byte. Prefill works in chunks of [`CHUNK`] tokens: per token and
//! value head `3 key_dim value_dim + CHUNK (3 key_dim + 2 value_dim)` multiply-adds, described as one product
//! of the same arithmetic, since it runs on matrix units.

use super::{Activation, LayerOps, ModelShape, OpArg, OpSink, Prefill, Projection, Weight};
use mixfleet_hal::OpSig;
use mixfleet_hal::cast::to_u32;
use serde::{Deserialize, Serialize};

/// Tokens of a chunk in published kernels.
const CHUNK: u32 = 64;

/// Linear attention in all but some layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinearAttention {
    /// Heads of queries and keys.
    pub key_heads: u32,
    /// Heads of values.
    pub value_heads: u32,
    /// Length of a key.
    pub key_dim: u32,
    /// Length of a value.
    pub value_dim: u32,
    /// Tokens that the convolution before it sees.
    pub convolution: u32,
    /// The last of this many consecutive layers has full attention instead.
    pub period: u32,
    /// Whether the layers with full attention gate its output, by a projection as large as that of queries.
    pub gated: bool,
}

impl LinearAttention {
    /// Layers with full attention among `layers`.
    pub(super) fn full(&self, layers: u32) -> u32 {
        layers / self.period.max(1)
    }

    fn keys(&self) -> u32 {
        self.key_heads * self.key_dim
    }

    fn values(&self) -> u32 {
        self.value_heads * self.value_dim
    }

    /// Rows of the projection to queries, keys, values, the output's gate, and two gates for each value head.
    fn projected(&self) -> u32 {
        2 * self.keys() + 2 * self.values() + 2 * self.value_heads
    }

    /// Elements of a layer's matrices.
    pub(crate) fn parameters(&self, hidden: u32) -> u64 {
        u64::from(hidden) * (u64::from(self.projected()) + u64::from(self.values()))
    }

    /// Bytes of a sequence's state in a layer: f32, with what the convolution remembers.
    fn state_bytes(&self) -> u64 {
        let n = u64::from;
        let matrix = n(self.value_heads) * n(self.key_dim) * n(self.value_dim);
        let remembered = n(self.convolution.max(1) - 1) * (2 * n(self.keys()) + n(self.values()));
        4 * (matrix + remembered)
    }

    /// Its share on one of `devices`.
    pub(super) fn split(self, devices: u32) -> Self {
        LinearAttention {
            key_heads: (self.key_heads / devices).max(1),
            value_heads: (self.value_heads / devices).max(1),
            ..self
        }
    }
}

impl ModelShape {
    /// Layers with full attention.
    pub fn full_layers(&self) -> u32 {
        self.linear.map_or(self.layers(), |linear| linear.full(self.layers()))
    }

    /// Bytes that a sequence takes at any length: the states of linear attention.
    pub fn state_bytes(&self) -> u64 {
        let layers = u64::from(self.layers() - self.full_layers());
        self.linear.map_or(0, |linear| layers * linear.state_bytes())
    }
}

/// What operations of linear attention read and write has no names, since the runtime does not serve it.
const UNNAMED: [OpArg; 0] = [];

impl LayerOps<'_> {
    /// Pushes everything in a layer with linear attention that is done row by row.
    pub(crate) fn linear_rows(&self, linear: &LinearAttention, tokens: u32, ops: &mut impl OpSink) {
        let (x, residual) = (self.shape.activation, Activation::Residual);
        self.norm(tokens, residual, Weight::AttnNorm, ops);
        let (weight, to) = (Weight::Unserved, Activation::Unserved);
        let projection = Projection { weight, bias: None, columns: linear.projected(), to };
        self.products([tokens, self.shape.hidden], Activation::Normed, &[projection], ops);
        let elements = u64::from(tokens) * u64::from(2 * linear.keys() + linear.values());
        ops.push(OpSig::SiluMul { elements, x }, &UNNAMED);
        let args = [to.into(), weight.into(), to.into()];
        self.inner_norm([tokens * linear.value_heads, linear.value_dim], args, ops);
        self.back([tokens, linear.values()], to, (weight, None), self.adds, ops);
    }

    /// Pushes what a layer computes of pieces of prompts by way of their states.
    pub(crate) fn linear_prefill(&self, linear: &LinearAttention, parts: &[Prefill], ops: &mut impl OpSink) {
        let (keys, values) = (linear.key_dim, linear.value_dim);
        let columns = 3 * values + CHUNK * (3 * keys + 2 * values) / keys.max(1);
        let (x, m) = (self.shape.activation, parts.iter().map(|part| part.tokens).sum());
        let (n, k, bias, accumulate) = (linear.value_heads * columns, keys, false, false);
        ops.push(OpSig::Gemm { m, n, k, x, weight: x, out: x, bias, accumulate }, &UNNAMED);
        self.linear_states(linear, to_u32(parts.len()), ops);
    }

    /// Pushes the operations that read and write the states of this many sequences.
    pub(crate) fn linear_states(&self, linear: &LinearAttention, sequences: u32, ops: &mut impl OpSink) {
        let bytes = u64::from(sequences) * linear.state_bytes();
        ops.push(OpSig::Copy { bytes }, &UNNAMED);
    }
}

#[cfg(test)]
mod tests {
    use crate::models::find;
    use mixfleet_hal::{DType, OpSig};

    #[test]
    fn decode_reads_and_writes_the_states_whatever_the_context() {
        let shape = find("qwen3-next-80b-a3b").unwrap().shape(DType::Bf16);
        let moved = |context: u64| -> f64 {
            let ops = shape.decode_ops(10, 10 * context);
            let copies = ops.iter().filter(|(sig, _)| matches!(sig, OpSig::Copy { .. }));
            copies.map(|(sig, runs)| sig.bytes() * *runs as f64).sum()
        };
        assert_eq!(moved(100), 2.0 * 10.0 * shape.state_bytes() as f64);
        assert_eq!(moved(100), moved(100_000));
        let keys = |sig: &OpSig| matches!(sig, OpSig::AttnDecode { .. });
        let full: u64 =
            shape.decode_ops(1, 1).iter().filter(|(sig, _)| keys(sig)).map(|(_, runs)| runs).sum();
        assert_eq!(full, 12);
    }

    #[test]
    fn prompts_take_time_in_proportion_to_their_length() {
        let shape = find("qwen3-next-80b-a3b").unwrap().shape(DType::Bf16);
        let flops = |tokens| {
            let ops = shape.prefill_ops(0, tokens, false);
            let of = |(sig, runs): &(OpSig, u64)| match *sig {
                OpSig::Gemm { k: 128, .. } => sig.flops() * *runs as f64,
                _ => 0.0,
            };
            ops.iter().map(of).sum::<f64>()
        };
        let of_head = 2.0 * (3.0 * 128.0 * 128.0 + 64.0 * 5.0 * 128.0);
        assert_eq!(flops(1000), 36.0 * 1000.0 * 32.0 * of_head);
        assert_eq!(flops(2000), 2.0 * flops(1000));
    }
}

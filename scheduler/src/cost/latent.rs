//! Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434): a token's keys and values are one latent
//! vector of all heads, and a rotated part of the key.
//!
//! - Heads attend to the latents: the up-projections are absorbed into the query and the output,
//!   `2 (kv_rank + rope) + 2 kv_rank` operations per head and key. The runtime does so for prompts, too.
//! - Other engines expand latents of prompts to K and V of every head: attention of as many KV heads as query
//!   heads, of the mean length of `nope + rope` and `v`. Latents of a prompt's earlier chunks are expanded
//!   again.
//!
//! The up-projections cost a row as much in either form.

use super::shape::{LayerWork, push};
use super::{ModelShape, Prefill};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{ColumnsOf, GroupedRows, KvShape, LatentKv, MatrixKind, OpSig, RotaryPart, Scalar};
use serde::{Deserialize, Serialize};

/// The lengths of multi-head latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LatentAttention {
    /// Length of a query's latent; 0 if queries are projected directly.
    pub q_rank: u32,
    /// Length of the latent of keys and values.
    pub kv_rank: u32,
    /// Length of a head's key without its rotated part.
    pub nope: u32,
    /// Length of the rotated part, which all heads share.
    pub rope: u32,
    /// Length of a head's value.
    pub v: u32,
}

impl LatentAttention {
    /// Elements stored for a token in a layer.
    pub fn stored(&self) -> u32 {
        self.kv_rank + self.rope
    }

    /// Elements of a layer's matrices.
    pub(super) fn parameters(&self, hidden: u32, heads: u32) -> u64 {
        let n = u64::from;
        let query = n(heads) * (n(self.nope) + n(self.rope));
        let queries = if self.q_rank == 0 { n(hidden) * query } else { n(self.q_rank) * (n(hidden) + query) };
        queries
            + n(hidden) * n(self.stored())
            + self.up(heads) * n(self.kv_rank)
            + n(heads * self.v) * n(hidden)
    }

    /// Rows of the up-projections of keys and values.
    fn up(&self, heads: u32) -> u64 {
        u64::from(heads) * (u64::from(self.nope) + u64::from(self.v))
    }
}

impl LatentAttention {
    /// Numbers of a row on its way through attention of so many heads, as the runtime lays them out.
    pub(super) fn activations(&self, heads: u32) -> u64 {
        let LatentAttention { q_rank, kv_rank, nope, rope, v } = *self;
        let of_heads = |length: u32| u64::from(heads) * u64::from(length);
        let stored = u64::from(self.stored());
        // queries, keys and latents, what is attended to, and a head's parts apart
        of_heads(self.stored())
            + stored
            + 2 * u64::from(kv_rank)
            + of_heads(kv_rank.max(nope + rope))
            + 2 * u64::from(q_rank)
            + of_heads(nope.max(v))
            + of_heads(kv_rank)
    }
}

/// What scores are multiplied by, which affects no cost.
const SCALE: Scalar = Scalar(1.0);

impl ModelShape {
    /// The stored KV of latent attention.
    pub(super) fn latent_kv(&self, latent: &LatentAttention) -> KvShape {
        KvShape {
            kv_heads: 1,
            head_dim: latent.stored(),
            page_tokens: self.page_tokens,
            dtype: self.kv,
            latent: Some(LatentKv { rank: latent.kv_rank, scale: SCALE }),
        }
    }

    /// Everything in latent attention that is done row by row.
    pub(super) fn latent_rows(&self, work: &mut LayerWork, latent: &LatentAttention, tokens: u32) {
        let (layers, x) = (u64::from(self.layers()), self.activation);
        let LatentAttention { q_rank, kv_rank, nope, rope: rotated, v } = *latent;
        let (query, stored) = (nope + rotated, latent.stored());
        let first = if q_rank > 0 { q_rank } else { self.heads * query };
        if work.fused {
            self.product(work, [tokens, first + stored, self.hidden], false, layers);
        } else {
            self.product(work, [tokens, first, self.hidden], false, layers);
            self.product(work, [tokens, stored, self.hidden], false, layers);
        }
        if q_rank > 0 {
            push(&mut work.plain, self.inner_norm(tokens, q_rank), layers);
            self.product(work, [tokens, self.heads * query, q_rank], false, layers);
        }
        push(&mut work.plain, self.inner_norm(tokens, kv_rank), layers);
        for (heads, head_dim, first) in [(self.heads, query, nope), (1, stored, kv_rank)] {
            let part = Some(RotaryPart { first, length: rotated, interleaved: true });
            push(&mut work.plain, OpSig::Rope { tokens, heads, head_dim, part, x }, layers);
        }
        if work.fused {
            self.product(work, [tokens, to_u32(latent.up(self.heads)), kv_rank], false, layers);
        } else {
            let rows = tokens * self.heads;
            let whole = |row| ColumnsOf { row, first: 0 };
            let (turned, key) =
                (ColumnsOf { row: query, first: nope }, ColumnsOf { row: stored, first: kv_rank });
            for (rows, cols, from, to) in [
                (tokens, kv_rank, whole(stored), whole(kv_rank)),
                (tokens, kv_rank, whole(kv_rank), whole(stored)),
                (rows, nope, whole(query), whole(nope)),
                (rows, kv_rank, whole(kv_rank), whole(stored)),
                (rows, rotated, turned, key),
            ] {
                push(&mut work.plain, OpSig::CopyColumns { rows, cols, from, to, x }, layers);
            }
            let (experts, weight) = (self.heads, MatrixKind::Plain(self.weight));
            let grouped = GroupedRows { choices: rows, fan: 1, experts, touched: experts, others: 0 };
            for [n, k] in [[kv_rank, nope], [v, kv_rank]] {
                let sig = OpSig::GroupedGemm { grouped, n, k, x, weight, out: x, bias: false };
                push(&mut work.plain, sig, layers);
            }
        }
        let kv = self.latent_kv(latent);
        push(&mut work.plain, OpSig::KvWrite { tokens, x, kv }, layers);
        self.sum(work, [tokens, self.hidden, self.heads * v], false, layers);
    }

    pub(super) fn latent_prefill(&self, work: &mut LayerWork, latent: &LatentAttention, parts: &[Prefill]) {
        let layers = u64::from(self.layers());
        if !work.fused {
            push(&mut work.plain, self.prefill_sig(parts, None, self.latent_kv(latent)), layers);
            return;
        }
        let head_dim = (latent.nope + latent.rope + latent.v).div_ceil(2);
        let kv = KvShape {
            kv_heads: self.heads,
            head_dim,
            page_tokens: self.page_tokens,
            dtype: self.activation,
            latent: None,
        };
        push(&mut work.plain, self.prefill_sig(parts, None, kv), layers);
        let before = parts.iter().map(|part| part.context).sum();
        if before > 0 {
            let up = [before, to_u32(latent.up(self.heads)), latent.kv_rank];
            self.product(work, up, false, layers);
        }
    }

    pub(super) fn latent_decode(
        &self,
        work: &mut LayerWork,
        latent: &LatentAttention,
        batch: u32,
        kv_tokens: u64,
    ) {
        let (layers, x, heads) = (u64::from(self.layers()), self.activation, self.heads);
        let kv = self.latent_kv(latent);
        let pages_max = self.pages(kv_tokens.div_ceil(u64::from(batch.max(1))));
        let sig = OpSig::AttnDecode { sequences: batch, kv_tokens, heads, pages_max, x, kv };
        push(&mut work.plain, sig, layers);
        let (rows, head_dim) = (batch * heads, latent.kv_rank);
        push(&mut work.plain, OpSig::AttnMerge { parts: 1, rows, head_dim, sinks: 0, out: x }, layers);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::find;
    use mixfleet_hal::DType;

    fn attention(ops: &[(OpSig, u64)]) -> Vec<(OpSig, u64)> {
        let is = |sig: &OpSig| matches!(sig, OpSig::AttnPrefill { .. } | OpSig::AttnDecode { .. });
        ops.iter().filter(|(sig, _)| is(sig)).copied().collect()
    }

    #[test]
    fn decode_reads_latents_once_and_computes_with_all_heads() {
        for name in ["deepseek-v3", "kimi-k2", "deepseek-v2-lite"] {
            let shape = find(name).unwrap().shape(DType::Bf16);
            let [(sig, runs)] = attention(&shape.decode_ops(4, 4 * 8192))[..] else {
                panic!("one attention")
            };
            assert_eq!(runs, u64::from(shape.layers()));
            let keys = 4.0 * 8192.0;
            let flops = keys * f64::from(shape.heads) * (2.0 * 576.0 + 2.0 * 512.0 + 1.0);
            assert_eq!(sig.flops(), flops, "{name}");
            let kv = keys * 576.0 * 2.0;
            assert!((sig.bytes() / kv - 1.0).abs() < 0.05, "{name}: {} {kv}", sig.bytes());
        }
    }

    #[test]
    fn other_engines_expand_the_latents_of_prompts_and_those_of_earlier_chunks_again() {
        let shape = find("deepseek-v3").unwrap().shape(DType::Bf16);
        let prompt = |context| [Prefill { context, tokens: 1000, last: false }];
        let pairs = 1000.0 * 1001.0 / 2.0;
        for (fused, of_pair) in
            [(true, 2.0 * 192.0 + 2.0 * 128.0 + 1.0), (false, 2.0 * 576.0 + 2.0 * 512.0 + 1.0)]
        {
            let ops = shape.attention_ops(&prompt(0), 0, 0, fused).merged();
            let [(sig, _)] = attention(&ops)[..] else { panic!("one attention") };
            assert_eq!(sig.flops(), pairs * 128.0 * of_pair);
        }
        let up = |context| {
            let mut ops = shape.dense_ops(1000, true).merged();
            ops.extend(shape.attention_ops(&prompt(context), 0, 0, true).merged());
            let expands =
                |sig: &OpSig| matches!(*sig, OpSig::Gemm { n, k, .. } if (n, k) == (128 * 256, 512));
            let rows = |(sig, runs): &(OpSig, u64)| match *sig {
                OpSig::Gemm { m, .. } if expands(sig) => u64::from(m) * runs,
                _ => 0,
            };
            ops.iter().map(rows).sum::<u64>()
        };
        assert_eq!([up(0), up(3000)], [61 * 1000, 61 * 4000]);
    }

    #[test]
    fn every_device_of_tensor_parallelism_keeps_all_latents() {
        let shape = find("deepseek-v3").unwrap().shape(DType::Bf16);
        assert_eq!((shape.kv_copies(8), shape.split(8).kv_bytes_per_token()), (8.0, 70_272));
        assert_eq!(find("qwen3-32b").unwrap().shape(DType::Bf16).kv_copies(16), 2.0);
    }
}

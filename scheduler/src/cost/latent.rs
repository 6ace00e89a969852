//! Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434): a token's keys and values are one latent
//! vector of all heads, and a rotated part of the key.
//!
//! Both forms are described by attention that devices know:
//!
//! - Decode absorbs the up-projections into the query and the output, so that all heads attend to the
//!   latents: `2 (kv_rank + rope) + 2 kv_rank` operations per head and key. That is attention of one KV head
//!   whose K and V are the halves of what is stored, with as many query heads as give that arithmetic. The
//!   bytes of the KV are exact, the arithmetic is within half a percent.
//! - Prefill expands latents to K and V of every head: attention of as many KV heads as query heads, of the
//!   mean length of `nope + rope` and `v`. Latents of a prompt's earlier chunks are expanded again.
//!
//! The up-projections cost a row as much in either form.

use super::shape::{LayerWork, push};
use super::{ModelShape, Prefill};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{KvShape, OpSig};
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

impl ModelShape {
    /// The stored KV of latent attention: K and V are its halves.
    pub(super) fn latent_kv(&self, latent: &LatentAttention) -> KvShape {
        let head_dim = latent.stored().div_ceil(2);
        KvShape { kv_heads: 1, head_dim, page_tokens: self.page_tokens, dtype: self.kv }
    }

    /// Everything in latent attention that is done row by row.
    pub(super) fn latent_rows(&self, work: &mut LayerWork, latent: &LatentAttention, tokens: u32) {
        let layers = u64::from(self.layers());
        let query = self.heads * (latent.nope + latent.rope);
        let first = if latent.q_rank > 0 { latent.q_rank } else { query };
        if work.fused {
            self.product(work, [tokens, first + latent.stored(), self.hidden], false, layers);
        } else {
            self.product(work, [tokens, first, self.hidden], false, layers);
            self.product(work, [tokens, latent.stored(), self.hidden], false, layers);
        }
        if latent.q_rank > 0 {
            push(&mut work.plain, self.inner_norm(tokens, latent.q_rank), layers);
            self.product(work, [tokens, query, latent.q_rank], false, layers);
        }
        push(&mut work.plain, self.inner_norm(tokens, latent.kv_rank), layers);
        self.product(work, [tokens, to_u32(latent.up(self.heads)), latent.kv_rank], false, layers);
        let rope = |heads| OpSig::Rope { tokens, heads, head_dim: latent.rope, x: self.activation };
        push(&mut work.plain, rope(self.heads), layers);
        push(&mut work.plain, rope(1), layers);
        let kv = self.latent_kv(latent);
        push(&mut work.plain, OpSig::KvWrite { tokens, x: self.activation, kv }, layers);
        self.sum(work, [tokens, self.hidden, self.heads * latent.v], false, layers);
    }

    pub(super) fn latent_prefill(&self, work: &mut LayerWork, latent: &LatentAttention, parts: &[Prefill]) {
        let layers = u64::from(self.layers());
        let head_dim = (latent.nope + latent.rope + latent.v).div_ceil(2);
        let kv =
            KvShape { kv_heads: self.heads, head_dim, page_tokens: self.page_tokens, dtype: self.activation };
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
        let layers = u64::from(self.layers());
        let kv = self.latent_kv(latent);
        let per_key = 2.0 * f64::from(latent.stored()) + 2.0 * f64::from(latent.kv_rank) + 1.0;
        let heads = f64::from(self.heads) * per_key / (4.0 * f64::from(kv.head_dim) + 1.0);
        let heads = to_u32(heads.round().max(1.0));
        let longest = kv_tokens.div_ceil(u64::from(batch.max(1)));
        let x = self.activation;
        let pages_max = self.pages(longest);
        push(
            &mut work.plain,
            OpSig::AttnDecode { sequences: batch, kv_tokens, heads, pages_max, x, kv },
            layers,
        );
        let rows = batch * self.heads;
        push(
            &mut work.plain,
            OpSig::AttnMerge { parts: 1, rows, head_dim: latent.kv_rank, sinks: 0, out: x },
            layers,
        );
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
            assert!((sig.flops() / flops - 1.0).abs() < 0.02, "{name}: {} {flops}", sig.flops());
            let kv = keys * 576.0 * 2.0;
            assert!((sig.bytes() / kv - 1.0).abs() < 0.05, "{name}: {} {kv}", sig.bytes());
        }
    }

    #[test]
    fn prefill_has_the_arithmetic_of_expanded_heads_and_expands_earlier_chunks_again() {
        let shape = find("deepseek-v3").unwrap().shape(DType::Bf16);
        let ops = shape.prefill_ops(0, 1000, false);
        let [(sig, _)] = attention(&ops)[..] else { panic!("one attention") };
        let pairs = 1000.0 * 1001.0 / 2.0;
        assert_eq!(sig.flops(), pairs * 128.0 * (2.0 * 192.0 + 2.0 * 128.0 + 1.0));
        let up = |before| {
            let ops = shape.prefill_ops(before, 1000, false);
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

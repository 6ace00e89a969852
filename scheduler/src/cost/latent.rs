//! Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434): a token's keys and values are one latent
//! vector of all heads, and a rotated part of the key.
//!
//! - Absorbed: heads attend to the latents, since the up-projections are absorbed into the query and the
//!   output, in `2 (kv_rank + rope) + 2 kv_rank` operations per head and key. Here decodes do so.
//! - Expanded: latents become K and V of every head, those of a prompt's earlier chunks again. Attention then
//!   has as many KV heads as query heads. The runtime does so for prompts where that is less arithmetic
//!   ([`LatentAttention::expands`]), with values as long as keys; other engines do so for all prompts, with
//!   heads of the mean length of `nope + rope` and `v`.

use super::shape::{LayerWork, OpCounts, push};
use super::{ModelShape, Prefill};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{ColumnsOf, DType, GroupedRows, KvShape, LatentKv, MatrixKind, OpSig, RotaryPart, Scalar};
use serde::{Deserialize, Serialize};

/// Tokens whose keys and values of all heads have memory beside a step: as many as the longest step has, so
/// that a step of prompts without earlier chunks always has room.
pub const EXPANDED_TOKENS: u32 = 8192;

/// Tokens whose latents are expanded at a time, which bounds what is between latents and keys.
const PIECE_TOKENS: u32 = 1024;

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
    /// Tokens whose keys and values of all heads have memory beside a step; 0 where prompts, too, attend to
    /// latents.
    #[serde(default)]
    pub expanded_tokens: u32,
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
    /// Length of a head's query, and of its key.
    pub fn query(&self) -> u32 {
        self.nope + self.rope
    }

    /// The same where prompts of a model with such contexts may be expanded, if lengths are as that needs:
    /// values no longer than keys, keys no longer than what is stored, and that in pairs.
    #[must_use]
    pub fn expanding(self, context_max: u32) -> Self {
        let can = self.v <= self.query() && self.nope <= self.kv_rank && self.stored().is_multiple_of(2);
        LatentAttention { expanded_tokens: if can { EXPANDED_TOKENS.min(context_max) } else { 0 }, ..self }
    }

    /// Whether a step's prompts are expanded: there is memory for all keys that they see, and it is less
    /// arithmetic. Of n new tokens of a prompt that sees c keys, with p pairs of a query and a key that it
    /// sees, a head takes so many multiplications and additions, where r is `kv_rank`, s is `r + rope` and
    /// q is `nope + rope`:
    ///
    /// - absorbed: `n r nope` to lift queries, `p (s + r)` for scores and sums, `n r v` to lower these;
    /// - expanded: `c s q` for keys, of which a rotated part is a product with ones as well, `c r v` for
    ///   values, and `p 2 q` for scores and sums of values that are padded to the length of keys.
    ///
    /// Bytes do not decide: an expanded key is written and read once a head, `4 q` numbers beside the `s q +
    /// r v` operations that make it. With c much longer than n it takes `n (s + r - 2q) > s q + r v`: chunks
    /// of 251 tokens and more in DeepSeek-V2 and V3, whatever the number of heads. Without earlier chunks 128
    /// are enough, since queries are not lifted.
    pub fn expands(&self, parts: &[Prefill], page_tokens: u32) -> bool {
        let n = |count: u32| u128::from(count);
        let LatentAttention { kv_rank, nope, v, expanded_tokens, .. } = *self;
        let (stored, query) = (self.stored(), self.query());
        let (mut room, mut absorbed, mut expanded) = (n(self.expanded_pages(page_tokens)), 0, 0);
        for part in parts {
            let keys = n(part.context) + n(part.tokens);
            let Some(left) = room.checked_sub(keys.div_ceil(n(page_tokens.max(1)))) else { return false };
            room = left;
            let pairs = n(part.tokens) * n(part.context) + n(part.tokens) * (n(part.tokens) + 1) / 2;
            absorbed += n(part.tokens) * n(kv_rank) * (n(nope) + n(v)) + pairs * (n(stored) + n(kv_rank));
            expanded += keys * (n(stored) * n(query) + n(kv_rank) * n(v)) + pairs * 2 * n(query);
        }
        expanded_tokens > 0 && expanded < absorbed
    }

    /// Pages for the keys and values that are made of latents.
    pub fn expanded_pages(&self, page_tokens: u32) -> u32 {
        self.expanded_tokens.div_ceil(page_tokens.max(1))
    }

    /// Tokens whose latents are expanded at a time.
    pub fn piece_tokens(&self) -> u32 {
        PIECE_TOKENS.min(self.expanded_tokens)
    }

    /// The keys and values of so many heads that are made of latents.
    pub fn expanded_kv(&self, heads: u32, page_tokens: u32, dtype: DType) -> KvShape {
        KvShape { kv_heads: heads, head_dim: self.query(), page_tokens, dtype, latent: None }
    }

    /// Elements of the matrix that makes keys of all heads, which stands beside those of the checkpoint.
    pub fn key_elements(&self, heads: u32) -> u64 {
        let all = u64::from(heads) * u64::from(self.query()) * u64::from(self.stored());
        if self.expanded_tokens > 0 { all } else { 0 }
    }

    /// Bytes of what is made of latents, and of what is between: keys and values in pages; latents of a piece
    /// in rows and without their rotated parts, keys and values of it, and these before they are padded; and
    /// the factors of scores, in f32.
    pub fn expanded_bytes(&self, heads: u32, page_tokens: u32, x: DType) -> u64 {
        let n = u64::from;
        let (piece, pages) = (n(self.piece_tokens()), n(self.expanded_pages(page_tokens)));
        let of_heads = n(heads) * (2 * n(self.query()) + n(self.v));
        let pools = self.expanded_kv(heads, page_tokens, x).token() * pages * n(page_tokens);
        x.size_bytes() * (pools + piece * (n(self.stored()) + n(self.kv_rank) + of_heads))
            + 4 * piece * n(self.stored())
    }

    /// Numbers of a row on its way through attention of so many heads, as the runtime lays them out.
    pub(super) fn activations(&self, heads: u32) -> u64 {
        let LatentAttention { q_rank, kv_rank, nope, rope, v, .. } = *self;
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
        let LatentAttention { q_rank, kv_rank, nope, rope: rotated, v, .. } = *latent;
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
            let whole = |row| ColumnsOf { row, first: 0 };
            for (from, to) in [(stored, kv_rank), (kv_rank, stored)] {
                let (from, to) = (whole(from), whole(to));
                let sig = OpSig::CopyColumns { rows: tokens, cols: kv_rank, from, to, x };
                push(&mut work.plain, sig, layers);
            }
        }
        let kv = self.latent_kv(latent);
        push(&mut work.plain, OpSig::KvWrite { tokens, x, kv }, layers);
        self.sum(work, [tokens, self.hidden, self.heads * v], false, layers);
    }

    /// What lifts the queries of so many rows to latents, and lowers what they attended to.
    pub(super) fn latent_lifts(&self, latent: &LatentAttention, tokens: u32) -> OpCounts {
        let (layers, x, mut ops) = (u64::from(self.layers()), self.activation, OpCounts::new());
        if tokens == 0 {
            return ops;
        }
        let LatentAttention { kv_rank, nope, rope: rotated, v, .. } = *latent;
        let (query, stored, rows) = (latent.query(), latent.stored(), tokens * self.heads);
        let whole = |row| ColumnsOf { row, first: 0 };
        let (turned, key) =
            (ColumnsOf { row: query, first: nope }, ColumnsOf { row: stored, first: kv_rank });
        for (cols, from, to) in [
            (nope, whole(query), whole(nope)),
            (kv_rank, whole(kv_rank), whole(stored)),
            (rotated, turned, key),
        ] {
            push(&mut ops, OpSig::CopyColumns { rows, cols, from, to, x }, layers);
        }
        let (experts, weight) = (self.heads, MatrixKind::Plain(self.weight));
        let grouped = GroupedRows { choices: rows, fan: 1, experts, touched: experts, others: 0 };
        for [n, k] in [[kv_rank, nope], [v, kv_rank]] {
            push(&mut ops, OpSig::GroupedGemm { grouped, n, k, x, weight, out: x, bias: false }, layers);
        }
        ops
    }

    /// Attention of prompts whose latents are expanded.
    fn latent_expanded(&self, ops: &mut OpCounts, latent: &LatentAttention, parts: &[Prefill]) {
        let (layers, x, heads, weight) = (u64::from(self.layers()), self.activation, self.heads, self.weight);
        let LatentAttention { kv_rank, v, .. } = *latent;
        let (query, stored) = (latent.query(), latent.stored());
        let columns = |rows, cols, from, to| {
            let [from, to] = [from, to].map(|row| ColumnsOf { row, first: 0 });
            OpSig::CopyColumns { rows, cols, from, to, x }
        };
        let kv = latent.expanded_kv(heads, self.page_tokens, x);
        let product = |m, n, k| OpSig::Gemm { m, n, k, x, weight, out: x, bias: false, accumulate: false };
        let (mut left, piece) =
            (parts.iter().map(|part| part.context + part.tokens).sum::<u32>(), latent.piece_tokens());
        while left > 0 {
            let tokens = left.min(piece);
            left -= tokens;
            for sig in [
                OpSig::KvGather { tokens, kv: self.latent_kv(latent), wire: x },
                columns(tokens, kv_rank, stored, kv_rank),
                OpSig::Rope { tokens, heads: 1, head_dim: stored, part: None, x },
                product(tokens, heads * query, stored),
                product(tokens, heads * v, kv_rank),
                columns(tokens * heads, v, v, query),
                OpSig::KvWrite { tokens, x, kv },
            ] {
                push(ops, sig, layers);
            }
        }
        let rows = heads * parts.iter().map(|part| part.tokens).sum::<u32>();
        push(ops, columns(rows, query, query, query), layers);
        push(ops, self.prefill_sig(parts, None, kv), layers);
        push(ops, columns(rows, v, query, v), layers);
    }

    pub(super) fn latent_prefill(&self, work: &mut LayerWork, latent: &LatentAttention, parts: &[Prefill]) {
        let layers = u64::from(self.layers());
        if !work.fused {
            match latent.expands(parts, self.page_tokens) {
                true => self.latent_expanded(&mut work.plain, latent, parts),
                false => push(&mut work.plain, self.prefill_sig(parts, None, self.latent_kv(latent)), layers),
            }
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

    /// The shape of a model whose prompts attend to latents.
    fn absorbing(name: &str) -> ModelShape {
        let shape = find(name).unwrap().shape(DType::Bf16);
        let latent = shape.latent.map(|latent| LatentAttention { expanded_tokens: 0, ..latent });
        ModelShape { latent, ..shape }
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
        let shape = absorbing("deepseek-v3");
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

    /// What is chosen has the fewer operations as operations count them. They count an exponential for each
    /// pair as well, and rotations, which the choice leaves out: a thousandth of the others.
    #[test]
    fn prompts_are_expanded_where_that_is_less_arithmetic() {
        let (shape, absorbing) =
            (find("deepseek-v2-lite").unwrap().shape(DType::Bf16), absorbing("deepseek-v2-lite"));
        let latent = shape.latent.unwrap();
        let flops = |ops: OpCounts| ops.iter().map(|(sig, runs)| sig.flops() * *runs as f64).sum::<f64>();
        let is_expanded = |context, tokens| latent.expands(&[Prefill { context, tokens, last: true }], 16);
        for context in [0, 100, 1000, 5000] {
            for tokens in [1, 50, 100, 150, 200, 250, 300, 1000, 3000] {
                let part = [Prefill { context, tokens, last: true }];
                let mut made = OpCounts::new();
                shape.latent_expanded(&mut made, &latent, &part);
                let mut over = absorbing.latent_lifts(&latent, tokens);
                over.push((
                    shape.prefill_sig(&part, None, shape.latent_kv(&latent)),
                    u64::from(shape.layers()),
                ));
                let (made, over) = (flops(made), flops(over));
                if (made / over - 1.0).abs() > 2e-3 {
                    assert_eq!(is_expanded(context, tokens), made < over, "{tokens} after {context}");
                }
            }
        }
        assert_eq!([127, 128].map(|tokens| is_expanded(0, tokens)), [false, true]);
        // there is memory for so many keys, and pages begin anew for each prompt
        assert_eq!([0, 1].map(|context| is_expanded(context, EXPANDED_TOKENS)), [true, false]);
        let two =
            |tokens| [tokens, EXPANDED_TOKENS / 2].map(|tokens| Prefill { context: 0, tokens, last: true });
        assert!(latent.expands(&two(EXPANDED_TOKENS / 2), 16));
        assert!(!latent.expands(&two(EXPANDED_TOKENS / 2 + 1), 16));
    }

    /// Latents are expanded piece by piece, those of earlier chunks as well.
    #[test]
    fn every_key_that_prompts_see_is_expanded_once() {
        let shape = find("deepseek-v3").unwrap().shape(DType::Bf16);
        let ops = shape.prefill_ops(2000, 1000, false);
        let gathered = ops.iter().filter_map(|(sig, runs)| match *sig {
            OpSig::KvGather { tokens, .. } => Some((tokens, *runs)),
            _ => None,
        });
        assert_eq!(gathered.collect::<Vec<_>>(), [(1024, 2 * 61), (3000 - 2048, 61)]);
    }

    #[test]
    fn every_device_of_tensor_parallelism_keeps_all_latents() {
        let shape = find("deepseek-v3").unwrap().shape(DType::Bf16);
        assert_eq!((shape.kv_copies(8), shape.split(8).kv_bytes_per_token()), (8.0, 70_272));
        assert_eq!(find("qwen3-32b").unwrap().shape(DType::Bf16).kv_copies(16), 2.0);
    }
}

//! Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434): a token's keys and values are one latent
//! vector of all heads, and a rotated part of the key.
//!
//! - Absorbed: heads attend to the latents, since the up-projections are absorbed into the query and the
//!   output, in `2 (kv_rank + rope) + 2 kv_rank` operations per head and key. Here decodes do so.
//! - Expanded: latents become K and V of every head, those of a prompt's earlier chunks again. Attention then
//!   has as many KV heads as query heads. The runtime does so for prompts where that is less arithmetic
//!   ([`LatentAttention::expands`]), with values as long as keys; other engines do so for all prompts, with
//!   heads of the mean length of `nope + rope` and `v`.

use super::{
    Activation, AttentionSizes, LayerOps, ModelShape, OpArg, OpSink, Prefill, Projection, StepTable, Weight,
};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{ColumnsOf, DType, GroupedRows, KvShape, LatentKv, MatrixKind, OpSig, RotaryPart, Scalar};
use serde::{Deserialize, Serialize};

/// Tokens whose keys and values of all heads have memory beside a step: as many as the longest step has, so
/// that a step of prompts without earlier chunks always has room.
pub const EXPANDED_TOKENS: u32 = 8192;

/// Tokens whose latents are expanded at a time, which bounds the intermediate buffers.
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
    pub(crate) fn parameters(&self, hidden: u32, heads: u32) -> u64 {
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

    /// The same if prompts of a model with such contexts may be expanded, which needs these lengths: values
    /// no longer than keys, keys no longer than the stored latents, and those of even length.
    #[must_use]
    pub fn expanding(self, context_max: u32) -> Self {
        let can = self.v <= self.query() && self.nope <= self.kv_rank && self.stored().is_multiple_of(2);
        LatentAttention { expanded_tokens: if can { EXPANDED_TOKENS.min(context_max) } else { 0 }, ..self }
    }

    /// Whether a step's prompts are expanded: there is memory for all keys that they see, and it is less
    /// arithmetic. Of n new tokens of a prompt that sees c keys, with p pairs of a query and a key that it
    /// sees, a head takes this many multiplications and additions, where r is `kv_rank`, s is `r + rope` and
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

    /// The keys and values of this many heads, expanded from latents.
    pub fn expanded_kv(&self, heads: u32, page_tokens: u32, dtype: DType) -> KvShape {
        KvShape { kv_heads: heads, head_dim: self.query(), page_tokens, dtype, latent: None }
    }

    /// Elements of the matrix that computes keys of all heads, kept beside those of the checkpoint.
    pub fn key_elements(&self, heads: u32) -> u64 {
        let all = u64::from(heads) * u64::from(self.query()) * u64::from(self.stored());
        if self.expanded_tokens > 0 { all } else { 0 }
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
}

/// RowColumns of the rows of a buffer: the length of a row, and the first column.
#[derive(Clone, Copy)]
struct RowColumns {
    of: OpArg,
    row: u32,
    first: u32,
}

impl RowColumns {
    /// From the first column on, of a buffer without its first elements.
    fn after(buffer: Activation, elements: u64, row: u32) -> Self {
        RowColumns { of: OpArg::From(buffer, elements), row, first: 0 }
    }

    fn whole(buffer: Activation, row: u32) -> Self {
        RowColumns::after(buffer, 0, row)
    }
}

impl LayerOps<'_> {
    fn copy(&self, [rows, cols]: [u32; 2], from: RowColumns, to: RowColumns, ops: &mut impl OpSink) {
        let of = |RowColumns { row, first, .. }: RowColumns| ColumnsOf { row, first };
        let sig = OpSig::CopyColumns { rows, cols, from: of(from), to: of(to), x: self.shape.activation };
        ops.push(sig, &[from.of, to.of]);
    }

    /// A product of rows of activations with a matrix of latent attention that is stored as it is.
    fn product(
        &self,
        [m, n, k]: [u32; 3],
        from: Activation,
        by: Weight,
        to: Activation,
        ops: &mut impl OpSink,
    ) {
        let (x, weight) = (self.shape.activation, self.shape.weight);
        let sig = OpSig::Gemm { m, n, k, x, weight, out: x, bias: false, accumulate: false };
        ops.push(sig, &[from.into(), by.into(), to.into()]);
    }

    /// From normed rows to queries, and to the stored latents.
    pub(super) fn latent_rows(&self, latent: &LatentAttention, tokens: u32, ops: &mut impl OpSink) {
        let ModelShape { hidden, heads, activation: x, .. } = *self.shape;
        let LatentAttention { q_rank, kv_rank, nope, rope: length, .. } = *latent;
        let (query, stored) = (latent.query(), latent.stored());
        // queries are whole where what they attend to comes later
        let whole = Activation::Attended;
        let projection = |weight, columns, to| Projection { weight, bias: None, columns, to };
        let first = match q_rank {
            0 => projection(Weight::Q, heads * query, whole),
            _ => projection(Weight::QDown, q_rank, Activation::LowQ),
        };
        let kv = projection(Weight::KvDown, stored, Activation::K);
        let from_hidden = |of: &[Projection], ops: &mut _| {
            self.products([tokens, hidden], Activation::Normed, of, ops);
        };
        if self.joins {
            from_hidden(&[first, kv], ops);
            self.up_queries(latent, tokens, ops);
        } else {
            from_hidden(&[first], ops);
            self.up_queries(latent, tokens, ops);
            from_hidden(&[kv], ops);
        }
        for (of, heads, head_dim, first) in [(whole, heads, query, nope), (Activation::K, 1, stored, kv_rank)]
        {
            let part = Some(RotaryPart { first, length, interleaved: true });
            let args = [of.into(), Activation::CosSin.into()];
            ops.push(OpSig::Rope { tokens, heads, head_dim, part, x }, &args);
        }
        let [raw, latents] = [Activation::RawLatent, Activation::V].map(|of| RowColumns::whole(of, kv_rank));
        let key = RowColumns::whole(Activation::K, stored);
        if !self.joins {
            self.copy([tokens, kv_rank], key, raw, ops);
        }
        self.inner_norm([tokens, kv_rank], [raw.of, Weight::KvNorm.into(), latents.of], ops);
        match self.joins {
            true => self.keys_and_values(latent, tokens, ops),
            false => self.copy([tokens, kv_rank], latents, key, ops),
        }
    }

    /// Queries of the numbers that they are projected to first, if they are.
    fn up_queries(&self, latent: &LatentAttention, tokens: u32, ops: &mut impl OpSink) {
        let (low, columns) = (Activation::LowQNormed, self.shape.heads * latent.query());
        if latent.q_rank > 0 {
            let args = [Activation::LowQ.into(), Weight::QDownNorm.into(), low.into()];
            self.inner_norm([tokens, latent.q_rank], args, ops);
            let up = Projection { weight: Weight::Q, bias: None, columns, to: Activation::Attended };
            self.products([tokens, latent.q_rank], low, &[up], ops);
        }
    }

    /// Keys and values of all heads, as other engines make them.
    fn keys_and_values(&self, latent: &LatentAttention, tokens: u32, ops: &mut impl OpSink) {
        let (columns, to) = (to_u32(latent.up(self.shape.heads)), Activation::Unserved);
        let up = Projection { weight: Weight::KvUp, bias: None, columns, to };
        self.products([tokens, latent.kv_rank], Activation::V, &[up], ops);
    }

    /// Pushes attention of prompts as other engines run it: keys and values of earlier chunks are made again.
    pub(crate) fn attend_up(
        &self,
        latent: &LatentAttention,
        parts: &[Prefill],
        sizes: &AttentionSizes,
        ops: &mut impl OpSink,
    ) {
        let kv = KvShape {
            kv_heads: self.shape.heads,
            head_dim: (latent.query() + latent.v).div_ceil(2),
            page_tokens: self.shape.page_tokens,
            dtype: self.shape.activation,
            latent: None,
        };
        ops.push(self.prefill_sig((0, None), (kv, sizes.prefill_pages_max), sizes), &[]);
        let before = parts.iter().map(|part| part.context).sum();
        if before > 0 {
            self.keys_and_values(latent, before, ops);
        }
    }

    /// The product of each head's rows with its matrix `[n, k]`.
    fn by_head(
        &self,
        tokens: u32,
        [n, k]: [u32; 2],
        from: Activation,
        by: Weight,
        to: Activation,
        ops: &mut impl OpSink,
    ) {
        let (heads, x, weight) =
            (self.shape.heads, self.shape.activation, MatrixKind::Plain(self.shape.weight));
        let grouped =
            GroupedRows { choices: tokens * heads, fan: 1, experts: heads, touched: heads, others: 0 };
        let (order, starts) = (Activation::HeadOrder, Activation::HeadStarts);
        let args = [from.into(), by.into(), order.into(), starts.into(), to.into()];
        ops.push(OpSig::GroupedGemm { grouped, n, k, x, weight, out: x, bias: false }, &args);
    }

    /// Pushes what lifts the queries of the first `tokens` rows to latents.
    pub(crate) fn lift(&self, latent: &LatentAttention, tokens: u32, ops: &mut impl OpSink) {
        if tokens == 0 {
            return;
        }
        let LatentAttention { kv_rank, nope, rope, .. } = *latent;
        let (query, stored, rows) = (latent.query(), latent.stored(), tokens * self.shape.heads);
        let (parts, lifted) = (Activation::HeadParts, Activation::LiftedQ);
        let whole = RowColumns::whole(Activation::Attended, query);
        let to = RowColumns::whole(Activation::Q, stored);
        self.copy([rows, nope], whole, RowColumns::whole(parts, nope), ops);
        self.by_head(tokens, [kv_rank, nope], parts, Weight::Lift, lifted, ops);
        self.copy([rows, kv_rank], RowColumns::whole(lifted, kv_rank), to, ops);
        self.copy(
            [rows, rope],
            RowColumns { first: nope, ..whole },
            RowColumns { first: kv_rank, ..to },
            ops,
        );
    }

    /// Pushes what lowers what the first `tokens` rows attended to, to values.
    pub(crate) fn lower(&self, latent: &LatentAttention, tokens: u32, ops: &mut impl OpSink) {
        if tokens > 0 {
            let (from, to) = (Activation::Attended, Activation::HeadParts);
            self.by_head(tokens, [latent.v, latent.kv_rank], from, Weight::Lower, to, ops);
        }
    }

    /// Rows of all heads that attend to keys of their own, behind `before` columns per head of the others.
    fn behind(&self, sizes: &AttentionSizes, buffer: Activation, before: u32, row: u32) -> RowColumns {
        let elements = u64::from(sizes.lifted()) * u64::from(self.shape.heads) * u64::from(before);
        RowColumns::after(buffer, elements, row)
    }

    /// Pushes what moves the queries of expanded prompts to where they attend from, before what decodes
    /// attended to is written over them.
    pub(crate) fn move_queries(
        &self,
        latent: &LatentAttention,
        sizes: &AttentionSizes,
        ops: &mut impl OpSink,
    ) {
        let (query, rows) = (latent.query(), (sizes.tokens - sizes.lifted()) * self.shape.heads);
        if rows > 0 {
            let from = self.behind(sizes, Activation::Attended, query, query);
            let to = self.behind(sizes, Activation::Q, latent.stored(), query);
            self.copy([rows, query], from, to, ops);
        }
    }

    /// Pushes the extraction of values from the attention output of expanded prompts.
    pub(crate) fn cut_values(&self, latent: &LatentAttention, sizes: &AttentionSizes, ops: &mut impl OpSink) {
        let rows = (sizes.tokens - sizes.lifted()) * self.shape.heads;
        if rows > 0 {
            let from = self.behind(sizes, Activation::Attended, latent.kv_rank, latent.query());
            let to = self.behind(sizes, Activation::HeadParts, latent.v, latent.v);
            self.copy([rows, latent.v], from, to, ops);
        }
    }

    /// Pushes the expansion of keys and values from the latents that prompts see, piece by piece, and the
    /// attention to them.
    pub(crate) fn attend_expanded(
        &self,
        latent: &LatentAttention,
        pages_max: u32,
        sizes: &AttentionSizes,
        ops: &mut impl OpSink,
    ) {
        let (x, heads) = (self.shape.activation, self.shape.heads);
        let LatentAttention { kv_rank, v, .. } = *latent;
        let (query, stored) = (latent.query(), latent.stored());
        let kv = latent.expanded_kv(heads, self.shape.page_tokens, x);
        let pools = [Activation::ExpandedKeyPool, Activation::ExpandedValuePool].map(OpArg::from);
        let (all, latents) = (Activation::PieceStored, Activation::PieceLatents);
        let (keys, made) = (Activation::PieceKeys, Activation::PieceMade);
        let (mut left, mut piece) = (to_u32(sizes.kv[0].prefill_tokens), 0);
        while left > 0 {
            let tokens = left.min(latent.piece_tokens());
            let args = [StepTable::PieceFrom(piece).into(), OpArg::Pools, all.into()];
            ops.push(OpSig::KvGather { tokens, kv: self.kv(), wire: x }, &args);
            let to = RowColumns::whole(latents, kv_rank);
            self.copy([tokens, kv_rank], RowColumns::whole(all, stored), to, ops);
            let args = [all.into(), Activation::PieceFactors.into()];
            ops.push(OpSig::Rope { tokens, heads: 1, head_dim: stored, part: None, x }, &args);
            self.product([tokens, heads * query, stored], all, Weight::Keys, keys, ops);
            self.product([tokens, heads * v, kv_rank], latents, Weight::Lower, made, ops);
            let padded = RowColumns::whole(Activation::PieceValues, query);
            self.copy([tokens * heads, v], RowColumns::whole(made, v), padded, ops);
            let slots = StepTable::PieceTo(piece).into();
            ops.push(OpSig::KvWrite { tokens, x, kv }, &[keys.into(), padded.of, slots, pools[0], pools[1]]);
            left -= tokens;
            piece += 1;
        }
        let q = self.behind(sizes, Activation::Q, stored, query);
        let out = self.behind(sizes, Activation::Attended, kv_rank, query);
        let tables = [StepTable::QueryStart, StepTable::Context, StepTable::ExpandedPages].map(OpArg::from);
        let args = [q.of, tables[0], tables[1], tables[2], pools[0], pools[1], out.of];
        ops.push(self.prefill_sig((0, None), (kv, pages_max), sizes), &args);
    }
}

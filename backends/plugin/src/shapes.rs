//! The operations of the C interface: their dtypes, kinds and shapes.
//!
//! A kind that came later is one that libraries which were built before do not know, and say 0 for.

/// 32-bit floats.
pub const MIXFLEET_F32: u32 = 0;
/// The upper 16 bits of an f32.
pub const MIXFLEET_BF16: u32 = 1;
/// 16-bit floats of IEEE 754.
pub const MIXFLEET_F16: u32 = 2;
/// 8-bit floats with 4 exponent and 3 fraction bits and no infinities.
pub const MIXFLEET_F8E4M3: u32 = 3;
/// Unsigned 32-bit integers.
pub const MIXFLEET_U32: u32 = 4;

/// `shape.embed`. Operands: ids `[tokens]` u32, table `[vocab, hidden]`, out `[tokens, hidden]`.
pub const MIXFLEET_EMBED: u32 = 0;
/// `shape.rms_norm`. Operands: x `[rows, cols]`, weight `[cols]`, out `[rows, cols]` = x / sqrt(mean(x^2) +
/// eps) * weight.
pub const MIXFLEET_RMS_NORM: u32 = 1;
/// `shape.gemm`. Operands: x `[m, k]`, weight `[n, k]`, with `bias` bias `[n]`, out `[m, n]` = x weight^T (+
/// bias) (+ out with `accumulate`), accumulated in f32.
pub const MIXFLEET_GEMM: u32 = 2;
/// `shape.rope`. Operands: x `[tokens, heads, head_dim]` in place, cos_sin `[tokens, head_dim]` f32
/// (head_dim/2 cosines, then as many sines): pairs (i, i + head_dim/2) become (a cos - b sin, b cos + a
/// sin).
pub const MIXFLEET_ROPE: u32 = 3;
/// `shape.kv_write`. Operands: k, v `[tokens, kv_heads, head_dim]`, slots `[tokens]` u32, k_pool, v_pool. A
/// slot is page * page_tokens + offset in the page; the layout in a page is the library's own.
pub const MIXFLEET_KV_WRITE: u32 = 4;
/// `shape.attn_prefill`. Operands: q `[tokens, heads, head_dim]`, query_start `[sequences + 1]` u32, context
/// `[sequences]` u32 (keys that the last query sees), pages `[sequences, pages_max]` u32, k_pool, v_pool,
/// out `[tokens, heads, head_dim]`. Causal, scaled by 1/sqrt(head_dim).
pub const MIXFLEET_ATTN_PREFILL: u32 = 5;
/// `shape.attn_decode`. Operands: q `[sequences, heads, head_dim]`, range `[sequences, 2]` u32 (first and
/// one past the last key), pages `[sequences, pages_max]` u32, k_pool, v_pool, acc `[sequences, heads,
/// head_dim]` f32 = sum of exp(score - max) v, stat `[sequences, heads, 2]` f32 = max, sum. An empty range
/// gives 0, -inf, 0.
pub const MIXFLEET_ATTN_DECODE: u32 = 6;
/// `shape.attn_merge`. Operands: acc `[parts, rows, head_dim]` f32, stat `[parts, rows, 2]` f32, out `[rows,
/// head_dim]`: joined by maxima and sums, and normalised. A row whose parts are all empty gives 0.
pub const MIXFLEET_ATTN_MERGE: u32 = 7;
/// `shape.elements`. Operands: gate, up, out `[elements]` = gate / (1 + exp(-gate)) * up.
pub const MIXFLEET_SILU_MUL: u32 = 8;
/// `shape.elements`. Operands: a, b, out `[elements]` = a + b.
pub const MIXFLEET_ADD: u32 = 9;
/// `shape.sample`. Draws tokens, as hal/src/sample.rs says; a device without it has the host draw.
pub const MIXFLEET_SAMPLE: u32 = 10;
/// `shape.bytes`. Operands: from, to.
pub const MIXFLEET_COPY: u32 = 11;
/// `shape.bytes`. Operand: to; every 32-bit element becomes `word`.
pub const MIXFLEET_FILL: u32 = 12;
/// `shape.kv_move`. Operands: slots `[tokens]` u32, k_pool, v_pool, out `[tokens, 2, kv_heads, head_dim]`.
pub const MIXFLEET_KV_GATHER: u32 = 13;
/// `shape.kv_move`. Operands: in `[tokens, 2, kv_heads, head_dim]`, slots `[tokens]` u32, k_pool, v_pool.
pub const MIXFLEET_KV_SCATTER: u32 = 14;

/// `shape.rope_part`. As `MIXFLEET_ROPE` of the numbers first to first + length of each head, with cos_sin
/// `[tokens, length]`. Pairs are neighbours (first + 2i, first + 2i + 1) if they are interleaved, else
/// (first + i, first + i + length/2).
pub const MIXFLEET_ROPE_PART: u32 = 15;
/// `shape.columns`. Operands: from `[rows, from_row]`, to `[rows, to_row]`. Copies the columns of `from` that
/// begin at from_first to the columns of `to` that begin at to_first; other columns stay.
pub const MIXFLEET_COPY_COLUMNS: u32 = 16;
/// `shape.kv_write`. Operands: k `[tokens, head_dim]`, slots `[tokens]` u32, k_pool. Keys contain their
/// values: there is one head, and no pool of values.
pub const MIXFLEET_LATENT_WRITE: u32 = 17;
/// `shape.kv_move`. Operands: slots `[tokens]` u32, k_pool, out `[tokens, head_dim]`.
pub const MIXFLEET_LATENT_GATHER: u32 = 18;
/// `shape.kv_move`. Operands: in `[tokens, head_dim]`, slots `[tokens]` u32, k_pool.
pub const MIXFLEET_LATENT_SCATTER: u32 = 19;
/// `shape.latent_prefill`. As `MIXFLEET_ATTN_PREFILL` without v_pool: the value of a key is its first `rank`
/// numbers, scores are multiplied by `scale`, and out is `[tokens, heads, rank]`.
pub const MIXFLEET_LATENT_PREFILL: u32 = 20;
/// `shape.latent_decode`. As `MIXFLEET_ATTN_DECODE`, likewise: acc is `[sequences, heads, rank]`.
pub const MIXFLEET_LATENT_DECODE: u32 = 21;
/// `shape.attn_prefill`. As `MIXFLEET_ATTN_PREFILL` with sinks `[heads]` f32 before out: exp(sink - max)
/// joins the sum that the weights of a head are divided by.
pub const MIXFLEET_SINK_PREFILL: u32 = 22;
/// `shape.sink_merge`. As `MIXFLEET_ATTN_MERGE`, with sinks `[sinks]` f32 before out; row r uses sink r %
/// sinks.
pub const MIXFLEET_SINK_MERGE: u32 = 23;
/// `shape.clamped_swiglu`. Operands: gate_up `[elements, 2]`, out `[elements]` = (min(max(up, -limit), limit)
/// + 1) g / (1 + exp(-alpha g)) with g = min(gate, limit).
pub const MIXFLEET_CLAMPED_SWIGLU: u32 = 24;
/// `shape.route`. Operands: logits `[tokens, experts]` f32, with `bias` bias `[experts]` f32, chosen
/// `[tokens, active]` u32 (best first), weights `[tokens, active]` f32, order `[tokens * active]` u32
/// (choices, as token * active + its place, by expert and then by number), starts `[experts + 1]` u32 (of
/// each expert's choices in order). hal/src/mixture.rs says how experts are chosen.
pub const MIXFLEET_ROUTE: u32 = 25;
/// `shape.grouped_gemm`. Operands: x `[choices / fan, k]`, weight `[experts, n, k]`, with `bias` bias
/// `[experts, n]`, order `[choices]` u32, starts `[experts + 1]` u32, out `[choices, n]`:
/// `out[c] = x[c / fan] weight[e]^T (+ bias[e])` for each choice c of expert e.
pub const MIXFLEET_GROUPED_GEMM: u32 = 26;
/// `shape.combine`. Operands: x `[tokens, active, cols]`, weights `[tokens, active]` f32, out `[tokens,
/// cols]` f32 = sum of a token's weights times its rows (+ out with `accumulate`).
pub const MIXFLEET_COMBINE: u32 = 27;

/// Paged KV.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetKv {
    /// Heads of keys and values.
    pub kv_heads: u32,
    /// Length of a head.
    pub head_dim: u32,
    /// Tokens of a page.
    pub page_tokens: u32,
    /// Dtype of the elements in pages.
    pub dtype: u32,
}

/// Shape of `MIXFLEET_EMBED`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetEmbed {
    /// Rows to fetch.
    pub tokens: u32,
    /// Rows of the table.
    pub vocab: u32,
    /// Length of a row.
    pub hidden: u32,
    /// Dtype of the table.
    pub table: u32,
    /// Dtype of the result.
    pub out: u32,
}

/// Shape of `MIXFLEET_RMS_NORM`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetRmsNorm {
    /// Rows.
    pub rows: u32,
    /// Length of a row.
    pub cols: u32,
    /// Added to the mean square.
    pub eps: f32,
    /// Dtype of x.
    pub x: u32,
    /// Dtype of the weight.
    pub weight: u32,
    /// Dtype of the result.
    pub out: u32,
}

/// Shape of `MIXFLEET_GEMM`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetGemm {
    /// Rows of x.
    pub m: u32,
    /// Rows of the weight.
    pub n: u32,
    /// Inner dimension.
    pub k: u32,
    /// Dtype of x.
    pub x: u32,
    /// Dtype of weight and bias.
    pub weight: u32,
    /// Dtype of the result.
    pub out: u32,
    /// 1 if a bias follows the weight.
    pub bias: u32,
    /// 1 if the result is added to out.
    pub accumulate: u32,
}

/// Shape of `MIXFLEET_ROPE`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetRope {
    /// Tokens.
    pub tokens: u32,
    /// Heads.
    pub heads: u32,
    /// Length of a head.
    pub head_dim: u32,
    /// Dtype of x.
    pub x: u32,
}

/// Shape of `MIXFLEET_KV_WRITE`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetKvWrite {
    /// Tokens.
    pub tokens: u32,
    /// Dtype of k and v.
    pub x: u32,
    /// The pages.
    pub kv: MixfleetKv,
}

/// Shape of `MIXFLEET_ATTN_PREFILL`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetAttnPrefill {
    /// Pairs of query and key that are visible.
    pub pairs: u64,
    /// Keys over all sequences.
    pub kv_tokens: u64,
    /// New tokens over all sequences.
    pub tokens: u32,
    /// Sequences.
    pub sequences: u32,
    /// Heads of queries.
    pub heads: u32,
    /// Length of a row of the page table.
    pub pages_max: u32,
    /// A query at p sees keys p-window+1 to p; 0 if it sees all up to p.
    pub window: u32,
    /// Dtype of q and out.
    pub x: u32,
    /// The pages.
    pub kv: MixfleetKv,
}

/// Shape of `MIXFLEET_ATTN_DECODE`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetAttnDecode {
    /// Keys over all ranges.
    pub kv_tokens: u64,
    /// Sequences.
    pub sequences: u32,
    /// Heads of queries.
    pub heads: u32,
    /// Length of a row of the page table.
    pub pages_max: u32,
    /// Dtype of q.
    pub x: u32,
    /// The pages.
    pub kv: MixfleetKv,
}

/// Shape of `MIXFLEET_ATTN_MERGE`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetAttnMerge {
    /// Parts of the KV.
    pub parts: u32,
    /// Sequences times heads.
    pub rows: u32,
    /// Length of a head.
    pub head_dim: u32,
    /// Dtype of the result.
    pub out: u32,
}

/// Shape of `MIXFLEET_SILU_MUL` and `MIXFLEET_ADD`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetElements {
    /// Elements.
    pub elements: u64,
    /// Dtype of all operands.
    pub x: u32,
}

/// Shape of `MIXFLEET_SAMPLE`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetSample {
    /// Rows.
    pub rows: u32,
    /// Length of a row.
    pub cols: u32,
    /// Entries of the history.
    pub history: u32,
    /// Best tokens to list.
    pub tops: u32,
}

/// Shape of `MIXFLEET_COPY` and `MIXFLEET_FILL`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetBytes {
    /// Bytes, a multiple of 4.
    pub bytes: u64,
    /// What to fill with.
    pub word: u32,
}

/// Shape of `MIXFLEET_KV_GATHER` and `MIXFLEET_KV_SCATTER`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetKvMove {
    /// Slots.
    pub tokens: u32,
    /// Dtype outside of pages.
    pub wire: u32,
    /// The pages.
    pub kv: MixfleetKv,
}

/// Shape of `MIXFLEET_ROPE_PART`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetRopePart {
    /// Tokens.
    pub tokens: u32,
    /// Heads.
    pub heads: u32,
    /// Length of a head.
    pub head_dim: u32,
    /// Dtype of x.
    pub x: u32,
    /// The first number that is rotated.
    pub first: u32,
    /// Numbers that are rotated, an even number.
    pub length: u32,
    /// 1 if pairs are neighbours.
    pub interleaved: u32,
}

/// Shape of `MIXFLEET_COPY_COLUMNS`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetColumns {
    /// Rows of both.
    pub rows: u32,
    /// Columns to copy.
    pub cols: u32,
    /// Length of a row of from.
    pub from_row: u32,
    /// The first column there.
    pub from_first: u32,
    /// Length of a row of to.
    pub to_row: u32,
    /// The first column there.
    pub to_first: u32,
    /// Dtype of both.
    pub x: u32,
}

/// Shape of `MIXFLEET_LATENT_PREFILL`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetLatentPrefill {
    /// As of other attention; `kv.head_dim` is the length of a key.
    pub attention: MixfleetAttnPrefill,
    /// Length of a value.
    pub rank: u32,
    /// Factor of scores.
    pub scale: f32,
}

/// Shape of `MIXFLEET_LATENT_DECODE`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetLatentDecode {
    /// As of other attention; `kv.head_dim` is the length of a key.
    pub attention: MixfleetAttnDecode,
    /// Length of a value.
    pub rank: u32,
    /// Factor of scores.
    pub scale: f32,
}

/// Shape of `MIXFLEET_SINK_MERGE`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetSinkMerge {
    /// As without sinks.
    pub merge: MixfleetAttnMerge,
    /// Sinks: heads.
    pub sinks: u32,
}

/// Shape of `MIXFLEET_CLAMPED_SWIGLU`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetClampedSwiglu {
    /// Elements of out.
    pub elements: u64,
    /// Factor of the gate in the sigmoid.
    pub alpha: f32,
    /// Largest gate, and largest magnitude of up.
    pub limit: f32,
    /// Dtype of both.
    pub x: u32,
}

/// Shape of `MIXFLEET_ROUTE`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetRoute {
    /// Tokens.
    pub tokens: u32,
    /// Experts.
    pub experts: u32,
    /// Experts that a token chooses.
    pub active: u32,
    /// 1 if a bias follows the logits, which joins scores for the choice alone.
    pub bias: u32,
    /// What logits become: 0 softmax, 1 sigmoid. Other values are not supported.
    pub scoring: u32,
    /// Groups of experts; 1 without groups.
    pub groups: u32,
    /// Groups that a token can choose from.
    pub groups_active: u32,
    /// Experts of a group whose sum says how good it is.
    pub group_best: u32,
    /// 1 if a token's weights are divided by their sum.
    pub normalise: u32,
    /// Factor of all weights.
    pub scale: f32,
}

/// Shape of `MIXFLEET_GROUPED_GEMM`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetGroupedGemm {
    /// Rows of the result.
    pub choices: u32,
    /// Consecutive choices that share a row of x.
    pub fan: u32,
    /// Experts.
    pub experts: u32,
    /// Experts that are expected to have rows, which changes no result.
    pub touched: u32,
    /// Rows of an expert's matrix.
    pub n: u32,
    /// Inner dimension.
    pub k: u32,
    /// Dtype of x.
    pub x: u32,
    /// Dtype of weight and bias.
    pub weight: u32,
    /// Dtype of the result.
    pub out: u32,
    /// 1 if a bias follows the weight.
    pub bias: u32,
}

/// Shape of `MIXFLEET_COMBINE`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MixfleetCombine {
    /// Tokens.
    pub tokens: u32,
    /// Choices of a token.
    pub active: u32,
    /// Length of a row.
    pub cols: u32,
    /// Dtype of x.
    pub x: u32,
    /// 1 if the result is added to out.
    pub accumulate: u32,
}

/// The shape of an operation; its kind says which.
#[repr(C)]
#[derive(Clone, Copy)]
pub union MixfleetShape {
    /// Of `MIXFLEET_EMBED`.
    pub embed: MixfleetEmbed,
    /// Of `MIXFLEET_RMS_NORM`.
    pub rms_norm: MixfleetRmsNorm,
    /// Of `MIXFLEET_GEMM`.
    pub gemm: MixfleetGemm,
    /// Of `MIXFLEET_ROPE`.
    pub rope: MixfleetRope,
    /// Of `MIXFLEET_KV_WRITE` and `MIXFLEET_LATENT_WRITE`.
    pub kv_write: MixfleetKvWrite,
    /// Of `MIXFLEET_ATTN_PREFILL` and `MIXFLEET_SINK_PREFILL`.
    pub attn_prefill: MixfleetAttnPrefill,
    /// Of `MIXFLEET_ATTN_DECODE`.
    pub attn_decode: MixfleetAttnDecode,
    /// Of `MIXFLEET_ATTN_MERGE`.
    pub attn_merge: MixfleetAttnMerge,
    /// Of `MIXFLEET_SILU_MUL` and `MIXFLEET_ADD`.
    pub elements: MixfleetElements,
    /// Of `MIXFLEET_SAMPLE`.
    pub sample: MixfleetSample,
    /// Of `MIXFLEET_COPY` and `MIXFLEET_FILL`.
    pub bytes: MixfleetBytes,
    /// Of `MIXFLEET_KV_GATHER`, `MIXFLEET_KV_SCATTER` and their latent variants.
    pub kv_move: MixfleetKvMove,
    /// Of `MIXFLEET_ROPE_PART`.
    pub rope_part: MixfleetRopePart,
    /// Of `MIXFLEET_COPY_COLUMNS`.
    pub columns: MixfleetColumns,
    /// Of `MIXFLEET_LATENT_PREFILL`.
    pub latent_prefill: MixfleetLatentPrefill,
    /// Of `MIXFLEET_LATENT_DECODE`.
    pub latent_decode: MixfleetLatentDecode,
    /// Of `MIXFLEET_SINK_MERGE`.
    pub sink_merge: MixfleetSinkMerge,
    /// Of `MIXFLEET_CLAMPED_SWIGLU`.
    pub clamped_swiglu: MixfleetClampedSwiglu,
    /// Of `MIXFLEET_ROUTE`.
    pub route: MixfleetRoute,
    /// Of `MIXFLEET_GROUPED_GEMM`.
    pub grouped_gemm: MixfleetGroupedGemm,
    /// Of `MIXFLEET_COMBINE`.
    pub combine: MixfleetCombine,
    /// Room for shapes of later versions.
    pub reserved: [u64; 16],
}

// what libraries were compiled with
const _: () = assert!(size_of::<MixfleetShape>() == 128);

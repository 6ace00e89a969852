#ifndef MIXFLEET_H
#define MIXFLEET_H

#include <stdint.h>

// 32-bit floats.
#define MIXFLEET_F32 0

// The upper 16 bits of an f32.
#define MIXFLEET_BF16 1

// 16-bit floats of IEEE 754.
#define MIXFLEET_F16 2

// 8-bit floats with 4 exponent and 3 fraction bits and no infinities.
#define MIXFLEET_F8E4M3 3

// Unsigned 32-bit integers.
#define MIXFLEET_U32 4

// `shape.embed`. Operands: ids `[tokens]` u32, table `[vocab, hidden]`, out `[tokens, hidden]`.
#define MIXFLEET_EMBED 0

// `shape.rms_norm`. Operands: x `[rows, cols]`, weight `[cols]`, out `[rows, cols]` = x / sqrt(mean(x^2) +
// eps) * weight.
#define MIXFLEET_RMS_NORM 1

// `shape.gemm`. Operands: x `[m, k]`, weight `[n, k]`, with `bias` bias `[n]`, out `[m, n]` = x weight^T (+
// bias) (+ out with `accumulate`), accumulated in f32.
#define MIXFLEET_GEMM 2

// `shape.rope`. Operands: x `[tokens, heads, head_dim]` in place, cos_sin `[tokens, head_dim]` f32
// (head_dim/2 cosines, then as many sines): pairs (i, i + head_dim/2) become (a cos - b sin, b cos + a
// sin).
#define MIXFLEET_ROPE 3

// `shape.kv_write`. Operands: k, v `[tokens, kv_heads, head_dim]`, slots `[tokens]` u32, k_pool, v_pool. A
// slot is page * page_tokens + offset in the page; the layout in a page is the library's own.
#define MIXFLEET_KV_WRITE 4

// `shape.attn_prefill`. Operands: q `[tokens, heads, head_dim]`, query_start `[sequences + 1]` u32, context
// `[sequences]` u32 (keys that the last query sees), pages `[sequences, pages_max]` u32, k_pool, v_pool,
// out `[tokens, heads, head_dim]`. Causal, scaled by 1/sqrt(head_dim).
#define MIXFLEET_ATTN_PREFILL 5

// `shape.attn_decode`. Operands: q `[sequences, heads, head_dim]`, range `[sequences, 2]` u32 (first and
// one past the last key), pages `[sequences, pages_max]` u32, k_pool, v_pool, acc `[sequences, heads,
// head_dim]` f32 = sum of exp(score - max) v, stat `[sequences, heads, 2]` f32 = max, sum. An empty range
// gives 0, -inf, 0.
#define MIXFLEET_ATTN_DECODE 6

// `shape.attn_merge`. Operands: acc `[parts, rows, head_dim]` f32, stat `[parts, rows, 2]` f32, out `[rows,
// head_dim]`: joined by maxima and sums, and normalised. A row whose parts are all empty gives 0.
#define MIXFLEET_ATTN_MERGE 7

// `shape.elements`. Operands: gate, up, out `[elements]` = gate / (1 + exp(-gate)) * up.
#define MIXFLEET_SILU_MUL 8

// `shape.elements`. Operands: a, b, out `[elements]` = a + b.
#define MIXFLEET_ADD 9

// `shape.sample`. Draws tokens, as hal/src/sample.rs says; a device without it has the host draw.
#define MIXFLEET_SAMPLE 10

// `shape.bytes`. Operands: from, to.
#define MIXFLEET_COPY 11

// `shape.bytes`. Operand: to; every 32-bit element becomes `word`.
#define MIXFLEET_FILL 12

// `shape.kv_move`. Operands: slots `[tokens]` u32, k_pool, v_pool, out `[tokens, 2, kv_heads, head_dim]`.
#define MIXFLEET_KV_GATHER 13

// `shape.kv_move`. Operands: in `[tokens, 2, kv_heads, head_dim]`, slots `[tokens]` u32, k_pool, v_pool.
#define MIXFLEET_KV_SCATTER 14

// `shape.rope_part`. As `MIXFLEET_ROPE` of the numbers first to first + length of each head, with cos_sin
// `[tokens, length]`. Pairs are neighbours (first + 2i, first + 2i + 1) if they are interleaved, else
// (first + i, first + i + length/2).
#define MIXFLEET_ROPE_PART 15

// `shape.columns`. Operands: from `[rows, from_row]`, to `[rows, to_row]`. Copies the columns of `from` that
// begin at from_first to the columns of `to` that begin at to_first; other columns stay.
#define MIXFLEET_COPY_COLUMNS 16

// `shape.kv_write`. Operands: k `[tokens, head_dim]`, slots `[tokens]` u32, k_pool. Keys contain their
// values: there is one head, and no pool of values.
#define MIXFLEET_LATENT_WRITE 17

// `shape.kv_move`. Operands: slots `[tokens]` u32, k_pool, out `[tokens, head_dim]`.
#define MIXFLEET_LATENT_GATHER 18

// `shape.kv_move`. Operands: in `[tokens, head_dim]`, slots `[tokens]` u32, k_pool.
#define MIXFLEET_LATENT_SCATTER 19

// `shape.latent_prefill`. As `MIXFLEET_ATTN_PREFILL` without v_pool: the value of a key is its first `rank`
// numbers, scores are multiplied by `scale`, and out is `[tokens, heads, rank]`.
#define MIXFLEET_LATENT_PREFILL 20

// `shape.latent_decode`. As `MIXFLEET_ATTN_DECODE`, likewise: acc is `[sequences, heads, rank]`.
#define MIXFLEET_LATENT_DECODE 21

// `shape.attn_prefill`. As `MIXFLEET_ATTN_PREFILL` with sinks `[heads]` f32 before out: exp(sink - max)
// joins the sum that the weights of a head are divided by.
#define MIXFLEET_SINK_PREFILL 22

// `shape.sink_merge`. As `MIXFLEET_ATTN_MERGE`, with sinks `[sinks]` f32 before out; row r uses sink r %
// sinks.
#define MIXFLEET_SINK_MERGE 23

// `shape.clamped_swiglu`. Operands: gate_up `[elements, 2]`, out `[elements]` = (min(max(up, -limit), limit)
// + 1) g / (1 + exp(-alpha g)) with g = min(gate, limit).
#define MIXFLEET_CLAMPED_SWIGLU 24

// `shape.route`. Operands: logits `[tokens, experts]` f32, with `bias` bias `[experts]` f32, chosen
// `[tokens, active]` u32 (best first), weights `[tokens, active]` f32, order `[tokens * active]` u32
// (choices, as token * active + its place, by expert and then by number), starts `[experts + 1]` u32 (of
// each expert's choices in order). hal/src/mixture.rs says how experts are chosen.
#define MIXFLEET_ROUTE 25

// `shape.grouped_gemm`. Operands: x `[choices / fan, k]`, weight `[experts, n, k]`, with `bias` bias
// `[experts, n]`, order `[choices]` u32, starts `[experts + 1]` u32, out `[choices, n]`:
// `out[c] = x[c / fan] weight[e]^T (+ bias[e])` for each choice c of expert e.
#define MIXFLEET_GROUPED_GEMM 26

// `shape.combine`. Operands: x `[tokens, active, cols]`, weights `[tokens, active]` f32, out `[tokens,
// cols]` f32 = sum of a token's weights times its rows (+ out with `accumulate`).
#define MIXFLEET_COMBINE 27

// The version of the interface; libraries of another one are refused.
#define MIXFLEET_ABI 1

// It is done.
#define MIXFLEET_OK 0

// There is not enough memory.
#define MIXFLEET_OUT_OF_MEMORY 1

// The device cannot do this at all.
#define MIXFLEET_UNSUPPORTED 2

// The device is gone, and every later call fails too.
#define MIXFLEET_DEVICE_LOST 3

// The caller broke the contract: an index beyond its table, for example.
#define MIXFLEET_INVALID 4

// Anything else.
#define MIXFLEET_FAILED 5

// Memory of a device, opaque to all but the library.
struct MixfleetBuffer;

// A device of the library, which alone knows what it is.
struct MixfleetDevice;

// A batch that a library has prepared for many runs, which alone knows what it is.
struct MixfleetGraph;

// An error message: text that ends with a zero byte.
struct MixfleetError {
  // Size of this structure in bytes.
  uint32_t struct_bytes;
  // The text.
  char text[252];
};

// What a device is.
struct MixfleetInfo {
  // Size of this structure in bytes; the library leaves it as it is.
  uint32_t struct_bytes;
  // Cores, compute units or similar; 0 if not known.
  uint32_t compute_units;
  // Memory of all buffers together, in bytes.
  uint64_t memory_bytes;
  // The largest buffer, in bytes.
  uint64_t allocation_bytes_max;
  // Offsets of operands are multiples of this power of two.
  uint64_t alignment_bytes;
  // Tokens of a KV page in which attention is fastest.
  uint32_t kv_page_tokens;
  // 1 for host cores, 2 for a graphics processor, 3 for any other part.
  uint32_t kind;
  // Name of the part, for people; ends with a zero.
  char name[128];
  // What measurements hold for: part, driver, version of the kernels; ends with a zero.
  char fingerprint[128];
};

// Shape of `MIXFLEET_EMBED`.
struct MixfleetEmbed {
  // Rows to fetch.
  uint32_t tokens;
  // Rows of the table.
  uint32_t vocab;
  // Length of a row.
  uint32_t hidden;
  // Dtype of the table.
  uint32_t table;
  // Dtype of the result.
  uint32_t out;
};

// Shape of `MIXFLEET_RMS_NORM`.
struct MixfleetRmsNorm {
  // Rows.
  uint32_t rows;
  // Length of a row.
  uint32_t cols;
  // Added to the mean square.
  float eps;
  // Dtype of x.
  uint32_t x;
  // Dtype of the weight.
  uint32_t weight;
  // Dtype of the result.
  uint32_t out;
};

// Shape of `MIXFLEET_GEMM`.
struct MixfleetGemm {
  // Rows of x.
  uint32_t m;
  // Rows of the weight.
  uint32_t n;
  // Inner dimension.
  uint32_t k;
  // Dtype of x.
  uint32_t x;
  // Dtype of weight and bias.
  uint32_t weight;
  // Dtype of the result.
  uint32_t out;
  // 1 if a bias follows the weight.
  uint32_t bias;
  // 1 if the result is added to out.
  uint32_t accumulate;
};

// Shape of `MIXFLEET_ROPE`.
struct MixfleetRope {
  // Tokens.
  uint32_t tokens;
  // Heads.
  uint32_t heads;
  // Length of a head.
  uint32_t head_dim;
  // Dtype of x.
  uint32_t x;
};

// Paged KV.
struct MixfleetKv {
  // Heads of keys and values.
  uint32_t kv_heads;
  // Length of a head.
  uint32_t head_dim;
  // Tokens of a page.
  uint32_t page_tokens;
  // Dtype of the elements in pages.
  uint32_t dtype;
};

// Shape of `MIXFLEET_KV_WRITE`.
struct MixfleetKvWrite {
  // Tokens.
  uint32_t tokens;
  // Dtype of k and v.
  uint32_t x;
  // The pages.
  struct MixfleetKv kv;
};

// Shape of `MIXFLEET_ATTN_PREFILL`.
struct MixfleetAttnPrefill {
  // Pairs of query and key that are visible.
  uint64_t pairs;
  // Keys over all sequences.
  uint64_t kv_tokens;
  // New tokens over all sequences.
  uint32_t tokens;
  // Sequences.
  uint32_t sequences;
  // Heads of queries.
  uint32_t heads;
  // Length of a row of the page table.
  uint32_t pages_max;
  // A query at p sees keys p-window+1 to p; 0 if it sees all up to p.
  uint32_t window;
  // Dtype of q and out.
  uint32_t x;
  // The pages.
  struct MixfleetKv kv;
};

// Shape of `MIXFLEET_ATTN_DECODE`.
struct MixfleetAttnDecode {
  // Keys over all ranges.
  uint64_t kv_tokens;
  // Sequences.
  uint32_t sequences;
  // Heads of queries.
  uint32_t heads;
  // Length of a row of the page table.
  uint32_t pages_max;
  // Dtype of q.
  uint32_t x;
  // The pages.
  struct MixfleetKv kv;
};

// Shape of `MIXFLEET_ATTN_MERGE`.
struct MixfleetAttnMerge {
  // Parts of the KV.
  uint32_t parts;
  // Sequences times heads.
  uint32_t rows;
  // Length of a head.
  uint32_t head_dim;
  // Dtype of the result.
  uint32_t out;
};

// Shape of `MIXFLEET_SILU_MUL` and `MIXFLEET_ADD`.
struct MixfleetElements {
  // Elements.
  uint64_t elements;
  // Dtype of all operands.
  uint32_t x;
};

// Shape of `MIXFLEET_SAMPLE`.
struct MixfleetSample {
  // Rows.
  uint32_t rows;
  // Length of a row.
  uint32_t cols;
  // Entries of the history.
  uint32_t history;
  // Best tokens to list.
  uint32_t tops;
};

// Shape of `MIXFLEET_COPY` and `MIXFLEET_FILL`.
struct MixfleetBytes {
  // Bytes, a multiple of 4.
  uint64_t bytes;
  // What to fill with.
  uint32_t word;
};

// Shape of `MIXFLEET_KV_GATHER` and `MIXFLEET_KV_SCATTER`.
struct MixfleetKvMove {
  // Slots.
  uint32_t tokens;
  // Dtype outside of pages.
  uint32_t wire;
  // The pages.
  struct MixfleetKv kv;
};

// Shape of `MIXFLEET_ROPE_PART`.
struct MixfleetRopePart {
  // Tokens.
  uint32_t tokens;
  // Heads.
  uint32_t heads;
  // Length of a head.
  uint32_t head_dim;
  // Dtype of x.
  uint32_t x;
  // The first number that is rotated.
  uint32_t first;
  // Numbers that are rotated, an even number.
  uint32_t length;
  // 1 if pairs are neighbours.
  uint32_t interleaved;
};

// Shape of `MIXFLEET_COPY_COLUMNS`.
struct MixfleetColumns {
  // Rows of both.
  uint32_t rows;
  // Columns to copy.
  uint32_t cols;
  // Length of a row of from.
  uint32_t from_row;
  // The first column there.
  uint32_t from_first;
  // Length of a row of to.
  uint32_t to_row;
  // The first column there.
  uint32_t to_first;
  // Dtype of both.
  uint32_t x;
};

// Shape of `MIXFLEET_LATENT_PREFILL`.
struct MixfleetLatentPrefill {
  // As of other attention; `kv.head_dim` is the length of a key.
  struct MixfleetAttnPrefill attention;
  // Length of a value.
  uint32_t rank;
  // Factor of scores.
  float scale;
};

// Shape of `MIXFLEET_LATENT_DECODE`.
struct MixfleetLatentDecode {
  // As of other attention; `kv.head_dim` is the length of a key.
  struct MixfleetAttnDecode attention;
  // Length of a value.
  uint32_t rank;
  // Factor of scores.
  float scale;
};

// Shape of `MIXFLEET_SINK_MERGE`.
struct MixfleetSinkMerge {
  // As without sinks.
  struct MixfleetAttnMerge merge;
  // Sinks: heads.
  uint32_t sinks;
};

// Shape of `MIXFLEET_CLAMPED_SWIGLU`.
struct MixfleetClampedSwiglu {
  // Elements of out.
  uint64_t elements;
  // Factor of the gate in the sigmoid.
  float alpha;
  // Largest gate, and largest magnitude of up.
  float limit;
  // Dtype of both.
  uint32_t x;
};

// Shape of `MIXFLEET_ROUTE`.
struct MixfleetRoute {
  // Tokens.
  uint32_t tokens;
  // Experts.
  uint32_t experts;
  // Experts that a token chooses.
  uint32_t active;
  // 1 if a bias follows the logits, which joins scores for the choice alone.
  uint32_t bias;
  // What logits become: 0 softmax, 1 sigmoid. Other values are not supported.
  uint32_t scoring;
  // Groups of experts; 1 without groups.
  uint32_t groups;
  // Groups that a token can choose from.
  uint32_t groups_active;
  // Experts of a group whose sum says how good it is.
  uint32_t group_best;
  // 1 if a token's weights are divided by their sum.
  uint32_t normalise;
  // Factor of all weights.
  float scale;
};

// Shape of `MIXFLEET_GROUPED_GEMM`.
struct MixfleetGroupedGemm {
  // Rows of the result.
  uint32_t choices;
  // Consecutive choices that share a row of x.
  uint32_t fan;
  // Experts.
  uint32_t experts;
  // Experts that are expected to have rows, which changes no result.
  uint32_t touched;
  // Rows of an expert's matrix.
  uint32_t n;
  // Inner dimension.
  uint32_t k;
  // Dtype of x.
  uint32_t x;
  // Dtype of weight and bias.
  uint32_t weight;
  // Dtype of the result.
  uint32_t out;
  // 1 if a bias follows the weight.
  uint32_t bias;
};

// Shape of `MIXFLEET_COMBINE`.
struct MixfleetCombine {
  // Tokens.
  uint32_t tokens;
  // Choices of a token.
  uint32_t active;
  // Length of a row.
  uint32_t cols;
  // Dtype of x.
  uint32_t x;
  // 1 if the result is added to out.
  uint32_t accumulate;
};

// The shape of an operation; its kind says which.
union MixfleetShape {
  // Of `MIXFLEET_EMBED`.
  struct MixfleetEmbed embed;
  // Of `MIXFLEET_RMS_NORM`.
  struct MixfleetRmsNorm rms_norm;
  // Of `MIXFLEET_GEMM`.
  struct MixfleetGemm gemm;
  // Of `MIXFLEET_ROPE`.
  struct MixfleetRope rope;
  // Of `MIXFLEET_KV_WRITE` and `MIXFLEET_LATENT_WRITE`.
  struct MixfleetKvWrite kv_write;
  // Of `MIXFLEET_ATTN_PREFILL` and `MIXFLEET_SINK_PREFILL`.
  struct MixfleetAttnPrefill attn_prefill;
  // Of `MIXFLEET_ATTN_DECODE`.
  struct MixfleetAttnDecode attn_decode;
  // Of `MIXFLEET_ATTN_MERGE`.
  struct MixfleetAttnMerge attn_merge;
  // Of `MIXFLEET_SILU_MUL` and `MIXFLEET_ADD`.
  struct MixfleetElements elements;
  // Of `MIXFLEET_SAMPLE`.
  struct MixfleetSample sample;
  // Of `MIXFLEET_COPY` and `MIXFLEET_FILL`.
  struct MixfleetBytes bytes;
  // Of `MIXFLEET_KV_GATHER`, `MIXFLEET_KV_SCATTER` and their latent variants.
  struct MixfleetKvMove kv_move;
  // Of `MIXFLEET_ROPE_PART`.
  struct MixfleetRopePart rope_part;
  // Of `MIXFLEET_COPY_COLUMNS`.
  struct MixfleetColumns columns;
  // Of `MIXFLEET_LATENT_PREFILL`.
  struct MixfleetLatentPrefill latent_prefill;
  // Of `MIXFLEET_LATENT_DECODE`.
  struct MixfleetLatentDecode latent_decode;
  // Of `MIXFLEET_SINK_MERGE`.
  struct MixfleetSinkMerge sink_merge;
  // Of `MIXFLEET_CLAMPED_SWIGLU`.
  struct MixfleetClampedSwiglu clamped_swiglu;
  // Of `MIXFLEET_ROUTE`.
  struct MixfleetRoute route;
  // Of `MIXFLEET_GROUPED_GEMM`.
  struct MixfleetGroupedGemm grouped_gemm;
  // Of `MIXFLEET_COMBINE`.
  struct MixfleetCombine combine;
  // Room for shapes of later versions.
  uint64_t reserved[16];
};

// A part of a buffer.
struct MixfleetSlice {
  // The buffer.
  struct MixfleetBuffer *buffer;
  // Where it begins there, in bytes.
  uint64_t offset;
  // Its length in bytes.
  uint64_t bytes;
};

// An operation. Sizes, alignment and overlaps of its operands were checked; indices in them were not.
struct MixfleetOp {
  // Size of this structure in bytes.
  uint32_t struct_bytes;
  // Its kind, `MIXFLEET_EMBED` and so on. Kinds that are not known are not supported.
  uint32_t kind;
  // Its shape.
  union MixfleetShape shape;
  // The operands; none in a query for support.
  const struct MixfleetSlice *args;
  // Number of operands.
  uint32_t arg_count;
  // 0.
  uint32_t reserved;
};

// A device's health. What it cannot tell stays NaN.
struct MixfleetHealth {
  // Size of this structure in bytes.
  uint32_t struct_bytes;
  // 0.
  uint32_t reserved;
  // Temperature in degrees Celsius.
  double temperature_c;
  // Power draw in watts.
  double power_w;
  // Clock in MHz.
  double clock_mhz;
};

// The functions of a library. Those marked as optional may be null.
struct MixfleetBackend {
  // Size of this structure in bytes.
  uint32_t struct_bytes;
  // `MIXFLEET_ABI`.
  uint32_t abi;
  // The lower-case name by which devices are selected, as in `acme:0`; ends with a zero.
  const char *name;
  // Number of devices, or below 0 with the reason why there are none in `error`.
  int32_t (*count)(struct MixfleetError *error);
  // Describes a device, without opening it.
  int32_t (*info)(uint32_t index, struct MixfleetInfo *info, struct MixfleetError *error);
  // Opens a device.
  int32_t (*open)(uint32_t index, struct MixfleetDevice **device, struct MixfleetError *error);
  // Closes a device, all of whose buffers are freed.
  void (*close)(struct MixfleetDevice *device);
  // Whether a device can run an operation: 0 no, 1 at native speed, 2 slowly or by conversion.
  int32_t (*support)(struct MixfleetDevice *device, const struct MixfleetOp *op);
  // Allocates memory, which holds nothing of another process.
  int32_t (*alloc)(struct MixfleetDevice *device,
                   uint64_t bytes,
                   struct MixfleetBuffer **buffer,
                   struct MixfleetError *error);
  // Frees memory, which nothing uses any more.
  void (*free)(struct MixfleetDevice *device, struct MixfleetBuffer *buffer);
  // Copies from the host to a device.
  int32_t (*write)(struct MixfleetDevice *device,
                   const struct MixfleetSlice *to,
                   const void *data,
                   struct MixfleetError *error);
  // Copies from a device to the host.
  int32_t (*read)(struct MixfleetDevice *device,
                  const struct MixfleetSlice *from,
                  void *data,
                  struct MixfleetError *error);
  // Runs operations in order, each of which sees the writes of earlier ones, and returns when all are
  // done.
  int32_t (*run)(struct MixfleetDevice *device,
                 const struct MixfleetOp *ops,
                 uint32_t count,
                 struct MixfleetError *error);
  // Optional: bytes of memory that could be allocated now.
  uint64_t (*memory_free)(struct MixfleetDevice *device);
  // Optional: reads the device's health.
  void (*health)(struct MixfleetDevice *device, struct MixfleetHealth *health);
  // Optional, together with `replay` and `forget`: all three or none. Prepares operations for many runs;
  // the library must copy what it keeps: `ops` and their operand lists are valid only during the call,
  // while the buffers stay. The content of buffers changes between runs.
  int32_t (*record)(struct MixfleetDevice *device,
                    const struct MixfleetOp *ops,
                    uint32_t count,
                    struct MixfleetGraph **graph,
                    struct MixfleetError *error);
  // Runs a prepared batch as `run` would.
  int32_t (*replay)(struct MixfleetDevice *device, struct MixfleetGraph *graph, struct MixfleetError *error);
  // Frees a prepared batch, which does not run.
  void (*forget)(struct MixfleetDevice *device, struct MixfleetGraph *graph);
};

#endif  /* MIXFLEET_H */

#ifdef __cplusplus
extern "C"
#endif
// What a library exports.
const struct MixfleetBackend *mixfleet_backend(uint32_t abi);

/* A backend in plain C: loops over host memory, for all operations but drawing tokens, which the host then does.
 * Alone it knows 32-bit floats; example.c adds those of 16 bits, quicker products, and batches to run again. */
#include "mixfleet.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* 1. The device and its memory. */

struct MixfleetDevice { int open; };
struct MixfleetBuffer { unsigned char *bytes; };

static int fail(struct MixfleetError *error, int32_t status, const char *text) {
    snprintf(error->text, sizeof error->text, "%s", text);
    return status;
}

static int32_t count(struct MixfleetError *error) { return 1; }

static int32_t info(uint32_t index, struct MixfleetInfo *info, struct MixfleetError *error) {
    info->allocation_bytes_max = (info->memory_bytes = (uint64_t)4 << 30) / 2;
    info->kv_page_tokens = 16;
    info->alignment_bytes = info->kind = 1;
    snprintf(info->name, sizeof info->name, "loops in C");
    snprintf(info->fingerprint, sizeof info->fingerprint, "loops 1");
    return MIXFLEET_OK;
}

static int32_t open_device(uint32_t index, struct MixfleetDevice **device, struct MixfleetError *error) {
    static struct MixfleetDevice only;
    return *device = &only, MIXFLEET_OK;
}

static void close_device(struct MixfleetDevice *device) {}
static void free_buffer(struct MixfleetDevice *device, struct MixfleetBuffer *buffer) {
    free(buffer->bytes);
    free(buffer);
}

static int32_t alloc(struct MixfleetDevice *device, uint64_t bytes, struct MixfleetBuffer **buffer,
                     struct MixfleetError *error) {
    *buffer = calloc(1, sizeof **buffer);
    if (*buffer && ((*buffer)->bytes = calloc(1, bytes ? bytes : 1))) return MIXFLEET_OK;
    if (*buffer) free_buffer(device, *buffer);
    return fail(error, MIXFLEET_OUT_OF_MEMORY, "the host has no memory");
}

static int32_t copy_in(struct MixfleetDevice *device, const struct MixfleetSlice *to, const void *data,
                       struct MixfleetError *error) {
    return memcpy(to->buffer->bytes + to->offset, data, to->bytes), MIXFLEET_OK;
}

static int32_t copy_out(struct MixfleetDevice *device, const struct MixfleetSlice *from, void *data,
                        struct MixfleetError *error) {
    return memcpy(data, from->buffer->bytes + from->offset, from->bytes), MIXFLEET_OK;
}

/* 2. Elements of operands. */

static unsigned char *arg(const struct MixfleetOp *op, int i) {
    return op->args[i].buffer->bytes + op->args[i].offset;
}

static size_t word(const struct MixfleetOp *op, int operand, size_t i) {
    uint32_t value;
    memcpy(&value, arg(op, operand) + 4 * i, 4);
    return value;
}

#ifndef MIXFLEET_DTYPES /* which has these four for more dtypes */
static int known(uint32_t dtype) { return dtype == MIXFLEET_F32; }
static size_t element(uint32_t dtype) { return 4; }

static float load(const unsigned char *at, size_t i, uint32_t dtype) {
    float value;
    return memcpy(&value, at + 4 * i, 4), value;
}

static void store(unsigned char *at, size_t i, uint32_t dtype, float value) { memcpy(at + 4 * i, &value, 4); }
#endif

/* The sum of products of two rows, which begin at `i` and `j`, in 16 parts, which make a vector. */
static float dot(const unsigned char *a, size_t i, uint32_t a_dtype, const unsigned char *b, size_t j, uint32_t b_dtype,
                 size_t count) {
    float sums[16] = {0}, sum = 0;
    size_t at = 0;
    for (; at + 16 <= count; at += 16)
        for (size_t s = 0; s < 16; s++) sums[s] += load(a, i + at + s, a_dtype) * load(b, j + at + s, b_dtype);
    for (; at < count; at++) sum += load(a, i + at, a_dtype) * load(b, j + at, b_dtype);
    for (size_t s = 0; s < 16; s++) sum += sums[s];
    return sum;
}

/* 3. Operations. Operands are checked by who calls; indices are not. */

static int embed(const struct MixfleetOp *op, struct MixfleetError *error) {
    struct MixfleetEmbed s = op->shape.embed;
    for (size_t t = 0; t < s.tokens; t++) {
        size_t id = word(op, 0, t);
        if (id >= s.vocab) return fail(error, MIXFLEET_INVALID, "embed: an id is not in the table");
        for (size_t i = 0; i < s.hidden; i++)
            store(arg(op, 2), t * s.hidden + i, s.out, load(arg(op, 1), id * s.hidden + i, s.table));
    }
    return MIXFLEET_OK;
}

static void rms_norm(const struct MixfleetOp *op) {
    struct MixfleetRmsNorm s = op->shape.rms_norm;
    for (size_t r = 0; r < s.rows; r++) {
        double sum = 0;
        for (size_t i = r * s.cols; i < (r + 1) * s.cols; i++)
            sum += (double)load(arg(op, 0), i, s.x) * load(arg(op, 0), i, s.x);
        double scale = 1 / sqrt(sum / s.cols + s.eps);
        for (size_t i = 0, at = r * s.cols; i < s.cols; i++, at++)
            store(arg(op, 2), at, s.out, (float)(load(arg(op, 0), at, s.x) * scale * load(arg(op, 1), i, s.weight)));
    }
}

static void gemm(const struct MixfleetOp *op) {
    struct MixfleetGemm s = op->shape.gemm;
    unsigned char *out = arg(op, s.bias ? 3 : 2);
    for (size_t m = 0; m < s.m; m++)
        for (size_t n = 0, at = m * s.n; n < s.n; n++, at++) {
            float sum = dot(arg(op, 0), m * s.k, s.x, arg(op, 1), n * s.k, s.weight, s.k);
            if (s.bias) sum += load(arg(op, 2), n, s.weight);
            if (s.accumulate) sum += load(out, at, s.out);
            store(out, at, s.out, sum);
        }
}

static void rope(const struct MixfleetOp *op) {
    struct MixfleetRope s = op->shape.rope;
    size_t pairs = s.head_dim / 2;
    for (size_t row = 0; row < (size_t)s.tokens * s.heads; row++)
        for (size_t i = 0; i < pairs; i++) {
            size_t at = row * s.head_dim + i, angle = row / s.heads * s.head_dim + i;
            float a = load(arg(op, 0), at, s.x), b = load(arg(op, 0), at + pairs, s.x);
            float cosine = load(arg(op, 1), angle, MIXFLEET_F32), sine = load(arg(op, 1), angle + pairs, MIXFLEET_F32);
            store(arg(op, 0), at, s.x, a * cosine - b * sine);
            store(arg(op, 0), at + pairs, s.x, a * sine + b * cosine);
        }
}

static void elements(const struct MixfleetOp *op) {
    struct MixfleetElements s = op->shape.elements;
    for (size_t i = 0; i < s.elements; i++) {
        float a = load(arg(op, 0), i, s.x), b = load(arg(op, 1), i, s.x);
        store(arg(op, 2), i, s.x, op->kind == MIXFLEET_ADD ? a + b : (float)(a / (1 + exp(-(double)a)) * b));
    }
}

/* Pages are rows of [slot, kv_heads, head_dim]. Returns the slots that a pool has. */
static size_t slots_of(const struct MixfleetOp *op, int pool, struct MixfleetKv kv) {
    return op->args[pool].bytes / ((size_t)kv.kv_heads * kv.head_dim * element(kv.dtype));
}

/* K and V of tokens, or `count` = 1 of both, between slots and a matrix each, or one with V behind K. */
static int kv_move(const struct MixfleetOp *op, int writes, int gathers, int count, struct MixfleetError *error) {
    struct MixfleetKvMove s = op->shape.kv_move; /* that of writing is the same */
    int slots = writes ? count : !gathers, pools = slots + 1;
    size_t row = (size_t)s.kv.kv_heads * s.kv.head_dim;
    for (size_t i = 0; i < s.tokens * count * row; i++) {
        size_t token = i / row / count, v = i / row % count, slot = word(op, slots, token);
        if (slot >= slots_of(op, pools, s.kv)) return fail(error, MIXFLEET_INVALID, "a slot is beyond the pool");
        unsigned char *rows = arg(op, gathers ? pools + count : writes * (int)v), *pool = arg(op, pools + (int)v);
        size_t out = writes ? token * row + i % row : i, in = slot * row + i % row;
        if (gathers) store(rows, out, s.wire, load(pool, in, s.kv.dtype));
        else store(pool, in, s.kv.dtype, load(rows, out, s.wire));
    }
    return MIXFLEET_OK;
}

#define HEAD_MAX 4096
/* Values: their length (0: keys'), what multiplies scores, if they have a pool of their own, if there are sinks. */
struct Values { size_t length; float scale; int pools, sinks; };

/* A query over keys first..end of its sequence: acc = sum of exp(score - max) v, and stat = max, sum. attn_decode
 * gives these for one query of each sequence, attn_prefill acc / sum for all. The pools follow the pages. */
static int attention(const struct MixfleetOp *op, const struct MixfleetAttnPrefill *p, const struct MixfleetAttnDecode *d,
                     struct Values v, struct MixfleetError *error) {
    struct MixfleetAttnPrefill s = p ? *p : (struct MixfleetAttnPrefill){
        0, 0, d->sequences, d->sequences, d->heads, d->pages_max, 0, d->x, d->kv};
    if (!v.length) v = (struct Values){s.kv.head_dim, 1 / sqrtf((float)s.kv.head_dim), 2, v.sinks};
    int decodes = p == NULL; /* which is attention of one query of each sequence */
    size_t dim = s.kv.head_dim, pages = decodes ? 2 : 3, slots = slots_of(op, (int)pages + 1, s.kv);
    int out = (int)pages + 1 + v.pools + v.sinks;
    const unsigned char *keys = arg(op, (int)pages + 1), *values = arg(op, (int)pages + v.pools);
    for (size_t q = 0; q < s.sequences; q++) {
        size_t begin = decodes ? q : word(op, 1, q), stop = decodes ? q + 1 : word(op, 1, q + 1);
        size_t context = decodes ? 1 : word(op, 2, q);
        if (begin > stop || stop > s.tokens || stop - begin > context)
            return fail(error, MIXFLEET_INVALID, "attn_prefill: a sequence's rows are not its last keys");
        for (size_t row = begin * s.heads; row < stop * s.heads; row++) {
            float acc[HEAD_MAX] = {0}, stat[2] = {-INFINITY, 0};
            size_t kv_head = row % s.heads / (s.heads / s.kv.kv_heads);
            /* the last key of a query is its own */
            size_t end = decodes ? word(op, 1, 2 * q + 1) : context - (stop - row / s.heads) + 1;
            size_t first = decodes ? word(op, 1, 2 * q) : s.window && end > s.window ? end - s.window : 0;
            if (first < end && end > (size_t)s.pages_max * s.kv.page_tokens)
                return fail(error, MIXFLEET_INVALID, "attention: a key is beyond the page table");
            for (size_t key = first; key < end; key++) {
                size_t page = word(op, (int)pages, q * s.pages_max + key / s.kv.page_tokens);
                size_t slot = page * s.kv.page_tokens + key % s.kv.page_tokens;
                if (slot >= slots) return fail(error, MIXFLEET_INVALID, "attention: a page is beyond the pool");
                size_t at = (slot * s.kv.kv_heads + kv_head) * dim;
                float score = dot(arg(op, 0), row * dim, s.x, keys, at, s.kv.dtype, dim) * v.scale;
                float old = score > stat[0] ? expf(stat[0] - score) : 1; /* rescales what is summed */
                if (score > stat[0]) stat[0] = score;
                float weight = expf(score - stat[0]);
                for (size_t i = 0; i < v.length; i++) acc[i] = acc[i] * old + weight * load(values, at + i, s.kv.dtype);
                stat[1] = stat[1] * old + weight;
            }
            if (v.sinks) stat[1] += expf(load(arg(op, out - 1), row % s.heads, MIXFLEET_F32) - stat[0]);
            for (size_t i = 0; i < v.length; i++)
                store(arg(op, out), row * v.length + i, decodes ? MIXFLEET_F32 : s.x, decodes ? acc[i] : acc[i] / stat[1]);
            if (decodes) memcpy(arg(op, out + 1) + row * sizeof stat, stat, sizeof stat);
        }
    }
    return MIXFLEET_OK;
}

static void attn_merge(const struct MixfleetOp *op, size_t sinks) { /* which are the operand before the result */
    struct MixfleetAttnMerge s = op->shape.attn_merge;
    for (size_t r = 0; r < s.rows; r++) {
        float max = -INFINITY;
        for (size_t p = 0; p < s.parts; p++) max = fmaxf(max, load(arg(op, 1), 2 * (p * s.rows + r), MIXFLEET_F32));
        for (size_t i = 0; i < s.head_dim; i++) {
            double all = 0, sum = 0;
            for (size_t row = r; row < (size_t)s.parts * s.rows; row += s.rows) {
                double part = load(arg(op, 1), 2 * row + 1, MIXFLEET_F32);
                double weight = part == 0 ? 0 : exp((double)load(arg(op, 1), 2 * row, MIXFLEET_F32) - max);
                all += weight * load(arg(op, 0), row * s.head_dim + i, MIXFLEET_F32);
                sum += weight * part;
            }
            if (sinks && sum > 0) sum += exp((double)load(arg(op, 2), r % sinks, MIXFLEET_F32) - max);
            store(arg(op, sinks ? 3 : 2), r * s.head_dim + i, s.out, sum > 0 ? (float)(all / sum) : 0);
        }
    }
}

static int run_one(const struct MixfleetOp *op, struct MixfleetError *error) {
    switch (op->kind) {
    case MIXFLEET_EMBED: return embed(op, error);
    case MIXFLEET_RMS_NORM: return rms_norm(op), MIXFLEET_OK;
    case MIXFLEET_GEMM: return gemm(op), MIXFLEET_OK;
    case MIXFLEET_ROPE: return rope(op), MIXFLEET_OK;
    case MIXFLEET_ATTN_PREFILL: return attention(op, &op->shape.attn_prefill, NULL, (struct Values){0}, error);
    case MIXFLEET_ATTN_DECODE: return attention(op, NULL, &op->shape.attn_decode, (struct Values){0}, error);
    case MIXFLEET_ATTN_MERGE: return attn_merge(op, 0), MIXFLEET_OK;
    case MIXFLEET_SILU_MUL: case MIXFLEET_ADD: return elements(op), MIXFLEET_OK;
    case MIXFLEET_COPY: return memcpy(arg(op, 1), arg(op, 0), op->shape.bytes.bytes), MIXFLEET_OK;
    case MIXFLEET_FILL:
        for (size_t i = 0; i < op->shape.bytes.bytes; i += 4) memcpy(arg(op, 0) + i, &op->shape.bytes.word, 4);
        return MIXFLEET_OK;
    case MIXFLEET_KV_WRITE: case MIXFLEET_KV_GATHER: case MIXFLEET_KV_SCATTER:
        return kv_move(op, op->kind == MIXFLEET_KV_WRITE, op->kind == MIXFLEET_KV_GATHER, 2, error);
    default: return fail(error, MIXFLEET_UNSUPPORTED, "not an operation of this library");
    }
}

/* What is not supported is not asked for, and `validate` counts it so. */
static int32_t support(struct MixfleetDevice *device, const struct MixfleetOp *op) {
    const union MixfleetShape *s = &op->shape;
    switch (op->kind) {
    case MIXFLEET_EMBED: return known(s->embed.table) && known(s->embed.out);
    case MIXFLEET_RMS_NORM: return known(s->rms_norm.x) && known(s->rms_norm.weight) && known(s->rms_norm.out);
    case MIXFLEET_GEMM: return known(s->gemm.x) && known(s->gemm.weight) && known(s->gemm.out);
    case MIXFLEET_ROPE: return known(s->rope.x);
    case MIXFLEET_KV_WRITE: return known(s->kv_write.x) && known(s->kv_write.kv.dtype);
    case MIXFLEET_ATTN_PREFILL:
        return known(s->attn_prefill.x) && known(s->attn_prefill.kv.dtype) && s->attn_prefill.kv.head_dim <= HEAD_MAX;
    case MIXFLEET_ATTN_DECODE:
        return known(s->attn_decode.x) && known(s->attn_decode.kv.dtype) && s->attn_decode.kv.head_dim <= HEAD_MAX;
    case MIXFLEET_ATTN_MERGE: return known(s->attn_merge.out);
    case MIXFLEET_SILU_MUL: case MIXFLEET_ADD: return known(s->elements.x);
    case MIXFLEET_KV_GATHER: case MIXFLEET_KV_SCATTER: return known(s->kv_move.wire) && known(s->kv_move.kv.dtype);
    default: return op->kind == MIXFLEET_COPY || op->kind == MIXFLEET_FILL;
    }
}

/* 4. The table, and the door. */

static int32_t run(struct MixfleetDevice *device, const struct MixfleetOp *ops, uint32_t count,
                   struct MixfleetError *error) {
    int status = MIXFLEET_OK;
    for (uint32_t i = 0; i < count && !status; i++) status = run_one(&ops[i], error);
    return status;
}

static const struct MixfleetBackend first = {
    .struct_bytes = sizeof first, .abi = MIXFLEET_ABI, .name = "first",
    .count = count, .info = info, .open = open_device, .close = close_device, .support = support,
    .alloc = alloc, .free = free_buffer, .write = copy_in, .read = copy_out, .run = run,
};

#ifndef MIXFLEET_DTYPES
const struct MixfleetBackend *mixfleet_backend(uint32_t abi) { return abi == MIXFLEET_ABI ? &first : NULL; }
#endif

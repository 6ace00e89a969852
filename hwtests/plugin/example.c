/* A backend in plain C: loops over host memory, for every operation but drawing tokens, which the host then does.
 * It shows what a library has to have, and nothing of how to be fast. With MIXFLEET_BLAS matrix products go to
 * somebody's BLAS, which is what most parts bring. */
#include "mixfleet.h"

#ifdef MIXFLEET_BLAS
#include <cblas.h>
#endif

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct MixfleetDevice {
    int open;
};
struct MixfleetBuffer {
    unsigned char *bytes;
};

static int fail(struct MixfleetError *error, int32_t status, const char *text) {
    snprintf(error->text, sizeof error->text, "%s", text);
    return status;
}

/* Elements of any dtype as floats. */

static size_t element(uint32_t dtype) { return dtype == MIXFLEET_F32 || dtype == MIXFLEET_U32 ? 4 : 2; }

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static float half(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
    if (!exponent) return from_bits(sign | to_bits((float)fraction * 0x1p-24f));
    return from_bits(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13);
}

static uint16_t to_half(float value) {
    uint16_t sign = (uint16_t)(to_bits(value) >> 16 & 0x8000);
    float size = fabsf(value);
    if (isnan(value)) return 0x7e00;
    if (size >= 65520.0f) return sign | 0x7c00;
    int exponent;
    frexpf(size, &exponent); /* size = f * 2^exponent, f from 0.5 to 1 */
    if (exponent < -13) exponent = -13;
    /* units of the last place, rounded to even */
    long units = lrintf(ldexpf(size, 11 - exponent));
    return sign | (uint16_t)(units < 1024 ? units : ((long)(exponent + 14) << 10) + units - 1024);
}

static float load(const unsigned char *at, size_t i, uint32_t dtype) {
    uint16_t two;
    if (dtype == MIXFLEET_F32) {
        float value;
        memcpy(&value, at + 4 * i, 4);
        return value;
    }
    memcpy(&two, at + 2 * i, 2);
    return dtype == MIXFLEET_BF16 ? from_bits((uint32_t)two << 16) : half(two);
}

static void store(unsigned char *at, size_t i, uint32_t dtype, float value) {
    if (dtype == MIXFLEET_F32) {
        memcpy(at + 4 * i, &value, 4);
        return;
    }
    uint32_t bits = to_bits(value);
    uint16_t two = to_half(value);
    if (dtype == MIXFLEET_BF16) /* rounded to even */
        two = isnan(value) ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    memcpy(at + 2 * i, &two, 2);
}

static uint32_t word(const unsigned char *at, size_t i) {
    uint32_t value;
    memcpy(&value, at + 4 * i, 4);
    return value;
}

/* Operations. Operands are checked by who calls; indices are not. */

static unsigned char *arg(const struct MixfleetOp *op, int i) {
    return op->args[i].buffer->bytes + op->args[i].offset;
}

static int embed(const struct MixfleetOp *op, struct MixfleetError *error) {
    struct MixfleetEmbed s = op->shape.embed;
    for (size_t t = 0; t < s.tokens; t++) {
        uint32_t id = word(arg(op, 0), t);
        if (id >= s.vocab) return fail(error, MIXFLEET_INVALID, "embed: an id is not in the table");
        for (size_t i = 0; i < s.hidden; i++)
            store(arg(op, 2), t * s.hidden + i, s.out, load(arg(op, 1), (size_t)id * s.hidden + i, s.table));
    }
    return MIXFLEET_OK;
}

static void rms_norm(const struct MixfleetOp *op) {
    struct MixfleetRmsNorm s = op->shape.rms_norm;
    for (size_t r = 0; r < s.rows; r++) {
        double sum = 0;
        for (size_t i = 0; i < s.cols; i++) {
            double x = load(arg(op, 0), r * s.cols + i, s.x);
            sum += x * x;
        }
        double scale = 1 / sqrt(sum / s.cols + s.eps);
        for (size_t i = 0; i < s.cols; i++) {
            double x = load(arg(op, 0), r * s.cols + i, s.x);
            store(arg(op, 2), r * s.cols + i, s.out, (float)(x * scale * load(arg(op, 1), i, s.weight)));
        }
    }
}

/* A row as floats, and the product of two: sums side by side, which a compiler makes vectors of. */
static void floats(float *to, const unsigned char *from, size_t first, size_t count, uint32_t dtype) {
    if (dtype == MIXFLEET_BF16)
        for (size_t i = 0; i < count; i++) {
            uint16_t two;
            memcpy(&two, from + 2 * (first + i), 2);
            to[i] = from_bits((uint32_t)two << 16);
        }
    else if (dtype == MIXFLEET_F16)
        for (size_t i = 0; i < count; i++) {
            uint16_t two;
            memcpy(&two, from + 2 * (first + i), 2);
            to[i] = half(two);
        }
    else
        memcpy(to, from + 4 * first, 4 * count);
}

static float dot(const float *a, const float *b, size_t count) {
    float sums[16] = {0}, sum = 0;
    size_t i = 0;
    for (; i + 16 <= count; i += 16)
        for (size_t j = 0; j < 16; j++) sums[j] += a[i + j] * b[i + j];
    for (; i < count; i++) sum += a[i] * b[i];
    for (size_t j = 0; j < 16; j++) sum += sums[j];
    return sum;
}

/* x weight^T, to be freed; null where the host has no memory. */
static float *product(const struct MixfleetOp *op) {
    struct MixfleetGemm s = op->shape.gemm;
    float *x = malloc((size_t)s.m * s.k * sizeof *x), *sums = malloc((size_t)s.m * s.n * sizeof *sums);
#ifdef MIXFLEET_BLAS
    size_t rows = s.n;
#else
    size_t rows = 1; /* of the weights at a time */
#endif
    float *weight = malloc(rows * s.k * sizeof *weight);
    if (x && weight && sums) {
        floats(x, arg(op, 0), 0, (size_t)s.m * s.k, s.x);
#ifdef MIXFLEET_BLAS
        floats(weight, arg(op, 1), 0, rows * s.k, s.weight);
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)s.m, (int)s.n, (int)s.k, 1, x, (int)s.k, weight,
                    (int)s.k, 0, sums, (int)s.n);
#else
        for (size_t n = 0; n < s.n; n++) {
            floats(weight, arg(op, 1), n * s.k, s.k, s.weight);
            for (size_t m = 0; m < s.m; m++) sums[m * s.n + n] = dot(x + m * s.k, weight, s.k);
        }
#endif
    }
    int done = x && weight;
    free(x);
    free(weight);
    if (done) return sums;
    free(sums);
    return NULL;
}

static int gemm(const struct MixfleetOp *op, struct MixfleetError *error) {
    struct MixfleetGemm s = op->shape.gemm;
    unsigned char *out = arg(op, s.bias ? 3 : 2);
    float *sums = product(op);
    if (!sums) return fail(error, MIXFLEET_OUT_OF_MEMORY, "the host has no memory");
    for (size_t m = 0; m < s.m; m++)
        for (size_t n = 0; n < s.n; n++) {
            float sum = sums[m * s.n + n];
            if (s.bias) sum += load(arg(op, 2), n, s.weight);
            if (s.accumulate) sum += load(out, m * s.n + n, s.out);
            store(out, m * s.n + n, s.out, sum);
        }
    free(sums);
    return MIXFLEET_OK;
}

static void rope(const struct MixfleetOp *op) {
    struct MixfleetRope s = op->shape.rope;
    size_t pairs = s.head_dim / 2;
    for (size_t t = 0; t < s.tokens; t++)
        for (size_t h = 0; h < s.heads; h++)
            for (size_t i = 0; i < pairs; i++) {
                size_t at = (t * s.heads + h) * s.head_dim + i;
                float a = load(arg(op, 0), at, s.x), b = load(arg(op, 0), at + pairs, s.x);
                float c = load(arg(op, 1), t * s.head_dim + i, MIXFLEET_F32);
                float n = load(arg(op, 1), t * s.head_dim + pairs + i, MIXFLEET_F32);
                store(arg(op, 0), at, s.x, a * c - b * n);
                store(arg(op, 0), at + pairs, s.x, a * n + b * c);
            }
}

/* Pages are rows of [slot, kv_heads, head_dim]. Returns the slots that a pool has. */
static size_t slots_of(const struct MixfleetOp *op, int pool, struct MixfleetKv kv) {
    return op->args[pool].bytes / ((size_t)kv.kv_heads * kv.head_dim * element(kv.dtype));
}

/* Copies rows between a matrix of `stride` elements a row and the slots of a pool. */
static int move(const struct MixfleetOp *op, int slots, int pool, unsigned char *rows, size_t stride, uint32_t dtype,
                struct MixfleetKv kv, size_t tokens, int into_pool, struct MixfleetError *error) {
    size_t row = (size_t)kv.kv_heads * kv.head_dim, most = slots_of(op, pool, kv);
    for (size_t t = 0; t < tokens; t++) {
        size_t slot = word(arg(op, slots), t);
        if (slot >= most) return fail(error, MIXFLEET_INVALID, "a slot is beyond the pool");
        for (size_t i = 0; i < row; i++)
            if (into_pool)
                store(arg(op, pool), slot * row + i, kv.dtype, load(rows, t * stride + i, dtype));
            else
                store(rows, t * stride + i, dtype, load(arg(op, pool), slot * row + i, kv.dtype));
    }
    return MIXFLEET_OK;
}

static int kv_write(const struct MixfleetOp *op, struct MixfleetError *error) {
    struct MixfleetKvWrite s = op->shape.kv_write;
    size_t row = (size_t)s.kv.kv_heads * s.kv.head_dim;
    int status = move(op, 2, 3, arg(op, 0), row, s.x, s.kv, s.tokens, 1, error);
    return status ? status : move(op, 2, 4, arg(op, 1), row, s.x, s.kv, s.tokens, 1, error);
}

/* The wire layout has K and V of a token one behind the other. */
static int kv_move(const struct MixfleetOp *op, int gathers, struct MixfleetError *error) {
    struct MixfleetKvMove s = op->shape.kv_move;
    size_t row = (size_t)s.kv.kv_heads * s.kv.head_dim;
    int slots = gathers ? 0 : 1, pools = gathers ? 1 : 2;
    unsigned char *wire = arg(op, gathers ? 3 : 0), *values = wire + row * element(s.wire);
    int status = move(op, slots, pools, wire, 2 * row, s.wire, s.kv, s.tokens, !gathers, error);
    return status ? status : move(op, slots, pools + 1, values, 2 * row, s.wire, s.kv, s.tokens, !gathers, error);
}

/* One query over keys first..end of a sequence: acc = sum of exp(score - max) v; max and sum. */
struct Attention {
    const struct MixfleetOp *op;
    int pages, k_pool;
    uint32_t heads, pages_max, x;
    struct MixfleetKv kv;
};

static int attend(const struct Attention *a, size_t query, size_t sequence, size_t head, size_t first, size_t end,
                  float *acc, float stat[2], struct MixfleetError *error) {
    const struct MixfleetKv kv = a->kv;
    size_t dim = kv.head_dim, kv_head = head / (a->heads / kv.kv_heads), most = slots_of(a->op, a->k_pool, kv);
    float own[4096], row[4096];
    floats(own, arg(a->op, 0), (query * a->heads + head) * dim, dim, a->x);
    stat[0] = -INFINITY;
    stat[1] = 0;
    memset(acc, 0, dim * sizeof *acc);
    if (first < end && end > (size_t)a->pages_max * kv.page_tokens)
        return fail(error, MIXFLEET_INVALID, "attention: a key is beyond the page table");
    for (size_t key = first; key < end; key++) {
        size_t page = word(arg(a->op, a->pages), sequence * a->pages_max + key / kv.page_tokens);
        size_t slot = page * kv.page_tokens + key % kv.page_tokens, at = (slot * kv.kv_heads + kv_head) * dim;
        if (slot >= most) return fail(error, MIXFLEET_INVALID, "attention: a page is beyond the pool");
        floats(row, arg(a->op, a->k_pool), at, dim, kv.dtype);
        float score = dot(own, row, dim) / sqrtf((float)dim);
        if (score > stat[0]) { /* what was summed so far is relative to a smaller maximum */
            float old = expf(stat[0] - score);
            for (size_t i = 0; i < dim; i++) acc[i] *= old;
            stat[1] *= old;
            stat[0] = score;
        }
        float weight = expf(score - stat[0]);
        floats(row, arg(a->op, a->k_pool + 1), at, dim, kv.dtype);
        for (size_t i = 0; i < dim; i++) acc[i] += weight * row[i];
        stat[1] += weight;
    }
    return MIXFLEET_OK;
}

static int attn_prefill(const struct MixfleetOp *op, float *acc, struct MixfleetError *error) {
    struct MixfleetAttnPrefill s = op->shape.attn_prefill;
    struct Attention a = {op, 3, 4, s.heads, s.pages_max, s.x, s.kv};
    float stat[2];
    for (size_t q = 0; q < s.sequences; q++) {
        size_t begin = word(arg(op, 1), q), end = word(arg(op, 1), q + 1), context = word(arg(op, 2), q);
        if (begin > end || end > s.tokens || end - begin > context)
            return fail(error, MIXFLEET_INVALID, "attn_prefill: a sequence's rows are not its last keys");
        for (size_t t = begin; t < end; t++) {
            size_t last = context - (end - t) + 1; /* one past the key of the query itself */
            size_t first = s.window && last > s.window ? last - s.window : 0;
            for (size_t h = 0; h < s.heads; h++) {
                int status = attend(&a, t, q, h, first, last, acc, stat, error);
                if (status) return status;
                for (size_t i = 0; i < s.kv.head_dim; i++)
                    store(arg(op, 6), (t * s.heads + h) * s.kv.head_dim + i, s.x, acc[i] / stat[1]);
            }
        }
    }
    return MIXFLEET_OK;
}

static int attn_decode(const struct MixfleetOp *op, float *acc, struct MixfleetError *error) {
    struct MixfleetAttnDecode s = op->shape.attn_decode;
    struct Attention a = {op, 2, 3, s.heads, s.pages_max, s.x, s.kv};
    float stat[2];
    for (size_t q = 0; q < s.sequences; q++)
        for (size_t h = 0; h < s.heads; h++) {
            size_t first = word(arg(op, 1), 2 * q), end = word(arg(op, 1), 2 * q + 1), at = q * s.heads + h;
            int status = attend(&a, q, q, h, first, end, acc, stat, error);
            if (status) return status;
            for (size_t i = 0; i < s.kv.head_dim; i++)
                store(arg(op, 5), at * s.kv.head_dim + i, MIXFLEET_F32, acc[i]);
            store(arg(op, 6), 2 * at, MIXFLEET_F32, stat[0]);
            store(arg(op, 6), 2 * at + 1, MIXFLEET_F32, stat[1]);
        }
    return MIXFLEET_OK;
}

static void attn_merge(const struct MixfleetOp *op) {
    struct MixfleetAttnMerge s = op->shape.attn_merge;
    for (size_t r = 0; r < s.rows; r++) {
        double max = -INFINITY, sum = 0;
        for (size_t p = 0; p < s.parts; p++) max = fmax(max, load(arg(op, 1), 2 * (p * s.rows + r), MIXFLEET_F32));
        for (size_t i = 0; i < s.head_dim; i++) {
            double all = 0;
            sum = 0;
            for (size_t p = 0; p < s.parts; p++) {
                size_t row = p * s.rows + r;
                double part = load(arg(op, 1), 2 * row + 1, MIXFLEET_F32);
                if (part == 0) continue;
                double weight = exp(load(arg(op, 1), 2 * row, MIXFLEET_F32) - max);
                all += weight * load(arg(op, 0), row * s.head_dim + i, MIXFLEET_F32);
                sum += weight * part;
            }
            store(arg(op, 2), r * s.head_dim + i, s.out, sum > 0 ? (float)(all / sum) : 0);
        }
    }
}

static void elements(const struct MixfleetOp *op) {
    struct MixfleetElements s = op->shape.elements;
    for (size_t i = 0; i < s.elements; i++) {
        float a = load(arg(op, 0), i, s.x), b = load(arg(op, 1), i, s.x);
        store(arg(op, 2), i, s.x, op->kind == MIXFLEET_ADD ? a + b : (float)(a / (1 + exp(-(double)a)) * b));
    }
}

static int run_one(const struct MixfleetOp *op, struct MixfleetError *error) {
    float acc[4096];
    switch (op->kind) {
    case MIXFLEET_EMBED: return embed(op, error);
    case MIXFLEET_RMS_NORM: return rms_norm(op), MIXFLEET_OK;
    case MIXFLEET_GEMM: return gemm(op, error);
    case MIXFLEET_ROPE: return rope(op), MIXFLEET_OK;
    case MIXFLEET_KV_WRITE: return kv_write(op, error);
    case MIXFLEET_ATTN_PREFILL: return attn_prefill(op, acc, error);
    case MIXFLEET_ATTN_DECODE: return attn_decode(op, acc, error);
    case MIXFLEET_ATTN_MERGE: return attn_merge(op), MIXFLEET_OK;
    case MIXFLEET_SILU_MUL:
    case MIXFLEET_ADD: return elements(op), MIXFLEET_OK;
    case MIXFLEET_COPY: return memcpy(arg(op, 1), arg(op, 0), op->shape.bytes.bytes), MIXFLEET_OK;
    case MIXFLEET_FILL:
        for (size_t i = 0; i < op->shape.bytes.bytes / 4; i++) memcpy(arg(op, 0) + 4 * i, &op->shape.bytes.word, 4);
        return MIXFLEET_OK;
    case MIXFLEET_KV_GATHER: return kv_move(op, 1, error);
    case MIXFLEET_KV_SCATTER: return kv_move(op, 0, error);
    default: return fail(error, MIXFLEET_UNSUPPORTED, "an operation of a later version");
    }
}

/* The table. */

static int32_t run(struct MixfleetDevice *device, const struct MixfleetOp *ops, uint32_t count,
                   struct MixfleetError *error) {
    (void)device;
    for (uint32_t i = 0; i < count; i++) {
        int status = run_one(&ops[i], error);
        if (status) return status;
    }
    return MIXFLEET_OK;
}

/* A batch to run again: copies of the operations and of their operands' lists. */
struct MixfleetGraph {
    uint32_t count;
    struct MixfleetOp *ops;
    struct MixfleetSlice *args;
};

static void forget(struct MixfleetDevice *device, struct MixfleetGraph *graph) {
    (void)device;
    free(graph->ops);
    free(graph->args);
    free(graph);
}

static int32_t record(struct MixfleetDevice *device, const struct MixfleetOp *ops, uint32_t count,
                      struct MixfleetGraph **graph, struct MixfleetError *error) {
    size_t args = 0;
    for (uint32_t i = 0; i < count; i++) args += ops[i].arg_count;
    struct MixfleetGraph *made = calloc(1, sizeof *made);
    if (!made) return fail(error, MIXFLEET_OUT_OF_MEMORY, "the host has no memory");
    made->count = count;
    made->ops = calloc(count ? count : 1, sizeof *made->ops);
    made->args = calloc(args ? args : 1, sizeof *made->args);
    if (!made->ops || !made->args) {
        forget(device, made);
        return fail(error, MIXFLEET_OUT_OF_MEMORY, "the host has no memory");
    }
    struct MixfleetSlice *next = made->args;
    for (uint32_t i = 0; i < count; i++) {
        made->ops[i] = ops[i];
        memcpy(next, ops[i].args, ops[i].arg_count * sizeof *next);
        made->ops[i].args = next;
        next += ops[i].arg_count;
    }
    *graph = made;
    return MIXFLEET_OK;
}

static int32_t replay(struct MixfleetDevice *device, struct MixfleetGraph *graph, struct MixfleetError *error) {
    return run(device, graph->ops, graph->count, error);
}

static int32_t support(struct MixfleetDevice *device, const struct MixfleetOp *op) {
    (void)device;
    uint32_t none = MIXFLEET_F8E4M3;
    switch (op->kind) {
    case MIXFLEET_EMBED: return op->shape.embed.table != none;
    case MIXFLEET_GEMM: return op->shape.gemm.weight != none;
    case MIXFLEET_ATTN_PREFILL: return op->shape.attn_prefill.kv.head_dim <= 4096;
    case MIXFLEET_ATTN_DECODE: return op->shape.attn_decode.kv.head_dim <= 4096;
    default: return op->kind <= MIXFLEET_KV_SCATTER && op->kind != MIXFLEET_SAMPLE;
    }
}

static int32_t count(struct MixfleetError *error) {
    (void)error;
    return 1;
}

static int32_t info(uint32_t index, struct MixfleetInfo *info, struct MixfleetError *error) {
    (void)index, (void)error;
    info->compute_units = 1;
    info->memory_bytes = (uint64_t)4 << 30;
    info->allocation_bytes_max = (uint64_t)2 << 30;
    info->alignment_bytes = 1;
    info->kv_page_tokens = 16;
    info->kind = 1;
    snprintf(info->name, sizeof info->name, "loops in C");
    snprintf(info->fingerprint, sizeof info->fingerprint, "loops 1");
    return MIXFLEET_OK;
}

static int32_t open_device(uint32_t index, struct MixfleetDevice **device, struct MixfleetError *error) {
    (void)index;
    *device = calloc(1, sizeof **device);
    return *device ? MIXFLEET_OK : fail(error, MIXFLEET_OUT_OF_MEMORY, "the host has no memory");
}

static void close_device(struct MixfleetDevice *device) { free(device); }

static int32_t alloc(struct MixfleetDevice *device, uint64_t bytes, struct MixfleetBuffer **buffer,
                     struct MixfleetError *error) {
    (void)device;
    struct MixfleetBuffer *made = calloc(1, sizeof *made);
    if (made) made->bytes = calloc(1, bytes ? bytes : 1);
    if (!made || !made->bytes) {
        free(made);
        return fail(error, MIXFLEET_OUT_OF_MEMORY, "the host has no memory");
    }
    *buffer = made;
    return MIXFLEET_OK;
}

static void free_buffer(struct MixfleetDevice *device, struct MixfleetBuffer *buffer) {
    (void)device;
    free(buffer->bytes);
    free(buffer);
}

static int32_t copy_in(struct MixfleetDevice *device, const struct MixfleetSlice *to, const void *data,
                     struct MixfleetError *error) {
    (void)device, (void)error;
    memcpy(to->buffer->bytes + to->offset, data, to->bytes);
    return MIXFLEET_OK;
}

static int32_t copy_out(struct MixfleetDevice *device, const struct MixfleetSlice *from, void *data,
                    struct MixfleetError *error) {
    (void)device, (void)error;
    memcpy(data, from->buffer->bytes + from->offset, from->bytes);
    return MIXFLEET_OK;
}

static const struct MixfleetBackend table = {
    .struct_bytes = sizeof table,
    .abi = MIXFLEET_ABI,
#ifdef MIXFLEET_BLAS
    .name = "blas",
#else
    .name = "loops",
#endif
    .count = count,
    .info = info,
    .open = open_device,
    .close = close_device,
    .support = support,
    .alloc = alloc,
    .free = free_buffer,
    .write = copy_in,
    .read = copy_out,
    .run = run,
    .record = record,
    .replay = replay,
    .forget = forget,
};

const struct MixfleetBackend *mixfleet_backend(uint32_t abi) { return abi == MIXFLEET_ABI ? &table : NULL; }

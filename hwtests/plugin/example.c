/* first.c with what it leaves out: floats of 16 bits, matrix products whose operands are made floats once, batches to
 * run again, and operations of more families of models, where the header has them. With MIXFLEET_BLAS matrix
 * products go to somebody's BLAS, which is what most parts bring. */
#define MIXFLEET_DTYPES

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "mixfleet.h"

#ifdef MIXFLEET_BLAS
#include <cblas.h>
#endif

static int known(uint32_t dtype) { return dtype <= MIXFLEET_F16; }

static size_t element(uint32_t dtype) { return dtype == MIXFLEET_F32 ? 4 : 2; }

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

#include "first.c"
#ifdef MIXFLEET_ROPE_PART
#include "families.c"
#else
#define run_more run_one
#define support_more support
#endif

static void floats(float *to, const unsigned char *from, size_t count, uint32_t dtype) {
    for (size_t i = 0; i < count; i++) to[i] = load(from, i, dtype);
}

static int quick_gemm(const struct MixfleetOp *op, struct MixfleetError *error) {
    struct MixfleetGemm s = op->shape.gemm;
    size_t x_count = (size_t)s.m * s.k, out_count = (size_t)s.m * s.n;
#ifdef MIXFLEET_BLAS
    size_t rows = s.n;
#else
    size_t rows = 1; /* of the weight at a time */
#endif
    float *x = malloc((x_count + rows * s.k + out_count) * sizeof *x);
    if (!x) return fail(error, MIXFLEET_OUT_OF_MEMORY, "the host has no memory");
    float *weight = x + x_count, *sums = weight + rows * s.k;
    floats(x, arg(op, 0), x_count, s.x);
#ifdef MIXFLEET_BLAS
    floats(weight, arg(op, 1), rows * s.k, s.weight);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)s.m, (int)s.n, (int)s.k, 1, x, (int)s.k, weight,
                (int)s.k, 0, sums, (int)s.n);
#else
    for (size_t n = 0; n < s.n; n++) {
        floats(weight, arg(op, 1) + n * s.k * element(s.weight), s.k, s.weight);
        for (size_t m = 0; m < s.m; m++)
            sums[m * s.n + n] = dot((unsigned char *)x, m * s.k, MIXFLEET_F32, (unsigned char *)weight, 0, MIXFLEET_F32, s.k);
    }
#endif
    unsigned char *out = arg(op, s.bias ? 3 : 2);
    for (size_t i = 0; i < out_count; i++) {
        float sum = sums[i] + (s.bias ? load(arg(op, 2), i % s.n, s.weight) : 0);
        store(out, i, s.out, sum + (s.accumulate ? load(out, i, s.out) : 0));
    }
    free(x);
    return MIXFLEET_OK;
}

static int32_t quick_run(struct MixfleetDevice *device, const struct MixfleetOp *ops, uint32_t count,
                         struct MixfleetError *error) {
    int status = MIXFLEET_OK;
    for (uint32_t i = 0; i < count && !status; i++)
        status = ops[i].kind == MIXFLEET_GEMM ? quick_gemm(&ops[i], error) : run_more(&ops[i], error);
    return status;
}

/* A batch to run again: copies of the operations and of their operands' lists. */
struct MixfleetGraph {
    uint32_t count;
    struct MixfleetOp *ops;
    struct MixfleetSlice *args;
};

static void forget(struct MixfleetDevice *device, struct MixfleetGraph *graph) {
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
    return quick_run(device, graph->ops, graph->count, error);
}

const struct MixfleetBackend *mixfleet_backend(uint32_t abi) {
    static struct MixfleetBackend table;
    if (abi != MIXFLEET_ABI) return NULL;
    table = first;
#ifdef MIXFLEET_BLAS
    table.name = "blas";
#else
    table.name = "loops";
#endif
    table.run = quick_run;
    table.support = support_more;
    table.record = record;
    table.replay = replay;
    table.forget = forget;
    return &table;
}

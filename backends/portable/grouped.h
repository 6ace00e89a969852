// The operands of grouped_gemm: out [choices, n] = x [choices / fan, k] . weight [experts, n, k]^T (+ bias
// [experts, n]) of each choice's expert, by `order` and `starts`; X, WEIGHT, OUT. `bias` is not read unless
// `has_bias`. A place is one in `order`. What is not a choice is not computed, so no load leaves its operand.
// With CODE the weights are those of codes.h, whose groups end with matrices, and WEIGHT is the dtype of the bias.

#ifdef CODE
#define MATRICES WEIGHTS
#define GROUPS , uint group_rows, uint group_cols
#define START_MATRICES START_WEIGHTS
#define ELEMENT(line, at) WEIGHT_AT((ulong)(line), at)
#define LOAD_LINE(line, i, w)                                                                                   \
    for (uint element = 0; element < VEC; ++element) w[element] = WEIGHT_AT(line, i + element)
#else
#define MATRICES READS(WEIGHT, weight)
#define GROUPS
#define START_MATRICES START(weight)
#define ELEMENT(line, at) LOAD(WEIGHT, weight, (ulong)(line)*k + (at))
#define LOAD_LINE(line, i, w) LOAD_VEC(WEIGHT, weight, (line) * k + i, w)
#endif

#if defined(CODE) && OUTER
#define SCALED(line, sum) ((sum)*outer[(line) / n])
#else
#define SCALED(line, sum) (sum)
#endif

#define OPERANDS                                                                                                \
    READS(X, x), MATRICES, READS(WEIGHT, bias), READS(u32, order), READS(u32, starts), WRITES(OUT, out),        \
        uint choices, uint fan, uint experts, uint n, uint k, uint has_bias GROUPS

#define START_OPERANDS                                                                                          \
    START(x);                                                                                                   \
    START_MATRICES;                                                                                             \
    START(bias);                                                                                                \
    START(order);                                                                                               \
    START(starts);                                                                                              \
    START(out)

// The last expert that begins at or before a place.
DEVICE uint expert_of(GLOBAL const uint* starts, uint experts, uint place) {
    uint low = 0, high = experts;
    while (high - low > 1) {
        const uint middle = (low + high) / 2;
        if (starts[middle] <= place) low = middle;
        else high = middle;
    }
    return low;
}

// `line` is expert * n + col.
#define FINISH(choice, line, col, sum)                                                                          \
    do {                                                                                                        \
        float total = SCALED(line, sum);                                                                        \
        if (has_bias) total += LOAD(WEIGHT, bias, line);                                                        \
        STORE(OUT, out, (ulong)(choice)*n + (col), total);                                                      \
    } while (0)

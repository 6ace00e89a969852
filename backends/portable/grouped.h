// The operands of grouped_gemm: out [choices, n] = x [choices / fan, k] . weight [experts, n, k]^T (+ bias
// [experts, n]) of each choice's expert, by `order` and `starts`; X, WEIGHT, OUT. `bias` is not read unless
// `has_bias`. A place is one in `order`. What is not a choice is not computed, so no load leaves its operand.

#define OPERANDS                                                                                                \
    READS(X, x), READS(WEIGHT, weight), READS(WEIGHT, bias), READS(u32, order), READS(u32, starts),             \
        WRITES(OUT, out), uint choices, uint fan, uint experts, uint n, uint k, uint has_bias

#define START_OPERANDS                                                                                          \
    START(x);                                                                                                   \
    START(weight);                                                                                              \
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
        float total = (sum);                                                                                    \
        if (has_bias) total += LOAD(WEIGHT, bias, line);                                                        \
        STORE(OUT, out, (ulong)(choice)*n + (col), total);                                                      \
    } while (0)

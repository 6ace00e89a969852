// The operands of gemm: out [m, n] = x [m, k] . weight [n, k]^T (+ bias [n]) (+ out); X, WEIGHT, OUT. `bias`
// is not read unless `has_bias`.
//
// Rows and columns past the edge repeat the last one and are not stored, so that no load leaves its operand.

#define OPERANDS                                                                                                \
    READS(X, x), READS(WEIGHT, weight), READS(WEIGHT, bias), WRITES(OUT, out), uint m, uint n, uint k,          \
        uint has_bias, uint accumulate

#define START_OPERANDS                                                                                          \
    START(x);                                                                                                   \
    START(weight);                                                                                              \
    START(bias);                                                                                                \
    START(out)

#define ELEMENT(line, at) LOAD(WEIGHT, weight, (ulong)(line)*k + (at))

#define FINISH(row, col, sum)                                                                                   \
    do {                                                                                                        \
        const ulong at = (ulong)(row)*n + (col);                                                                \
        float total = (sum);                                                                                    \
        if (has_bias) total += LOAD(WEIGHT, bias, col);                                                         \
        if (accumulate) total += LOAD(OUT, out, at);                                                            \
        STORE(OUT, out, at, total);                                                                             \
    } while (0)

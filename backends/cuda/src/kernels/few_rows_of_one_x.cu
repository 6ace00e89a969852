// Up to three products of a few rows of one x, a block for some rows of one of them: few_rows.h.

#define ONE_OF(p)                                                                                               \
    READS(WEIGHT, weight##p), READS(WEIGHT, bias##p), WRITES(OUT, out##p), uint n##p, uint flags##p, uint settled##p
#define START_ONE(p)                                                                                            \
    START(weight##p);                                                                                           \
    START(bias##p);                                                                                             \
    START(out##p)

KERNEL_OF(32 * WARPS, 1) gemm_few_rows_of_one_x(READS(X, x), uint m, uint k, ONE_OF(0), ONE_OF(1), ONE_OF(2)) {
    SHARED_BYTES(memory);
    const uint g = THREAD % 32 / 4;
    // blocks of each product, one after another
    const uint end0 = (n0 + ROWS - 1) / ROWS, end1 = end0 + (n1 + ROWS - 1) / ROWS;
    const uint which = GROUP_X < end0 ? 0 : GROUP_X < end1 ? 1 : 2;
    const uint row0 = (GROUP_X - (which == 0 ? 0 : which == 1 ? end0 : end1)) * ROWS;
    const uint n = which == 0 ? n0 : which == 1 ? n1 : n2;
    const TYPE(WEIGHT)* const weight = which == 0 ? weight0 : which == 1 ? weight1 : weight2;
    const uint settled = which == 0 ? settled0 : which == 1 ? settled1 : settled2;
    const TYPE(WEIGHT)* lines[2 * ROW_TILES];
    for (uint r = 0; r < 2 * ROW_TILES; ++r) lines[r] = row_of(weight, row0 + 8 * r + g, n, k);
    if (settled) fetch_first_weights(memory, lines, k);
    START(x);
    START_ONE(0);
    START_ONE(1);
    START_ONE(2);
    if (!settled) fetch_first_weights(memory, lines, k);
    const TYPE(WEIGHT)* const bias = which == 0 ? bias0 : which == 1 ? bias1 : bias2;
    TYPE(OUT)* const out = which == 0 ? out0 : which == 1 ? out1 : out2;
    const uint flags = which == 0 ? flags0 : which == 1 ? flags1 : flags2;
    const uint has_bias = flags % 2, accumulate = flags / 2;
    const float* sums = multiply(memory, lines, x, m, k);
    FINISH_ALL(sums);
}

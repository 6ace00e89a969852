// quantised_gemm and quantised_embed: codes.h; X, OUT, and WEIGHT, the dtype of the bias, which is f32.

// Rows that a group works on together.
#ifndef ROWS
#define ROWS 4
#endif

// One group per column, its threads along k, ROWS rows at a time.
KERNEL(GROUP)
quantised_gemm(READS(X, x), WEIGHTS, READS(WEIGHT, bias), WRITES(OUT, out), uint m, uint n, uint k, uint has_bias,
               uint accumulate, uint group_rows, uint group_cols) {
    LOCAL float scratch[GROUP];
    START(x);
    START_WEIGHTS;
    START(bias);
    START(out);
    const uint col = GROUP_X, row = GROUP_Y * ROWS;
    float acc[ROWS];
    for (uint r = 0; r < ROWS; ++r) acc[r] = 0.0f;
    for (uint i = THREAD; i < k; i += GROUP) {
        const float w = WEIGHT_AT(col, i);
        for (uint r = 0; r < ROWS; ++r) {
            if (row + r < m) acc[r] = MAD(LOAD(X, x, (ulong)(row + r) * k + i), w, acc[r]);
        }
    }
#if OUTER
    const float factor = outer[0];
#else
    const float factor = 1.0f;
#endif
    // no `if` around a barrier: PoCL 3.1 then runs thread 0's branch in every thread
    for (uint r = 0; r < ROWS && row + r < m; ++r) {
        const float sum = group_sum(acc[r], scratch);
        if (THREAD == 0) FINISH(row + r, col, sum * factor);
    }
}

// out [tokens, k]; a row whose id is not in the table becomes NaN, which no later step can hide
KERNEL(GROUP)
quantised_embed(READS(u32, ids), WEIGHTS, WRITES(OUT, out), uint vocab, uint k, ulong count, uint group_rows,
                uint group_cols) {
    START(ids);
    START_WEIGHTS;
    START(out);
    const ulong i = EACH;
    if (i >= count) return;
    const uint id = ids[i / k];
    float v = NAN;
    if (id < vocab) v = WEIGHT_AT(id, (uint)(i % k));
#if OUTER
    v *= outer[0];
#endif
    STORE(OUT, out, i, v);
}

// Rows of weights of codes.h as a matrix in X, for products of many rows: expand.h. COLUMNS: those that share a scale.

// A thread for 8 columns of a row, from row `first` on.
KERNEL(GROUP) widen(WEIGHTS, WRITES(X, out), uint first, uint k, uint group_rows) {
    START_WEIGHTS;
    START(out);
    const uint col = (GROUP_X * GROUP + THREAD) * 8, group_cols = COLUMNS;
    if (col >= k) return;
    const uint row = first + GROUP_Y;
    const float scale = GROUP_NUMBER(scales, 0) * FACTOR;
#if ZERO
    const float zero = GROUP_NUMBER(zeros, 1);
#endif
    uint pairs[4];
#if NARROW
    const uint own[1] = {codes[(ulong)row * (k / 8) + col / 8]};
#else
    const uint2 words = *(const uint2*)(codes + (ulong)row * (k / 4) + col / 4);
    const uint own[2] = {words.x, words.y};
#endif
    expand(own, pairs);
    float v[8];
#pragma unroll
    for (uint i = 0; i < 4; ++i) {
        float pair[2];
        UNPACK2(pairs[i], pair);
#pragma unroll
        for (uint j = 0; j < 2; ++j) {
#if ZERO == 1
            v[COLUMN_OF(i, j)] = (pair[j] - zero) * scale;
#elif ZERO == 2
            v[COLUMN_OF(i, j)] = MAD(pair[j], scale, -zero);
#else
            v[COLUMN_OF(i, j)] = pair[j] * scale;
#endif
        }
    }
    STORE_VEC8(X, out, (ulong)GROUP_Y * k + col, v);
}

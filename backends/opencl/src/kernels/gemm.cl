// For CPUs: no barrier; see gemm.h for the operands.

// Rows that a thread works on together.
#define ROWS 4

// For CPUs: no barrier, dot products along k in vectors. A thread computes COLS columns of BAND rows,
// ROWS at a time: its weights stay in the first cache, the rows of a band in the second. 4 x 4 vectors of
// sums fill the registers of AVX-512.
#define COLS 4

kernel void gemm(OPERANDS) {
    START_OPERANDS;
    const uint col = get_global_id(0) * COLS;
    const uint first = get_global_id(1) * BAND;
    const uint end = min(m, first + BAND);
    global const TYPE(WEIGHT)* w[COLS];
    for (uint c = 0; c < COLS; ++c) w[c] = weight + (ulong)min(col + c, n - 1) * k;
    for (uint row = first; row < end; row += ROWS) {
        global const TYPE(X)* a[ROWS];
        floatw acc[ROWS][COLS];
        for (uint r = 0; r < ROWS; ++r) {
            a[r] = x + (ulong)min(row + r, m - 1) * k;
            for (uint c = 0; c < COLS; ++c) acc[r][c] = 0.0f;
        }
        uint i = 0;
        for (; i + W <= k; i += W) {
            floatw b[COLS];
#pragma unroll
            for (uint c = 0; c < COLS; ++c) b[c] = LOADW(WEIGHT, w[c], i);
#pragma unroll
            for (uint r = 0; r < ROWS; ++r) {
                const floatw v = LOADW(X, a[r], i);
#pragma unroll
                for (uint c = 0; c < COLS; ++c) acc[r][c] = MAD(v, b[c], acc[r][c]);
            }
        }
#pragma unroll
        for (uint r = 0; r < ROWS; ++r) {
#pragma unroll
            for (uint c = 0; c < COLS; ++c) {
                float sum = SUMW(acc[r][c]);
                for (uint j = i; j < k; ++j) sum = MAD(LOAD(X, a[r], j), LOAD(WEIGHT, w[c], j), sum);
                if (row + r < m && col + c < n) FINISH(row + r, col + c, sum);
            }
        }
    }
}

// For CPUs and one row: the weights are read once, nearly in order, which is all that counts. A thread
// computes STRIP columns, two at a time, each in two sums that hide the latency of an addition.
kernel void gemv(OPERANDS) {
    const uint first = get_global_id(0) * STRIP, end = min(n, first + STRIP);
    START_OPERANDS;
    for (uint col = first; col < end; col += 2) {
        global const TYPE(WEIGHT)* v = weight + (ulong)col * k;
        global const TYPE(WEIGHT)* w = weight + (ulong)min(col + 1, n - 1) * k;
        floatw v0 = 0.0f, v1 = 0.0f, w0 = 0.0f, w1 = 0.0f;
        uint i = 0;
        for (; i + 2 * W <= k; i += 2 * W) {
            const floatw a = LOADW(X, x, i), b = LOADW(X, x, i + W);
            v0 = MAD(a, LOADW(WEIGHT, v, i), v0);
            v1 = MAD(b, LOADW(WEIGHT, v, i + W), v1);
            w0 = MAD(a, LOADW(WEIGHT, w, i), w0);
            w1 = MAD(b, LOADW(WEIGHT, w, i + W), w1);
        }
        float v_sum = SUMW(v0 + v1), w_sum = SUMW(w0 + w1);
        for (; i < k; ++i) {
            v_sum = MAD(LOAD(X, x, i), LOAD(WEIGHT, v, i), v_sum);
            w_sum = MAD(LOAD(X, x, i), LOAD(WEIGHT, w, i), w_sum);
        }
        FINISH(0, col, v_sum);
        if (col + 1 < end) FINISH(0, col + 1, w_sum);
    }
}

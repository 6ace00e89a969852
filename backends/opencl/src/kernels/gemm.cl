// out [m, n] = x [m, k] . weight [n, k]^T (+ bias [n]) (+ out); X, WEIGHT, OUT. `bias` is not read unless
// `has_bias`.
//
// Rows and columns past the edge repeat the last one and are not stored, so that no load leaves its operand.

#define OPERANDS                                                                                                \
    IN(X) x, ulong x_at, IN(WEIGHT) weight, ulong weight_at, IN(WEIGHT) bias, ulong bias_at, OUT_(OUT) out,     \
        ulong out_at, uint m, uint n, uint k, uint has_bias, uint accumulate

#define FINISH(row, col, sum)                                                                                   \
    do {                                                                                                        \
        const ulong at = out_at + (ulong)(row)*n + (col);                                                       \
        float total = (sum);                                                                                    \
        if (has_bias) total += LOAD(WEIGHT, bias, bias_at + (col));                                                 \
        if (accumulate) total += LOAD(OUT, out, at);                                                            \
        STORE(OUT, out, at, total);                                                                             \
    } while (0)

// Rows that a thread works on together.
#define ROWS 4

// For CPUs: no barrier, dot products along k in vectors. A thread computes COLS columns of BAND rows,
// ROWS at a time: its weights stay in the first cache, the rows of a band in the second. 4 x 4 vectors of
// sums fill the registers of AVX-512.
#define COLS 4

kernel void gemm(OPERANDS) {
    const uint col = get_global_id(0) * COLS;
    const uint first = get_global_id(1) * BAND;
    const uint end = min(m, first + BAND);
    IN(WEIGHT) w[COLS];
    for (uint c = 0; c < COLS; ++c) w[c] = weight + weight_at + (ulong)min(col + c, n - 1) * k;
    for (uint row = first; row < end; row += ROWS) {
        IN(X) a[ROWS];
        floatw acc[ROWS][COLS];
        for (uint r = 0; r < ROWS; ++r) {
            a[r] = x + x_at + (ulong)min(row + r, m - 1) * k;
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
    x += x_at;
    for (uint col = first; col < end; col += 2) {
        IN(WEIGHT) v = weight + weight_at + (ulong)col * k;
        IN(WEIGHT) w = weight + weight_at + (ulong)min(col + 1, n - 1) * k;
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

// For GPUs and few rows: one group per column, coalesced along k, ROWS rows at a time.
kernel void gemv_group(OPERANDS) {
    local float scratch[GROUP];
    const uint col = get_group_id(0), row = get_global_id(1) * ROWS;
    weight += weight_at + (ulong)col * k;
    x += x_at + (ulong)row * k;
    float acc[ROWS] = {0.0f};
    for (uint i = get_local_id(0); i < k; i += GROUP) {
        const float w = LOAD(WEIGHT, weight, i);
#pragma unroll
        for (uint r = 0; r < ROWS; ++r)
            if (row + r < m) acc[r] = MAD(LOAD(X, x, (ulong)r * k + i), w, acc[r]);
    }
    for (uint r = 0; r < ROWS && row + r < m; ++r) {
        const float sum = group_sum(acc[r], scratch);
        if (get_local_id(0) == 0) FINISH(row + r, col, sum);
    }
}

// For GPUs and many rows: 64 x 64 tiles through local memory, 4 x 4 sums for each of 256 threads.
#define TILE 64
#define DEPTH 16
#define SIDE 16

kernel void gemm_group(OPERANDS) {
    local float xs[DEPTH][TILE + 1];
    local float ws[DEPTH][TILE + 1];
    const uint lid = get_local_id(0), tx = lid % SIDE, ty = lid / SIDE;
    const uint col0 = get_group_id(0) * TILE, row0 = get_group_id(1) * TILE;
    float acc[4][4] = {{0.0f}};
    for (uint k0 = 0; k0 < k; k0 += DEPTH) {
        for (uint i = lid; i < TILE * DEPTH; i += SIDE * SIDE) {
            const uint line = i / DEPTH, d = i % DEPTH, at = min(k0 + d, k - 1);
            const bool inside = k0 + d < k;
            const float a = LOAD(X, x, x_at + (ulong)min(row0 + line, m - 1) * k + at);
            const float b = LOAD(WEIGHT, weight, weight_at + (ulong)min(col0 + line, n - 1) * k + at);
            xs[d][line] = inside ? a : 0.0f;
            ws[d][line] = inside ? b : 0.0f;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint d = 0; d < DEPTH; ++d) {
            for (uint r = 0; r < 4; ++r) {
                const float v = xs[d][ty + SIDE * r];
                for (uint c = 0; c < 4; ++c) acc[r][c] = MAD(v, ws[d][tx + SIDE * c], acc[r][c]);
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    for (uint r = 0; r < 4; ++r) {
        for (uint c = 0; c < 4; ++c) {
            const uint row = row0 + ty + SIDE * r, col = col0 + tx + SIDE * c;
            if (row < m && col < n) FINISH(row, col, acc[r][c]);
        }
    }
}

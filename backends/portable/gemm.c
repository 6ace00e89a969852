// For any GPU, all dtypes.

// Rows that a group works on together.
#ifndef ROWS
#define ROWS 4
#endif

// Few rows: one group per column, coalesced along k, ROWS rows at a time; VEC divides k.
KERNEL(GROUP) gemv(OPERANDS) {
    LOCAL float scratch[GROUP];
    START_OPERANDS;
    const uint col = GROUP_X, row = GROUP_Y * ROWS;
    const ulong line = (ulong)col * k;
    float acc[ROWS], w[VEC], v[VEC];
    for (uint r = 0; r < ROWS; ++r) acc[r] = 0.0f;
    for (uint i = THREAD * VEC; i < k; i += GROUP * VEC) {
        LOAD_VEC(WEIGHT, weight, line + i, w);
        for (uint r = 0; r < ROWS; ++r) {
            if (row + r < m) {
                LOAD_VEC(X, x, (ulong)(row + r) * k + i, v);
                for (uint j = 0; j < VEC; ++j) acc[r] = MAD(v[j], w[j], acc[r]);
            }
        }
    }
    // no `if` around a barrier: PoCL 3.1 then runs thread 0's branch in every thread
    for (uint r = 0; r < ROWS && row + r < m; ++r) {
        const float sum = group_sum(acc[r], scratch);
        if (THREAD == 0) FINISH(row + r, col, sum);
    }
}

// Many rows: tiles.
#define ROW_AT(line) (row0 + (line) < m ? row0 + (line) : m - 1)
#define LINE_AT(line) (col0 + (line) < n ? col0 + (line) : n - 1)

KERNEL(256) gemm(OPERANDS) {
    LOCAL float xs[DEPTH][TILE + 1];
    LOCAL float ws[DEPTH][TILE + 1];
    START_OPERANDS;
    const uint lid = THREAD, tx = lid % SIDE, ty = lid / SIDE;
    const uint col0 = GROUP_X * TILE, row0 = GROUP_Y * TILE;
    SUM_TILES(k, ROW_AT, LINE_AT);
    for (uint r = 0; r < 4; ++r) {
        for (uint c = 0; c < 4; ++c) {
            const uint row = row0 + ty + SIDE * r, col = col0 + tx + SIDE * c;
            if (row < m && col < n) FINISH(row, col, acc[r][c]);
        }
    }
}

// gemm of a few rows: few_rows.h. settled: no launch before this one that may still run writes the weights.

KERNEL_OF(32 * WARPS, 1) gemm_few_rows(OPERANDS, uint settled) {
    SHARED_BYTES(memory);
    const uint g = THREAD % 32 / 4, row0 = GROUP_X * ROWS;
    const TYPE(WEIGHT)* lines[2 * ROW_TILES];
    for (uint r = 0; r < 2 * ROW_TILES; ++r) lines[r] = row_of(weight, row0 + 8 * r + g, n, k);
    if (settled) fetch_first_weights(memory, lines, k);
    START_OPERANDS;
    if (!settled) fetch_first_weights(memory, lines, k);
    const float* sums = multiply(memory, lines, x, m, k);
    FINISH_ALL(sums);
}

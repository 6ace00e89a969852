// gemm of a few rows: few_rows.h. settled: no launch before this one that may still run writes the weights.

KERNEL_OF(32 * WARPS, 1) gemm_few_rows(OPERANDS, uint settled) {
    SHARED_BYTES(memory);
    const uint g = THREAD % 32 / 4, tiles = (n + ROWS - 1) / ROWS;
    const auto lines_of = [&](uint tile, const TYPE(WEIGHT)** lines) {
        for (uint r = 0; r < 2 * ROW_TILES; ++r) lines[r] = row_of(weight, tile * ROWS + 8 * r + g, n, k);
    };
    if (settled) fetch_first_weights(memory, k, tiles, lines_of);
    START_OPERANDS;
    if (!settled) fetch_first_weights(memory, k, tiles, lines_of);
    multiply(memory, x, m, k, tiles, lines_of, [&](uint tile, const float* sums) {
        const uint row0 = tile * ROWS;
        FINISH_ALL(sums);
    });
}

// A gate, its up and silu_mul of them for a few rows, what the three write, bit by bit: few_rows.h. Row tile 0 is of the
// gate, row tile 1 of up; OUT is X.

KERNEL_OF(32 * WARPS, 1) gemm_few_rows_gated(READS(X, x), READS(WEIGHT, gate_weight), READS(WEIGHT, up_weight),
                                             WRITES(X, gate), WRITES(X, up), WRITES(X, out), uint m, uint n, uint k,
                                             uint gate_settled, uint up_settled) {
    SHARED_BYTES(memory);
    const uint g = THREAD % 32 / 4, row0 = GROUP_X * 16;
    const TYPE(WEIGHT)* lines[4];
    for (uint r = 0; r < 4; ++r) lines[r] = row_of(r < 2 ? gate_weight : up_weight, row0 + r % 2 * 8 + g, n, k);
    const bool settled = gate_settled && up_settled;
    if (settled) fetch_first_weights(memory, lines, k);
    START(x);
    START(gate_weight);
    START(up_weight);
    START(gate);
    START(up);
    START(out);
    if (!settled) fetch_first_weights(memory, lines, k);
    const float* sums = multiply(memory, lines, x, m, k);
    for (uint i = THREAD; i < 16 * COLS; i += 32 * WARPS) {
        const uint row = i / 16, col = row0 + i % 16;
        if (row >= m || col >= n) continue;
        const ulong at = (ulong)row * n + col;
        STORE(X, gate, at, total_of(sums, row, i % 16));
        STORE(X, up, at, total_of(sums, row, 16 + i % 16));
        const float v = LOAD(X, gate, at), u = LOAD(X, up, at); // as rounded
        STORE(X, out, at, u * (v / (1.0f + EXP(-v))));
    }
}

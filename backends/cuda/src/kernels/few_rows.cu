// gemm of a few rows on tensor cores, bound by the weights' bandwidth: out [m, n] = x [m, k] . weight [n, k]^T.
// X, WEIGHT (bf16 or f16), OUT; m <= 8 TILES. k is a multiple of 8 and rows are aligned to 16 bytes.
//
// The weights are the left operand, 16 rows of them to an instruction, and go from memory to registers without
// a stop: the order of k is free as long as both operands agree, so a lane takes 8 neighbours along k of its
// two rows for two instructions. A block is ROW_TILES * 16 weight rows; its warps share k, and their sums meet
// in shared memory, in a fixed order.
//
// An f32 x is the exact sum of three bf16 (8 + 8 + 8 bits of fraction), each multiplied exactly: SPLIT 3.

#define STEPS 4
#define ROWS (16 * ROW_TILES)
#define COLS (8 * TILES)

#if SPLIT == 3
// v = hi + mid + low, two neighbours to a register
DEVICE void split(float a, float b, uint* parts) {
    for (uint i = 0; i < 3; ++i) {
        float pair[2];
        parts[i] = pack_bf16(a, b);
        unpack_bf16(parts[i], pair);
        a -= pair[0];
        b -= pair[1];
    }
}
#endif

// The 8 elements of x for two instructions: [SPLIT][4 registers].
DEVICE void load_x(const TYPE(X)* p, bool present, uint parts[SPLIT][4]) {
#if SPLIT == 3
    float v[8];
    for (uint i = 0; i < 8; ++i) v[i] = 0.0f;
    if (present) load8_f32(p, v);
    for (uint i = 0; i < 4; ++i) {
        uint three[3];
        split(v[2 * i], v[2 * i + 1], three);
        for (uint s = 0; s < 3; ++s) parts[s][i] = three[s];
    }
#else
    uint4 v = make_uint4(0, 0, 0, 0);
    if (present) v = *(const uint4*)p;
    parts[0][0] = v.x; parts[0][1] = v.y; parts[0][2] = v.z; parts[0][3] = v.w;
#endif
}

KERNEL(32 * WARPS) gemm_few_rows(OPERANDS) {
    LOCAL float sums[WARPS][COLS][ROWS];
    const uint lane = THREAD % 32, warp = THREAD / 32, g = lane / 4, t = lane % 4;
    const uint row0 = GROUP_X * ROWS;
    float acc[ROW_TILES][TILES][4]; // C fragments: rows g, g + 8 of the weights, columns 2t, 2t + 1 of x's rows
    for (uint r = 0; r < ROW_TILES; ++r)
        for (uint c = 0; c < TILES; ++c)
            for (uint i = 0; i < 4; ++i) acc[r][c][i] = 0.0f;
    const TYPE(WEIGHT)* lines[2 * ROW_TILES];
    for (uint r = 0; r < 2 * ROW_TILES; ++r) {
        const uint row = row0 + 8 * r + g;
        lines[r] = weight + (ulong)(row < n ? row : n - 1) * k;
    }
    for (uint k0 = warp * 32 * STEPS; k0 < k; k0 += WARPS * 32 * STEPS) {
        uint4 w[STEPS][2 * ROW_TILES];
#pragma unroll
        for (uint s = 0; s < STEPS; ++s) {
            const uint at = k0 + 32 * s + 8 * t;
#pragma unroll
            for (uint r = 0; r < 2 * ROW_TILES; ++r)
                w[s][r] = at < k ? load_once16(lines[r] + at) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (uint s = 0; s < STEPS; ++s) {
            const uint at = k0 + 32 * s + 8 * t;
#pragma unroll
            for (uint c = 0; c < TILES; ++c) {
                const uint row = 8 * c + g;
                uint parts[SPLIT][4];
                load_x(x + (ulong)row * k + at, row < m && at < k, parts);
#pragma unroll
                for (uint r = 0; r < ROW_TILES; ++r) {
                    const uint4 upper = w[s][2 * r], lower = w[s][2 * r + 1];
                    const uint first[4] = {upper.x, lower.x, upper.y, lower.y};
                    const uint second[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
                    for (uint p = 0; p < SPLIT; ++p) {
                        CAT(mma_, WEIGHT)(acc[r][c], first, parts[p]);
                        CAT(mma_, WEIGHT)(acc[r][c], second, parts[p] + 2);
                    }
                }
            }
        }
    }
    for (uint r = 0; r < ROW_TILES; ++r)
        for (uint c = 0; c < TILES; ++c)
            for (uint i = 0; i < 4; ++i) sums[warp][8 * c + 2 * t + i % 2][16 * r + g + i / 2 * 8] = acc[r][c][i];
    BARRIER();
    for (uint i = THREAD; i < ROWS * COLS; i += 32 * WARPS) {
        const uint row = i / ROWS, col = row0 + i % ROWS;
        float sum = 0.0f;
        for (uint v = 0; v < WARPS; ++v) sum += sums[v][row][i % ROWS];
        if (row < m && col < n) FINISH(row, col, sum);
    }
}

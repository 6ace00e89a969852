// What the products of a few rows share, whatever the weights are: 8 TILES rows of x, 16 ROW_TILES rows of weights to a
// block, whose WARPS share k.

#define ROWS (16 * ROW_TILES)
#define COLS (8 * TILES)
#define X_VECTORS (SPLIT == 3 ? 2 : 1) // of 16 bytes, for 8 elements of a row of x

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

// The 8 elements of a row of x for two instructions: [SPLIT][4 registers].
DEVICE void load_x(const uint4* from, uint parts[SPLIT][4]) {
#if SPLIT == 3
    const uint4 halves[2] = {from[0], from[32]};
    float v[8];
    for (uint i = 0; i < 2; ++i) {
        v[4 * i] = bits_to_float(halves[i].x); v[4 * i + 1] = bits_to_float(halves[i].y);
        v[4 * i + 2] = bits_to_float(halves[i].z); v[4 * i + 3] = bits_to_float(halves[i].w);
    }
    for (uint i = 0; i < 4; ++i) {
        uint three[3];
        split(v[2 * i], v[2 * i + 1], three);
        for (uint s = 0; s < 3; ++s) parts[s][i] = three[s];
    }
#else
    const uint4 v = from[0];
    parts[0][0] = v.x; parts[0][1] = v.y; parts[0][2] = v.z; parts[0][3] = v.w;
#endif
}

// Puts a warp's C fragments, rows g, g + 8 of the weights and columns 2t, 2t + 1 of x's rows, among the sums of a block.
DEVICE void put_sums(float* sums, float acc[ROW_TILES][TILES][4]) {
    const uint lane = THREAD % 32, warp = THREAD / 32, g = lane / 4, t = lane % 4;
    for (uint r = 0; r < ROW_TILES; ++r)
        for (uint c = 0; c < TILES; ++c)
            for (uint i = 0; i < 4; ++i)
                sums[(warp * COLS + 8 * c + 2 * t + i % 2) * ROWS + 16 * r + g + i / 2 * 8] = acc[r][c][i];
}

// The product of a row of x and a row of the block's weights.
DEVICE float total_of(const float* sums, uint row, uint weight_row) {
    float sum = 0.0f;
    for (uint v = 0; v < WARPS; ++v) sum += sums[(v * COLS + row) * ROWS + weight_row];
    return sum;
}

// Writes a block's rows of a product, as FINISH does.
#define FINISH_ALL(sums)                                                                                        \
    for (uint i = THREAD; i < ROWS * COLS; i += 32 * WARPS) {                                                   \
        const uint row = i / ROWS, col = row0 + i % ROWS;                                                       \
        if (row < m && col < n) FINISH(row, col, total_of(sums, row, i % ROWS));                                \
    }

// Products of many rows: tiles of 64 x 64 through local memory, 4 x 4 sums for each of 256 threads.
#define TILE 64
#define DEPTH 16
#define SIDE 16

// Defines the sums `acc [4][4]` of thread `lid`, (`tx`, `ty`), over the first `depth` of k columns, by tiles `xs`
// and `ws` [DEPTH][TILE + 1]: their line i is row ROW_AT(i) of x, or line LINE_AT(i) of the weight,
// of which ELEMENT has the elements.
#define SUM_TILES(depth, ROW_AT, LINE_AT)                                                                       \
    float acc[4][4];                                                                                            \
    for (uint r = 0; r < 4; ++r)                                                                                \
        for (uint c = 0; c < 4; ++c) acc[r][c] = 0.0f;                                                          \
    for (uint k0 = 0; k0 < depth; k0 += DEPTH) {                                                                \
        for (uint i = lid; i < TILE * DEPTH; i += SIDE * SIDE) {                                                \
            const uint line = i / DEPTH, d = i % DEPTH;                                                         \
            const uint at = k0 + d < k ? k0 + d : k - 1;                                                        \
            const float a = LOAD(X, x, (ulong)ROW_AT(line) * k + at);                                           \
            const float b = ELEMENT(LINE_AT(line), at);                                                         \
            xs[d][line] = k0 + d < k ? a : 0.0f;                                                                \
            ws[d][line] = k0 + d < k ? b : 0.0f;                                                                \
        }                                                                                                       \
        BARRIER();                                                                                              \
        for (uint d = 0; d < DEPTH; ++d) {                                                                      \
            for (uint r = 0; r < 4; ++r) {                                                                      \
                const float v = xs[d][ty + SIDE * r];                                                           \
                for (uint c = 0; c < 4; ++c) acc[r][c] = MAD(v, ws[d][tx + SIDE * c], acc[r][c]);               \
            }                                                                                                   \
        }                                                                                                       \
        BARRIER();                                                                                              \
    }

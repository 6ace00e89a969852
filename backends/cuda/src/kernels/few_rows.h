// What the products of a few rows share: out [m, n] = x [m, k] . weight [n, k]^T on tensor cores, bound by the weights'
// bandwidth. X, WEIGHT (bf16 or f16), OUT; m <= 8 TILES. k is a multiple of 8 and rows are aligned to 16 bytes.
//
// The weights are the left operand, 16 rows of them to an instruction: the order of k is free as long as both operands
// agree, so a lane takes 8 neighbours along k of its two rows for two instructions. A block is ROW_TILES * 16 weight
// rows; its warps share k, and their sums meet in shared memory, in a fixed order.
//
// A lane copies what it will multiply to a place of its own in shared memory, STAGES pairs of steps ahead: so many bytes
// are under way without a register for each, and no thread waits for another. On an H200 it was slower with rows brought
// to the second cache before, and with a warp to each row of weights.
//
// An f32 x is the exact sum of three bf16 (8 + 8 + 8 bits of fraction), each multiplied exactly: SPLIT 3.

#define STEPS 4 // steps of 32 along k that a warp takes of its rows together: 256 bytes of each
#define PAIR 2  // steps whose copies are waited for together: 128 bytes of a row, a line of the cache
#define SLOT (2 * ROW_TILES + TILES * X_VECTORS)          // vectors of a lane for a step

// Where a lane is among the copies of its part: how many steps are begun, the next one's place along k and in the ring.
typedef struct {
    uint fetched, next, into;
} Ahead;

// Begins to copy a lane's part of the step at `at` along k: two rows of weights for each row tile.
DEVICE void fetch_weights(uint4* slot, const TYPE(WEIGHT)* const* lines, uint k, uint at) {
    const bool inside = at < k;
#pragma unroll
    for (uint r = 0; r < 2 * ROW_TILES; ++r) copy16_of_line(slot + 32 * r, lines[r] + (inside ? at : 0), inside);
}

// And of TILES rows of x.
DEVICE void fetch_x(uint4* slot, const TYPE(X)* x, uint m, uint k, uint at) {
    const uint g = THREAD % 32 / 4;
#pragma unroll
    for (uint c = 0; c < TILES; ++c) {
        const uint row = 8 * c + g;
        const bool present = at < k && row < m;
        const TYPE(X)* from = x + (present ? (ulong)row * k + at : 0);
#pragma unroll
        for (uint i = 0; i < X_VECTORS; ++i)
            copy16(slot + 32 * (2 * ROW_TILES + X_VECTORS * c + i), from + 4 * i, present);
    }
}

DEVICE uint4* ring_of(uchar* memory) {
    return (uint4*)memory + THREAD / 32 * STAGES * PAIR * SLOT * 32 + THREAD % 32;
}

// Steps of a warp.
DEVICE uint steps_of(uint k) {
    const uint chunks = (k + 32 * STEPS - 1) / (32 * STEPS), warp = THREAD / 32;
    return chunks > warp ? (chunks - warp + WARPS - 1) / WARPS * STEPS : 0;
}

DEVICE Ahead at_start(void) {
    const Ahead start = {0, THREAD / 32 * 32 * STEPS + 8 * (THREAD % 4), 0};
    return start;
}

DEVICE void go_on(Ahead* ahead) {
    ahead->fetched += PAIR;
    ahead->next += ahead->fetched % STEPS == 0 ? 32 * (STEPS * (WARPS - 1) + PAIR) : 32 * PAIR;
    ahead->into = ahead->into + 1 == STAGES ? 0 : ahead->into + 1;
}

// Copies of a pair of steps; `call` begins those of one, given its slot and its place along k.
#define FETCH_PAIR(ahead, call)                                                                                 \
    do {                                                                                                        \
        for (uint i = 0; i < PAIR; ++i) {                                                                       \
            uint4* const slot = ring + ((ahead).into * PAIR + i) * SLOT * 32;                                   \
            const uint at = (ahead).next + 32 * i;                                                              \
            if ((ahead).fetched < count) call;                                                                  \
        }                                                                                                       \
        go_on(&(ahead));                                                                                        \
    } while (0)

// Begins to copy the weights of the first steps, which hides the launches before this one where those leave the
// weights as they are. What is written before must be visible otherwise.
DEVICE void fetch_first_weights(uchar* memory, const TYPE(WEIGHT)* const* lines, uint k) {
    uint4* const ring = ring_of(memory);
    const uint count = steps_of(k);
    Ahead ahead = at_start();
#pragma unroll
    for (uint i = 0; i < STAGES - 1; ++i) FETCH_PAIR(ahead, fetch_weights(slot, lines, k, at));
}

// The sums of a block over k: [WARPS][COLS][ROWS] in `memory`, which the copies use before. lines: rows g and g + 8 of
// each row tile of the weights, the first steps of which are under way.
DEVICE float* multiply(uchar* memory, const TYPE(WEIGHT)* const* lines, const TYPE(X)* x, uint m, uint k) {
    float acc[ROW_TILES][TILES][4]; // C fragments
    for (uint r = 0; r < ROW_TILES; ++r)
        for (uint c = 0; c < TILES; ++c)
            for (uint i = 0; i < 4; ++i) acc[r][c][i] = 0.0f;
    uint4* const ring = ring_of(memory);
    const uint count = steps_of(k);
    Ahead ahead = at_start();
#pragma unroll
    for (uint i = 0; i < STAGES - 1; ++i) {
        FETCH_PAIR(ahead, fetch_x(slot, x, m, k, at));
        copies_close();
    }
    uint from = 0; // place in the ring
    for (uint step = 0; step < count; step += PAIR) {
        copies_wait<STAGES - 2>();
        const uint4* const stage = ring + from * PAIR * SLOT * 32;
        from = from + 1 == STAGES ? 0 : from + 1;
        // the place before this one, whose elements are in registers by now
        FETCH_PAIR(ahead, (fetch_weights(slot, lines, k, at), fetch_x(slot, x, m, k, at)));
        copies_close();
#pragma unroll
        for (uint i = 0; i < PAIR; ++i) {
            const uint4* const slot = stage + i * SLOT * 32;
            uint4 w[2 * ROW_TILES];
            uint parts[TILES][SPLIT][4];
#pragma unroll
            for (uint r = 0; r < 2 * ROW_TILES; ++r) w[r] = slot[32 * r];
#pragma unroll
            for (uint c = 0; c < TILES; ++c) load_x(slot + 32 * (2 * ROW_TILES + X_VECTORS * c), parts[c]);
#pragma unroll
            for (uint c = 0; c < TILES; ++c)
#pragma unroll
                for (uint r = 0; r < ROW_TILES; ++r) {
                    const uint4 upper = w[2 * r], lower = w[2 * r + 1];
                    const uint first[4] = {upper.x, lower.x, upper.y, lower.y};
                    const uint second[4] = {upper.z, lower.z, upper.w, lower.w};
#pragma unroll
                    for (uint p = 0; p < SPLIT; ++p) {
                        CAT(mma_, WEIGHT)(acc[r][c], first, parts[c][p]);
                        CAT(mma_, WEIGHT)(acc[r][c], second, parts[c][p] + 2);
                    }
                }
        }
    }
    copies_wait<0>();
    BARRIER();
    float* const sums = (float*)memory;
    put_sums(sums, acc);
    BARRIER();
    return sums;
}

DEVICE const TYPE(WEIGHT)* row_of(const TYPE(WEIGHT)* weight, uint row, uint n, uint k) {
    return weight + (ulong)(row < n ? row : n - 1) * k;
}

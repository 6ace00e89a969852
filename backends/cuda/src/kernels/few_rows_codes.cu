// quantised_gemm of a few rows on tensor cores: out [m, n] = x [m, k] . weight [n, k]^T with weights of codes.h.
//
// X (bf16, f16, or f32 with SPLIT 3), OUT, WEIGHT (of the bias, f32), CODE, SCALE, ZERO, SUPERS, COLUMNS: those that
// share a scale, 32, 64 or a multiple of 128. k is a multiple of 32, rows are aligned to 16 bytes.
//
// As in few_rows.h the weights are the left operand and a lane has 8 neighbours along k of its two rows for two
// instructions; a step is 32 columns, a chunk 4 steps. Codes become numbers in registers (expand.h). Scales multiply
// sums: of each step, or of more where a scale has more columns. What is subtracted from a group, a zero point or a
// minimum, multiplies the sum of x, which is a product with ones.
//
// The lanes of a warp copy its rows of a chunk together, STAGES - 1 chunks ahead, and each lane its part of x.

#define CHUNK 128
#define STEPS 4
#define SPAN (COLUMNS < CHUNK ? COLUMNS / 32 : STEPS) // steps below one scale
#define GROUPS (STEPS / SPAN)
#define ROW_VECTORS (NARROW ? 4 : 8)  // of 16 bytes, for a row of a chunk
#define LINES (ROWS * ROW_VECTORS / 32) // vectors that a lane copies of a chunk
#define CODE_VECTORS (ROWS * ROW_VECTORS)
#define STAGE_VECTORS (CODE_VECTORS + STEPS * TILES * X_VECTORS * 32)

// Puts neighbours of x in the order of the numbers.
DEVICE void pair_x(uint* v) {
#if NARROW
    const uint first = low_halves(v[0], v[2]), second = high_halves(v[0], v[2]);
    v[2] = low_halves(v[1], v[3]);
    v[3] = high_halves(v[1], v[3]);
    v[0] = first;
    v[1] = second;
#elif CODE == 5
    for (uint i = 0; i < 4; i += 2) {
        const uint first = low_halves(v[i], v[i + 1]);
        v[i + 1] = high_halves(v[i], v[i + 1]);
        v[i] = first;
    }
#endif
}

// Scales of a row in a chunk and what is subtracted, as they are stored.
typedef struct {
#if SUPERS
    uint scales, zeros, supers;
#else
    TYPE(SCALE) scales[GROUPS], zeros[GROUPS];
#endif
} Stored;

typedef struct {
    float scale, zero; // a group is scale * its sum - zero * the sum of x
} Group;

#define NUMBERS                                                                                                 \
    const TYPE(SCALE)* __restrict__ scales, const TYPE(SCALE)* __restrict__ zeros,                              \
        const ushort* __restrict__ supers

DEVICE Stored load_numbers(NUMBERS, ulong row, uint k, uint chunk) {
    Stored stored;
#if SUPERS
    const ulong at = row * (k / CHUNK) + chunk;
    stored.scales = scales[at];
    stored.zeros = ZERO ? zeros[at] : 0;
    const ulong super = row * (k / 256) + chunk / 2;
    stored.supers = SUPERS == 2 ? ((const uint*)supers)[super] : supers[super];
#else
    const uint groups = (k + COLUMNS - 1) / COLUMNS;
    const ulong line = row * groups;
#pragma unroll
    for (uint i = 0; i < GROUPS; ++i) {
        const uint at = COLUMNS < CHUNK ? chunk * GROUPS + i : chunk / (COLUMNS / CHUNK);
        stored.scales[i] = scales[line + (at < groups ? at : groups - 1)];
        if (ZERO) stored.zeros[i] = zeros[line + (at < groups ? at : groups - 1)];
    }
#endif
    return stored;
}

DEVICE Group group_of(const Stored* stored, uint i) {
    Group group;
#if SUPERS
    float both[2];
    unpack_f16(stored->supers, both);
    group.scale = (float)(signed char)(stored->scales >> 8 * i) * both[0];
    group.zero = ZERO ? (float)(signed char)(stored->zeros >> 8 * i) * both[1] : 0.0f;
#else
    group.scale = LOAD(SCALE, stored->scales, i);
    group.zero = ZERO ? LOAD(SCALE, stored->zeros, i) * (ZERO == 1 ? group.scale : 1.0f) : 0.0f;
    group.scale *= FACTOR;
#endif
    return group;
}

// Where the vector of a row lies in a chunk's copies: lanes that read together are in unlike banks.
DEVICE uint place_of(uint row, uint vector) {
    return row * ROW_VECTORS + (vector ^ (NARROW ? row / 2 % 4 : row % 4 * 2));
}

DEVICE void fetch_codes(uint4* stage, const uint* const* lines, uint k, uint chunk) {
    const uint lane = THREAD % 32, vector = lane % ROW_VECTORS;
    const bool inside = chunk * CHUNK + vector * (CHUNK / ROW_VECTORS) < k;
#pragma unroll
    for (uint i = 0; i < LINES; ++i)
        copy16_of_line(stage + place_of(i * (32 / ROW_VECTORS) + lane / ROW_VECTORS, vector),
                       lines[i] + (inside ? chunk * ROW_VECTORS * 4 : 0), inside);
}

DEVICE void fetch_x(uint4* stage, const TYPE(X)* x, uint m, uint k, uint chunk) {
    const uint lane = THREAD % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (uint s = 0; s < STEPS; ++s)
#pragma unroll
        for (uint c = 0; c < TILES; ++c) {
            const uint row = 8 * c + g, at = chunk * CHUNK + 32 * s + 8 * t;
            const bool present = at < k && row < m;
            const TYPE(X)* from = x + (present ? (ulong)row * k + at : 0);
#pragma unroll
            for (uint i = 0; i < X_VECTORS; ++i)
                copy16(stage + CODE_VECTORS + ((s * TILES + c) * X_VECTORS + i) * 32 + lane, from + 4 * i, present);
        }
}

// Adds a chunk's products.
DEVICE void multiply_chunk(float acc[ROW_TILES][TILES][4], const uint4* stage, const Stored stored[ROW_TILES][2]) {
    const uint lane = THREAD % 32, g = lane / 4, t = lane % 4;
    const uint ones[4] = {ONES, ONES, ONES, ONES};
#pragma unroll
    for (uint span = 0; span < GROUPS; ++span) {
        float part[ROW_TILES][TILES][4], sums[TILES][4];
#pragma unroll
        for (uint c = 0; c < TILES; ++c)
#pragma unroll
            for (uint i = 0; i < 4; ++i) {
                sums[c][i] = 0.0f;
                for (uint r = 0; r < ROW_TILES; ++r) part[r][c][i] = 0.0f;
            }
#pragma unroll
        for (uint s = span * SPAN; s < (span + 1) * SPAN; ++s) {
            uint parts[TILES][SPLIT][4];
#pragma unroll
            for (uint c = 0; c < TILES; ++c) {
                load_x(stage + CODE_VECTORS + (s * TILES + c) * X_VECTORS * 32 + lane, parts[c]);
#pragma unroll
                for (uint p = 0; p < SPLIT; ++p) {
                    pair_x(parts[c][p]);
                    if (ZERO) {
                        MMA(sums[c], ones, parts[c][p]);
                        MMA(sums[c], ones, parts[c][p] + 2);
                    }
                }
            }
#pragma unroll
            for (uint r = 0; r < ROW_TILES; ++r) {
                uint numbers[2][4];
#pragma unroll
                for (uint half = 0; half < 2; ++half) {
                    const uint row = 16 * r + 8 * half + g;
#if NARROW
                    const uint* const words = (const uint*)(stage + place_of(row, s)) + t;
                    const uint own[1] = {words[0]};
#else
                    const uint2 words = ((const uint2*)(stage + place_of(row, 2 * s + t / 2)))[t % 2];
                    const uint own[2] = {words.x, words.y};
#endif
                    expand(own, numbers[half]);
                }
                const uint first[4] = {numbers[0][0], numbers[1][0], numbers[0][1], numbers[1][1]};
                const uint second[4] = {numbers[0][2], numbers[1][2], numbers[0][3], numbers[1][3]};
#pragma unroll
                for (uint c = 0; c < TILES; ++c)
#pragma unroll
                    for (uint p = 0; p < SPLIT; ++p) {
                        MMA(part[r][c], first, parts[c][p]);
                        MMA(part[r][c], second, parts[c][p] + 2);
                    }
            }
        }
#pragma unroll
        for (uint r = 0; r < ROW_TILES; ++r) {
            const Group group[2] = {group_of(&stored[r][0], span), group_of(&stored[r][1], span)};
#pragma unroll
            for (uint c = 0; c < TILES; ++c)
#pragma unroll
                for (uint i = 0; i < 4; ++i) {
                    acc[r][c][i] = MAD(group[i / 2].scale, part[r][c][i], acc[r][c][i]);
                    if (ZERO) acc[r][c][i] = MAD(-group[i / 2].zero, sums[c][i % 2], acc[r][c][i]);
                }
        }
    }
}

DEVICE void load_all_numbers(Stored stored[ROW_TILES][2], NUMBERS, const ulong rows[ROW_TILES][2], uint k,
                             uint chunk) {
    const uint chunks = (k + CHUNK - 1) / CHUNK, last = chunk < chunks ? chunk : chunks - 1;
#pragma unroll
    for (uint r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (uint half = 0; half < 2; ++half)
            stored[r][half] = load_numbers(scales, zeros, supers, rows[r][half], k, last);
}

// settled: no launch before this one that may still run writes the codes.
KERNEL(32 * WARPS) quantised_few_rows(READS(X, x), WEIGHTS, READS(WEIGHT, bias), WRITES(OUT, out), uint m, uint n, uint k,
                                      uint has_bias, uint accumulate, uint group_rows, uint settled) {
    SHARED_BYTES(memory);
    const uint lane = THREAD % 32, warp = THREAD / 32, row0 = GROUP_X * ROWS, chunks = (k + CHUNK - 1) / CHUNK;
    uint4* const ring = (uint4*)memory + warp * STAGES * STAGE_VECTORS;
    const uint* lines[LINES];
#pragma unroll
    for (uint i = 0; i < LINES; ++i) {
        const uint row = row0 + i * (32 / ROW_VECTORS) + lane / ROW_VECTORS;
        lines[i] = codes + ((ulong)(row < n ? row : n - 1) * (k / (NARROW ? 8 : 4)) + lane % ROW_VECTORS * 4);
    }
    if (settled)
        for (uint i = 0; i < STAGES - 1; ++i) fetch_codes(ring + i * STAGE_VECTORS, lines, k, warp + i * WARPS);
    START(x);
    START_WEIGHTS;
    START(bias);
    START(out);
    if (!settled)
        for (uint i = 0; i < STAGES - 1; ++i) fetch_codes(ring + i * STAGE_VECTORS, lines, k, warp + i * WARPS);
#pragma unroll
    for (uint i = 0; i < STAGES - 1; ++i) {
        fetch_x(ring + i * STAGE_VECTORS, x, m, k, warp + i * WARPS);
        copies_close();
    }
    ulong rows[ROW_TILES][2]; // of scales
    float acc[ROW_TILES][TILES][4];
    for (uint r = 0; r < ROW_TILES; ++r)
        for (uint half = 0; half < 2; ++half) {
            const uint row = row0 + 16 * r + 8 * half + lane / 4;
            rows[r][half] = (row < n ? row : n - 1) / group_rows;
            for (uint c = 0; c < TILES; ++c) acc[r][c][2 * half] = acc[r][c][2 * half + 1] = 0.0f;
        }
    Stored next[ROW_TILES][2];
    load_all_numbers(next, scales, zeros, supers, rows, k, warp);
    uint from = 0, into = STAGES - 1; // places in the ring
    for (uint chunk = warp; chunk < chunks; chunk += WARPS) {
        Stored stored[ROW_TILES][2];
        for (uint r = 0; r < ROW_TILES; ++r)
            for (uint half = 0; half < 2; ++half) stored[r][half] = next[r][half];
        load_all_numbers(next, scales, zeros, supers, rows, k, chunk + WARPS);
        copies_wait<STAGES - 2>();
        // every lane's copies are there, and no lane reads the place before this one any more
        warp_barrier();
        fetch_codes(ring + into * STAGE_VECTORS, lines, k, chunk + (STAGES - 1) * WARPS);
        fetch_x(ring + into * STAGE_VECTORS, x, m, k, chunk + (STAGES - 1) * WARPS);
        copies_close();
        multiply_chunk(acc, ring + from * STAGE_VECTORS, stored);
        from = from + 1 == STAGES ? 0 : from + 1;
        into = into + 1 == STAGES ? 0 : into + 1;
    }
    copies_wait<0>();
    BARRIER();
    float* const sums = (float*)memory;
    put_sums(sums, acc);
    BARRIER();
    FINISH_ALL(sums);
}

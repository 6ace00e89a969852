// Attention to latents on tensor cores: X is KV, bf16 or f16; HEAD_DIM a multiple of 8, VALUE_DIM of 32. All
// heads have the same keys, whose first VALUE_DIM numbers are their values.
//
// A block is HEADS = 16 * ROW_TILES heads of one query: keys come TILE at a time into two buffers, each once
// for all of these heads and for both products, the next by copies that run beside the arithmetic. A warp
// computes the scores of 8 of the keys for all heads; behind a barrier it has those of all keys, and sums its
// quarter of the values.
//
// Shared rows are chunks of 16 bytes, as in prefill_mma.cu.

#define TILE (8 * WARPS)
#define ROW ((HEAD_DIM + 63) / 64 * 64)
#define STEPS ((HEAD_DIM + 31) / 32)  // of 32 numbers of a key; behind it there are zeros
#define CHUNKS (4 * STEPS)            // of 16 bytes
#define SCORES (TILE + 8)             // from one head's scores to the next, which lie in unlike banks
#define COLUMNS (VALUE_DIM / 8 / WARPS) // of 8 numbers of a value each, of a warp

DEVICE ushort* chunk_at(ushort* rows, uint row, uint chunk) { return rows + row * ROW + (chunk ^ row % 8) * 8; }

// Begins to copy TILE keys, and returns the line of the warp's key lane % 8.
DEVICE uint fetch(const Keys* keys, ushort* tile, uint base, uint end) {
    const uint lane = THREAD % 32, key0 = THREAD / 32 * 8;
    const uint own = line_of(keys, base + key0 + lane % 8, end);
#pragma unroll 2
    for (uint step = 0; step < STEPS; ++step) {
        const uint i = 32 * step + lane, key = i / CHUNKS, chunk = i % CHUNKS, line = shuffle_uint(own, key);
        const bool there = line != NOWHERE && chunk < HEAD_DIM / 8;
        copy16(chunk_at(tile, key0 + key, chunk), keys->k_pool + (there ? (ulong)line * HEAD_DIM + chunk * 8 : 0), there);
    }
    return own;
}

// What `present` heads with queries at `q` attend to in [first, end): in each row tile this lane's heads g
// and g + 8, of which `sum` has a quarter.
DEVICE void attend(const Keys* keys, const TYPE(X)* q, uint present, uint first, uint end, uchar* memory,
                   float (*acc)[COLUMNS][4], float (*max)[2], float (*sum)[2]) {
    ushort* const queries = (ushort*)memory;                // [HEADS, ROW]
    ushort* const tiles = queries + HEADS * ROW;            // [2, TILE, ROW]
    float* const scores = (float*)(tiles + 2 * TILE * ROW); // [HEADS, SCORES]
    const uint lane = THREAD % 32, warp = THREAD / 32, g = lane / 4, t = lane % 4;
    for (uint i = THREAD; i < HEADS * CHUNKS; i += 32 * WARPS) {
        const uint head = i / CHUNKS, chunk = i % CHUNKS;
        const bool there = head < present && chunk < HEAD_DIM / 8;
        copy16(chunk_at(queries, head, chunk), q + (there ? head * HEAD_DIM + chunk * 8 : 0), there);
    }
    for (uint r = 0; r < ROW_TILES; ++r) {
        for (uint n = 0; n < COLUMNS; ++n)
            for (uint c = 0; c < 4; ++c) acc[r][n][c] = 0.0f;
        for (uint i = 0; i < 2; ++i) {
            max[r][i] = -INFINITY;
            sum[r][i] = 0.0f;
        }
    }
    uint next = fetch(keys, tiles, first, end), buffer = 0;
    for (uint base = first; base < end; base += TILE, buffer = 1 - buffer) {
        const uint lines = next;
        copies_close();
        copies_wait<0>();
        BARRIER();
        // all have read the other buffer
        if (base + TILE < end) next = fetch(keys, tiles + (1 - buffer) * TILE * ROW, base + TILE, end);
        ushort* const tile = tiles + buffer * TILE * ROW;

        // two sums each, so that products wait less for each other
        float own[ROW_TILES][2][4];
        for (uint r = 0; r < ROW_TILES; ++r)
            for (uint c = 0; c < 8; ++c) own[r][c / 4][c % 4] = 0.0f;
#pragma unroll 2
        for (uint step = 0; step < STEPS; ++step) {
            uint right[4];
            load_matrices(right, chunk_at(tile, 8 * warp + lane % 8, 4 * step + lane / 8));
#pragma unroll
            for (uint r = 0; r < ROW_TILES; ++r)
#pragma unroll
                for (uint half = 0; half < 2; ++half) {
                    uint left[4];
                    load_matrices(left, chunk_at(queries, 16 * r + lane % 16, 4 * step + 2 * half + lane / 16));
                    CAT(mma_, KV)(own[r][half], left, right + 2 * half);
                }
        }
#pragma unroll
        for (uint c = 0; c < 2; ++c) {
            const bool there = shuffle_uint(lines, 2 * t + c) != NOWHERE;
#pragma unroll
            for (uint r = 0; r < ROW_TILES; ++r)
#pragma unroll
                for (uint i = 0; i < 2; ++i)
                    scores[(16 * r + 8 * i + g) * SCORES + 8 * warp + 2 * t + c] =
                        there ? (own[r][0][2 * i + c] + own[r][1][2 * i + c]) * SCALE : -INFINITY;
        }
        BARRIER();

        uint weights[ROW_TILES][TILE / 8][2]; // left fragments: heads g and g + 8
#pragma unroll
        for (uint r = 0; r < ROW_TILES; ++r)
#pragma unroll
            for (uint i = 0; i < 2; ++i) {
                const float* const row = scores + (16 * r + 8 * i + g) * SCORES + 2 * t;
                float top = -INFINITY;
#pragma unroll
                for (uint n = 0; n < TILE / 8; ++n) top = FMAX(top, FMAX(row[8 * n], row[8 * n + 1]));
                top = FMAX(top, shuffle_xor(top, 1));
                top = FMAX(top, shuffle_xor(top, 2));
                const float new_max = FMAX(max[r][i], top), keep = share(max[r][i], new_max);
                max[r][i] = new_max;
                sum[r][i] *= keep;
#pragma unroll
                for (uint n = 0; n < COLUMNS; ++n) {
                    acc[r][n][2 * i] *= keep;
                    acc[r][n][2 * i + 1] *= keep;
                }
#pragma unroll
                for (uint n = 0; n < TILE / 8; ++n) {
                    const float a = share(row[8 * n], new_max), b = share(row[8 * n + 1], new_max);
                    sum[r][i] += a + b;
                    weights[r][n][i] = CAT(pack_, KV)(a, b);
                }
            }
#pragma unroll
        for (uint n = 0; n < COLUMNS; ++n) {
            uint right[4];
            load_matrices_transposed(right, chunk_at(tile, lane, warp * COLUMNS + n));
#pragma unroll
            for (uint r = 0; r < ROW_TILES; ++r)
#pragma unroll
                for (uint half = 0; half < 2; ++half) {
                    const uint left[4] = {weights[r][2 * half][0], weights[r][2 * half][1], weights[r][2 * half + 1][0],
                                          weights[r][2 * half + 1][1]};
                    CAT(mma_, KV)(acc[r][n], left, right + 2 * half);
                }
        }
    }
    copies_close();
    copies_wait<0>();
#pragma unroll
    for (uint r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (uint i = 0; i < 2; ++i) {
            sum[r][i] += shuffle_xor(sum[r][i], 1);
            sum[r][i] += shuffle_xor(sum[r][i], 2);
        }
}

// Grid as in decode.h.
KERNEL(32 * WARPS) attn_decode_latent(DECODE_OPERANDS, DECODE_EXTRA) {
    START_DECODE;
    START(part_acc);
    START(part_stat);
    SHARED_BYTES(memory);
    const uint warp = THREAD / 32, g = THREAD % 32 / 4, t = THREAD % 4, sequence = blockIdx.z;
    const uint head0 = GROUP_Y * HEADS, present = heads - head0 < HEADS ? heads - head0 : HEADS;
    const Cut all = cut(range[2 * sequence], RANGE_END(sequence), parts, chunk);
    if (GROUP_X >= all.used) return;
    const uint first = all.first + GROUP_X * all.size;
    const uint end = all.end - first < all.size ? all.end : first + all.size;
    const uint row = sequence * heads + head0;
    const Keys keys = KEYS(sequence, head0);
    float acc[ROW_TILES][COLUMNS][4], max[ROW_TILES][2], sum[ROW_TILES][2];
    attend(&keys, q + (ulong)row * HEAD_DIM, present, first, end, memory, acc, max, sum);
#pragma unroll
    for (uint r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (uint i = 0; i < 2; ++i) {
            const uint head = 16 * r + 8 * i + g;
            if (head >= present) continue;
            float *to, *head_stat;
            place(&all, row + head, GROUP_X, parts, acc_out, stat, part_acc, part_stat, &to, &head_stat);
#pragma unroll
            for (uint n = 0; n < COLUMNS; ++n)
                for (uint c = 0; c < 2; ++c) to[8 * (warp * COLUMNS + n) + 2 * t + c] = acc[r][n][2 * i + c];
            if (warp == 0 && t == 0) {
                head_stat[0] = max[r][i];
                head_stat[1] = sum[r][i];
            }
        }
}

// Grid (head groups, tokens): a prompt's tokens go through the keys one by one, each with all heads of a
// block.
KERNEL(32 * WARPS) attn_prefill_latent(PREFILL_OPERANDS) {
    START_PREFILL;
    SHARED_BYTES(memory);
    const uint warp = THREAD / 32, g = THREAD % 32 / 4, t = THREAD % 4;
    const uint head0 = GROUP_X * HEADS, present = heads - head0 < HEADS ? heads - head0 : HEADS;
    uint first, end;
    const uint s = visible(query_start, context, GROUP_Y, sequences, window, KEYS_MAX, &first, &end);
    const ulong row = (ulong)GROUP_Y * heads + head0;
    const Keys keys = KEYS(s, head0);
    float acc[ROW_TILES][COLUMNS][4], max[ROW_TILES][2], sum[ROW_TILES][2];
    attend(&keys, q + row * HEAD_DIM, present, first, end, memory, acc, max, sum);
#pragma unroll
    for (uint r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (uint i = 0; i < 2; ++i) {
            const uint head = 16 * r + 8 * i + g;
            if (head >= present) continue;
            float total = sum[r][i];
            const float scale = join_sink(max[r][i], &total, sinks, head0 + head, has_sinks) / total;
#pragma unroll
            for (uint n = 0; n < COLUMNS; ++n)
                *(uint*)(out + (row + head) * VALUE_DIM + 8 * (warp * COLUMNS + n) + 2 * t) =
                    CAT(pack_, X)(acc[r][n][2 * i] * scale, acc[r][n][2 * i + 1] * scale);
        }
}

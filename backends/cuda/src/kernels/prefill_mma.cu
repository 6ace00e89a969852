// Prefill attention on tensor cores (flash attention: Dao 2023): X is KV, bf16 or f16; HEAD_DIM a multiple of 16;
// TILE keys at a time, 32 or 64.
//
// A block is one KV head and BLOCK_ROWS rows of one sequence, where a row is a query of one of the heads that
// share the KV head, a query's heads side by side: grid (tiles, kv_heads). Keys come TILE at a time into two
// buffers, the next by copies that run beside the arithmetic. A warp holds 16 * ROW_TILES rows.
//
// Shared rows are HEAD_DIM elements in chunks of 16 bytes, chunk c of row r at c ^ (r % 8): the 8 rows that
// one matrix load reads then lie in unlike banks. For that, rows are apart by a multiple of 8 chunks.

#define PREFILL_WARPS 4
#define WARP_ROWS (16 * ROW_TILES)
#define BLOCK_ROWS (PREFILL_WARPS * WARP_ROWS)
#define TILE_WARPS (TILE / 32)
#define ROW ((HEAD_DIM + 63) / 64 * 64)

DEVICE ushort* chunk_at(ushort* rows, uint row, uint chunk) { return rows + row * ROW + (chunk ^ row % 8) * 8; }

// Looks up a lane's key, and tells whether any of the warp's keys is absent.
DEVICE void find(const Keys* keys, uint t, uint first, uint end, uint* line, bool* absent) {
    *line = line_of(keys, t, first, end);
    const bool any = any_lane(*line == NOWHERE);
    if (THREAD % 32 == 0) *absent = any;
}

// Begins to copy TILE rows of a pool, by their lines.
DEVICE void fetch(ushort* to, const ushort* pool, const uint* lines) {
    for (uint i = THREAD; i < TILE * CHUNKS; i += 32 * PREFILL_WARPS) {
        const uint row = i / CHUNKS, chunk = i % CHUNKS, line = lines[row];
        const bool present = line != NOWHERE;
        copy16(chunk_at(to, row, chunk), pool + (present ? (ulong)line * HEAD_DIM + chunk * 8 : 0), present);
    }
}

KERNEL(32 * PREFILL_WARPS) attn_prefill_mma(PREFILL_OPERANDS) {
    // what else there is is used by instructions that stay behind these, and an address of the launch takes no register
    START(query_start);
    START(context);
    START(pages);
    START(sinks);
    SHARED_BYTES(memory);
    ushort* const queries = (ushort*)memory;            // [BLOCK_ROWS, ROW]
    ushort* const k_tiles = queries + BLOCK_ROWS * ROW; // [2, TILE, ROW]
    ushort* const v_tiles = k_tiles + 2 * TILE * ROW;   // [2, TILE, ROW]
    LOCAL uint lines[3][TILE]; // of this step, the next and the one after
    LOCAL bool absent[3][TILE_WARPS];
    const uint lane = THREAD % 32, warp = THREAD / 32, g = lane / 4, t = lane % 4;
    const uint ratio = heads / kv_heads, kv_head = GROUP_Y;

    // the sequence and the rows of this block; the longest rows first
    uint tile = gridDim.x - 1 - GROUP_X, s = 0, count = 0;
    for (; s < sequences; ++s) {
        const uint start = query_start[s], stop = query_start[s + 1];
        const bool sane = start <= stop && stop <= tokens && stop - start <= context[s];
        count = sane ? (stop - start) * ratio : 0;
        const uint tiles = (count + BLOCK_ROWS - 1) / BLOCK_ROWS;
        if (tile < tiles) break;
        tile -= tiles;
    }
    if (s == sequences) return;
    const uint row0 = tile * BLOCK_ROWS, token0 = query_start[s];
    const uint position0 = context[s] - count / ratio; // of the sequence's first query
    const uint last_row = (row0 + BLOCK_ROWS < count ? row0 + BLOCK_ROWS : count) - 1;
    // the first row sees least of the end, the last row least of the start
    const uint end_min = position0 + row0 / ratio + 1, end_max = position0 + last_row / ratio + 1;
    const uint first_min = end_min > window ? end_min - window : 0;
    const uint first_max = end_max > window ? end_max - window : 0;
    const uint key_first = first_min / TILE * TILE;
    const uint key_end = end_max < KEYS_MAX ? end_max : (uint)KEYS_MAX;
    const Keys keys = KEYS(s, kv_head * ratio);

    for (uint i = THREAD; i < BLOCK_ROWS * CHUNKS; i += 32 * PREFILL_WARPS) {
        const uint row = row0 + i / CHUNKS;
        const bool present = row < count;
        const ulong line = (ulong)(token0 + row / ratio) * heads + kv_head * ratio + row % ratio;
        copy16(chunk_at(queries, i / CHUNKS, i % CHUNKS), q + (present ? line * HEAD_DIM + i % CHUNKS * 8 : 0), present);
    }
    if (warp < 2 * TILE_WARPS)
        find(&keys, key_first + THREAD, first_min, key_end, &lines[warp / TILE_WARPS][THREAD % TILE],
             &absent[warp / TILE_WARPS][warp % TILE_WARPS]);
    BARRIER();
    fetch(k_tiles, k_pool, lines[0]);
    fetch(v_tiles, v_pool, lines[0]);
    copies_close();

    // this lane's rows: g and g + 8 of each row tile; what they see
    uint seen_first[ROW_TILES][2], seen_end[ROW_TILES][2];
    for (uint r = 0; r < ROW_TILES; ++r)
        for (uint i = 0; i < 2; ++i) {
            const uint row = row0 + warp * WARP_ROWS + r * 16 + i * 8 + g;
            const uint position = position0 + (row < count ? row : count - 1) / ratio;
            seen_end[r][i] = position + 1;
            seen_first[r][i] = position + 1 > window ? position + 1 - window : 0;
        }
    float acc[ROW_TILES][HEAD_DIM / 8][4], max[ROW_TILES][2], sum[ROW_TILES][2];
    for (uint r = 0; r < ROW_TILES; ++r) {
        for (uint n = 0; n < HEAD_DIM / 8; ++n)
            for (uint c = 0; c < 4; ++c) acc[r][n][c] = 0.0f;
        for (uint i = 0; i < 2; ++i) {
            max[r][i] = -INFINITY;
            sum[r][i] = 0.0f;
        }
    }

    uint step = 0;
    for (uint base = key_first; base < key_end; base += TILE, ++step) {
        const uint buffer = step % 2;
        // the other buffer is free since the barrier that ended the last step
        if (base + TILE < key_end) {
            fetch(k_tiles + (1 - buffer) * TILE * ROW, k_pool, lines[(step + 1) % 3]);
            fetch(v_tiles + (1 - buffer) * TILE * ROW, v_pool, lines[(step + 1) % 3]);
        }
        copies_close();
        copies_wait<1>();
        BARRIER();
        if (warp < TILE_WARPS)
            find(&keys, base + 2 * TILE + THREAD, first_min, key_end, &lines[(step + 2) % 3][THREAD],
                 &absent[(step + 2) % 3][warp]);
        ushort* const k_tile = k_tiles + buffer * TILE * ROW;
        ushort* const v_tile = v_tiles + buffer * TILE * ROW;

        float scores[ROW_TILES][TILE / 8][4];
        for (uint r = 0; r < ROW_TILES; ++r)
            for (uint n = 0; n < TILE / 8; ++n)
                for (uint c = 0; c < 4; ++c) scores[r][n][c] = 0.0f;
#pragma unroll
        for (uint d = 0; d < HEAD_DIM / 16; ++d) {
            uint left[ROW_TILES][4];
#pragma unroll
            for (uint r = 0; r < ROW_TILES; ++r)
                load_matrices(left[r], chunk_at(queries, warp * WARP_ROWS + r * 16 + lane % 16, 2 * d + lane / 16));
#pragma unroll
            for (uint n = 0; n < TILE / 16; ++n) {
                uint right[4];
                load_matrices(right, chunk_at(k_tile, 16 * n + lane / 16 * 8 + lane % 8, 2 * d + lane / 8 % 2));
#pragma unroll
                for (uint r = 0; r < ROW_TILES; ++r) {
                    CAT(mma_, KV)(scores[r][2 * n], left[r], right);
                    CAT(mma_, KV)(scores[r][2 * n + 1], left[r], right + 2);
                }
            }
        }

        bool all_seen = base >= first_max && base + TILE <= end_min;
        for (uint w = 0; w < TILE_WARPS; ++w) all_seen = all_seen && !absent[step % 3][w];
        uint weights[ROW_TILES][TILE / 8][2]; // left fragments: rows g and g + 8
#pragma unroll
        for (uint r = 0; r < ROW_TILES; ++r) {
#pragma unroll
            for (uint i = 0; i < 2; ++i) {
                if (!all_seen) {
#pragma unroll
                    for (uint n = 0; n < TILE / 8; ++n)
#pragma unroll
                        for (uint c = 0; c < 2; ++c) {
                            const uint at = 8 * n + 2 * t + c;
                            const bool there = base + at >= seen_first[r][i] && base + at < seen_end[r][i] &&
                                               lines[step % 3][at] != NOWHERE;
                            if (!there) scores[r][n][2 * i + c] = -INFINITY;
                        }
                }
                float top = -INFINITY;
#pragma unroll
                for (uint n = 0; n < TILE / 8; ++n)
#pragma unroll
                    for (uint c = 0; c < 2; ++c) {
                        scores[r][n][2 * i + c] *= SCALE;
                        top = FMAX(top, scores[r][n][2 * i + c]);
                    }
                top = FMAX(top, shuffle_xor(top, 1));
                top = FMAX(top, shuffle_xor(top, 2));
                const float new_max = FMAX(max[r][i], top);
                const float keep = max[r][i] > -INFINITY ? exp2_fast((max[r][i] - new_max) * LOG2E) : 0.0f;
                max[r][i] = new_max;
                sum[r][i] *= keep;
#pragma unroll
                for (uint n = 0; n < HEAD_DIM / 8; ++n) {
                    acc[r][n][2 * i] *= keep;
                    acc[r][n][2 * i + 1] *= keep;
                }
                const float base_max = new_max > -INFINITY ? new_max : 0.0f;
#pragma unroll
                for (uint n = 0; n < TILE / 8; ++n) {
                    const float a = exp2_fast((scores[r][n][2 * i] - base_max) * LOG2E);
                    const float b = exp2_fast((scores[r][n][2 * i + 1] - base_max) * LOG2E);
                    sum[r][i] += a + b;
                    weights[r][n][i] = CAT(pack_, KV)(a, b);
                }
            }
        }
#pragma unroll
        for (uint n = 0; n < TILE / 16; ++n) {
#pragma unroll
            for (uint d = 0; d < HEAD_DIM / 16; ++d) {
                uint right[4];
                load_matrices_transposed(right, chunk_at(v_tile, 16 * n + lane % 16, 2 * d + lane / 16));
#pragma unroll
                for (uint r = 0; r < ROW_TILES; ++r) {
                    const uint left[4] = {weights[r][2 * n][0], weights[r][2 * n][1], weights[r][2 * n + 1][0],
                                          weights[r][2 * n + 1][1]};
                    CAT(mma_, KV)(acc[r][2 * d], left, right);
                    CAT(mma_, KV)(acc[r][2 * d + 1], left, right + 2);
                }
            }
        }
        BARRIER();
    }
    copies_wait<0>();

#pragma unroll
    for (uint r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (uint i = 0; i < 2; ++i) {
            sum[r][i] += shuffle_xor(sum[r][i], 1);
            sum[r][i] += shuffle_xor(sum[r][i], 2);
            const uint row = row0 + warp * WARP_ROWS + r * 16 + i * 8 + g;
            if (row >= count) continue;
            const ulong line = (ulong)(token0 + row / ratio) * heads + kv_head * ratio + row % ratio;
            const uint head = kv_head * ratio + row % ratio;
            float all = sum[r][i];
            const float keep = join_sink(max[r][i], &all, sinks, head, has_sinks), scale = keep / all;
#pragma unroll
            for (uint n = 0; n < HEAD_DIM / 8; ++n)
                *(uint*)(out + line * HEAD_DIM + 8 * n + 2 * t) =
                    CAT(pack_, X)(acc[r][n][2 * i] * scale, acc[r][n][2 * i + 1] * scale);
        }
}

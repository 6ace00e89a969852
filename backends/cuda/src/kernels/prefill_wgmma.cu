// Prefill attention on Hopper's tensor cores (FlashAttention-3: Shah et al. 2024): X is KV, bf16 or f16; HEAD_DIM
// is 64 or 128.
//
// A block goes through items: one KV head and BLOCK_ROWS rows of one sequence, rows as in prefill_mma.cu; each block
// takes every `gridDim.x`-th. Two warpgroups hold 64 rows each; a third one copies keys and values, TILE at a time,
// into STAGES buffers of each. A warpgroup begins the scores of the next tile and the product with the values of
// this one, and makes weights of those scores while the values are multiplied; the two begin in turns.
//
// In shared memory a matrix is panels of 64 elements of each row, which is 128 bytes: chunk c of 16 bytes of row r
// is at c ^ (r % 8). Products read that as their 128-byte swizzle, from panels at multiples of 1024 bytes.

#define CONSUMERS 2
#define WARPGROUP 128
#define GROUP_ROWS 64
#define BLOCK_ROWS (CONSUMERS * GROUP_ROWS)
#define TILE 128
#define PANELS (HEAD_DIM / 64)
#define PANEL_BYTES(rows) ((rows) * 128)
#define TILE_BYTES (PANELS * PANEL_BYTES(TILE))
#define QUERY_BYTES (PANELS * PANEL_BYTES(GROUP_ROWS))
// of a thread: 65536 in all, in steps of 8
#define PRODUCER_REGISTERS 72
#define CONSUMER_REGISTERS 216
// Weights are 2^GROWTH_MAX at most: the maximum that they are relative to follows only scores further above it.
#ifndef GROWTH_MAX
#define GROWTH_MAX 8.0f
#endif
#define SWIZZLED (1ull << 62)
#define EIGHT_ROWS 1024 // bytes from 8 rows of a panel to the next 8

#ifdef WGMMA

// Where chunk `chunk` of row `row` lies in panels of `rows`.
DEVICE uint chunk_at(uint rows, uint row, uint chunk) {
    return chunk / 8 * PANEL_BYTES(rows) + row * 128 + (chunk % 8 ^ row % 8) * 16;
}

// The PTX manual's "Matrix Descriptor Format"; `leading` is from one panel to the next, where rows lie across k.
DEVICE ulong matrix_at(uint address, uint leading) {
    const ulong strides = (ulong)(EIGHT_ROWS >> 4) << 32 | (ulong)(leading >> 4) << 16;
    return SWIZZLED | strides | (address & 0x3FFFFu) >> 4;
}

// A warp copies 32 rows of a tile, ROWS_AT_ONCE with each instruction; where they go repeats every 8 rows.
#define ROWS_AT_ONCE (32 / CHUNKS)
#define PLACES (8 / ROWS_AT_ONCE)

// Begins to copy a warp's rows of a tile, whose lines the lanes hold, of which some may be absent. `pool` is at
// the lane's chunk, and `places` are those of the lane's first PLACES rows.
template <bool some_absent> DEVICE void fetch(uint tile, const uint* places, const uchar* pool, uint line) {
#pragma unroll
    for (uint i = 0; i < CHUNKS; ++i) {
        const uint from = shuffle_uint(line, i * ROWS_AT_ONCE + THREAD % 32 / CHUNKS);
        const bool present = !some_absent || from != NOWHERE;
        copy16_at(tile + places[i % PLACES] + i / PLACES * EIGHT_ROWS,
                  pool + (present ? (ulong)from * (2 * HEAD_DIM) : 0), present);
    }
}

// The rows of a block: of sequence `s`, from `row0` to `count`, whose first is query `token0` at `position0`.
typedef struct {
    uint s, kv_head, row0, count, token0, position0;
    uint first_min, key_first, key_end, steps; // keys that any of them sees, and their tiles
} Rows;

// What all lanes of a warp have, told to the assembler: products wait for each other where it thinks that lanes differ.
DEVICE uint uniform(uint v) { return shuffle_uint(v, 0); }

// A stage of the ring of buffers, and the parity of its phase.
typedef struct {
    uint at, parity;
} Stage;

DEVICE void go_on(Stage* stage) {
    if (++stage->at == STAGES) {
        stage->at = 0;
        stage->parity ^= 1;
    }
}

#endif

KERNEL_OF(WARPGROUP * (CONSUMERS + 1), 1) attn_prefill_wgmma(PREFILL_OPERANDS) {
    START_PREFILL;
#ifdef WGMMA
    SHARED_BYTES(memory);
    LOCAL ulong k_full[STAGES], k_free[STAGES], v_full[STAGES], v_free[STAGES], q_full[CONSUMERS];
    LOCAL __align__(16) uint absent[STAGES][TILE / 32]; // a bit for each key
    const uint to_panels = (1024 - shared_address(memory) % 1024) % 1024;
    uchar* const queries = memory + to_panels;                // [CONSUMERS]
    uchar* const k_tiles = queries + CONSUMERS * QUERY_BYTES; // [STAGES]
    uchar* const v_tiles = k_tiles + STAGES * TILE_BYTES;     // [STAGES]
    const uint lane = THREAD % 32, warp = shuffle_uint(THREAD / 32, 0), group = warp / 4;
    const uint ratio = heads / kv_heads;
    const auto rows_of = [&](uint s) {
        const uint start = query_start[s], stop = query_start[s + 1];
        const bool sane = start <= stop && stop <= tokens && stop - start <= context[s];
        return sane ? (stop - start) * ratio : 0;
    };
    uint tiles = 0;
#pragma unroll 4
    for (uint s = 0; s < sequences; ++s) tiles += (rows_of(s) + BLOCK_ROWS - 1) / BLOCK_ROWS;

    // the next rows of this block, the longest rows first; false if there are no more
    uint round = 0, s = sequences, tiles_before = tiles;
    const auto next_rows = [&](Rows* rows) {
        // every other round runs backwards, so that all blocks have as much to do
        const uint item = round * gridDim.x + (round % 2 == 0 ? GROUP_X : gridDim.x - 1 - GROUP_X);
        if (item >= tiles * kv_heads) return false;
        ++round;
        const uint tile = tiles - 1 - item / kv_heads;
        while (tile < tiles_before) tiles_before -= (rows_of(--s) + BLOCK_ROWS - 1) / BLOCK_ROWS;
        rows->s = s;
        rows->kv_head = item % kv_heads;
        rows->row0 = (tile - tiles_before) * BLOCK_ROWS;
        rows->count = rows_of(s);
        rows->token0 = query_start[s];
        rows->position0 = context[s] - rows->count / ratio;
        const uint end = rows->row0 + BLOCK_ROWS, last_row = (end < rows->count ? end : rows->count) - 1;
        const uint first_end = rows->position0 + rows->row0 / ratio + 1;
        const uint last_end = rows->position0 + last_row / ratio + 1;
        rows->first_min = first_end > window ? first_end - window : 0;
        rows->key_first = rows->first_min / TILE * TILE;
        rows->key_end = last_end < KEYS_MAX ? last_end : (uint)KEYS_MAX;
        const bool any = rows->key_first < rows->key_end;
        rows->steps = any ? (rows->key_end - rows->key_first + TILE - 1) / TILE : 0;
        return true;
    };

    if (THREAD == 0) {
        for (uint i = 0; i < STAGES; ++i) {
            phases_begin(&k_full[i], WARPGROUP + 4); // copies, and the bits of each warp's keys
            phases_begin(&v_full[i], WARPGROUP);
            phases_begin(&k_free[i], 4 * CONSUMERS);
            phases_begin(&v_free[i], 4 * CONSUMERS);
        }
        for (uint i = 0; i < CONSUMERS; ++i) phases_begin(&q_full[i], WARPGROUP);
    }
    BARRIER();

    if (group == CONSUMERS) {
        registers_fewer<PRODUCER_REGISTERS>();
        const uint chunk = lane % CHUNKS;
        uint places[PLACES];
        for (uint i = 0; i < PLACES; ++i)
            places[i] = chunk_at(TILE, warp % 4 * 32 + i * ROWS_AT_ONCE + lane / CHUNKS, chunk);
        const uchar* const k_chunk = settled((const uchar*)(k_pool + chunk * 8));
        const uchar* const v_chunk = settled((const uchar*)(v_pool + chunk * 8));
        Stage stage = {0, 1};
        for (Rows rows; next_rows(&rows);) {
            const Keys keys = KEYS(rows.s, rows.kv_head * ratio);
            for (uint base = rows.key_first; base < rows.key_end; base += TILE, go_on(&stage)) {
                const uint t = base + THREAD % WARPGROUP;
                const uint line = line_of(&keys, t, rows.first_min, rows.key_end);
                const uint bits = lanes_where(line == NOWHERE);
                const auto fetch_rows = [&](uchar* tiles, const uchar* pool) {
                    const uint tile = shared_address(tiles) + stage.at * TILE_BYTES;
                    if (bits == 0)
                        fetch<false>(tile, places, pool, line);
                    else
                        fetch<true>(tile, places, pool, line);
                };
                phase_wait(&k_free[stage.at], stage.parity);
                fetch_rows(k_tiles, k_chunk);
                phase_arrive_after_copies(&k_full[stage.at]);
                if (lane == 0) {
                    absent[stage.at][warp % 4] = bits;
                    phase_arrive(&k_full[stage.at]);
                }
                phase_wait(&v_free[stage.at], stage.parity);
                fetch_rows(v_tiles, v_chunk);
                phase_arrive_after_copies(&v_full[stage.at]);
            }
        }
        copies_close();
        copies_wait<0>();
        return;
    }
    registers_more<CONSUMER_REGISTERS>();

    uchar* const group_queries = queries + group * QUERY_BYTES;
    const auto fetch_queries = [&](const Rows& rows) {
        for (uint i = THREAD % WARPGROUP; i < GROUP_ROWS * CHUNKS; i += WARPGROUP) {
            const uint row = rows.row0 + group * GROUP_ROWS + i / CHUNKS;
            const bool present = row < rows.count;
            const uint head = rows.kv_head * ratio + row % ratio;
            const ulong line = (ulong)(rows.token0 + row / ratio) * heads + head;
            copy16(group_queries + chunk_at(GROUP_ROWS, i / CHUNKS, i % CHUNKS),
                   q + (present ? line * HEAD_DIM + i % CHUNKS * 8 : 0), present);
        }
        phase_arrive_after_copies(&q_full[group]);
    };
    const uint g = lane / 4, t = lane % 4;

    // of this lane's rows, g and g + 8 of its warp's 16: what they see, and what all rows of the warp see
    uint seen_first[2], seen_end[2], first_max, end_min;
    float max[2], sum[2], keep[2] = {1.0f, 1.0f};
    float scores[TILE / 2], acc[HEAD_DIM / 2];
    uint weights[TILE / 4];
    const ulong query_matrix = matrix_at(shared_address(group_queries), 16);
    const ulong k_matrix = matrix_at(shared_address(k_tiles), 16);
    const ulong v_matrix = matrix_at(shared_address(v_tiles), PANEL_BYTES(TILE));

    // begins the scores of a tile
    const auto multiply_keys = [&](const Stage& stage) {
        products_open();
        const ulong keys = k_matrix + stage.at * (TILE_BYTES >> 4);
#pragma unroll
        for (uint d = 0; d < HEAD_DIM / 16; ++d)
            CAT(product_of_shared_, KV)(scores,
                                        query_matrix + d / 4 * (PANEL_BYTES(GROUP_ROWS) >> 4) + d % 4 * 2,
                                        keys + d / 4 * (PANEL_BYTES(TILE) >> 4) + d % 4 * 2, d > 0);
        products_close();
    };
    // begins to add a tile's values
    const auto multiply_values = [&](const Stage& stage) {
        products_open();
        const ulong values = v_matrix + stage.at * (TILE_BYTES >> 4);
#pragma unroll
        for (uint n = 0; n < TILE / 16; ++n)
            CAT(product_of_registers_, KV)(acc, weights + 4 * n, values + n * (2 * EIGHT_ROWS >> 4));
        products_close();
    };
    const auto release = [&](ulong* barrier) {
        warp_barrier();
        if (lane == 0) phase_arrive(barrier);
    };
    const auto rescale = [&]() {
        if (!any_lane(keep[0] != 1.0f || keep[1] != 1.0f)) return;
#pragma unroll
        for (uint n = 0; n < HEAD_DIM / 8; ++n)
#pragma unroll
            for (uint c = 0; c < 4; ++c) acc[4 * n + c] *= keep[c / 2];
    };
    // makes weights of scores, and what to keep of the sums so far
    const auto softmax = [&](const Stage& stage, uint base) {
        const uint4 bits = *(const uint4*)absent[stage.at];
        release(&k_free[stage.at]);
        if (base < first_max || base + TILE > end_min || (bits.x | bits.y | bits.z | bits.w) != 0) {
            const uint words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
            for (uint n = 0; n < TILE / 8; ++n)
#pragma unroll
                for (uint c = 0; c < 4; ++c) {
                    const uint at = 8 * n + 2 * t + c % 2;
                    const bool there = base + at >= seen_first[c / 2] && base + at < seen_end[c / 2] &&
                                       (words[n / 4] >> at % 32 & 1) == 0;
                    if (!there) scores[4 * n + c] = -INFINITY;
                }
        }
#pragma unroll
        for (uint i = 0; i < 2; ++i) {
            float tops[2] = {scores[2 * i], scores[2 * i + 1]};
#pragma unroll
            for (uint n = 1; n < TILE / 8; ++n)
#pragma unroll
                for (uint c = 0; c < 2; ++c) tops[c] = FMAX(tops[c], scores[4 * n + 2 * i + c]);
            float top = FMAX(tops[0], tops[1]);
            top = FMAX(top, shuffle_xor(top, 1));
            top = FMAX(top, shuffle_xor(top, 2));
            keep[i] = 1.0f;
            if ((top - max[i]) * (SCALE * LOG2E) > GROWTH_MAX) {
                keep[i] = exp2_fast((max[i] - top) * (SCALE * LOG2E));
                max[i] = top;
            }
            const float base_max = (max[i] > -INFINITY ? max[i] : 0.0f) * (SCALE * LOG2E);
            float sums[2] = {sum[i] * keep[i], 0.0f};
#pragma unroll
            for (uint n = 0; n < TILE / 8; ++n)
#pragma unroll
                for (uint c = 0; c < 2; ++c) {
                    float& score = scores[4 * n + 2 * i + c];
                    score = exp2_fast(MAD(score, SCALE * LOG2E, -base_max));
                    sums[c] += score;
                }
            sum[i] = sums[0] + sums[1];
        }
    };
    const auto pack = [&]() {
#pragma unroll
        for (uint n = 0; n < TILE / 4; ++n) weights[n] = CAT(pack_, KV)(scores[2 * n], scores[2 * n + 1]);
    };
    // the warpgroups begin their products in turns
    const uint mine = 1 + group, other = 2 - group;
    if (group == 1) turn_give(other, CONSUMERS * WARPGROUP);

    Rows following;
    bool more = uniform(next_rows(&following));
    if (more) fetch_queries(following);
    uint q_parity = 0;
    Stage stage = {0, 0};
    while (more) {
        const Rows rows = following;
        const uint steps = uniform(rows.steps);
        const uint warp_row0 = rows.row0 + group * GROUP_ROWS + warp % 4 * 16;
        for (uint i = 0; i < 2; ++i) {
            const uint row = warp_row0 + 8 * i + g;
            const uint position = rows.position0 + (row < rows.count ? row : rows.count - 1) / ratio;
            seen_end[i] = position + 1;
            seen_first[i] = position + 1 > window ? position + 1 - window : 0;
            max[i] = -INFINITY;
            sum[i] = 0.0f;
            keep[i] = 1.0f;
        }
        end_min = shuffle_uint(seen_end[0], 0);
        first_max = shuffle_uint(seen_first[1], 31);
        for (uint i = 0; i < HEAD_DIM / 2; ++i) acc[i] = 0.0f;

        phase_wait(&q_full[group], q_parity);
        q_parity ^= 1;
        if (steps > 0) {
            phase_wait(&k_full[stage.at], stage.parity);
            products_see_shared();
            turn_wait(mine, CONSUMERS * WARPGROUP);
            multiply_keys(stage);
            turn_give(other, CONSUMERS * WARPGROUP);
            products_wait<0>();
            hold(scores);
            softmax(stage, rows.key_first);
            phase_wait(&v_full[stage.at], stage.parity);
            pack();
            for (uint step = 1; step < steps; ++step) {
                Stage next = stage;
                go_on(&next);
                phase_wait(&k_full[next.at], next.parity);
                products_see_shared();
                turn_wait(mine, CONSUMERS * WARPGROUP);
                multiply_keys(next);
                hold(acc);
                rescale();
                multiply_values(stage);
                turn_give(other, CONSUMERS * WARPGROUP);
                products_wait<1>();
                hold(scores);
                softmax(next, rows.key_first + step * TILE);
                hold(scores);
                // here, since without a branch the assembler puts the wait below before the softmax
                phase_wait(&v_full[next.at], next.parity);
                products_wait<0>();
                hold(acc);
                hold(scores);
                release(&v_free[stage.at]);
                pack();
                stage = next;
            }
            rescale();
            products_see_shared();
            multiply_values(stage);
        }
        // queries of the next rows, once no warp of the group multiplies these
        more = uniform(next_rows(&following));
        if (more) {
            turn_wait(1 + CONSUMERS + group, WARPGROUP);
            fetch_queries(following);
        }
        if (steps > 0) {
            products_wait<0>();
            hold(acc);
            release(&v_free[stage.at]);
            go_on(&stage);
        }

        for (uint i = 0; i < 2; ++i) {
            sum[i] += shuffle_xor(sum[i], 1);
            sum[i] += shuffle_xor(sum[i], 2);
            const uint row = warp_row0 + 8 * i + g;
            if (row >= rows.count) continue;
            const uint head = rows.kv_head * ratio + row % ratio;
            const ulong line = (ulong)(rows.token0 + row / ratio) * heads + head;
            float all = sum[i];
            const float joined = join_sink(max[i] * SCALE, &all, sinks, head, has_sinks), scale = joined / all;
#pragma unroll
            for (uint n = 0; n < HEAD_DIM / 8; ++n)
                *(uint*)(out + line * HEAD_DIM + 8 * n + 2 * t) =
                    CAT(pack_, X)(acc[4 * n + 2 * i] * scale, acc[4 * n + 2 * i + 1] * scale);
        }
    }
    // as many waits as the other warpgroup gives
    if (group == 0) turn_wait(mine, CONSUMERS * WARPGROUP);
#endif
}

// Decode attention in f32 arithmetic, for any dtypes and head_dim: X, KV, HEAD_DIM, HEADS.
//
// A warp takes 32 keys at a time. For the scores a lane is a key and reads all of it, once for all HEADS
// queries; for the values a lane is VD neighbouring dimensions (of DIMS such groups) and the keys pass by.

#define GROUPS ((VALUE_DIM + 32 * VD - 1) / (32 * VD))
// Keys whose values are under way together.
#define AHEAD 8

// KW elements: 8 where rows allow aligned vectors of them, else 1. VD elements likewise: 4, 2 or 1.
#define LOAD_KEYS(T) CAT(CAT(CAT(load, KW), _), T)
#define LOAD_VALUES(T) CAT(CAT(CAT(load, VD), _), T)

// A key's weights for all heads.
DEVICE void load_weights(const float* p, float* w) {
#if HEADS % 4 == 0
    for (uint h = 0; h < HEADS; h += 4) load4_f32(p + h, w + h);
#else
    for (uint h = 0; h < HEADS; ++h) w[h] = p[h];
#endif
}

KERNEL(32 * WARPS) attn_decode(DECODE_OPERANDS, DECODE_EXTRA) {
    START_DECODE;
    START(part_acc);
    START(part_stat);
    LOCAL __align__(16) float query[HEADS][HEAD_DIM];
    LOCAL __align__(16) float weights[WARPS][32][HEADS];
    LOCAL uint places[WARPS][32];
    LOCAL float sums[WARPS][HEADS][VALUE_DIM];
    LOCAL float stats[WARPS][HEADS][2];
    const uint lane = THREAD % 32, warp = THREAD / 32, sequence = blockIdx.z;
    const uint ratio = heads / kv_heads, groups = (ratio + HEADS - 1) / HEADS;
    const uint kv_head = GROUP_Y / groups, head0 = kv_head * ratio + GROUP_Y % groups * HEADS;
    const uint rest = (kv_head + 1) * ratio - head0, present = rest < HEADS ? rest : HEADS;
    const Cut all = cut(range[2 * sequence], RANGE_END(sequence), parts, chunk);
    if (GROUP_X >= all.used) return;
    const uint first = all.first + GROUP_X * all.size;
    const uint end = all.end - first < all.size ? all.end : first + all.size;
    const ulong row = (ulong)sequence * heads + head0;
    for (uint i = THREAD; i < HEADS * HEAD_DIM; i += 32 * WARPS)
        query[i / HEAD_DIM][i % HEAD_DIM] = i / HEAD_DIM < present ? LOAD(X, q, row * HEAD_DIM + i) * SCALE : 0.0f;
    BARRIER();
    const Keys keys = KEYS(sequence, head0);
    float max[HEADS], sum[HEADS], acc[HEADS][GROUPS][VD];
    for (uint h = 0; h < HEADS; ++h) {
        max[h] = -INFINITY;
        sum[h] = 0.0f;
        for (uint i = 0; i < GROUPS * VD; ++i) acc[h][i / VD][i % VD] = 0.0f;
    }
    for (uint base = first + 32 * warp; base < end; base += 32 * WARPS) {
        const uint line = line_of(&keys, base + lane, end);
        float score[HEADS];
        for (uint h = 0; h < HEADS; ++h) score[h] = 0.0f;
        if (line != NOWHERE) {
            const TYPE(KV)* key = k_pool + line_at(&keys, line);
#pragma unroll 4
            for (uint d = 0; d < HEAD_DIM; d += KW) {
                float v[KW], part[KW];
                LOAD_KEYS(KV)(key + d, v);
                for (uint h = 0; h < HEADS; ++h) {
                    LOAD_KEYS(f32)(&query[h][d], part);
                    for (uint j = 0; j < KW; ++j) score[h] = MAD(part[j], v[j], score[h]);
                }
            }
        }
        float value_scale = 1.0f;
#if KIND(KV)
        if (line != NOWHERE) {
            const float key_scale = scale_at(&keys, k_pool, line_at(&keys, line), line);
            for (uint h = 0; h < HEADS; ++h) score[h] *= key_scale;
            value_scale = scale_at(&keys, v_pool, line_at(&keys, line), line);
        }
#endif
        for (uint h = 0; h < HEADS; ++h) {
            score[h] = CAPPED(score[h]);
            float top = line != NOWHERE ? score[h] : -INFINITY;
            for (uint mask = 16; mask > 0; mask /= 2) top = FMAX(top, shuffle_xor(top, mask));
            const float new_max = FMAX(max[h], top);
            const float keep = share(max[h], new_max);
            const float p = line != NOWHERE ? exp2_fast((score[h] - new_max) * LOG2E) : 0.0f;
            max[h] = new_max;
            sum[h] = sum[h] * keep + p;
            weights[warp][lane][h] = p * value_scale;
            for (uint i = 0; i < GROUPS * VD; ++i) acc[h][i / VD][i % VD] *= keep;
        }
        places[warp][lane] = line;
        warp_barrier();
        for (uint j0 = 0; j0 < 32; j0 += AHEAD) {
            float v[AHEAD][GROUPS][VD];
#pragma unroll
            for (uint j = 0; j < AHEAD; ++j) {
                const uint place = places[warp][j0 + j];
                for (uint i = 0; i < GROUPS; ++i) {
                    const uint d = (i * 32 + lane) * VD;
                    // absent values count 0: a weight of 0 times what lies there may be NaN
                    const bool there = place != NOWHERE && d < VALUE_DIM;
                    const TYPE(KV)* value = v_pool + line_at(&keys, place) + d;
                    for (uint e = 0; e < VD; ++e) v[j][i][e] = 0.0f;
                    if (there) LOAD_VALUES(KV)(value, v[j][i]);
                }
            }
#pragma unroll
            for (uint j = 0; j < AHEAD; ++j) {
                float w[HEADS];
                load_weights(weights[warp][j0 + j], w);
                for (uint h = 0; h < HEADS; ++h)
                    for (uint i = 0; i < GROUPS * VD; ++i)
                        acc[h][i / VD][i % VD] = MAD(w[h], v[j][i / VD][i % VD], acc[h][i / VD][i % VD]);
            }
        }
        warp_barrier();
    }
    for (uint h = 0; h < HEADS; ++h) {
        for (uint mask = 16; mask > 0; mask /= 2) sum[h] += shuffle_xor(sum[h], mask);
        for (uint i = 0; i < GROUPS; ++i)
            for (uint e = 0; e < VD; ++e) {
                const uint d = (i * 32 + lane) * VD + e;
                if (d < VALUE_DIM) sums[warp][h][d] = acc[h][i][e];
            }
        if (lane == 0) {
            stats[warp][h][0] = max[h];
            stats[warp][h][1] = sum[h];
        }
    }
    join(&all, sums, stats, (uint)row, present, GROUP_X, parts, acc_out, stat, part_acc, part_stat);
}

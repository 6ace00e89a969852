// Decode attention on tensor cores: bf16 or f16 KV, HEAD_DIM 64 or 128, up to HEADS = 8 query heads of one KV
// head to a block; X is KV, or f32 over bf16 KV (SPLIT 3: q and the weights as exact sums of three bf16).
//
// Keys and values go from memory to registers in vectors of 16 bytes, each once for all heads. A warp takes 16
// keys at a time. Scores: q [16 (8 unused), 16 dims] . k^T [16 dims, 8 keys]; a lane reads 8 neighbouring
// dimensions of its key, which only permutes the dimensions, in q alike. Values: v^T [16 dims, 16 keys] .
// p^T [16 keys, 8 heads]: the scores' result has the layout of that right operand; pairs of keys' values
// are put together by byte permutation.

#define PAIRS (HEAD_DIM / 32)      // pairs of instructions along a key
#define DV (HEAD_DIM / 16)         // dimensions of a lane, in each half of the head
#define VALUE_REGISTERS (DV / 2)

#if DV == 8
#define LOAD_DV(p, r)                                                                                           \
    do {                                                                                                        \
        const uint4 v = load_once16(p);                                                                         \
        (r)[0] = v.x; (r)[1] = v.y; (r)[2] = v.z; (r)[3] = v.w;                                                 \
    } while (0)
#else
#define LOAD_DV(p, r)                                                                                           \
    do {                                                                                                        \
        const uint2 v = load_once8(p);                                                                          \
        (r)[0] = v.x; (r)[1] = v.y;                                                                             \
    } while (0)
#endif

// Two values in the KV's dtype; SPLIT 3 gives what is left to the next two.
DEVICE void split(float a, float b, uint* parts) {
    for (uint i = 0; i < SPLIT; ++i) {
        float pair[2];
        parts[i] = CAT(pack_, KV)(a, b);
        CAT(unpack_, KV)(parts[i], pair);
        a -= pair[0];
        b -= pair[1];
    }
}

KERNEL_OF(32 * WARPS, SPLIT == 3 ? 2 : 3) attn_decode_mma(DECODE_OPERANDS, DECODE_EXTRA) {
    START_DECODE;
    START(part_acc);
    START(part_stat);
    LOCAL float sums[WARPS][HEADS][HEAD_DIM];
    LOCAL float stats[WARPS][HEADS][2];
    const uint lane = THREAD % 32, warp = THREAD / 32, g = lane / 4, t = lane % 4, sequence = blockIdx.z;
    const uint ratio = heads / kv_heads, groups = (ratio + HEADS - 1) / HEADS;
    const uint kv_head = GROUP_Y / groups, head0 = kv_head * ratio + GROUP_Y % groups * HEADS;
    const uint rest = (kv_head + 1) * ratio - head0, present = rest < HEADS ? rest : HEADS;
    const Cut all = cut(range[2 * sequence], RANGE_END(sequence), parts, chunk);
    if (GROUP_X >= all.used) return;
    const uint first = all.first + GROUP_X * all.size;
    const uint end = all.end - first < all.size ? all.end : first + all.size;
    const ulong row = (ulong)sequence * heads + head0;
    const Keys keys = KEYS(sequence, head0);

    // left fragments of q: row g is head g, rows 8 to 15 are 0
    uint query[PAIRS][4][SPLIT];
#pragma unroll
    for (uint j = 0; j < PAIRS; ++j) {
        float v[8];
        for (uint i = 0; i < 8; ++i) v[i] = 0.0f;
        if (g < present) CAT(load8_, X)(q + (row + g) * HEAD_DIM + 32 * j + 8 * t, v);
        for (uint i = 0; i < 4; ++i) split(v[2 * i], v[2 * i + 1], query[j][i]);
    }
    float acc[DV][4]; // rows: dimensions g DV + i and HEAD_DIM / 2 + g DV + i; columns: heads 2t, 2t + 1
    for (uint i = 0; i < DV; ++i)
        for (uint c = 0; c < 4; ++c) acc[i][c] = 0.0f;
    float max = -INFINITY, sum = 0.0f; // of head g

    uint next = line_of(&keys, first + 16 * warp + lane % 16, end);
    for (uint base = first + 16 * warp; base < end; base += 16 * WARPS) {
        const uint lines = next; // of key base + lane % 16
        uint key_registers[2][PAIRS][4], value_registers[4][2][VALUE_REGISTERS];
#pragma unroll
        for (uint n = 0; n < 2; ++n) {
            const uint line = shuffle_uint(lines, 8 * n + g);
            const TYPE(KV)* key = k_pool + (ulong)line * HEAD_DIM + 8 * t;
#pragma unroll
            for (uint j = 0; j < PAIRS; ++j) {
                uint4 v = make_uint4(0, 0, 0, 0);
                if (line != NOWHERE) v = load_once16(key + 32 * j);
                key_registers[n][j][0] = v.x; key_registers[n][j][1] = v.y;
                key_registers[n][j][2] = v.z; key_registers[n][j][3] = v.w;
            }
        }
#pragma unroll
        for (uint n = 0; n < 4; ++n) {
            const uint line = shuffle_uint(lines, n / 2 * 8 + 2 * t + n % 2);
            const TYPE(KV)* value = v_pool + (ulong)line * HEAD_DIM + g * DV;
#pragma unroll
            for (uint half_head = 0; half_head < 2; ++half_head) {
                for (uint i = 0; i < VALUE_REGISTERS; ++i) value_registers[n][half_head][i] = 0;
                if (line != NOWHERE) LOAD_DV(value + half_head * (HEAD_DIM / 2), value_registers[n][half_head]);
            }
        }
        next = line_of(&keys, base + 16 * WARPS + lane % 16, end);

        float score[4]; // of head g and keys 2t, 2t + 1, 8 + 2t, 9 + 2t
        float top = -INFINITY;
#pragma unroll
        for (uint n = 0; n < 2; ++n) {
            float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
            for (uint j = 0; j < PAIRS; ++j)
#pragma unroll
                for (uint p = 0; p < SPLIT; ++p) {
                    const uint first_left[4] = {query[j][0][p], 0, query[j][1][p], 0};
                    const uint second_left[4] = {query[j][2][p], 0, query[j][3][p], 0};
                    CAT(mma_, KV)(s, first_left, key_registers[n][j]);
                    CAT(mma_, KV)(s, second_left, key_registers[n][j] + 2);
                }
            for (uint i = 0; i < 2; ++i) {
                const bool there = shuffle_uint(lines, 8 * n + 2 * t + i) != NOWHERE;
                score[2 * n + i] = there ? s[i] * SCALE : -INFINITY;
                top = FMAX(top, score[2 * n + i]);
            }
        }
        top = FMAX(top, shuffle_xor(top, 1));
        top = FMAX(top, shuffle_xor(top, 2));
        const float new_max = FMAX(max, top);
        const float keep = share(max, new_max);
        max = new_max;
        sum *= keep;
        float p[4];
        for (uint i = 0; i < 4; ++i) {
            p[i] = share(score[i], new_max);
            sum += p[i];
        }
        uint weights[2][SPLIT]; // right fragments: keys 2t, 2t + 1 and 8 + 2t, 9 + 2t of head g
        split(p[0], p[1], weights[0]);
        split(p[2], p[3], weights[1]);
        const float keep_even = shuffle(keep, 8 * t), keep_odd = shuffle(keep, 8 * t + 4);
#pragma unroll
        for (uint i = 0; i < DV; ++i) {
            uint left[4];
#pragma unroll
            for (uint c = 0; c < 4; ++c) {
                const uint a = value_registers[c / 2 * 2][c % 2][i / 2], b = value_registers[c / 2 * 2 + 1][c % 2][i / 2];
                left[c] = i % 2 == 0 ? low_halves(a, b) : high_halves(a, b);
            }
            acc[i][0] *= keep_even; acc[i][1] *= keep_odd;
            acc[i][2] *= keep_even; acc[i][3] *= keep_odd;
#pragma unroll
            for (uint s = 0; s < SPLIT; ++s) {
                const uint right[2] = {weights[0][s], weights[1][s]};
                CAT(mma_, KV)(acc[i], left, right);
            }
        }
    }
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    for (uint i = 0; i < DV; ++i)
        for (uint c = 0; c < 4; ++c) {
            const uint h = 2 * t + c % 2;
            if (h < HEADS) sums[warp][h][c / 2 * (HEAD_DIM / 2) + g * DV + i] = acc[i][c];
        }
    if (t == 0 && g < HEADS) {
        stats[warp][g][0] = max;
        stats[warp][g][1] = sum;
    }
    join(&all, sums, stats, (uint)row, present, GROUP_X, parts, acc_out, stat, part_acc, part_stat);
}

// What both decode kernels and their combine share. A block works on one part of one sequence's keys for up
// to HEADS query heads of one KV head: grid (parts, kv_heads * head groups, sequences). Parts beyond what a
// sequence needs end at once; a sequence of one part writes its result, the others leave partial results in
// scratch for `attn_combine`: part_acc [sequences, heads, parts, value_dim], part_stat [.., parts, 2].

#define WARPS 4
#define LOG2E 1.4426950408889634f
#define NOWHERE 0xFFFFFFFFu

#define DECODE_EXTRA WRITES(f32, part_acc), WRITES(f32, part_stat), uint parts, uint chunk

// One sequence's keys, cut into equal parts.
typedef struct {
    uint first, end; // of the whole sequence
    uint size;       // tokens of a part
    uint used;       // parts that have any; 1 for an empty range
} Cut;

// `chunk` tokens to a part, or more where the table's bound on parts asks for it: what the host planned for
// may be outdated in a replay.
DEVICE Cut cut(uint first, uint end, uint parts, uint chunk) {
    const uint length = end > first ? end - first : 0;
    const uint least = (length + parts - 1) / parts;
    const uint size = least > chunk ? (least + 63) / 64 * 64 : chunk;
    const uint used = length == 0 ? 1 : (length + size - 1) / size;
    const Cut all = {first, first + length, size, used};
    return all;
}

// Where a head's result goes.
DEVICE void place(const Cut* all, uint row, uint part, uint parts, float* acc_out, float* stat, float* part_acc,
                  float* part_stat, float** acc, float** head_stat) {
    const ulong line = all->used == 1 ? row : (ulong)row * parts + part;
    *acc = (all->used == 1 ? acc_out : part_acc) + line * VALUE_DIM;
    *head_stat = (all->used == 1 ? stat : part_stat) + line * 2;
}

// Line of token `t` in the pools, in rows of HEAD_DIM; NOWHERE if it has none.
DEVICE uint line_of(const Keys* keys, uint t, uint end) {
    if (t >= end) return NOWHERE;
    const uint page = keys->pages[t / keys->page_tokens];
    if (page >= keys->page_count) return NOWHERE;
    return (page * keys->kv_heads + keys->kv_head) * keys->page_tokens + t % keys->page_tokens;
}

// The factor that takes sums from one maximum to another.
DEVICE float share(float from, float to) { return from > -INFINITY ? exp2_fast((from - to) * LOG2E) : 0.0f; }

// Joins what the warps of a block found: sums [WARPS][HEADS][VALUE_DIM], stats [WARPS][HEADS][2], both
// shared.
DEVICE void join(const Cut* all, float (*sums)[HEADS][VALUE_DIM], float (*stats)[HEADS][2], uint row, uint present,
                 uint part, uint parts, float* acc_out, float* stat, float* part_acc, float* part_stat) {
    BARRIER();
    for (uint i = THREAD; i < present * VALUE_DIM; i += 32 * WARPS) {
        const uint h = i / VALUE_DIM, d = i % VALUE_DIM;
        float max = -INFINITY;
        for (uint w = 0; w < WARPS; ++w) max = FMAX(max, stats[w][h][0]);
        float sum = 0.0f, total = 0.0f;
        for (uint w = 0; w < WARPS; ++w) {
            const float keep = share(stats[w][h][0], max);
            sum = MAD(keep, stats[w][h][1], sum);
            total = MAD(keep, sums[w][h][d], total);
        }
        float *acc, *head_stat;
        place(all, row + h, part, parts, acc_out, stat, part_acc, part_stat, &acc, &head_stat);
        acc[d] = total;
        if (d == 0) {
            head_stat[0] = max;
            head_stat[1] = sum;
        }
    }
}

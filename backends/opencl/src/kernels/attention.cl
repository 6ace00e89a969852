// Paged attention; X, KV, HEAD_DIM and W (which divides HEAD_DIM). Page layout as in kv.cl. A page outside the
// pool, and a token past the page table, count as absent.

#define VECTORS (HEAD_DIM / W)
#define SPAN 16

// What a head's keys are found by.
typedef struct {
    IN(KV) k_pool;
    IN(KV) v_pool;
    global const uint* pages; // this sequence's row of the page table
    uint page_count;
    uint page_tokens;
    uint kv_heads;
    uint kv_head;
} Keys;

// Element of token `t`'s row in the pools; false if it is nowhere.
bool key_at(const Keys* keys, uint t, ulong* at) {
    const uint page = keys->pages[t / keys->page_tokens];
    const ulong line = ((ulong)page * keys->kv_heads + keys->kv_head) * keys->page_tokens + t % keys->page_tokens;
    *at = line * HEAD_DIM;
    return page < keys->page_count;
}

// The running softmax of one query's head, in one thread: no barrier. (Milakov & Gimelshein 2018)
void attend(const floatw* q, const Keys* keys, uint first, uint end, float* max, float* sum, floatw* acc) {
    *max = -INFINITY;
    *sum = 0.0f;
    for (uint d = 0; d < VECTORS; ++d) acc[d] = 0.0f;
    for (uint t = first; t < end;) {
        ulong at;
        const bool present = key_at(keys, t, &at);
        const uint count = min(min(keys->page_tokens - t % keys->page_tokens, end - t), (uint)SPAN);
        t += count;
        if (!present) continue;
        float scores[SPAN];
        for (uint j = 0; j < SPAN; ++j) scores[j] = -INFINITY;
        for (uint j = 0; j < count; ++j) {
            floatw dot = 0.0f;
#pragma unroll
            for (uint d = 0; d < VECTORS; ++d)
                dot = MAD(q[d], LOADW(KV, keys->k_pool, at + j * HEAD_DIM + d * W), dot);
            scores[j] = SUMW(dot);
        }
        const float16 s = vload16(0, scores);
        const float new_max = fmax(*max, max16(s));
        if (new_max == -INFINITY) continue;
        const float16 p = exp(s - new_max);
        const float keep = exp(*max - new_max);
        *max = new_max;
        *sum = *sum * keep + sum16(p);
        vstore16(p, 0, scores);
#pragma unroll
        for (uint d = 0; d < VECTORS; ++d) acc[d] *= keep;
        for (uint j = 0; j < count; ++j) {
#pragma unroll
            for (uint d = 0; d < VECTORS; ++d)
                acc[d] = MAD((floatw)scores[j], LOADW(KV, keys->v_pool, at + j * HEAD_DIM + d * W), acc[d]);
        }
    }
}

// The same in one group: threads over tokens for the scores, over dimensions for the values.
#define DIMS ((HEAD_DIM + GROUP - 1) / GROUP)

void attend_group(local const float* q, const Keys* keys, uint first, uint end, float* max, float* sum, float* acc,
                  local float* scratch, local float* weights, local ulong* rows) {
    const uint lid = get_local_id(0);
    *max = -INFINITY;
    *sum = 0.0f;
    for (uint i = 0; i < DIMS; ++i) acc[i] = 0.0f;
    for (uint base = first; base < end; base += GROUP) {
        ulong at = 0;
        const bool present = base + lid < end && key_at(keys, base + lid, &at);
        float score = -INFINITY;
        if (present) {
            score = 0.0f;
            for (uint d = 0; d < HEAD_DIM; ++d) score = MAD(q[d], LOAD(KV, keys->k_pool, at + d), score);
        }
        const float new_max = fmax(*max, group_max(score, scratch));
        const float p = present && new_max > -INFINITY ? exp(score - new_max) : 0.0f;
        const float keep = *max > -INFINITY ? exp(*max - new_max) : 0.0f;
        *max = new_max;
        *sum = *sum * keep + group_sum(p, scratch);
        weights[lid] = p;
        rows[lid] = at;
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint i = 0; i < DIMS; ++i) {
            const uint d = lid + i * GROUP;
            acc[i] *= keep;
            // a weight of 0 may stand for no key: what lies there may be NaN
            for (uint j = 0; j < GROUP && d < HEAD_DIM; ++j)
                if (weights[j] > 0.0f) acc[i] = MAD(weights[j], LOAD(KV, keys->v_pool, rows[j] + d), acc[i]);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
}

#define POOLS IN(KV) k_pool, ulong k_pool_at, uint page_count, IN(KV) v_pool, ulong v_pool_at
#define SHAPE uint sequences, uint heads, uint kv_heads, uint page_tokens, uint pages_max

#define KEYS(sequence, head)                                                                                     \
    { k_pool + k_pool_at, v_pool + v_pool_at, pages + pages_at + (ulong)(sequence)*pages_max, page_count,        \
      page_tokens, kv_heads, (head) / (heads / kv_heads) }

#define PREFILL_OPERANDS                                                                                         \
    IN(X) q, ulong q_at, global const uint* query_start, ulong query_start_at, global const uint* context,       \
        ulong context_at, global const uint* pages, ulong pages_at, POOLS, OUT_(X) out, ulong out_at, SHAPE,     \
        uint tokens, uint window

// The sequence that query `row` belongs to, and the tokens that it sees; nothing where the operands are wrong.
uint visible(global const uint* query_start, global const uint* context, uint row, uint sequences, uint window,
             ulong keys_max, uint* first, uint* end) {
    uint s = 0;
    while (s + 1 < sequences && query_start[s + 1] <= row) ++s;
    const uint behind = query_start[s + 1] - row; // this query and those after it
    const bool sane = query_start[s] <= row && row < query_start[s + 1] && behind <= context[s];
    *end = sane ? (uint)min((ulong)(context[s] - behind + 1), keys_max) : 0;
    *first = *end > window ? *end - window : 0;
    return s;
}

#define DECODE_OPERANDS                                                                                          \
    IN(X) q, ulong q_at, global const uint* range, ulong range_at, global const uint* pages, ulong pages_at,     \
        POOLS, global float* acc_out, ulong acc_at, global float* stat, ulong stat_at, SHAPE

#define KEYS_MAX ((ulong)pages_max * page_tokens)
#define SCALE (1.0f / sqrt((float)HEAD_DIM))

// Threads: heads, then rows.
kernel void attn_prefill(PREFILL_OPERANDS) {
    const uint head = get_global_id(0), row = get_global_id(1);
    if (head >= heads || row >= tokens) return;
    uint first, end;
    const uint s = visible(query_start + query_start_at, context + context_at, row, sequences, window, KEYS_MAX,
                           &first, &end);
    const Keys keys = KEYS(s, head);
    const ulong at = ((ulong)row * heads + head) * HEAD_DIM;
    floatw query[VECTORS], acc[VECTORS];
    for (uint d = 0; d < VECTORS; ++d) query[d] = LOADW(X, q, q_at + at + d * W) * SCALE;
    float max, sum;
    attend(query, &keys, first, end, &max, &sum, acc);
    float result[HEAD_DIM];
    for (uint d = 0; d < VECTORS; ++d) STOREW_f32(result, d * W, acc[d] / sum);
    for (uint d = 0; d < HEAD_DIM; ++d) STORE(X, out, out_at + at + d, result[d]);
}

kernel void attn_decode(DECODE_OPERANDS) {
    const uint head = get_global_id(0), row = get_global_id(1);
    if (head >= heads || row >= sequences) return;
    const Keys keys = KEYS(row, head);
    const ulong line = (ulong)row * heads + head;
    floatw query[VECTORS], acc[VECTORS];
    for (uint d = 0; d < VECTORS; ++d) query[d] = LOADW(X, q, q_at + line * HEAD_DIM + d * W) * SCALE;
    const uint end = (uint)min((ulong)range[range_at + 2 * row + 1], KEYS_MAX);
    float max, sum;
    attend(query, &keys, range[range_at + 2 * row], end, &max, &sum, acc);
    for (uint d = 0; d < VECTORS; ++d) STOREW_f32(acc_out, acc_at + line * HEAD_DIM + d * W, acc[d]);
    stat[stat_at + 2 * line] = max;
    stat[stat_at + 2 * line + 1] = sum;
}

// Groups: heads, then rows.
#define GROUP_MEMORY                                                                                             \
    local float query[HEAD_DIM], scratch[GROUP], weights[GROUP];                                                 \
    local ulong rows[GROUP];                                                                                     \
    const uint head = get_group_id(0), row = get_global_id(1), lid = get_local_id(0);                            \
    const ulong line = (ulong)row * heads + head;                                                                \
    for (uint d = lid; d < HEAD_DIM; d += GROUP) query[d] = LOAD(X, q, q_at + line * HEAD_DIM + d) * SCALE;      \
    barrier(CLK_LOCAL_MEM_FENCE);                                                                                \
    float max, sum, acc[DIMS]

kernel void attn_prefill_group(PREFILL_OPERANDS) {
    GROUP_MEMORY;
    uint first, end;
    const uint s = visible(query_start + query_start_at, context + context_at, row, sequences, window, KEYS_MAX,
                           &first, &end);
    const Keys keys = KEYS(s, head);
    attend_group(query, &keys, first, end, &max, &sum, acc, scratch, weights, rows);
    for (uint i = 0; i < DIMS; ++i) {
        const uint d = lid + i * GROUP;
        if (d < HEAD_DIM) STORE(X, out, out_at + line * HEAD_DIM + d, acc[i] / sum);
    }
}

kernel void attn_decode_group(DECODE_OPERANDS) {
    GROUP_MEMORY;
    const Keys keys = KEYS(row, head);
    const uint end = (uint)min((ulong)range[range_at + 2 * row + 1], KEYS_MAX);
    attend_group(query, &keys, range[range_at + 2 * row], end, &max, &sum, acc, scratch, weights, rows);
    for (uint i = 0; i < DIMS; ++i) {
        const uint d = lid + i * GROUP;
        if (d < HEAD_DIM) acc_out[acc_at + line * HEAD_DIM + d] = acc[i];
    }
    if (lid == 0) {
        stat[stat_at + 2 * line] = max;
        stat[stat_at + 2 * line + 1] = sum;
    }
}

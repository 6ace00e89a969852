// Attention for CPUs: a thread per row and head, no barrier; keys.h, and W, which divides both lengths.

#define VECTORS (HEAD_DIM / W)
#define VALUES (VALUE_DIM / W)
#define SPAN 16

// The running softmax of one query's head, in one thread: no barrier. (Milakov & Gimelshein 2018)
void attend(const floatw* q, const Keys* keys, uint first, uint end, float* max, float* sum, floatw* acc) {
    *max = -INFINITY;
    *sum = 0.0f;
    for (uint d = 0; d < VALUES; ++d) acc[d] = 0.0f;
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
            scores[j] = CAPPED(SUMW(dot) * scale_at(keys, keys->k_pool, at + j * HEAD_DIM, t - count + j));
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
        for (uint d = 0; d < VALUES; ++d) acc[d] *= keep;
        for (uint j = 0; j < count; ++j) {
            const float weight = scores[j] * scale_at(keys, keys->v_pool, at + j * HEAD_DIM, t - count + j);
#pragma unroll
            for (uint d = 0; d < VALUES; ++d)
                acc[d] = MAD((floatw)weight, LOADW(KV, keys->v_pool, at + j * HEAD_DIM + d * W), acc[d]);
        }
    }
}

// Threads: heads, then rows.
kernel void attn_prefill(PREFILL_OPERANDS) {
    const uint head = get_global_id(0), row = get_global_id(1);
    if (head >= heads || row >= tokens) return;
    START_PREFILL;
    uint first, end;
    const uint s = visible(query_start, context, row, sequences, window, KEYS_MAX, &first, &end);
    const Keys keys = KEYS(s, head);
    const ulong line = (ulong)row * heads + head;
    floatw query[VECTORS], acc[VALUES];
    for (uint d = 0; d < VECTORS; ++d) query[d] = LOADW(X, q, line * HEAD_DIM + d * W) * SCALE;
    float max, sum;
    attend(query, &keys, first, end, &max, &sum, acc);
    const float keep = join_sink(max, &sum, sinks, head, has_sinks);
    float result[VALUE_DIM];
    for (uint d = 0; d < VALUES; ++d) STOREW_f32(result, d * W, acc[d] * keep / sum);
    for (uint d = 0; d < VALUE_DIM; ++d) STORE(X, out, line * VALUE_DIM + d, result[d]);
}

kernel void attn_decode(DECODE_OPERANDS) {
    const uint head = get_global_id(0), row = get_global_id(1);
    if (head >= heads || row >= sequences) return;
    START_DECODE;
    const Keys keys = KEYS(row, head);
    const ulong line = (ulong)row * heads + head;
    floatw query[VECTORS], acc[VALUES];
    for (uint d = 0; d < VECTORS; ++d) query[d] = LOADW(X, q, line * HEAD_DIM + d * W) * SCALE;
    float max, sum;
    attend(query, &keys, range[2 * row], RANGE_END(row), &max, &sum, acc);
    for (uint d = 0; d < VALUES; ++d) STOREW_f32(acc_out, line * VALUE_DIM + d * W, acc[d]);
    stat[2 * line] = max;
    stat[2 * line + 1] = sum;
}

// Attention of one query's head in one group, for any GPU and dtypes: threads over tokens for the scores,
// over dimensions for the values. The running softmax is Milakov & Gimelshein's (2018).

#define DIMS ((VALUE_DIM + GROUP - 1) / GROUP)

DEVICE void attend(IN_LOCAL const float* q, const Keys* keys, uint first, uint end, float* max, float* sum, float* acc,
                   IN_LOCAL float* scratch, IN_LOCAL float* weights, IN_LOCAL ulong* rows) {
    const uint lid = THREAD;
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
            score = CAPPED(score * scale_at(keys, keys->k_pool, at, base + lid));
        }
        const float new_max = FMAX(*max, group_max(score, scratch));
        const float p = present && new_max > -INFINITY ? EXP(score - new_max) : 0.0f;
        const float keep = *max > -INFINITY ? EXP(*max - new_max) : 0.0f;
        *max = new_max;
        *sum = *sum * keep + group_sum(p, scratch);
        weights[lid] = p > 0.0f ? p * scale_at(keys, keys->v_pool, at, base + lid) : 0.0f;
        rows[lid] = at;
        BARRIER();
        for (uint i = 0; i < DIMS; ++i) {
            const uint d = lid + i * GROUP;
            acc[i] *= keep;
            // a weight of 0 may stand for no key: what lies there may be NaN
            for (uint j = 0; j < GROUP && d < VALUE_DIM; ++j)
                if (weights[j] != 0.0f) acc[i] = MAD(weights[j], LOAD(KV, keys->v_pool, rows[j] + d), acc[i]);
        }
        BARRIER();
    }
}

// Groups: heads, then rows.
#define GROUP_MEMORY                                                                                             \
    LOCAL float query[HEAD_DIM];                                                                                 \
    LOCAL float scratch[GROUP];                                                                                  \
    LOCAL float weights[GROUP];                                                                                  \
    LOCAL ulong lines[GROUP];                                                                                    \
    const uint head = GROUP_X, row = GROUP_Y, lid = THREAD;                                                      \
    const ulong line = (ulong)row * heads + head

#define LOAD_QUERY                                                                                               \
    for (uint d = lid; d < HEAD_DIM; d += GROUP) query[d] = LOAD(X, q, line * HEAD_DIM + d) * SCALE;             \
    BARRIER();                                                                                                   \
    float max, sum, acc[DIMS]

KERNEL(GROUP) attn_prefill(PREFILL_OPERANDS) {
    GROUP_MEMORY;
    START_PREFILL;
    LOAD_QUERY;
    uint first, end;
    const uint s = visible(query_start, context, row, sequences, window, KEYS_MAX, &first, &end);
    const Keys keys = KEYS(s, head);
    attend(query, &keys, first, end, &max, &sum, acc, scratch, weights, lines);
    const float keep = join_sink(max, &sum, sinks, head, has_sinks);
    for (uint i = 0; i < DIMS; ++i) {
        const uint d = lid + i * GROUP;
        if (d < VALUE_DIM) STORE(X, out, line * VALUE_DIM + d, acc[i] * keep / sum);
    }
}

KERNEL(GROUP) attn_decode(DECODE_OPERANDS) {
    GROUP_MEMORY;
    START_DECODE;
    LOAD_QUERY;
    const Keys keys = KEYS(row, head);
    attend(query, &keys, range[2 * row], RANGE_END(row), &max, &sum, acc, scratch, weights, lines);
    for (uint i = 0; i < DIMS; ++i) {
        const uint d = lid + i * GROUP;
        if (d < VALUE_DIM) acc_out[line * VALUE_DIM + d] = acc[i];
    }
    if (lid == 0) {
        stat[2 * line] = max;
        stat[2 * line + 1] = sum;
    }
}

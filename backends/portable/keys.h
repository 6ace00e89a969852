// What every attention kernel shares: X, KV and HEAD_DIM; where keys lie (pages as in kv.c or kv_scaled.c),
// and who sees them. A page outside the pool, and a token past the page table, count as absent. Where keys
// contain their values, VALUE_DIM is the length of these and SCALE what scores are multiplied by, and v_pool
// is k_pool.

#ifndef VALUE_DIM
#define VALUE_DIM HEAD_DIM
#define SCALE (1.0f / SQRT((float)HEAD_DIM))
#endif

// With SOFT_CAP, the bound of scores; `tanh(z) = 1 - 2 / (1 + exp(2 z))`.
#ifdef SOFT_CAP
#define CAPPED(score) (SOFT_CAP * (1.0f - 2.0f / (1.0f + EXP((score) * (2.0f / SOFT_CAP)))))
#else
#define CAPPED(score) (score)
#endif

#define POOLS READS(KV, k_pool), uint page_count, READS(KV, v_pool)
#define SHAPE uint sequences, uint heads, uint kv_heads, uint page_tokens, uint pages_max

#define PREFILL_OPERANDS                                                                                         \
    READS(X, q), READS(u32, query_start), READS(u32, context), READS(u32, pages), POOLS, READS(f32, sinks),      \
        WRITES(X, out), SHAPE, uint tokens, uint window, uint has_sinks

#define START_PREFILL                                                                                            \
    START(q);                                                                                                    \
    START(query_start);                                                                                          \
    START(context);                                                                                              \
    START(pages);                                                                                                \
    START(k_pool);                                                                                               \
    START(v_pool);                                                                                               \
    START(sinks);                                                                                                \
    START(out)

#define DECODE_OPERANDS                                                                                          \
    READS(X, q), READS(u32, range), READS(u32, pages), POOLS, WRITES(f32, acc_out), WRITES(f32, stat), SHAPE

#define START_DECODE                                                                                             \
    START(q);                                                                                                    \
    START(range);                                                                                                \
    START(pages);                                                                                                \
    START(k_pool);                                                                                               \
    START(v_pool);                                                                                               \
    START(acc_out);                                                                                              \
    START(stat)

#define KEYS_MAX ((ulong)pages_max * page_tokens)

// What a head's keys are found by.
typedef struct {
    GLOBAL const TYPE(KV)* k_pool;
    GLOBAL const TYPE(KV)* v_pool;
    GLOBAL const uint* pages; // this sequence's row of the page table
    uint page_count;
    uint page_tokens;
    uint kv_heads;
    uint kv_head;
} Keys;

#define KEYS(sequence, head)                                                                                     \
    { k_pool, v_pool, pages + (ulong)(sequence)*pages_max, page_count, page_tokens, kv_heads,                    \
      (head) / (heads / kv_heads) }

// Element of line `line` in the pools, which have a line for each token of each KV head of each page.
DEVICE ulong line_at(const Keys* keys, ulong line) {
#if KIND(KV)
    const uint page_tokens = keys->page_tokens, token = (uint)(line % page_tokens);
    return (line - token) * HEAD_ELEMENTS(KV, HEAD_DIM) + token * HEAD_DIM;
#else
    return line * HEAD_DIM;
#endif
}

// The scale of token `t`'s row, which begins at element `at` of the pool.
DEVICE float scale_at(const Keys* keys, GLOBAL const TYPE(KV)* pool, ulong at, uint t) {
#if KIND(KV)
    const ulong behind = (ulong)keys->page_tokens * HEAD_DIM;
    const uint token = t % keys->page_tokens;
    return load_scale((GLOBAL const uchar*)(pool + (at - token * HEAD_DIM) + behind + token * SCALE_BYTES));
#else
    return 1.0f;
#endif
}

// Element of token `t`'s row in the pools; false if it is nowhere.
DEVICE bool key_at(const Keys* keys, uint t, ulong* at) {
    const uint page = keys->pages[t / keys->page_tokens];
    const ulong line = ((ulong)page * keys->kv_heads + keys->kv_head) * keys->page_tokens + t % keys->page_tokens;
    *at = line_at(keys, line);
    return page < keys->page_count;
}

// The sequence that query `row` belongs to, and the tokens that it sees; nothing where the operands are wrong.
DEVICE uint visible(GLOBAL const uint* query_start, GLOBAL const uint* context, uint row, uint sequences,
                    uint window, ulong keys_max, uint* first, uint* end) {
    uint s = 0;
    while (s + 1 < sequences && query_start[s + 1] <= row) ++s;
    const uint behind = query_start[s + 1] - row; // this query and those after it
    const bool sane = query_start[s] <= row && row < query_start[s + 1] && behind <= context[s];
    const ulong seen = sane ? (ulong)(context[s] - behind) + 1 : 0;
    *end = (uint)(seen < keys_max ? seen : keys_max);
    *first = *end > window ? *end - window : 0;
    return s;
}

// Adds the weight of a head's sink to the sum of the others, and returns what these are rescaled by.
DEVICE float join_sink(float max, float* sum, GLOBAL const float* sinks, uint head, uint has_sinks) {
    if (!has_sinks) return 1.0f;
    const float all = FMAX(max, sinks[head]), keep = EXP(max - all);
    *sum = MAD(*sum, keep, EXP(sinks[head] - all));
    return keep;
}

// One past the last key of a decode's sequence.
#define RANGE_END(row) (range[2 * (row) + 1] < KEYS_MAX ? range[2 * (row) + 1] : (uint)KEYS_MAX)

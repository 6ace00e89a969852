// As kv.c, where KV or X has heads of eight bits with a scale each. One thread per token and KV head; `count`
// is tokens * kv_heads.
//
// A head's part of a page is the codes of [page_tokens, head_dim], then the scales of [page_tokens].

// Where a head's elements begin and its scale is, in elements.
typedef struct {
    ulong elements, scale;
} Head;

DEVICE Head in_pool(uint slot, uint head, uint page_tokens, uint kv_heads, uint head_dim) {
    const ulong part = (ulong)(slot / page_tokens) * kv_heads + head;
    const ulong start = part * page_tokens * HEAD_ELEMENTS(KV, head_dim);
    const uint token = slot % page_tokens;
    const Head at = {start + token * head_dim, start + page_tokens * head_dim + token * SCALE_BYTES};
    return at;
}

// Of head `line` of [lines, head_dim].
DEVICE Head in_rows(ulong line, uint head_dim) {
    const ulong start = line * HEAD_ELEMENTS(X, head_dim);
    const Head at = {start, start + head_dim};
    return at;
}

// Copies a head; codes of one dtype as they are.
#define MOVE(name, FROM, TO)                                                                                     \
    DEVICE void name(GLOBAL const TYPE(FROM)* from, Head at, GLOBAL TYPE(TO)* to, Head put, uint head_dim) {     \
        const float own = KIND(FROM) ? load_scale((GLOBAL const uchar*)(from + at.scale)) : 1.0f;                \
        const bool same = KIND(FROM) != 0 && KIND(FROM) == KIND(TO);                                             \
        float scale = own, factor = same ? 1.0f : own;                                                           \
        if (KIND(TO) && !same) {                                                                                 \
            float most = 0.0f;                                                                                   \
            bool finite = true;                                                                                  \
            for (uint d = 0; d < head_dim; ++d) {                                                                \
                const float v = LOAD(FROM, from, at.elements + d) * own;                                         \
                most = FMAX(most, FMAX(v, -v));                                                                  \
                finite = finite && v - v == 0.0f;                                                                \
            }                                                                                                    \
            scale = finite ? scale_of(KIND(TO), most) : NAN;                                                     \
            factor = finite ? own * inverse_of(scale) : 0.0f;                                                    \
        }                                                                                                        \
        for (uint d = 0; d < head_dim; ++d)                                                                      \
            STORE(TO, to, put.elements + d, LOAD(FROM, from, at.elements + d) * factor);                         \
        if (KIND(TO)) store_scale((GLOBAL uchar*)(to + put.scale), scale);                                       \
    }

MOVE(move_in, X, KV)
MOVE(move_out, KV, X)

#define POOLS(ACCESS) ACCESS(KV, k_pool), uint pages, ACCESS(KV, v_pool)
#define SHAPE uint page_tokens, uint kv_heads, uint head_dim, ulong count

// k, v [tokens, kv_heads, head_dim]
KERNEL(GROUP) kv_write(READS(X, k), READS(X, v), READS(u32, slots), POOLS(WRITES), SHAPE) {
    START(k);
    START(v);
    START(slots);
    START(k_pool);
    START(v_pool);
    const ulong i = EACH;
    if (i >= count) return;
    const uint slot = slots[i / kv_heads];
    if (slot / page_tokens >= pages) return;
    const Head to = in_pool(slot, (uint)(i % kv_heads), page_tokens, kv_heads, head_dim);
    move_in(k, in_rows(i, head_dim), k_pool, to, head_dim);
    move_in(v, in_rows(i, head_dim), v_pool, to, head_dim);
}

// wire [tokens, 2, kv_heads, head_dim]
KERNEL(GROUP) kv_scatter(READS(X, wire), READS(u32, slots), POOLS(WRITES), SHAPE) {
    START(wire);
    START(slots);
    START(k_pool);
    START(v_pool);
    const ulong i = EACH;
    if (i >= count) return;
    const uint slot = slots[i / kv_heads], head = (uint)(i % kv_heads);
    if (slot / page_tokens >= pages) return;
    const ulong line = i / kv_heads * 2 * kv_heads + head;
    const Head to = in_pool(slot, head, page_tokens, kv_heads, head_dim);
    move_in(wire, in_rows(line, head_dim), k_pool, to, head_dim);
    move_in(wire, in_rows(line + kv_heads, head_dim), v_pool, to, head_dim);
}

KERNEL(GROUP) kv_gather(READS(u32, slots), POOLS(READS), WRITES(X, out), SHAPE) {
    START(slots);
    START(k_pool);
    START(v_pool);
    START(out);
    const ulong i = EACH;
    if (i >= count) return;
    const uint slot = slots[i / kv_heads], head = (uint)(i % kv_heads);
    const ulong line = i / kv_heads * 2 * kv_heads + head;
    if (slot / page_tokens < pages) {
        const Head from = in_pool(slot, head, page_tokens, kv_heads, head_dim);
        move_out(k_pool, from, out, in_rows(line, head_dim), head_dim);
        move_out(v_pool, from, out, in_rows(line + kv_heads, head_dim), head_dim);
        return;
    }
    for (uint row = 0; row < 2; ++row) {
        const Head put = in_rows(line + row * kv_heads, head_dim);
        for (uint d = 0; d < head_dim; ++d) STORE(X, out, put.elements + d, KIND(X) ? 0.0f : NAN);
        if (KIND(X)) store_scale((GLOBAL uchar*)(out + put.scale), NAN);
    }
}

// Moving keys and values in and out of pools; KV, X for the other side, and VEC, which divides head_dim.
// One thread per VEC elements; `count` is tokens * kv_heads * head_dim / VEC.
//
// Page layout: [pages, kv_heads, page_tokens, head_dim], so that one head's keys of a page lie together.
// A slot outside the pool is skipped when written and reads as NaN.
//
// Where keys contain their values, KV_ROWS is 1: there is no pool of values, and what stands for it is
// not used.

#ifndef KV_ROWS
#define KV_ROWS 2
#endif

// Element of the pool for element `i` of [kv_heads, head_dim] at `slot`.
DEVICE ulong pool_at(uint slot, uint i, uint page_tokens, uint kv_heads, uint head_dim) {
    const ulong page = slot / page_tokens;
    return ((page * kv_heads + i / head_dim) * page_tokens + slot % page_tokens) * head_dim + i % head_dim;
}

#define POOLS(ACCESS) ACCESS(KV, k_pool), uint pages, ACCESS(KV, v_pool)
#define SHAPE uint page_tokens, uint kv_heads, uint head_dim, ulong count

DEVICE void move_in(GLOBAL TYPE(KV)* pool, ulong to, GLOBAL const TYPE(X)* other, ulong from) {
    float v[VEC];
    LOAD_VEC(X, other, from, v);
    STORE_VEC(KV, pool, to, v);
}

// k, v [tokens, kv_heads, head_dim]
KERNEL(GROUP) kv_write(READS(X, k), READS(X, v), READS(u32, slots), POOLS(WRITES), SHAPE) {
    START(k);
    START(v);
    START(slots);
    START(k_pool);
    START(v_pool);
    const ulong i = EACH * VEC;
    if (EACH >= count) return;
    const uint width = kv_heads * head_dim;
    const uint slot = slots[i / width];
    if (slot / page_tokens >= pages) return;
    const ulong to = pool_at(slot, (uint)(i % width), page_tokens, kv_heads, head_dim);
    move_in(k_pool, to, k, i);
    if (KV_ROWS == 2) move_in(v_pool, to, v, i);
}

// wire [tokens, KV_ROWS, kv_heads, head_dim]
KERNEL(GROUP) kv_scatter(READS(X, wire), READS(u32, slots), POOLS(WRITES), SHAPE) {
    START(wire);
    START(slots);
    START(k_pool);
    START(v_pool);
    const ulong i = EACH * VEC;
    if (EACH >= count) return;
    const uint width = kv_heads * head_dim;
    const uint slot = slots[i / width];
    if (slot / page_tokens >= pages) return;
    const ulong from = i / width * KV_ROWS * width + i % width;
    const ulong to = pool_at(slot, (uint)(i % width), page_tokens, kv_heads, head_dim);
    move_in(k_pool, to, wire, from);
    if (KV_ROWS == 2) move_in(v_pool, to, wire, from + width);
}

KERNEL(GROUP) kv_gather(READS(u32, slots), POOLS(READS), WRITES(X, out), SHAPE) {
    START(slots);
    START(k_pool);
    START(v_pool);
    START(out);
    const ulong i = EACH * VEC;
    if (EACH >= count) return;
    const uint width = kv_heads * head_dim;
    const uint slot = slots[i / width];
    float k[VEC], v[VEC];
    for (uint j = 0; j < VEC; ++j) k[j] = v[j] = NAN;
    if (slot / page_tokens < pages) {
        const ulong from = pool_at(slot, (uint)(i % width), page_tokens, kv_heads, head_dim);
        LOAD_VEC(KV, k_pool, from, k);
        if (KV_ROWS == 2) LOAD_VEC(KV, v_pool, from, v);
    }
    const ulong to = i / width * KV_ROWS * width + i % width;
    STORE_VEC(X, out, to, k);
    if (KV_ROWS == 2) STORE_VEC(X, out, to + width, v);
}

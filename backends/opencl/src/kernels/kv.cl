// Moving keys and values in and out of pools; KV, and X for the other side. One thread per element.
//
// Page layout: [pages, kv_heads, page_tokens, head_dim], so that one head's keys of a page lie together.
// A slot outside the pool is skipped when written and reads as NaN.

// Element of the pool for element `i` of [kv_heads, head_dim] at `slot`.
ulong pool_at(uint slot, uint i, uint page_tokens, uint kv_heads, uint head_dim) {
    const ulong page = slot / page_tokens;
    return ((page * kv_heads + i / head_dim) * page_tokens + slot % page_tokens) * head_dim + i % head_dim;
}

#define POOLS global TYPE(KV)* k_pool, ulong k_pool_at, uint pages, global TYPE(KV)* v_pool, ulong v_pool_at
#define SHAPE uint page_tokens, uint kv_heads, uint head_dim, ulong count

// k, v [tokens, kv_heads, head_dim]
kernel void kv_write(IN(X) k, ulong k_at, IN(X) v, ulong v_at, global const uint* slots, ulong slots_at, POOLS,
                     SHAPE) {
    const size_t i = get_global_id(0);
    if (i >= count) return;
    const uint width = kv_heads * head_dim, slot = slots[slots_at + i / width];
    if (slot / page_tokens >= pages) return;
    const ulong to = pool_at(slot, i % width, page_tokens, kv_heads, head_dim);
    STORE(KV, k_pool, k_pool_at + to, LOAD(X, k, k_at + i));
    STORE(KV, v_pool, v_pool_at + to, LOAD(X, v, v_at + i));
}

// wire [tokens, 2, kv_heads, head_dim]; `count` is tokens * kv_heads * head_dim
kernel void kv_scatter(IN(X) wire, ulong wire_at, global const uint* slots, ulong slots_at, POOLS, SHAPE) {
    const size_t i = get_global_id(0);
    if (i >= count) return;
    const uint width = kv_heads * head_dim, slot = slots[slots_at + i / width];
    if (slot / page_tokens >= pages) return;
    const ulong from = wire_at + i / width * 2 * width + i % width;
    const ulong to = pool_at(slot, i % width, page_tokens, kv_heads, head_dim);
    STORE(KV, k_pool, k_pool_at + to, LOAD(X, wire, from));
    STORE(KV, v_pool, v_pool_at + to, LOAD(X, wire, from + width));
}

kernel void kv_gather(global const uint* slots, ulong slots_at, POOLS, OUT_(X) out, ulong out_at, SHAPE) {
    const size_t i = get_global_id(0);
    if (i >= count) return;
    const uint width = kv_heads * head_dim, slot = slots[slots_at + i / width];
    const bool inside = slot / page_tokens < pages;
    const ulong from = inside ? pool_at(slot, i % width, page_tokens, kv_heads, head_dim) : 0;
    const ulong to = out_at + i / width * 2 * width + i % width;
    STORE(X, out, to, inside ? LOAD(KV, k_pool, k_pool_at + from) : NAN);
    STORE(X, out, to + width, inside ? LOAD(KV, v_pool, v_pool_at + from) : NAN);
}

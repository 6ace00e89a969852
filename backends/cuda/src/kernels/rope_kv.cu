// rope of queries and keys, and kv_write of those keys and their values, in one launch: what the three write, bit by
// bit. X, KV, and VEC, which divides half a head. One thread per VEC pairs: of each query head, each key head and each
// value head of a token.

KERNEL(GROUP) rope_kv(WRITES(X, q), WRITES(X, k), READS(X, v), READS(f32, cos_sin), READS(u32, slots), POOLS(WRITES),
                      uint heads, uint kv_heads, uint half_dim, uint page_tokens, ulong count) {
    START(q);
    START(k);
    START(v);
    START(cos_sin);
    START(slots);
    START(k_pool);
    START(v_pool);
    if (EACH >= count) return;
    const uint vectors = half_dim / VEC, all_heads = heads + 2 * kv_heads, head_dim = 2 * half_dim;
    const ulong token = EACH / (all_heads * vectors);
    const uint head = (uint)(EACH / vectors % all_heads), d = (uint)(EACH % vectors) * VEC;
    const ulong table = token * head_dim + d;
    if (head < heads) {
        rotate(q, (token * heads + head) * head_dim + d, cos_sin, table, half_dim);
        return;
    }
    const bool is_key = head < heads + kv_heads;
    const uint kv_head = head - heads - (is_key ? 0 : kv_heads);
    const ulong at = (token * kv_heads + kv_head) * head_dim + d;
    if (is_key) rotate(k, at, cos_sin, table, half_dim);
    const uint slot = slots[token];
    if (slot / page_tokens >= pages) return;
    const ulong to = pool_at(slot, kv_head * head_dim + d, page_tokens, kv_heads, head_dim);
    for (uint part = 0; part < 2; ++part)
        move_in(is_key ? k_pool : v_pool, to + part * half_dim, is_key ? (const TYPE(X)*)k : v, at + part * half_dim);
}

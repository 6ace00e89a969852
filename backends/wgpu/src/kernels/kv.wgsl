// Between rows [tokens, kv_heads, head_dim] and KV pools. A thread per word of the destination.
//
// Page layout: [pages, kv_heads, page_tokens, head_dim], so that one head's keys of a page lie together. The
// pools are bound from page `first` on, up to page `end`: other slots are left to the other parts. A slot that
// is in no part is skipped when written, and the first part gathers NaN for it.
//
// head_dim is even where the pool has 16 bits. POOLS: 1 where keys contain their values; b1 is b0 then.

struct Shape {
    tokens: u32, kv_heads: u32, head_dim: u32, page_tokens: u32, first: u32, end: u32, pages: u32, nan: u32,
    row: u32, // elements from a token to the next in what is not a pool
    v_at: u32, // elements from a token's keys to its values, in the wire layout
}

fn slot_of(t: u32) -> u32 { return b2[p.at2 + t]; }

fn mine(slot: u32) -> bool {
    let page = slot / p.s.page_tokens;
    return page >= p.s.first && page < p.s.end;
}

// Element of the bound pools for element i of [kv_heads, head_dim] at `slot`.
fn pool_at(slot: u32, i: u32) -> u32 {
    let page = slot / p.s.page_tokens - p.s.first;
    let line = (page * p.s.kv_heads + i / p.s.head_dim) * p.s.page_tokens + slot % p.s.page_tokens;
    return line * p.s.head_dim + i % p.s.head_dim;
}

fn put_v(i: u32, a: f32, b: f32) {
    if OUT == F32 {
        out1[p.to1 + i] = bitcast<u32>(a);
    } else {
        out1[(p.to1 + i) >> 1u] = half_of(a) | (half_of(b) << 16u);
    }
}

// k and v in b0 and b1, `row` apart; both pools written
@compute @workgroup_size(GROUP)
fn kv_write(thread: Thread) {
    let width = p.s.kv_heads * p.s.head_dim;
    let i = (group_of(thread) * GROUP + thread.id) * PER_WORD;
    if i >= p.s.tokens * width { return; }
    let t = i / width;
    let slot = slot_of(t);
    if !mine(slot) { return; }
    let source = t * p.s.row + i % width;
    let next = source + PER_WORD - 1u;
    let to = pool_at(slot, i % width);
    put_word(to, in0(source), true, in0(next), true);
    if POOLS == 2u { put_v(to, in1(source + p.s.v_at), in1(next + p.s.v_at)); }
}

// Element i of the wire layout [tokens, POOLS, kv_heads, head_dim].
fn gathered(i: u32) -> f32 {
    let width = p.s.kv_heads * p.s.head_dim;
    let slot = slot_of(i / (POOLS * width));
    if !mine(slot) { return bitcast<f32>(p.s.nan); }
    let at = pool_at(slot, i % width);
    if i / width % POOLS == 0u { return in0(at); }
    return in1(at);
}

fn gathers(i: u32) -> bool {
    let slot = slot_of(i / (POOLS * p.s.kv_heads * p.s.head_dim));
    return mine(slot) || (slot / p.s.page_tokens >= p.s.pages && p.s.first == 0u);
}

// pools in b0 and b1
@compute @workgroup_size(GROUP)
fn kv_gather(thread: Thread) {
    let i = (group_of(thread) * GROUP + thread.id) * PER_WORD;
    let count = p.s.tokens * POOLS * p.s.kv_heads * p.s.head_dim;
    if i >= count { return; }
    let more = i + 1u < count && PER_WORD == 2u;
    let j = select(i, i + 1u, more);
    put_word(i, gathered(i), gathers(i), gathered(j), more && gathers(j));
}

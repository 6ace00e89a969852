// As kv.wgsl, where the pools or the rows have heads of eight bits with a scale each (mixfleet_hal::scaled).
// A thread per head of a token's keys or values, which is whole words everywhere.
//
// A head's part of a page is the codes of [page_tokens, head_dim], then the scales of [page_tokens]; elsewhere
// a scale follows its head.

struct Shape {
    tokens: u32, kv_heads: u32, head_dim: u32, page_tokens: u32, first: u32, end: u32, pages: u32, nan: u32,
    row: u32, // elements from a token to the next in what is not a pool, with scales
    v_at: u32, // elements from a token's keys to its values, in the wire layout
}

// Where a head's elements begin and its scale is, in elements.
struct Head { elements: u32, scale: u32 }

fn head_elements(dtype: u32) -> u32 { return p.s.head_dim + select(0u, 4u, is_scaled(dtype)); }

fn in_pool(dtype: u32, slot: u32, head: u32) -> Head {
    let part = (slot / p.s.page_tokens - p.s.first) * p.s.kv_heads + head;
    let start = part * p.s.page_tokens * head_elements(dtype);
    let token = slot % p.s.page_tokens;
    return Head(start + token * p.s.head_dim, start + p.s.page_tokens * p.s.head_dim + token * 4u);
}

fn in_rows(dtype: u32, token: u32, head: u32, value: bool) -> Head {
    let start = token * p.s.row + select(0u, p.s.v_at, value) + head * head_elements(dtype);
    return Head(start, start + p.s.head_dim);
}

fn source(value: bool, i: u32) -> f32 {
    if value { return in1(i); }
    return in0(i);
}

fn source_word(value: bool, i: u32) -> u32 {
    if value { return b1[word_of(D1, p.at1 + i)]; }
    return b0[word_of(D0, p.at0 + i)];
}

// The word that begins with element i of the destination, which of pools is out1 for values.
fn store_word(value: bool, i: u32, word: u32) {
    if value && !GATHER {
        out1[word_of(OUT, p.to1 + i)] = word;
    } else {
        out0[word_of(OUT, p.to0 + i)] = word;
    }
}

// The bits of the least power of two times which the largest code is no less than a magnitude, given as bits.
fn scale_of(most: u32) -> u32 {
    let carry = select(0x1FFFFFu, 0x1FFFFu, OUT == I8);
    let exponent = select(8u, 6u, OUT == I8);
    return ((max(most, 0x0D800000u) + carry) & 0x7F800000u) - (exponent << 23u); // at least 2^-100
}

// The nearest code, ties to even.
fn code_of(v: f32) -> u32 {
    if OUT == I8 { return bitcast<u32>(i32(round(v))) & 0xFFu; }
    let bits = bitcast<u32>(v);
    let size = bits & 0x7FFFFFFFu;
    // below 2^-6 a step is 2^-9
    let small = u32(round(abs(v) * 512.0));
    let large = ((size + 0x7FFFFu + ((size >> 20u) & 1u)) >> 20u) - 960u;
    return (select(large, small, size < 0x3C800000u) & 0x7Fu) | ((bits >> 24u) & 0x80u);
}

fn move_head(value: bool, at: Head, put: Head) {
    var scale = 0x3F800000u;
    if is_scaled(D0) { scale = source_word(value, at.scale); }
    let own = bitcast<f32>(scale);
    let same = D0 == OUT;
    var factor = select(own, 1.0, same);
    if is_scaled(OUT) && !same {
        var most = 0u; // magnitudes are in the order of their bits
        for (var d = 0u; d < p.s.head_dim; d++) {
            most = max(most, bitcast<u32>(source(value, at.elements + d) * own) & 0x7FFFFFFFu);
        }
        if most < 0x7F800000u {
            scale = scale_of(most);
            factor = own * bitcast<f32>(0x7F000000u - scale); // its inverse
        } else {
            scale = p.s.nan;
            factor = 0.0;
        }
    }
    let step = select(select(2u, 1u, OUT == F32), 4u, is_scaled(OUT));
    for (var d = 0u; d < p.s.head_dim; d += step) {
        var word = 0u;
        for (var j = 0u; j < step; j++) {
            let v = source(value, at.elements + d + j) * factor;
            if OUT == F32 {
                word = bitcast<u32>(v);
            } else if is_scaled(OUT) {
                word |= code_of(v) << (8u * j);
            } else {
                word |= half_of(v) << (16u * j);
            }
        }
        store_word(value, put.elements + d, word);
    }
    if is_scaled(OUT) { store_word(value, put.scale, scale); }
}

// The scale of a head that is nowhere, or its elements, are NaN.
fn absent(to: Head) {
    let nan = bitcast<f32>(p.s.nan);
    let step = select(select(2u, 1u, OUT == F32), 4u, is_scaled(OUT));
    var word = p.s.nan;
    if is_scaled(OUT) { word = 0u; }
    if OUT == BF16 || OUT == F16 { word = half_of(nan) | (half_of(nan) << 16u); }
    for (var d = 0u; d < p.s.head_dim; d += step) { store_word(false, to.elements + d, word); }
    if is_scaled(OUT) { store_word(false, to.scale, p.s.nan); }
}

// k and v in b0 and b1, slots in b2; both pools written. Or the pools in b0 and b1, and rows written.
@compute @workgroup_size(GROUP)
fn kv_scaled(thread: Thread) {
    let i = group_of(thread) * GROUP + thread.id;
    if i >= p.s.tokens * p.s.kv_heads * 2u { return; }
    let value = i % 2u == 1u;
    let head = i / 2u % p.s.kv_heads;
    let token = i / 2u / p.s.kv_heads;
    let slot = b2[p.at2 + token];
    let page = slot / p.s.page_tokens;
    if page >= p.s.first && page < p.s.end {
        if GATHER {
            move_head(value, in_pool(D0, slot, head), in_rows(OUT, token, head, value));
        } else {
            move_head(value, in_rows(D0, token, head, value), in_pool(OUT, slot, head));
        }
    } else if GATHER && page >= p.s.pages && p.s.first == 0u {
        absent(in_rows(OUT, token, head, value));
    }
}

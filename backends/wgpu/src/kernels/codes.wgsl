// Codes and scales as numbers (mixfleet_hal::quantised).
//
// CODE: 0 to 5 for u4, u5, u6, i8, e2m1, e4m3. SCALE: 0 to 4 for f32, bf16, f16, e4m3, i8.

fn field(word: u32, col: u32, bits: u32) -> u32 {
    let per_word = 32u / bits;
    return (word >> (bits * (col % per_word))) & ((1u << bits) - 1u);
}

fn signed_byte(byte: u32) -> f32 { return f32(byte & 127u) - f32(byte & 128u); }

// No product of a subnormal: a device may take it for zero.
fn e4m3(code: u32) -> f32 {
    let size = code & 127u;
    let v = select(bitcast<f32>((size << 20u) + 0x3C000000u), f32(size) * bitcast<f32>(0x3B000000u), size < 8u);
    return select(v, -v, (code & 128u) != 0u);
}

fn e2m1(code: u32) -> f32 {
    let size = code & 7u;
    let v = select(bitcast<f32>((size << 22u) + 0x3F000000u), 0.5 * f32(size), size < 2u);
    return select(v, -v, (code & 8u) != 0u);
}

// The word that element i of scales or zeros is in; elements of less than 32 bits begin at `i` in it.
fn scale_word(i: u32) -> u32 {
    if SCALE == 0u { return i; }
    if SCALE >= 3u { return i / 4u; }
    return i / 2u;
}

fn scale_number(word: u32, i: u32) -> f32 {
    if SCALE == 3u { return e4m3(field(word, i, 8u)); }
    if SCALE == 4u { return signed_byte(field(word, i, 8u)); }
    return number(SCALE, word, i);
}

// Weights of codes, scales and zeros (mixfleet_hal::quantised) in f32: dequantise, some rows of them, and lookup,
// rows by index. b0 codes, b1 high bits or the outer scale, b2 scales, b3 zeros, b4 supers, b5 ids; codes and
// high bits begin with row `first`, the others with row 0. What a format has not is not read.
//
// ZERO: 0 middle, 1 points, 2 minima. SUPERS: f16 factors of 256 columns. OUTER: whether b1 is the outer scale.

struct Shape { count: u32, k: u32, first: u32, end: u32, rows: u32, group_rows: u32, group_cols: u32, nan: u32 }

fn code_field(row: u32, col: u32, bits: u32) -> u32 {
    let per_word = 32u / bits;
    return field(b0[p.at0 + row * (p.s.k / per_word) + col / per_word], col, bits);
}

fn high_field(row: u32, col: u32, bits: u32) -> u32 {
    let per_word = 32u / bits;
    return field(b1[p.at1 + row * (p.s.k / per_word) + col / per_word], col, bits) << 4u;
}

// The number of a code, less the middle where that is zero.
fn code_number(row: u32, col: u32) -> f32 {
    var middle = 0.0;
    if CODE == 0u {
        if ZERO == 0u { middle = 8.0; }
        return f32(code_field(row, col, 4u)) - middle;
    }
    if CODE == 1u {
        if ZERO == 0u { middle = 16.0; }
        return f32(code_field(row, col, 4u) | high_field(row, col, 1u)) - middle;
    }
    if CODE == 2u {
        if ZERO == 0u { middle = 32.0; }
        return f32(code_field(row, col, 4u) | high_field(row, col, 2u)) - middle;
    }
    if CODE == 3u { return signed_byte(code_field(row, col, 8u)); }
    if CODE == 4u { return e2m1(code_field(row, col, 4u)); }
    return e4m3(code_field(row, col, 8u));
}

fn super_number(row: u32, col: u32, which: u32) -> f32 {
    if SUPERS == 0u { return 1.0; }
    let i = p.at4 + (row * (p.s.k / 256u) + col / 256u) * SUPERS + which;
    return number(F16, b4[i / 2u], i);
}

// The weight in row `row` of the whole matrix, `local` of the codes.
fn weight(local: u32, row: u32, col: u32) -> f32 {
    let groups = (p.s.k + p.s.group_cols - 1u) / p.s.group_cols;
    // integers fill whole words
    let row_groups = select(groups, (groups + 3u) / 4u * 4u, SCALE == 4u);
    let group = row / p.s.group_rows * row_groups + col / p.s.group_cols;
    // a binding of integers is counted in words
    let at2 = select(p.at2, p.at2 * 4u, SCALE == 4u) + group;
    let scale = scale_number(b2[scale_word(at2)], at2) * super_number(row, col, 0u);
    var v = code_number(local, col);
    if ZERO == 0u {
        v = v * scale;
    } else {
        let at3 = select(p.at3, p.at3 * 4u, SCALE == 4u) + group;
        let zero = scale_number(b3[scale_word(at3)], at3);
        if ZERO == 1u {
            v = (v - zero) * scale;
        } else {
            v = v * scale - zero * super_number(row, col, 1u);
        }
    }
    if OUTER { v = v * bitcast<f32>(b1[p.at1]); }
    return v;
}

// out [count / k, k] f32
@compute @workgroup_size(GROUP)
fn dequantise(thread: Thread) {
    let i = group_of(thread) * GROUP + thread.id;
    if i >= p.s.count { return; }
    let row = i / p.s.k;
    put(i, weight(row, p.s.first + row, i % p.s.k));
}

fn looked_up(i: u32) -> f32 {
    let id = b5[p.at5 + i / p.s.k];
    if id >= p.s.first && id < p.s.end { return weight(id - p.s.first, id, i % p.s.k); }
    return bitcast<f32>(p.s.nan); // which no later step can hide
}

// As `writes` of embed: a part of the table writes its own rows, and the first part those of no part.
fn writes(i: u32) -> bool {
    let id = b5[p.at5 + i / p.s.k];
    return (id >= p.s.first && id < p.s.end) || (id >= p.s.rows && p.s.first == 0u);
}

// out [tokens, k]
@compute @workgroup_size(GROUP)
fn lookup(thread: Thread) {
    let i = (group_of(thread) * GROUP + thread.id) * PER_WORD;
    if i >= p.s.count { return; }
    let more = i + 1u < p.s.count && PER_WORD == 2u;
    let j = select(i, i + 1u, more);
    put_word(i, looked_up(i), writes(i), looked_up(j), more && writes(j));
}

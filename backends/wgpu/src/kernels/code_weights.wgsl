// Lines of a weight of codes (b1) of four or eight bits and their scales (b5), eight elements at a time; groups end
// with matrices, and hold whole octets of a line.

fn scale_at(line: u32, i: u32) -> f32 {
    let groups = (p.s.k + p.s.group_cols - 1u) / p.s.group_cols;
    let at = p.at5 + line / p.s.group_rows * groups + i / p.s.group_cols;
    return scale_number(b5[scale_word(at)], at);
}

fn code_of(word: u32, i: u32) -> f32 {
    if CODE == 0u { return f32(field(word, i, 4u)) - 8.0; }
    if CODE == 3u { return signed_byte(field(word, i, 8u)); }
    if CODE == 4u { return e2m1(field(word, i, 4u)); }
    return e4m3(field(word, i, 8u));
}

fn w8(line: u32, i: u32) -> Octet {
    let narrow = CODE == 0u || CODE == 4u;
    let at = p.at1 + (line * p.s.k + i) / select(4u, 8u, narrow);
    let lo = b1[at];
    let hi = b1[select(at + 1u, at, narrow)];
    var v: array<f32, 8>;
    for (var j = 0u; j < 8u; j++) { v[j] = code_of(select(lo, hi, j >= 4u), j); }
    let scale = scale_at(line, i);
    return Octet(vec4(v[0], v[1], v[2], v[3]) * scale, vec4(v[4], v[5], v[6], v[7]) * scale);
}

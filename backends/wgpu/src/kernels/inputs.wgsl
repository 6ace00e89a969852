// Rows of x, eight elements at a time; past the row's end, 0.

fn x8(row: u32, i: u32) -> Octet {
    let at = p.at0 + row * p.s.k + i;
    if WIDE {
        if D0 == F32 { return Octet(bitcast<vec4<f32>>(v0[at / 4u]), bitcast<vec4<f32>>(v0[at / 4u + 1u])); }
        return octet(D0, v0[at / 8u]);
    }
    var v: array<f32, 8>;
    for (var j = 0u; j < min(8u, p.s.k - i); j++) { v[j] = in0(at - p.at0 + j); }
    return Octet(vec4(v[0], v[1], v[2], v[3]), vec4(v[4], v[5], v[6], v[7]));
}

// Lines of a weight of dtype D1, eight elements at a time.

fn w8(line: u32, i: u32) -> Octet {
    let at = p.at1 + line * p.s.k + i;
    if WIDE {
        if D1 == F32 { return Octet(bitcast<vec4<f32>>(v1[at / 4u]), bitcast<vec4<f32>>(v1[at / 4u + 1u])); }
        return octet(D1, v1[at / 8u]);
    }
    var v: array<f32, 8>;
    for (var j = 0u; j < min(8u, p.s.k - i); j++) { v[j] = in1(at - p.at1 + j); }
    return Octet(vec4(v[0], v[1], v[2], v[3]), vec4(v[4], v[5], v[6], v[7]));
}

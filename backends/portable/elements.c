// add, silu_mul, gelu_mul, clamped_swiglu, soft_cap, combine, rope, embed: one thread per VEC elements (rope: per
// VEC pairs); rope_part, copy_columns: one per pair or element; `count` threads in all. X, TABLE for embed, and VEC,
// which divides rows.

KERNEL(GROUP) add(READS(X, a), READS(X, b), WRITES(X, out), ulong count) {
    START(a);
    START(b);
    START(out);
    const ulong i = EACH;
    if (i >= count) return;
    float u[VEC], v[VEC];
    LOAD_VEC(X, a, i * VEC, u);
    LOAD_VEC(X, b, i * VEC, v);
    for (uint j = 0; j < VEC; ++j) u[j] += v[j];
    STORE_VEC(X, out, i * VEC, u);
}

KERNEL(GROUP) silu_mul(READS(X, gate), READS(X, up), WRITES(X, out), ulong count) {
    START(gate);
    START(up);
    START(out);
    const ulong i = EACH;
    if (i >= count) return;
    float g[VEC], u[VEC];
    LOAD_VEC(X, gate, i * VEC, g);
    LOAD_VEC(X, up, i * VEC, u);
    for (uint j = 0; j < VEC; ++j) u[j] *= g[j] / (1.0f + EXP(-g[j]));
    STORE_VEC(X, out, i * VEC, u);
}

// In the form with tanh: 1.5957691 is 2 sqrt(2 / pi), and 0.0713548 is 0.044715 times it.
KERNEL(GROUP) gelu_mul(READS(X, gate), READS(X, up), WRITES(X, out), ulong count) {
    START(gate);
    START(up);
    START(out);
    const ulong i = EACH;
    if (i >= count) return;
    float g[VEC], u[VEC];
    LOAD_VEC(X, gate, i * VEC, g);
    LOAD_VEC(X, up, i * VEC, u);
    for (uint j = 0; j < VEC; ++j) u[j] *= g[j] / (1.0f + EXP(-g[j] * (1.5957692f + 0.0713548128f * g[j] * g[j])));
    STORE_VEC(X, out, i * VEC, u);
}

// gate_up [count, VEC, 2]
KERNEL(GROUP) clamped_swiglu(READS(X, gate_up), WRITES(X, out), float alpha, float limit, ulong count) {
    START(gate_up);
    START(out);
    const ulong i = EACH;
    if (i >= count) return;
    float pairs[2 * VEC], v[VEC];
    LOAD_VEC(X, gate_up, 2 * i * VEC, pairs);
    LOAD_VEC(X, gate_up, (2 * i + 1) * VEC, pairs + VEC);
    for (uint j = 0; j < VEC; ++j) {
        const float gate = -FMAX(-pairs[2 * j], -limit), up = -FMAX(-FMAX(pairs[2 * j + 1], -limit), -limit);
        v[j] = (up + 1.0f) * (gate / (1.0f + EXP(-alpha * gate)));
    }
    STORE_VEC(X, out, i * VEC, v);
}

// In place: cap tanh(x / cap), where tanh(z) = 1 - 2 / (1 + exp(2 z)).
KERNEL(GROUP) soft_cap(WRITES(f32, x), float cap, ulong count) {
    START(x);
    const ulong i = EACH;
    if (i >= count) return;
    float v[VEC];
    LOAD_VEC(f32, x, i * VEC, v);
    for (uint j = 0; j < VEC; ++j) v[j] = cap * (1.0f - 2.0f / (1.0f + EXP(v[j] * (2.0f / cap))));
    STORE_VEC(f32, x, i * VEC, v);
}

// x [tokens, active, cols], weights [tokens, active], out [tokens, cols]
KERNEL(GROUP) combine(
    READS(X, x), READS(f32, weights), WRITES(f32, out), uint active, uint cols, uint accumulate, ulong count
) {
    START(x);
    START(weights);
    START(out);
    const ulong i = EACH;
    if (i >= count) return;
    const uint vectors = cols / VEC;
    const ulong token = i / vectors, col = i % vectors * VEC;
    float sum[VEC], v[VEC];
    for (uint j = 0; j < VEC; ++j) sum[j] = 0.0f;
    for (ulong choice = token * active; choice < (token + 1) * active; ++choice) {
        const float weight = weights[choice];
        LOAD_VEC(X, x, choice * cols + col, v);
        for (uint j = 0; j < VEC; ++j) sum[j] = MAD(weight, v[j], sum[j]);
    }
    if (accumulate) {
        LOAD_VEC(f32, out, i * VEC, v);
        for (uint j = 0; j < VEC; ++j) sum[j] += v[j];
    }
    STORE_VEC(f32, out, i * VEC, sum);
}

// x [tokens, heads, head_dim], cos_sin [tokens, head_dim]
KERNEL(GROUP) rope(WRITES(X, x), READS(f32, cos_sin), uint heads, uint half_dim, ulong count) {
    START(x);
    START(cos_sin);
    const ulong i = EACH;
    if (i >= count) return;
    const uint vectors = half_dim / VEC;
    const ulong head = i / vectors;
    const ulong d = i % vectors * VEC;
    const ulong at = head * 2 * half_dim + d, table = head / heads * 2 * half_dim + d;
    rotate(x, at, cos_sin, table, half_dim);
}

// As rope, of half_dim pairs from `first` on in heads of head_dim.
KERNEL(GROUP) rope_part(
    WRITES(X, x), READS(f32, cos_sin), uint heads, uint head_dim, uint first, uint half_dim, uint interleaved,
    ulong count
) {
    START(x);
    START(cos_sin);
    const ulong i = EACH;
    if (i >= count) return;
    const ulong head = i / half_dim, d = i % half_dim;
    const ulong at = head * head_dim + first + (interleaved ? 2 * d : d), other = at + (interleaved ? 1 : half_dim);
    const ulong table = head / heads * 2 * half_dim + d;
    const float a = LOAD(X, x, at), b = LOAD(X, x, other), c = cos_sin[table], s = cos_sin[table + half_dim];
    STORE(X, x, at, a * c - b * s);
    STORE(X, x, other, b * c + a * s);
}

// from [rows, from_row], to [rows, to_row]
KERNEL(GROUP) copy_columns(
    READS(X, from), WRITES(X, to), uint cols, uint from_row, uint from_first, uint to_row, uint to_first, ulong count
) {
    START(from);
    START(to);
    const ulong i = EACH;
    if (i >= count) return;
    const ulong row = i / cols, col = i % cols;
    STORE(X, to, row * to_row + to_first + col, LOAD(X, from, row * from_row + from_first + col));
}

// out [tokens, hidden]; a row whose id is not in the table becomes NaN, which no later step can hide
KERNEL(GROUP) embed(READS(u32, ids), READS(TABLE, table), WRITES(X, out), uint vocab, uint hidden, ulong count) {
    START(ids);
    START(table);
    START(out);
    const ulong i = EACH;
    if (i >= count) return;
    const uint vectors = hidden / VEC;
    const uint id = ids[i / vectors];
    float v[VEC];
    for (uint j = 0; j < VEC; ++j) v[j] = NAN;
    if (id < vocab) LOAD_VEC(TABLE, table, (ulong)id * hidden + i % vectors * VEC, v);
    STORE_VEC(X, out, i * VEC, v);
}

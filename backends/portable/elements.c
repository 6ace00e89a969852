// add, silu_mul, rope, embed: one thread per VEC elements (rope: per VEC pairs), `count` threads in all.
// X, TABLE for embed, and VEC, which divides rows.

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
    float a[VEC], b[VEC], c[VEC], s[VEC];
    LOAD_VEC(X, x, at, a);
    LOAD_VEC(X, x, at + half_dim, b);
    LOAD_VEC(f32, cos_sin, table, c);
    LOAD_VEC(f32, cos_sin, table + half_dim, s);
    for (uint j = 0; j < VEC; ++j) {
        const float v = a[j] * c[j] - b[j] * s[j];
        b[j] = b[j] * c[j] + a[j] * s[j];
        a[j] = v;
    }
    STORE_VEC(X, x, at, a);
    STORE_VEC(X, x, at + half_dim, b);
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

// add, silu_mul, rope, embed: one thread per element (rope: per pair). X, and TABLE for embed.

kernel void add(IN(X) a, ulong a_at, IN(X) b, ulong b_at, OUT_(X) out, ulong out_at, ulong count) {
    const size_t i = get_global_id(0);
    if (i < count) STORE(X, out, out_at + i, LOAD(X, a, a_at + i) + LOAD(X, b, b_at + i));
}

kernel void silu_mul(IN(X) gate, ulong gate_at, IN(X) up, ulong up_at, OUT_(X) out, ulong out_at, ulong count) {
    const size_t i = get_global_id(0);
    if (i >= count) return;
    const float g = LOAD(X, gate, gate_at + i);
    STORE(X, out, out_at + i, g / (1.0f + exp(-g)) * LOAD(X, up, up_at + i));
}

// x [tokens, heads, head_dim], cos_sin [tokens, head_dim]
kernel void rope(OUT_(X) x, ulong x_at, global const float* cos_sin, ulong cos_sin_at, uint heads, uint half_dim,
                 ulong count) {
    const size_t i = get_global_id(0);
    if (i >= count) return;
    const size_t head = i / half_dim, d = i % half_dim;
    const ulong at = x_at + head * 2 * half_dim + d;
    const ulong table = cos_sin_at + head / heads * 2 * half_dim + d;
    const float c = cos_sin[table], s = cos_sin[table + half_dim];
    const float a = LOAD(X, x, at), b = LOAD(X, x, at + half_dim);
    STORE(X, x, at, a * c - b * s);
    STORE(X, x, at + half_dim, b * c + a * s);
}

// out [tokens, hidden]; a row whose id is not in the table becomes NaN, which no later step can hide
kernel void embed(global const uint* ids, ulong ids_at, IN(TABLE) table, ulong table_at, OUT_(X) out, ulong out_at,
                  uint vocab, uint hidden, ulong count) {
    const size_t i = get_global_id(0);
    if (i >= count) return;
    const uint id = ids[ids_at + i / hidden];
    const float v = id < vocab ? LOAD(TABLE, table, table_at + (ulong)id * hidden + i % hidden) : NAN;
    STORE(X, out, out_at + i, v);
}

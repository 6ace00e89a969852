// Rotates VEC pairs of a head's elements by position: `at` is the first of them, its partner half a head further;
// `table` is the same place in cos_sin.
DEVICE void rotate(GLOBAL TYPE(X)* x, ulong at, GLOBAL const float* cos_sin, ulong table, uint half_dim) {
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

// rms_norm, one group per row; X, WEIGHT, OUT, and VEC, which divides rows.

KERNEL(GROUP) rms_norm(READS(X, x), READS(WEIGHT, weight), WRITES(OUT, out), uint rows, uint cols, float eps) {
    LOCAL float scratch[GROUP];
    START(x);
    START(weight);
    START(out);
    const ulong row = (ulong)GROUP_X * cols;
    float squares = 0.0f, v[VEC], w[VEC];
    for (uint i = THREAD * VEC; i < cols; i += GROUP * VEC) {
        LOAD_VEC(X, x, row + i, v);
        for (uint j = 0; j < VEC; ++j) squares = MAD(v[j], v[j], squares);
    }
    const float scale = 1.0f / SQRT(group_sum(squares, scratch) / cols + eps);
    for (uint i = THREAD * VEC; i < cols; i += GROUP * VEC) {
        LOAD_VEC(X, x, row + i, v);
        LOAD_VEC(WEIGHT, weight, i, w);
        for (uint j = 0; j < VEC; ++j) v[j] = v[j] * scale * w[j];
        STORE_VEC(OUT, out, row + i, v);
    }
}

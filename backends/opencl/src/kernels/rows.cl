// rms_norm for CPUs: one thread per row, no barrier; X, WEIGHT, OUT.

kernel void rms_norm(READS(X, x), READS(WEIGHT, weight), WRITES(OUT, out), uint rows, uint cols, float eps) {
    const size_t row = get_global_id(0);
    if (row >= rows) return;
    x += x_at + row * cols;
    weight += weight_at;
    out += out_at + row * cols;
    floatw squares = 0.0f;
    uint i = 0;
    for (; i + W <= cols; i += W) {
        const floatw v = LOADW(X, x, i);
        squares = MAD(v, v, squares);
    }
    float sum = SUMW(squares);
    for (; i < cols; ++i) sum = MAD(LOAD(X, x, i), LOAD(X, x, i), sum);
    const float scale = 1.0f / sqrt(sum / cols + eps);
    for (i = 0; i < cols; ++i) STORE(OUT, out, i, LOAD(X, x, i) * scale * LOAD(WEIGHT, weight, i));
}

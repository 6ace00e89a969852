// rms_norm and argmax for CPUs: one thread per row, no barrier; X, WEIGHT, OUT.

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

#define NONE 0xFFFFFFFFu

// Whether (v, i) beats (best, at): NaN never, a tie only from a lower index, anything the first time.
#define BEATS(v, i, best, at) ((v) > (best) || ((v) == (best) && (i) < (at)))

kernel void argmax(READS(f32, x), WRITES(u32, out), uint rows, uint cols) {
    const size_t row = get_global_id(0);
    if (row >= rows) return;
    x += x_at + row * cols;
    float16 best = -INFINITY;
    uint16 at = NONE;
    uint16 index = (uint16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    uint i = 0;
    for (; i + 16 <= cols; i += 16, index += 16u) {
        const float16 v = vload16(0, x + i);
        const int16 take = (v > best) | ((v == best) & (at == NONE));
        best = select(best, v, take);
        at = select(at, index, take);
    }
    float lanes[16];
    uint indices[16];
    vstore16(best, 0, lanes);
    vstore16(at, 0, indices);
    float v = lanes[0];
    uint winner = indices[0];
    for (uint lane = 1; lane < 16; ++lane) {
        if (BEATS(lanes[lane], indices[lane], v, winner)) v = lanes[lane], winner = indices[lane];
    }
    for (; i < cols; ++i) {
        if (BEATS(x[i], i, v, winner)) v = x[i], winner = i;
    }
    out[out_at + row] = winner == NONE ? 0 : winner;
}

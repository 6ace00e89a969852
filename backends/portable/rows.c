// rms_norm and argmax, one group per row; X, WEIGHT, OUT, and VEC, which divides rows.

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

#define NONE 0xFFFFFFFFu

// Whether (v, i) beats (best, at): NaN never, a tie only from a lower index, anything the first time.
#define BEATS(v, i, best, at) ((v) > (best) || ((v) == (best) && (i) < (at)))

KERNEL(GROUP) argmax(READS(f32, x), WRITES(u32, out), uint rows, uint cols) {
    LOCAL float values[GROUP];
    LOCAL uint indices[GROUP];
    START(x);
    START(out);
    const uint lid = THREAD;
    const ulong row = (ulong)GROUP_X * cols;
    float best = -INFINITY, v[VEC];
    uint winner = NONE;
    for (uint i = lid * VEC; i < cols; i += GROUP * VEC) {
        LOAD_VEC(f32, x, row + i, v);
        for (uint j = 0; j < VEC; ++j) {
            if (BEATS(v[j], i + j, best, winner)) {
                best = v[j];
                winner = i + j;
            }
        }
    }
    values[lid] = best;
    indices[lid] = winner;
    for (uint half_group = GROUP / 2; half_group > 0; half_group /= 2) {
        BARRIER();
        if (lid < half_group && BEATS(values[lid + half_group], indices[lid + half_group], values[lid], indices[lid])) {
            values[lid] = values[lid + half_group];
            indices[lid] = indices[lid + half_group];
        }
    }
    if (lid == 0) out[GROUP_X] = indices[0] == NONE ? 0 : indices[0];
}

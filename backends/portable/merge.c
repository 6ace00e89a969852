// attn_merge; OUT, and VEC, which divides head_dim. acc [parts, rows, head_dim], stat [parts, rows, 2],
// with `heads`: sinks [heads]; out [rows, head_dim]. One thread per VEC elements of the output.

KERNEL(GROUP) attn_merge(READS(f32, acc), READS(f32, stat), READS(f32, sinks), WRITES(OUT, out), uint parts,
                         uint head_dim, uint heads, ulong count) {
    START(acc);
    START(stat);
    START(sinks);
    START(out);
    const ulong i = EACH;
    if (i >= count) return;
    const uint vectors = head_dim / VEC;
    const ulong rows = count / vectors, row = i / vectors;
    const ulong d = i % vectors * VEC;
    const float sink = heads > 0 ? sinks[row % heads] : -INFINITY;
    float max = sink;
    for (uint p = 0; p < parts; ++p) max = FMAX(max, stat[2 * (p * rows + row)]);
    float sum = heads > 0 ? EXP(sink - max) : 0.0f, total[VEC];
    for (uint j = 0; j < VEC; ++j) total[j] = 0.0f;
    for (uint p = 0; p < parts; ++p) {
        const ulong at = p * rows + row;
        const float part_max = stat[2 * at];
        if (part_max == -INFINITY) continue;
        const float share = EXP(part_max - max);
        sum = MAD(share, stat[2 * at + 1], sum);
        float part[VEC];
        LOAD_VEC(f32, acc, at * head_dim + d, part);
        for (uint j = 0; j < VEC; ++j) total[j] = MAD(share, part[j], total[j]);
    }
    for (uint j = 0; j < VEC; ++j) total[j] = sum == 0.0f ? 0.0f : total[j] / sum;
    STORE_VEC(OUT, out, i * VEC, total);
}

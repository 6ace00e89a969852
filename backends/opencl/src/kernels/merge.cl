// attn_merge; OUT. acc [parts, rows, head_dim], stat [parts, rows, 2], out [rows, head_dim].
// One thread per element of the output.

kernel void attn_merge(global const float* acc, ulong acc_at, global const float* stat, ulong stat_at, OUT_(OUT) out,
                       ulong out_at, uint parts, uint head_dim, ulong count) {
    const size_t i = get_global_id(0);
    if (i >= count) return;
    const ulong rows = count / head_dim, row = i / head_dim;
    float max = -INFINITY;
    for (uint p = 0; p < parts; ++p) max = fmax(max, stat[stat_at + 2 * (p * rows + row)]);
    float sum = 0.0f, total = 0.0f;
    for (uint p = 0; p < parts; ++p) {
        const ulong at = p * rows + row;
        const float part_max = stat[stat_at + 2 * at];
        if (part_max == -INFINITY) continue;
        const float share = exp(part_max - max);
        sum = MAD(share, stat[stat_at + 2 * at + 1], sum);
        total = MAD(share, acc[acc_at + at * head_dim + i % head_dim], total);
    }
    STORE(OUT, out, out_at + i, sum == 0.0f ? 0.0f : total / sum);
}

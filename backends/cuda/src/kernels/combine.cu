// Recombines the parts of the sequences that have several, in order; one block per sequence and head. With OUT, writes
// what `attn_merge` of that single result does, too.

#ifdef OUT
#define MERGED , WRITES(OUT, out)
#define START_MERGED START(out)
#define FINISH(d, max, sum, total)                                                                                  STORE(OUT, out, (ulong)row * HEAD_DIM + (d), (max) == -INFINITY || (sum) == 0.0f ? 0.0f : (total) / (sum))
#else
#define MERGED
#define START_MERGED
#define FINISH(d, max, sum, total)
#endif

KERNEL(128) attn_combine(READS(u32, range), WRITES(f32, acc_out), WRITES(f32, stat), READS(f32, part_acc),
                         READS(f32, part_stat) MERGED, uint heads, uint page_tokens, uint pages_max, uint parts,
                         uint chunk) {
    START(range);
    START(acc_out);
    START(stat);
    START(part_acc);
    START(part_stat);
    START_MERGED;
    const uint row = GROUP_X, sequence = row / heads;
    const Cut all = cut(range[2 * sequence], RANGE_END(sequence), parts, chunk);
    if (all.used == 1) {
        for (uint d = THREAD; d < HEAD_DIM; d += 128)
            FINISH(d, stat[2 * row], stat[2 * row + 1], acc_out[(ulong)row * HEAD_DIM + d]);
        return;
    }
    const float* stats = part_stat + (ulong)row * parts * 2;
    const float* sums = part_acc + (ulong)row * parts * HEAD_DIM;
    float max = -INFINITY;
    for (uint p = 0; p < all.used; ++p) max = FMAX(max, stats[2 * p]);
    for (uint d = THREAD; d < HEAD_DIM; d += 128) {
        float total = 0.0f, sum = 0.0f;
        for (uint p = 0; p < all.used; ++p) {
            const float keep = share(stats[2 * p], max);
            total = MAD(keep, sums[(ulong)p * HEAD_DIM + d], total);
            sum = MAD(keep, stats[2 * p + 1], sum);
        }
        acc_out[(ulong)row * HEAD_DIM + d] = total;
        FINISH(d, max, sum, total);
        if (d == 0) {
            stat[2 * row] = max;
            stat[2 * row + 1] = sum;
        }
    }
}

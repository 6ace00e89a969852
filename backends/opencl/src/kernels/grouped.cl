// For CPUs: no barrier; see grouped.h for the operands.

// Rows that a thread works on together.
#define ROWS 4

// A thread computes COLS columns of BAND places, ROWS at a time, for each run of places of one expert, as the
// plain product does. Places before and behind those of all experts are passed over.
#define COLS 4

kernel void grouped(OPERANDS) {
    START_OPERANDS;
    const uint col = get_global_id(0) * COLS;
    const uint first = get_global_id(1) * BAND;
    const uint end = min(min(choices, starts[experts]), first + BAND);
    uint place = max(first, starts[0]);
    while (place < end) {
        const uint expert = expert_of(starts, experts, place);
        const uint last = max(place + 1, min(end, starts[expert + 1]));
        const ulong lines = (ulong)expert * n;
        global const TYPE(WEIGHT)* w[COLS];
        for (uint c = 0; c < COLS; ++c) w[c] = weight + (lines + min(col + c, n - 1)) * k;
        for (; place < last; place += ROWS) {
            global const TYPE(X)* a[ROWS];
            uint own[ROWS];
            floatw acc[ROWS][COLS];
            const uint some = min((uint)ROWS, last - place);
            for (uint r = 0; r < ROWS; ++r) {
                own[r] = order[min(place + r, last - 1)];
                a[r] = x + (ulong)(own[r] < choices ? own[r] / fan : 0) * k;
                for (uint c = 0; c < COLS; ++c) acc[r][c] = 0.0f;
            }
            uint i = 0;
            if (some == 1) {
                for (; i + W <= k; i += W) {
                    const floatw v = LOADW(X, a[0], i);
#pragma unroll
                    for (uint c = 0; c < COLS; ++c) acc[0][c] = MAD(v, LOADW(WEIGHT, w[c], i), acc[0][c]);
                }
            }
            for (; i + W <= k; i += W) {
                floatw b[COLS];
#pragma unroll
                for (uint c = 0; c < COLS; ++c) b[c] = LOADW(WEIGHT, w[c], i);
#pragma unroll
                for (uint r = 0; r < ROWS; ++r) {
                    const floatw v = LOADW(X, a[r], i);
#pragma unroll
                    for (uint c = 0; c < COLS; ++c) acc[r][c] = MAD(v, b[c], acc[r][c]);
                }
            }
#pragma unroll
            for (uint r = 0; r < ROWS; ++r) {
#pragma unroll
                for (uint c = 0; c < COLS; ++c) {
                    float sum = SUMW(acc[r][c]);
                    for (uint j = i; j < k; ++j) sum = MAD(LOAD(X, a[r], j), LOAD(WEIGHT, w[c], j), sum);
                    if (r < some && own[r] < choices && col + c < n) FINISH(own[r], lines + col + c, col + c, sum);
                }
            }
        }
        place = last;
    }
}

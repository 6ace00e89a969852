// For any GPU, all dtypes: products with the matrices of experts.

// Places that a group works on together.
#ifndef ROWS
#define ROWS 4
#endif

// Few rows: one group per column and ROWS places, coalesced along k, for each run of places of one expert; VEC
// divides k. Places before and behind those of all experts are passed over.
KERNEL(GROUP) grouped_few(OPERANDS) {
    LOCAL float scratch[GROUP];
    START_OPERANDS;
    const uint col = GROUP_X, first = GROUP_Y * ROWS;
    const uint own_end = starts[experts] < choices ? starts[experts] : choices;
    const uint end = first + ROWS < own_end ? first + ROWS : own_end;
    uint place = first > starts[0] ? first : starts[0];
    while (place < end) {
        const uint expert = expert_of(starts, experts, place);
        uint last = place + 1;
        while (last < end && last < starts[expert + 1]) ++last;
        const ulong line = (ulong)expert * n + col;
        float acc[ROWS], w[VEC], v[VEC];
        uint own[ROWS];
        for (uint r = 0; r < ROWS; ++r) {
            acc[r] = 0.0f;
            own[r] = place + r < last ? order[place + r] : choices;
        }
        for (uint i = THREAD * VEC; i < k; i += GROUP * VEC) {
            LOAD_LINE(line, i, w);
            for (uint r = 0; r < ROWS; ++r) {
                if (own[r] < choices) {
                    LOAD_VEC(X, x, (ulong)(own[r] / fan) * k + i, v);
                    for (uint j = 0; j < VEC; ++j) acc[r] = MAD(v[j], w[j], acc[r]);
                }
            }
        }
        for (uint r = 0; r < ROWS; ++r) {
            const float sum = group_sum(acc[r], scratch);
            if (THREAD == 0 && own[r] < choices) FINISH(own[r], line, col, sum);
        }
        place = last;
    }
}

// Many rows: tiles of one expert each. There are as many groups as tiles there can be; those beyond the tiles
// there are compute nothing.
#define ROW_AT(line) (own[line] < choices ? own[line] / fan : 0)
#define LINE_AT(line) (lines + (col0 + (line) < n ? col0 + (line) : n - 1))

KERNEL(256) grouped_many(OPERANDS) {
    LOCAL float xs[DEPTH][TILE + 1];
    LOCAL float ws[DEPTH][TILE + 1];
    LOCAL uint own[TILE];
    START_OPERANDS;
    const uint lid = THREAD, tx = lid % SIDE, ty = lid / SIDE;
    const uint col0 = GROUP_X * TILE;
    uint tile = GROUP_Y, expert = 0, row0 = choices, end = choices;
    for (; expert < experts; ++expert) {
        const uint begin = starts[expert], rows = starts[expert + 1] - begin, tiles = (rows + TILE - 1) / TILE;
        if (tile < tiles) {
            row0 = begin + tile * TILE;
            end = begin + rows < choices ? begin + rows : choices;
            break;
        }
        tile -= tiles;
    }
    const uint depth = row0 < end ? k : 0;
    const ulong lines = (ulong)(expert < experts ? expert : 0) * n;
    if (lid < TILE) own[lid] = row0 + lid < end ? order[row0 + lid] : choices;
    BARRIER();
    SUM_TILES(depth, ROW_AT, LINE_AT);
    for (uint r = 0; r < 4; ++r) {
        for (uint c = 0; c < 4; ++c) {
            const uint choice = own[ty + SIDE * r], col = col0 + tx + SIDE * c;
            if (choice < choices && col < n) FINISH(choice, lines + col, col, acc[r][c]);
        }
    }
}

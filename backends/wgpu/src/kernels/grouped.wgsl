// out [choices, n] = x [choices / fan, k] . weight [experts, n, k]^T (+ bias [experts, n]) of each choice's
// expert, by `order` (binding 3) and `starts` (binding 4). The matrices of the experts first .. first + bound are
// bound; choices of others are passed over. WIDE: k is a multiple of 8 and rows begin at multiples of 16 bytes.
//
// A thread stores pairs of columns that begin with an even one: whole words, as n is even where OUT has 16 bits.

struct Shape { choices: u32, fan: u32, experts: u32, first: u32, bound: u32, n: u32, k: u32, bias: u32,
    group_rows: u32, group_cols: u32 } // of quantised weights

fn choice_at(place: u32) -> u32 { return b3[p.at3 + place]; }
fn start_of(expert: u32) -> u32 { return b4[p.at4 + expert]; }

fn finished(line: u32, sum: f32) -> f32 {
    if p.s.bias != 0u { return sum + in2(line); }
    return sum;
}

// `lines` is where the expert's rows begin among those that are bound.
fn finish(choice: u32, lines: u32, col: u32, a: f32, b: f32) {
    if choice >= p.s.choices || col >= p.s.n { return; }
    let more = col + 1u < p.s.n;
    let second = select(col, col + 1u, more);
    let left = finished(lines + col, a);
    let right = finished(lines + second, b);
    if more {
        put2(choice * p.s.n + col, left, right);
    } else {
        put(choice * p.s.n + col, left);
    }
}

// For few rows: a group computes COLS columns of one choice, its threads along k.
const COLS = 4u;

@compute @workgroup_size(GROUP)
fn grouped_few(thread: Thread) {
    let across = (p.s.n + COLS - 1u) / COLS;
    let group = group_of(thread);
    if group >= across * p.s.choices { return; }
    let col0 = group % across * COLS;
    let place = group / across;
    var low = 0u;
    var high = p.s.experts;
    while high - low > 1u {
        let middle = (low + high) / 2u;
        if start_of(middle) <= place { low = middle; } else { high = middle; }
    }
    // places before and behind those of all experts are of none
    if place < start_of(0u) || place >= start_of(p.s.experts) { return; }
    let choice = choice_at(place);
    if low < p.s.first || low >= p.s.first + p.s.bound || choice >= p.s.choices { return; }
    let lines = (low - p.s.first) * p.s.n;
    var acc: array<f32, SUMS>; // [COLS]
    for (var i = thread.id * 8u; i < p.s.k; i += GROUP * 8u) {
        let x = x8(choice / p.s.fan, i);
        for (var c = 0u; c < COLS; c++) { acc[c] += dot8(x, w8(lines + min(col0 + c, p.s.n - 1u), i)); }
    }
    sums(thread, &acc);
    for (var c = thread.id * 2u; c < COLS; c += GROUP * 2u) {
        finish(choice, lines, col0 + c, acc[c], acc[c + 1u]);
    }
}

// For many rows: tiles of one expert each. There are as many groups as tiles there can be.
@compute @workgroup_size(GROUP)
fn grouped_many(thread: Thread) {
    let across = (p.s.n + TILE - 1u) / TILE;
    let group = group_of(thread);
    let col0 = group % across * TILE;
    var tile = group / across;
    var expert = p.s.first;
    var row0 = p.s.choices;
    var end = 0u;
    for (; expert < p.s.first + p.s.bound; expert++) {
        let begin = start_of(expert);
        let rows = start_of(expert + 1u) - begin;
        let tiles = (rows + TILE - 1u) / TILE;
        if tile < tiles {
            row0 = begin + tile * TILE;
            end = min(begin + rows, p.s.choices);
            break;
        }
        tile -= tiles;
    }
    if row0 >= end { return; }
    let lines = (expert - p.s.first) * p.s.n;
    let tx = thread.id % SIDE;
    let ty = thread.id / SIDE;
    let line = thread.id / 2u % TILE;
    let side = thread.id % 2u;
    let own = min(choice_at(min(row0 + line, end - 1u)), p.s.choices - 1u) / p.s.fan;
    var acc: Sums;
    for (var k0 = 0u; k0 < p.s.k; k0 += DEPTH4 * 4u) {
        let i = k0 + side * 8u;
        var v: Piece;
        if i < p.s.k {
            if thread.id < 2u * TILE {
                v = x_piece(own, i);
            } else {
                v = w_piece(lines + min(col0 + line, p.s.n - 1u), i);
            }
        }
        add_tiles(thread, v, &acc);
    }
    let totals = tile_sums(thread, &acc);
    for (var r = 0u; r < 4u; r++) {
        let place = row0 + ty + SIDE * r;
        if place >= end { continue; }
        let choice = choice_at(place);
        for (var c = 0u; c < 4u; c += 2u) {
            finish(choice, lines, col0 + 2u * tx + 16u * c, totals[r][c], totals[r][c + 1u]);
        }
    }
}

// out [m, ld] from its column `col`: x [m, k] . weight [n, k]^T (+ bias [n]) (+ out). n is the number of rows
// of the weight that are bound. WIDE: k is a multiple of 8 and rows begin at multiples of 16 bytes.
//
// Rows and columns past the edge repeat the last one and are not stored, so that no load leaves its operand.
// A thread stores pairs of columns that begin with an even one: whole words, as n is even where OUT has 16
// bits and `col` always.

struct Shape { m: u32, n: u32, k: u32, ld: u32, col: u32, bias: u32, accumulate: u32 }

fn finished(row: u32, col: u32, sum: f32) -> f32 {
    var total = sum;
    if p.s.bias != 0u { total += in2(col); }
    if p.s.accumulate != 0u { total += old(row * p.s.ld + p.s.col + col); }
    return total;
}

fn finish(row: u32, col: u32, a: f32, b: f32) {
    if row >= p.s.m || col >= p.s.n { return; }
    let more = col + 1u < p.s.n;
    let second = select(col, col + 1u, more);
    let at = row * p.s.ld + p.s.col + col;
    let left = finished(row, col, a);
    let right = finished(row, second, b);
    if more {
        put2(at, left, right);
    } else {
        put(at, left);
    }
}

// For up to ROWS rows: the weights are read once, which is all that counts. A group computes COLS columns, its
// threads along k.
const COLS = 4u;

@compute @workgroup_size(GROUP)
fn few_rows(thread: Thread) {
    let col0 = group_of(thread) * COLS;
    if col0 >= p.s.n { return; }
    var acc: array<f32, SUMS>; // [ROWS, COLS]
    for (var i = thread.id * 8u; i < p.s.k; i += GROUP * 8u) {
        var w: array<Octet, COLS>;
        for (var c = 0u; c < COLS; c++) { w[c] = w8(min(col0 + c, p.s.n - 1u), i); }
        for (var r = 0u; r < ROWS; r++) {
            let x = x8(min(r, p.s.m - 1u), i);
            for (var c = 0u; c < COLS; c++) { acc[r * COLS + c] += dot8(x, w[c]); }
        }
    }
    sums(thread, &acc);
    for (var i = thread.id; i < ROWS * COLS / 2u; i += GROUP) {
        let r = i / (COLS / 2u);
        let c = i % (COLS / 2u) * 2u;
        finish(r, col0 + c, acc[r * COLS + c], acc[r * COLS + c + 1u]);
    }
}

// For many rows: tiles.
@compute @workgroup_size(GROUP)
fn many_rows(thread: Thread) {
    let across = (p.s.n + TILE - 1u) / TILE;
    let down = (p.s.m + TILE - 1u) / TILE;
    let group = group_of(thread);
    if group >= across * down { return; }
    let col0 = group % across * TILE;
    let row0 = group / across * TILE;
    let tx = thread.id % SIDE;
    let ty = thread.id / SIDE;
    // half of the threads load x, half the weight: 64 lines of two octets
    let line = thread.id / 2u % TILE;
    let side = thread.id % 2u;
    var acc: Sums;
    for (var k0 = 0u; k0 < p.s.k; k0 += DEPTH4 * 4u) {
        let i = k0 + side * 8u;
        var v: Piece;
        if i < p.s.k {
            if thread.id < 2u * TILE {
                v = x_piece(min(row0 + line, p.s.m - 1u), i);
            } else {
                v = w_piece(min(col0 + line, p.s.n - 1u), i);
            }
        }
        add_tiles(thread, v, &acc);
    }
    let totals = tile_sums(thread, &acc);
    for (var r = 0u; r < 4u; r++) {
        for (var c = 0u; c < 4u; c += 2u) {
            finish(row0 + ty + SIDE * r, col0 + 2u * tx + 16u * c, totals[r][c], totals[r][c + 1u]);
        }
    }
}

// What the products of gemm.wgsl and grouped.wgsl have in common: rows of x and lines of the weight, eight
// elements at a time, and tiles of 64 x 64 through shared memory, 4 x 4 sums for each of 256 threads.

// Elements i .. i + 8 of row `row`; past the row's end, 0.
fn x8(row: u32, i: u32) -> Octet {
    let at = p.at0 + row * p.s.k + i;
    if WIDE {
        if D0 == F32 { return Octet(bitcast<vec4<f32>>(v0[at / 4u]), bitcast<vec4<f32>>(v0[at / 4u + 1u])); }
        return octet(D0, v0[at / 8u]);
    }
    var v: array<f32, 8>;
    for (var j = 0u; j < min(8u, p.s.k - i); j++) { v[j] = in0(at - p.at0 + j); }
    return Octet(vec4(v[0], v[1], v[2], v[3]), vec4(v[4], v[5], v[6], v[7]));
}

const TILE = 64u;
const DEPTH4 = 4u; // of a tile, in vectors of 4 along k
const SIDE = 16u;
// a row of 5 vectors: 8 threads that load 16 bytes of neighbouring rows each touch all 32 banks once
const STRIDE = 5u;

var<workgroup> xs: array<vec4<f32>, TILE * STRIDE>;
var<workgroup> ws: array<vec4<f32>, TILE * STRIDE>;

// Where a tile's column lies in `ws`: thread t takes columns 2t, 2t + 1, 2t + 32, 2t + 33 (pairs, for whole
// words of the output) and finds them at t, t + 16, t + 32, t + 48.
fn place_of(col: u32) -> u32 { return (col % 32u) / 2u + SIDE * (col % 2u + col / 32u * 2u); }

// Every thread of the group calls it, with its eight elements of a tile: half of them load x, half the weight,
// of line id / 2 % TILE the first or the second octet. Adds the tile to the thread's sums.
fn add_tiles(thread: Thread, v: Octet, acc: ptr<function, array<array<f32, 4>, 4>>) {
    let tx = thread.id % SIDE;
    let ty = thread.id / SIDE;
    let line = thread.id / 2u % TILE;
    let side = thread.id % 2u;
    workgroupBarrier();
    if thread.id < 2u * TILE {
        xs[line * STRIDE + side * 2u] = v.lo;
        xs[line * STRIDE + side * 2u + 1u] = v.hi;
    } else {
        ws[place_of(line) * STRIDE + side * 2u] = v.lo;
        ws[place_of(line) * STRIDE + side * 2u + 1u] = v.hi;
    }
    workgroupBarrier();
    for (var d = 0u; d < DEPTH4; d++) {
        var w: array<vec4<f32>, 4>;
        for (var c = 0u; c < 4u; c++) { w[c] = ws[(tx + SIDE * c) * STRIDE + d]; }
        for (var r = 0u; r < 4u; r++) {
            let x = xs[(ty + SIDE * r) * STRIDE + d];
            for (var c = 0u; c < 4u; c++) { (*acc)[r][c] += dot(x, w[c]); }
        }
    }
}

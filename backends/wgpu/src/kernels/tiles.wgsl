// Tiles of 64 x 64 through shared memory, 4 x 4 sums for each of 256 threads: products of many rows in gemm.wgsl and
// grouped.wgsl. matrix_tiles.wgsl has the same functions for adapters that multiply matrices.

// What a thread loads of a line, and its sums of a tile.
alias Piece = Octet;
alias Sums = array<array<f32, 4>, 4>;

fn x_piece(row: u32, i: u32) -> Piece { return x8(row, i); }
fn w_piece(line: u32, i: u32) -> Piece { return w8(line, i); }

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
fn add_tiles(thread: Thread, v: Piece, acc: ptr<function, Sums>) {
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

// Every thread of the group calls it. Its sums, [4, 4]: of rows ty + SIDE * r and columns 2 * tx + c % 2 + c / 2 * 32.
fn tile_sums(thread: Thread, acc: ptr<function, Sums>) -> array<array<f32, 4>, 4> { return *acc; }

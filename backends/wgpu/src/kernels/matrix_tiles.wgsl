// In place of tiles.wgsl where x and weight are f16 and subgroups multiply matrices: tiles of 64 x 64, in parts of
// EDGE x EDGE, of which each subgroup has PARTS beside each other. Products of f16 are exact in f32, and sums are f32.
// Part, Across and Down are matrices of EDGE x EDGE: sums, and f16 of x and of the weight.
//
// Elements go from memory to matrices as they are, since a conversion may flush what is below the least normal.

// the buffers of x and weight again
@group(0) @binding(0) var<storage, read> h0: array<f16>;
@group(0) @binding(1) var<storage, read> h1: array<f16>;
@group(0) @binding(8) var<storage, read> q0: array<vec4<f16>>;
@group(0) @binding(9) var<storage, read> q1: array<vec4<f16>>;

// What a thread loads of a line, and a subgroup's sums of a tile.
struct Piece { lo: vec4<f16>, hi: vec4<f16> }
alias Sums = array<Part, PARTS>;

fn x_piece(row: u32, i: u32) -> Piece {
    let at = p.at0 + row * p.s.k + i;
    if WIDE { return Piece(q0[at / 4u], q0[at / 4u + 1u]); }
    var v: array<f16, 8>;
    for (var j = 0u; j < min(8u, p.s.k - i); j++) { v[j] = h0[at + j]; }
    return Piece(vec4(v[0], v[1], v[2], v[3]), vec4(v[4], v[5], v[6], v[7]));
}

fn w_piece(line: u32, i: u32) -> Piece {
    let at = p.at1 + line * p.s.k + i;
    if WIDE { return Piece(q1[at / 4u], q1[at / 4u + 1u]); }
    var v: array<f16, 8>;
    for (var j = 0u; j < min(8u, p.s.k - i); j++) { v[j] = h1[at + j]; }
    return Piece(vec4(v[0], v[1], v[2], v[3]), vec4(v[4], v[5], v[6], v[7]));
}

const TILE = 64u;
const DEPTH4 = 4u; // of a tile, in vectors of 4 along k
const SIDE = 16u;
// rows begin at multiples of 16 bytes, as loads of matrices need; 48 bytes spread them over the banks
const STRIDE = 24u;
const ACROSS = TILE / EDGE;

var<workgroup> xs: array<f16, TILE * STRIDE>;
var<workgroup> ws: array<f16, TILE * STRIDE>;
var<workgroup> results: array<f32, TILE * TILE>;

// The first of a subgroup's parts. Where subgroups are smaller than the adapter's largest, more than one have the same,
// and store the same: matrices are for control flow that all of a group share.
fn first_part(thread: Thread) -> u32 { return thread.subgroup * PARTS % (ACROSS * ACROSS); }

// Every thread of the group calls it, with its eight elements of a tile: half of them load x, half the weight,
// of line id / 2 % TILE the first or the second octet. Adds the tile to the subgroup's sums.
fn add_tiles(thread: Thread, v: Piece, acc: ptr<function, Sums>) {
    let at = thread.id / 2u % TILE * STRIDE + thread.id % 2u * 8u;
    workgroupBarrier();
    if thread.id < 2u * TILE {
        for (var j = 0u; j < 4u; j++) {
            xs[at + j] = v.lo[j];
            xs[at + 4u + j] = v.hi[j];
        }
    } else {
        for (var j = 0u; j < 4u; j++) {
            ws[at + j] = v.lo[j];
            ws[at + 4u + j] = v.hi[j];
        }
    }
    workgroupBarrier();
    let first = first_part(thread);
    let line = first / ACROSS * EDGE * STRIDE;
    for (var d = 0u; d < DEPTH4 * 4u; d += EDGE) {
        let x = coopLoadT<Across>(&xs[line + d], STRIDE);
        for (var j = 0u; j < PARTS; j++) {
            let w = coopLoad<Down>(&ws[(first + j) % ACROSS * EDGE * STRIDE + d], STRIDE);
            (*acc)[j] = coopMultiplyAdd(x, w, (*acc)[j]);
        }
    }
}

// Every thread of the group calls it. Its share of all sums, [4, 4]: of rows ty + SIDE * r and columns
// 2 * tx + c % 2 + c / 2 * 32.
fn tile_sums(thread: Thread, acc: ptr<function, Sums>) -> array<array<f32, 4>, 4> {
    let first = first_part(thread);
    for (var j = 0u; j < PARTS; j++) {
        let row = first / ACROSS * EDGE;
        let col = (first + j) % ACROSS * EDGE;
        coopStoreT((*acc)[j], &results[row * TILE + col], TILE);
    }
    workgroupBarrier();
    var own: array<array<f32, 4>, 4>;
    for (var r = 0u; r < 4u; r++) {
        let row = thread.id / SIDE + SIDE * r;
        for (var c = 0u; c < 4u; c++) {
            own[r][c] = results[row * TILE + thread.id % SIDE * 2u + c % 2u + c / 2u * 32u];
        }
    }
    return own;
}

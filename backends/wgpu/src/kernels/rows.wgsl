// rms_norm and argmax: a group per row.

struct Shape { rows: u32, cols: u32, eps: f32 }

// x [rows, cols], weight [cols], out [rows, cols]; cols is even where OUT has 16 bits
@compute @workgroup_size(GROUP)
fn rms_norm(thread: Thread) {
    let row = group_of(thread);
    if row >= p.s.rows { return; }
    let base = row * p.s.cols;
    var squares: array<f32, SUMS>;
    for (var i = thread.id; i < p.s.cols; i += GROUP) {
        let v = in0(base + i);
        squares[0] += v * v;
    }
    sums(thread, &squares);
    let scale = 1.0 / sqrt(squares[0] / f32(p.s.cols) + p.s.eps);
    for (var i = thread.id * PER_WORD; i < p.s.cols; i += GROUP * PER_WORD) {
        let j = select(i, i + 1u, PER_WORD == 2u);
        let a = in0(base + i) * scale * in1(i);
        let b = in0(base + j) * scale * in1(j);
        put_word(base + i, a, true, b, true);
    }
}

// Order of f32 as an order of integers: NaN is 0, -0 is 0, the rest above.
fn rank(bits: u32) -> u32 {
    if (bits & 0x7FFFFFFFu) > 0x7F800000u { return 0u; }
    if (bits & 0x7FFFFFFFu) == 0u { return 0x80000000u; }
    return select(bits | 0x80000000u, ~bits, (bits & 0x80000000u) != 0u);
}

var<workgroup> ranks: array<u32, GROUP>;
var<workgroup> indices: array<u32, GROUP>;

// x [rows, cols], out0 [rows]. Integers, since a compiler may assume that there is no NaN.
@compute @workgroup_size(GROUP)
fn argmax(thread: Thread) {
    let row = group_of(thread);
    if row >= p.s.rows { return; }
    var best = 0u;
    var at = 0u;
    for (var i = thread.id; i < p.s.cols; i += GROUP) {
        let r = rank(b0[p.at0 + row * p.s.cols + i]);
        if r > best {
            best = r;
            at = i;
        }
    }
    ranks[thread.id] = best;
    indices[thread.id] = at;
    for (var width = GROUP / 2u; width > 0u; width /= 2u) {
        workgroupBarrier();
        if thread.id < width {
            let r = ranks[thread.id + width];
            let i = indices[thread.id + width];
            if r > ranks[thread.id] || (r == ranks[thread.id] && i < indices[thread.id]) {
                ranks[thread.id] = r;
                indices[thread.id] = i;
            }
        }
    }
    if thread.id == 0u { out0[p.to0 + row] = select(indices[0], 0u, ranks[0] == 0u); }
}

// rms_norm: a group per row.

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

// out0 [rows, dim] from acc [parts, rows, dim] and stat [parts, rows, 2]: normalised, or with out1 [rows, 2] a
// part again. A thread per word of out0.

// stride: rows from a part to the next; heads: those that have sinks (b2), or 0
struct Shape { parts: u32, rows: u32, dim: u32, stride: u32, heads: u32 }

const NONE = 0xFF800000u; // -inf: the maximum of an empty part

// Maximum and sum of a row over all parts.
struct Stat { max: f32, sum: f32, empty: bool }

fn stat_of(row: u32) -> Stat {
    var all = Stat(0.0, 0.0, true);
    for (var part = 0u; part < p.s.parts; part++) {
        let bits = b1[p.at1 + 2u * (part * p.s.stride + row)];
        if bits == NONE { continue; }
        let part_max = bitcast<f32>(bits);
        all.max = select(max(all.max, part_max), part_max, all.empty);
        all.empty = false;
    }
    if p.s.heads > 0u {
        let sink = bitcast<f32>(b2[p.at2 + row % p.s.heads]);
        all.max = select(max(all.max, sink), sink, all.empty);
        all.empty = false;
        all.sum = exp(sink - all.max);
    }
    for (var part = 0u; part < p.s.parts; part++) {
        let at = 2u * (part * p.s.stride + row);
        let bits = b1[p.at1 + at];
        if bits != NONE { all.sum += exp(bitcast<f32>(bits) - all.max) * in1(at + 1u); }
    }
    return all;
}

fn merged(row: u32, d: u32, all: Stat) -> f32 {
    var total = 0.0;
    for (var part = 0u; part < p.s.parts; part++) {
        let line = part * p.s.stride + row;
        let bits = b1[p.at1 + 2u * line];
        if bits != NONE { total += exp(bitcast<f32>(bits) - all.max) * in0(line * p.s.dim + d); }
    }
    if !NORMALISED { return total; }
    if all.sum == 0.0 { return 0.0; }
    return total / all.sum;
}

@compute @workgroup_size(GROUP)
fn attn_merge(thread: Thread) {
    let i = (group_of(thread) * GROUP + thread.id) * PER_WORD;
    let count = p.s.rows * p.s.dim;
    if i >= count { return; }
    let more = i + 1u < count && PER_WORD == 2u;
    let all = stat_of(i / p.s.dim);
    let a = merged(i / p.s.dim, i % p.s.dim, all);
    var b = 0.0;
    if more { b = merged((i + 1u) / p.s.dim, (i + 1u) % p.s.dim, stat_of((i + 1u) / p.s.dim)); }
    put_word(i, a, true, b, more);
    if !NORMALISED && i % p.s.dim == 0u {
        out1[p.to1 + 2u * (i / p.s.dim)] = select(bitcast<u32>(all.max), NONE, all.empty);
        out1[p.to1 + 2u * (i / p.s.dim) + 1u] = bitcast<u32>(all.sum);
    }
}

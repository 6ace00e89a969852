// add, silu_mul, gelu_mul, clamped_swiglu, soft_cap, combine, narrow, fill, embed, copy_columns: a thread per word of
// the output; rope: per UNIT pairs of OWN heads.

struct Shape { count: u32, width: u32, heads: u32, first: u32, end: u32, word: u32 }

fn thread_of(thread: Thread) -> u32 { return group_of(thread) * GROUP + thread.id; }

@compute @workgroup_size(GROUP)
fn add(thread: Thread) {
    let i = thread_of(thread) * PER_WORD;
    if i >= p.s.count { return; }
    let more = i + 1u < p.s.count && PER_WORD == 2u;
    let j = select(i, i + 1u, more);
    put_word(i, in0(i) + in1(i), true, in0(j) + in1(j), more);
}

fn silu_times(gate: f32, up: f32) -> f32 { return gate / (1.0 + exp(-gate)) * up; }

@compute @workgroup_size(GROUP)
fn silu_mul(thread: Thread) {
    let i = thread_of(thread) * PER_WORD;
    if i >= p.s.count { return; }
    let more = i + 1u < p.s.count && PER_WORD == 2u;
    let j = select(i, i + 1u, more);
    put_word(i, silu_times(in0(i), in1(i)), true, silu_times(in0(j), in1(j)), more);
}

// In the form with tanh: 1.5957691 is 2 sqrt(2 / pi), and 0.0713548 is 0.044715 times it.
fn gelu_times(gate: f32, up: f32) -> f32 {
    return gate / (1.0 + exp(-gate * (1.5957691216057308 + 0.07135481282052617 * gate * gate))) * up;
}

@compute @workgroup_size(GROUP)
fn gelu_mul(thread: Thread) {
    let i = thread_of(thread) * PER_WORD;
    if i >= p.s.count { return; }
    let more = i + 1u < p.s.count && PER_WORD == 2u;
    let j = select(i, i + 1u, more);
    put_word(i, gelu_times(in0(i), in1(i)), true, gelu_times(in0(j), in1(j)), more);
}

// `first` and `end` are the bits of alpha and the limit.
fn swiglu(i: u32) -> f32 {
    let limit = bitcast<f32>(p.s.end);
    let gate = min(in0(2u * i), limit);
    let up = clamp(in0(2u * i + 1u), -limit, limit);
    return (up + 1.0) * (gate / (1.0 + exp(-bitcast<f32>(p.s.first) * gate)));
}

@compute @workgroup_size(GROUP)
fn clamped_swiglu(thread: Thread) {
    let i = thread_of(thread) * PER_WORD;
    if i >= p.s.count { return; }
    let more = i + 1u < p.s.count && PER_WORD == 2u;
    put_word(i, swiglu(i), true, swiglu(select(i, i + 1u, more)), more);
}

// In place: `word` is the bits of the cap. `tanh(z) = 1 - 2 / (1 + exp(2 z))`, whose exponential must not overflow.
@compute @workgroup_size(GROUP)
fn soft_cap(thread: Thread) {
    let i = thread_of(thread);
    if i >= p.s.count { return; }
    let cap = bitcast<f32>(p.s.word);
    put(i, cap * (1.0 - 2.0 / (1.0 + exp(clamp(old(i) * (2.0 / cap), -80.0, 80.0)))));
}

// x [tokens, heads (choices of a token), width], weights [tokens, heads], out f32; `word`: adds to the old one.
@compute @workgroup_size(GROUP)
fn combine(thread: Thread) {
    let i = thread_of(thread);
    if i >= p.s.count { return; }
    let first = i / p.s.width * p.s.heads;
    var sum = 0.0;
    for (var c = first; c < first + p.s.heads; c++) { sum += in1(c) * in0(c * p.s.width + i % p.s.width); }
    if p.s.word != 0u { sum += old(i); }
    put(i, sum);
}

// Rounds f32 results of rows whose words no thread of the kernel before owns; `word`: adds to the old ones.
@compute @workgroup_size(GROUP)
fn narrow(thread: Thread) {
    let i = thread_of(thread) * PER_WORD;
    if i >= p.s.count { return; }
    let more = i + 1u < p.s.count && PER_WORD == 2u;
    let j = select(i, i + 1u, more);
    var a = in0(i);
    var b = in0(j);
    if p.s.word != 0u {
        a += old(i);
        b += old(j);
    }
    put_word(i, a, true, b, more);
}

@compute @workgroup_size(GROUP)
fn fill(thread: Thread) {
    let i = thread_of(thread);
    if i < p.s.count { out0[p.to0 + i] = p.s.word; }
}

// Whether an id is in the part first .. end of the table that is bound; nothing is loaded otherwise.
fn table_row(id: u32, d: u32) -> f32 {
    if id >= p.s.first && id < p.s.end { return in1((id - p.s.first) * p.s.width + d); }
    return bitcast<f32>(p.s.word); // NaN, which no later step can hide
}

// Whether this part of the table writes the row of `id`: its own, and the first part those of no part.
// `heads` is the number of rows in the whole table.
fn writes(id: u32) -> bool {
    return (id >= p.s.first && id < p.s.end) || (id >= p.s.heads && p.s.first == 0u);
}

// out [tokens, width]
@compute @workgroup_size(GROUP)
fn embed(thread: Thread) {
    let i = thread_of(thread) * PER_WORD;
    if i >= p.s.count { return; }
    let more = i + 1u < p.s.count && PER_WORD == 2u;
    let j = select(i, i + 1u, more);
    let id_a = b0[p.at0 + i / p.s.width];
    let id_b = b0[p.at0 + j / p.s.width];
    let a = table_row(id_a, i % p.s.width);
    let b = table_row(id_b, j % p.s.width);
    put_word(i, a, writes(id_a), b, more && writes(id_b));
}

// out0 = x [tokens, heads, end], b0 = cos_sin [tokens, 2 width], of each head the elements from `first` on; `word`:
// pairs are neighbours. A thread rotates pairs d .. d + UNIT of OWN heads, which are whole words.
@compute @workgroup_size(GROUP)
fn rope(thread: Thread) {
    let t = thread_of(thread);
    let units = p.s.width / UNIT;
    let head0 = t / units * OWN;
    let pair0 = t % units * UNIT;
    let neighbours = p.s.word != 0u;
    for (var head = head0; head < min(head0 + OWN, p.s.count); head++) {
        for (var d = pair0; d < pair0 + UNIT; d++) {
            let at = head * p.s.end + p.s.first + select(d, 2u * d, neighbours);
            let other = at + select(p.s.width, 1u, neighbours);
            let table = head / p.s.heads * 2u * p.s.width + d;
            let c = in0(table);
            let s = in0(table + p.s.width);
            let a = old(at);
            let b = old(other);
            put(at, a * c - b * s);
            put(other, b * c + a * s);
        }
    }
}

// out0 [rows, end] from its column `word` = b0 [rows, heads] from its column `first`, `width` columns.
fn is_copied(i: u32) -> bool { return i % p.s.end >= p.s.word && i % p.s.end < p.s.word + p.s.width; }

fn copied(i: u32) -> f32 {
    if !is_copied(i) { return 0.0; }
    return in0(i / p.s.end * p.s.heads + p.s.first + i % p.s.end - p.s.word);
}

@compute @workgroup_size(GROUP)
fn copy_columns(thread: Thread) {
    let i = thread_of(thread) * PER_WORD;
    if i >= p.s.count { return; }
    let more = i + 1u < p.s.count && PER_WORD == 2u;
    let j = select(i, i + 1u, more);
    put_word(i, copied(i), is_copied(i), copied(j), more && is_copied(j));
}

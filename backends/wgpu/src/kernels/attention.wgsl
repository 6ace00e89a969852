// Paged attention with an online softmax (Milakov & Gimelshein 2018; Dao et al. 2022): prefill, and decode,
// which is one query per sequence over a given range of tokens.
//
// A group takes ROWS rows of one sequence and KV head, a row being a query of one of the heads that share it, and
// goes through the keys in blocks of KEYS. Prefill keeps a block of keys in shared memory, as each is used by many
// rows; decode has few rows, loads each key once, and has a group for each `part_keys` keys of a sequence. Without
// TILED, where heads are so long that few rows fit, prefill loads keys as decode does. Values are used by one
// thread each and come straight from the pool.
//
// A value has VALUE_DIM elements: HEAD_DIM, or fewer in latents, whose values are the first elements of their
// keys; b5 is the pool of keys then.
//
// A page outside the pool, and a token past the page table, count as absent; pages outside first .. end are
// in another part of the pool. Page layout as in kv.wgsl or kv_scaled.wgsl. WIDE: head_dim is a multiple of 8,
// and the pool begins at a multiple of 16 bytes and has no scales.

struct Shape {
    sequences: u32, heads: u32, kv_heads: u32, page_tokens: u32, pages_max: u32, first: u32, end: u32,
    blocks: u32, // groups per KV head and part
    window: u32,
    row_first: u32, row_end: u32, // prefill: the queries that are bound
    parts: u32, part: u32, // decode: parts of a sequence; the first one's number in the output
    scale: f32,
    part_keys: u32,
    slices: u32, // SLICES; as a constant it tempts compilers to unroll a loop with barriers
    cap: f32, // with CAPPED: the soft cap of scores
}

const VECS = (HEAD_DIM + 3u) / 4u;
// odd, so that threads with neighbouring rows load from different banks
const STRIDE = VECS | 1u;
const PAIRS = (VALUE_DIM + 1u) / 2u;
// a thread sums the pairs of dimensions lane, lane + LANES, .. of every SLICES-th key
const SLICES = GROUP / LANES;
const UNITS = (PAIRS + LANES - 1u) / LANES;
const SEGMENTS = GROUP / ROWS;
const ABSENT = 0xFFFFFFFFu;
const SCALED = D4 >= F8E4M3;
const NONE = 0xFF800000u; // -inf: the maximum of an empty part
// below all scores; infinities are no constants in WGSL, and a compiler may assume that there are none
const LOWEST = -3.0e38;

var<workgroup> qs: array<vec4<f32>, ROWS * STRIDE>;
var<workgroup> ks: array<vec4<f32>, select(1u, KEYS * STRIDE, TILED)>;
var<workgroup> scores: array<f32, ROWS * KEYS>; // then weights
var<workgroup> key_at: array<u32, KEYS>; // element of the pools, or ABSENT
// of the keys, and of their values
var<workgroup> key_scale: array<f32, select(1u, KEYS, SCALED)>;
var<workgroup> value_scale: array<f32, select(1u, KEYS, SCALED)>;
var<workgroup> segment_max: array<f32, GROUP>;
var<workgroup> row_max: array<f32, ROWS>;
var<workgroup> row_keep: array<f32, ROWS>;
var<workgroup> row_sum: array<f32, ROWS>;

// Where a group works.
struct Work { sequence: u32, kv_head: u32, row0: u32, rows: u32, query0: u32, first: u32, end: u32, part: u32 }

// Heads that share a KV head.
fn ratio() -> u32 { return p.s.heads / p.s.kv_heads; }

fn word1(i: u32) -> u32 { return b1[p.at1 + i]; }
fn word2(i: u32) -> u32 { return b2[p.at2 + i]; }
fn word3(i: u32) -> u32 { return b3[p.at3 + i]; }

// The queries of a sequence that are bound; none where the operands are wrong. b1 = query_start, b2 = context.
fn queries_of(s: u32) -> vec2<u32> {
    let start = word1(s);
    let end = word1(s + 1u);
    if start > end || end - start > word2(s) { return vec2(0u, 0u); }
    let lo = max(start, p.s.row_first);
    let hi = min(end, p.s.row_end);
    return vec2(lo, max(lo, hi));
}

// Keys that a row of prefill sees.
fn seen(work: Work, row: u32) -> vec2<u32> {
    let query = work.query0 + row / ratio();
    let behind = word1(work.sequence + 1u) - query; // this query and those after it
    let end = min(word2(work.sequence) - behind + 1u, p.s.pages_max * p.s.page_tokens);
    return vec2(end - min(end, p.s.window), end);
}

fn prefill_work(group: u32) -> Work {
    var work = Work();
    work.kv_head = group / p.s.blocks;
    var block = group % p.s.blocks;
    for (var s = 0u; s < p.s.sequences; s++) {
        let queries = queries_of(s);
        let rows = (queries.y - queries.x) * ratio();
        let blocks = (rows + ROWS - 1u) / ROWS;
        if block < blocks {
            work.sequence = s;
            work.query0 = queries.x;
            work.row0 = block * ROWS;
            work.rows = rows;
            work.first = seen(work, work.row0).x;
            work.end = seen(work, min(work.row0 + ROWS, rows) - 1u).y;
            break;
        }
        block -= blocks;
    }
    return work;
}

// b1 = range.
fn decode_work(group: u32) -> Work {
    var work = Work();
    work.kv_head = group / p.s.blocks % p.s.kv_heads;
    work.part = group / p.s.blocks / p.s.kv_heads;
    let block = group % p.s.blocks;
    let per_sequence = (ratio() + ROWS - 1u) / ROWS;
    work.sequence = block / per_sequence;
    work.query0 = work.sequence;
    work.row0 = block % per_sequence * ROWS;
    work.rows = ratio();
    let end = min(word1(2u * work.sequence + 1u), p.s.pages_max * p.s.page_tokens);
    work.first = min(word1(2u * work.sequence), end);
    work.first += min(work.part * p.s.part_keys, end - work.first);
    work.end = work.first + min(p.s.part_keys, end - work.first);
    return work;
}

fn query_of(work: Work, row: u32) -> u32 {
    if PREFILL { return work.query0 + row / ratio() - p.s.row_first; }
    return work.query0;
}

fn head_of(work: Work, row: u32) -> u32 {
    if PREFILL { return work.kv_head * ratio() + row % ratio(); }
    return work.kv_head * ratio() + row;
}

// Four elements of a key from dimension d on.
fn key4(at: u32, d: u32) -> vec4<f32> {
    let i = p.at4 + at + d;
    if WIDE && D4 == F32 { return bitcast<vec4<f32>>(v4[i / 4u]); }
    if WIDE {
        let words = v4[i / 8u];
        let two = select(words.xy, words.zw, (d & 4u) != 0u);
        return vec4(halves(D4, two.x), halves(D4, two.y));
    }
    var v: array<f32, 4>;
    for (var j = 0u; j < min(4u, HEAD_DIM - d); j++) { v[j] = in4(at + d + j); }
    return vec4(v[0], v[1], v[2], v[3]);
}

fn value2(at: u32, d: u32) -> vec2<f32> {
    if D5 == BF16 || D5 == F16 { return halves(D5, b5[(p.at5 + at + d) >> 1u]); }
    let second = select(d, d + 1u, d + 1u < VALUE_DIM);
    return vec2(in5(at + d), in5(at + second));
}

fn load_queries(thread: Thread, work: Work) {
    for (var i = thread.id; i < ROWS * VECS; i += GROUP) {
        let row = min(work.row0 + i / VECS, work.rows - 1u);
        let d = i % VECS * 4u;
        let at = (query_of(work, row) * p.s.heads + head_of(work, row)) * HEAD_DIM + d;
        var v: array<f32, 4>;
        for (var j = 0u; j < min(4u, HEAD_DIM - d); j++) { v[j] = in0(at + j) * p.s.scale; }
        qs[i / VECS * STRIDE + i % VECS] = vec4(v[0], v[1], v[2], v[3]);
    }
}

fn find_keys(thread: Thread, work: Work, base: u32) {
    for (var j = thread.id; j < KEYS; j += GROUP) {
        var at = ABSENT;
        let t = base + j;
        if t < work.end {
            let page = word3(work.sequence * p.s.pages_max + t / p.s.page_tokens);
            if page >= p.s.first && page < p.s.end {
                let line = ((page - p.s.first) * p.s.kv_heads + work.kv_head) * p.s.page_tokens;
                at = (line + t % p.s.page_tokens) * HEAD_DIM;
                if SCALED {
                    // behind a part's codes are its scales
                    let start = line * (HEAD_DIM + 4u);
                    at = start + t % p.s.page_tokens * HEAD_DIM;
                    let scale = start + p.s.page_tokens * HEAD_DIM + t % p.s.page_tokens * 4u;
                    key_scale[j] = bitcast<f32>(b4[word_of(D4, p.at4 + scale)]);
                    value_scale[j] = bitcast<f32>(b5[word_of(D5, p.at5 + scale)]);
                }
            }
        }
        key_at[j] = at;
    }
}

// The keys that each row of the group sees: in decode all that the group goes through.
fn seen_by_rows(work: Work) -> array<vec2<u32>, ROWS> {
    var all: array<vec2<u32>, ROWS>;
    for (var r = 0u; r < ROWS; r++) {
        all[r] = vec2(0u, ABSENT);
        if PREFILL {
            all[r] = vec2<u32>();
            if work.row0 + r < work.rows { all[r] = seen(work, work.row0 + r); }
        }
    }
    return all;
}

// `tanh(z) = 1 - 2 / (1 + exp(2 z))`, whose exponential must not overflow.
fn capped(score: f32) -> f32 {
    if !CAPPED { return score; }
    return p.s.cap * (1.0 - 2.0 / (1.0 + exp(clamp(score * (2.0 / p.s.cap), -80.0, 80.0))));
}

// A key per thread.
fn score_keys(thread: Thread, work: Work, base: u32) {
    var tokens = seen_by_rows(work);
    for (var j = thread.id; j < KEYS; j += GROUP) {
        let at = key_at[j];
        var sum: array<f32, ROWS>;
        for (var r = 0u; r < ROWS; r++) { sum[r] = LOWEST; }
        if at != ABSENT {
            for (var r = 0u; r < ROWS; r++) { sum[r] = 0.0; }
            for (var v = 0u; v < VECS; v++) {
                let k = key4(at, v * 4u);
                for (var r = 0u; r < ROWS; r++) { sum[r] += dot(qs[r * STRIDE + v], k); }
            }
            if SCALED {
                for (var r = 0u; r < ROWS; r++) { sum[r] *= key_scale[j]; }
            }
        }
        for (var r = 0u; r < ROWS; r++) {
            let visible = base + j >= tokens[r].x && base + j < tokens[r].y;
            scores[r * KEYS + j] = select(LOWEST, capped(sum[r]), visible && at != ABSENT);
        }
    }
}

// Tiles of 2 x 2 scores per thread.
fn score_tiles(thread: Thread, work: Work, base: u32) {
    for (var i = thread.id; i < KEYS * VECS; i += GROUP) {
        let at = key_at[i / VECS];
        var k = vec4<f32>();
        if at != ABSENT { k = key4(at, i % VECS * 4u); }
        if SCALED && at != ABSENT { k *= key_scale[i / VECS]; }
        ks[i / VECS * STRIDE + i % VECS] = k;
    }
    workgroupBarrier();
    for (var i = thread.id; i < ROWS * KEYS / 4u; i += GROUP) {
        let r = i / (KEYS / 2u);
        let j = i % (KEYS / 2u);
        var sum = vec4<f32>();
        for (var v = 0u; v < VECS; v++) {
            let q0 = qs[r * STRIDE + v];
            let q1 = qs[(r + ROWS / 2u) * STRIDE + v];
            let k0 = ks[j * STRIDE + v];
            let k1 = ks[(j + KEYS / 2u) * STRIDE + v];
            sum += vec4(dot(q0, k0), dot(q0, k1), dot(q1, k0), dot(q1, k1));
        }
        for (var c = 0u; c < 4u; c++) {
            let row = r + c / 2u * (ROWS / 2u);
            let key = j + c % 2u * (KEYS / 2u);
            var score = LOWEST;
            if work.row0 + row < work.rows && key_at[key] != ABSENT {
                let tokens = seen(work, work.row0 + row);
                if base + key >= tokens.x && base + key < tokens.y { score = capped(sum[c]); }
            }
            scores[row * KEYS + key] = score;
        }
    }
}

// Scores become weights against the new maximum; `row_keep` takes older sums to it.
fn weigh(thread: Thread) {
    let row = thread.id % ROWS;
    var largest = LOWEST;
    for (var j = thread.id / ROWS; j < KEYS; j += SEGMENTS) { largest = max(largest, scores[row * KEYS + j]); }
    segment_max[thread.id] = largest;
    workgroupBarrier();
    if thread.id < ROWS {
        let before = row_max[thread.id];
        var now = before;
        for (var s = 0u; s < SEGMENTS; s++) { now = max(now, segment_max[s * ROWS + thread.id]); }
        row_keep[thread.id] = exp(before - now);
        row_max[thread.id] = now;
    }
    workgroupBarrier();
    for (var i = thread.id; i < ROWS * KEYS; i += GROUP) {
        let score = scores[i];
        scores[i] = select(exp(score - row_max[i / KEYS]), 0.0, score <= LOWEST);
    }
}

struct Sums { acc: array<array<vec2<f32>, UNITS>, ROWS>, sum: array<f32, ROWS> }

fn add_values(thread: Thread, all: ptr<function, Sums>) {
    for (var r = 0u; r < ROWS; r++) {
        let keep = row_keep[r];
        (*all).sum[r] *= keep;
        for (var u = 0u; u < UNITS; u++) { (*all).acc[r][u] *= keep; }
    }
    for (var j = thread.id / LANES; j < KEYS; j += SLICES) {
        let at = key_at[j];
        // what lies where there is no key may be NaN
        if at == ABSENT { continue; }
        for (var u = 0u; u < UNITS; u++) {
            let pair = thread.id % LANES + u * LANES;
            if pair >= PAIRS { continue; }
            var v = value2(at, 2u * pair);
            if SCALED { v *= value_scale[j]; }
            for (var r = 0u; r < ROWS; r++) { (*all).acc[r][u] += scores[r * KEYS + j] * v; }
        }
        for (var r = 0u; r < ROWS; r++) { (*all).sum[r] += scores[r * KEYS + j]; }
    }
}

// Adds the slices' sums in order, in the memory of the queries, which are of no more use.
fn add_slices(thread: Thread, all: ptr<function, Sums>) {
    let lane = thread.id % LANES;
    let slice = thread.id / LANES;
    for (var i = thread.id; i < ROWS * STRIDE; i += GROUP) { qs[i] = vec4<f32>(); }
    if thread.id < ROWS { row_sum[thread.id] = 0.0; }
    for (var s = 0u; s < p.s.slices; s++) {
        workgroupBarrier();
        if slice != s { continue; }
        for (var u = 0u; u < UNITS; u++) {
            let pair = lane + u * LANES;
            if pair >= PAIRS { continue; }
            for (var r = 0u; r < ROWS; r++) {
                let v = (*all).acc[r][u];
                let at = r * STRIDE + pair / 2u;
                if pair % 2u == 0u {
                    qs[at].x += v.x;
                    qs[at].y += v.y;
                } else {
                    qs[at].z += v.x;
                    qs[at].w += v.y;
                }
            }
        }
        if lane == 0u {
            for (var r = 0u; r < ROWS; r++) { row_sum[r] += (*all).sum[r]; }
        }
    }
    workgroupBarrier();
}

// out0 [queries, heads, value]; or [parts, queries, heads, value] un-normalised, and out1 its maxima and sums.
fn store(thread: Thread, work: Work) {
    for (var i = thread.id; i < ROWS * PAIRS; i += GROUP) {
        let r = i / PAIRS;
        let pair = i % PAIRS;
        let row = work.row0 + r;
        if row >= work.rows { break; }
        var line = query_of(work, row) * p.s.heads + head_of(work, row);
        var factor = 1.0;
        if NORMALISED {
            factor = select(1.0 / row_sum[r], 0.0, row_sum[r] == 0.0);
        } else {
            line += (p.s.part + work.part) * (p.s.row_end - p.s.row_first) * p.s.heads;
            if pair == 0u {
                out1[p.to1 + 2u * line] = select(bitcast<u32>(row_max[r]), NONE, row_max[r] <= LOWEST);
                out1[p.to1 + 2u * line + 1u] = bitcast<u32>(row_sum[r]);
            }
        }
        let four = qs[r * STRIDE + pair / 2u];
        let v = select(four.xy, four.zw, pair % 2u == 1u) * factor;
        let at = line * VALUE_DIM + 2u * pair;
        if 2u * pair + 1u < VALUE_DIM {
            put2(at, v.x, v.y);
        } else {
            put(at, v.x);
        }
    }
}

@compute @workgroup_size(GROUP)
fn attention(thread: Thread) {
    let group = group_of(thread);
    if group >= p.s.blocks * p.s.kv_heads * p.s.parts { return; }
    var work: Work;
    if PREFILL { work = prefill_work(group); } else { work = decode_work(group); }
    if work.rows == 0u { return; } // more groups than blocks of queries
    load_queries(thread, work);
    if thread.id < ROWS { row_max[thread.id] = LOWEST; }
    var all: Sums;
    for (var base = work.first; base < work.end; base += KEYS) {
        find_keys(thread, work, base);
        workgroupBarrier();
        if TILED { score_tiles(thread, work, base); } else { score_keys(thread, work, base); }
        workgroupBarrier();
        weigh(thread);
        workgroupBarrier();
        add_values(thread, &all);
        workgroupBarrier();
    }
    add_slices(thread, &all);
    store(thread, work);
}

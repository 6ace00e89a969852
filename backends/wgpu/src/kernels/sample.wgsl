// sample: draws a token from each row of logits, a group per row, as backends/portable/sample.c does.
//
// A number of 64 bits is two words, the lower one first. Floats are compared as integers, since a compiler may
// assume that there is no NaN and no infinity; and it may contract a product and a sum, so that each product
// passes through an operation on integers that the compiler cannot see through.

// `nothing` is 0.
struct Shape { rows: u32, cols: u32, entries: u32, tops: u32, nothing: u32 }

alias Wide = vec2<u32>;

const KEY_WRONG = 0xFFFFFFFFu; // of NaN and +infinity
const KEY_NONE = 0x007FFFFFu; // of -infinity
const NO_TOKEN = 0xFFFFFFFFu;
const BITS_NONE = 0xFF800000u;
const BITS_NAN = 0x7FC00000u;
const ZERO = Wide(0u, 0u);
const LOG2_E = 1.442695041f;
// tokens that are listed at most, and what stands for all of the row
const LIST = 1024u;
const ALL = 0xFFFFFFFFu;

var<workgroup> low_words: array<u32, GROUP>;
var<workgroup> high_words: array<u32, GROUP>;
var<workgroup> keys: array<u32, LIST>;
var<workgroup> ids: array<u32, LIST>;
var<workgroup> count: atomic<u32>;
var<workgroup> found: array<u32, 2>;

// The row, where its tokens are found, and what weights are relative to.
var<private> lid: u32;
var<private> start: u32;
var<private> listed: u32;
var<private> best: f32;
var<private> scale: f32;

fn plus(a: Wide, b: Wide) -> Wide {
    let low = a.x + b.x;
    return Wide(low, a.y + b.y + select(0u, 1u, low < a.x));
}

fn minus(a: Wide, b: Wide) -> Wide { return Wide(a.x - b.x, a.y - b.y - select(0u, 1u, a.x < b.x)); }

fn less(a: Wide, b: Wide) -> bool { return a.y < b.y || (a.y == b.y && a.x < b.x); }

fn times(a: u32, b: u32) -> Wide {
    let low = (a & 0xFFFFu) * (b & 0xFFFFu);
    let left = (a >> 16u) * (b & 0xFFFFu);
    let right = (a & 0xFFFFu) * (b >> 16u);
    let middle = left + right;
    let high = (a >> 16u) * (b >> 16u) + (middle >> 16u) + select(0u, 0x10000u, middle < left);
    return plus(Wide(low, high), Wide(middle << 16u, 0u));
}

fn part_of(total: Wide, fraction: u32) -> Wide {
    return plus(times(total.y, fraction), Wide(times(total.x, fraction).y, 0u));
}

fn product(a: f32, b: f32) -> f32 { return bitcast<f32>(bitcast<u32>(a * b) ^ p.s.nothing); }

fn key_of(bits: u32) -> u32 {
    let size = bits & 0x7FFFFFFFu;
    if size > 0x7F800000u || bits == 0x7F800000u { return KEY_WRONG; }
    if size == 0u { return 0x80000000u; }
    return select(bits | 0x80000000u, ~bits, (bits & 0x80000000u) != 0u);
}

fn bits_of(key: u32) -> u32 { return select(~key, key & 0x7FFFFFFFu, (key & 0x80000000u) != 0u); }

fn logit_of(key: u32) -> f32 { return bitcast<f32>(bits_of(key)); }

fn bits_at(i: u32) -> u32 { return out0[start + i]; }

fn key_at(i: u32) -> u32 { return key_of(bits_at(i)); }

// A positive normal number times 2^(40 + n), rounded down.
fn fixed_of(bits: u32, n: i32) -> Wide {
    let digits = (bits & 0x7FFFFFu) | 0x800000u;
    let shift = i32(bits >> 23u) - 110 + n;
    if shift <= -24 { return ZERO; }
    if shift < 0 { return Wide(digits >> u32(-shift), 0u); }
    if shift == 0 { return Wide(digits, 0u); }
    return Wide(digits << u32(shift), digits >> u32(32 - shift));
}

// 2^((logit - best) * scale), as hal/src/sample.rs has it: every product and every sum is rounded.
fn weight_of(key: u32) -> Wide {
    if key <= KEY_NONE || key == KEY_WRONG { return ZERO; }
    let y = product(logit_of(key) - best, scale);
    // -41, and all that is below
    if bitcast<u32>(y) >= 0xC2240000u { return ZERO; }
    let n = floor(y + 0.5);
    let f = y - n;
    var v = product(0.00015353362f, f) + 0.0013398875f;
    v = product(v, f) + 0.009618437f;
    v = product(v, f) + 0.055503324f;
    v = product(v, f) + 0.24022648f;
    v = product(v, f) + 0.6931472f;
    v = product(v, f) + 1.0f;
    return fixed_of(bitcast<u32>(v), i32(n));
}

fn group_total(v: Wide) -> Wide {
    workgroupBarrier();
    low_words[lid] = v.x;
    high_words[lid] = v.y;
    for (var width = GROUP / 2u; width > 0u; width /= 2u) {
        workgroupBarrier();
        if lid < width {
            let sum = plus(Wide(low_words[lid], high_words[lid]), Wide(low_words[lid + width], high_words[lid + width]));
            low_words[lid] = sum.x;
            high_words[lid] = sum.y;
        }
    }
    workgroupBarrier();
    return Wide(low_words[0], high_words[0]);
}

fn group_most(v: Wide) -> Wide {
    workgroupBarrier();
    low_words[lid] = v.x;
    high_words[lid] = v.y;
    for (var width = GROUP / 2u; width > 0u; width /= 2u) {
        workgroupBarrier();
        if lid < width {
            let other = Wide(low_words[lid + width], high_words[lid + width]);
            if less(Wide(low_words[lid], high_words[lid]), other) {
                low_words[lid] = other.x;
                high_words[lid] = other.y;
            }
        }
    }
    workgroupBarrier();
    return Wide(low_words[0], high_words[0]);
}

// The tokens of the order up to this one.
struct Run { key: u32, id: u32 }

fn holds(run: Run, key: u32, id: u32) -> bool { return key > run.key || (key == run.key && id <= run.id); }

// A token's place in the order; the better, the larger.
fn rank(key: u32, id: u32) -> Wide { return Wide(~id, key); }

// The best token of this thread's.
fn thread_best() -> Wide {
    var best_key = 0u;
    var at = NO_TOKEN;
    for (var i = lid; i < p.s.cols; i += GROUP) {
        let key = key_at(i);
        if key > best_key {
            best_key = key;
            at = i;
        }
    }
    return rank(best_key, at);
}

// The best token that comes after `before`; 0 if there is none.
fn next_best(before: Wide) -> Wide {
    var most = ZERO;
    let end = min(listed, p.s.cols);
    for (var i = lid; i < end; i += GROUP) {
        var place: Wide;
        if listed == ALL { place = rank(key_at(i), i); } else { place = rank(keys[i], ids[i]); }
        if less(place, before) && less(most, place) { most = place; }
    }
    return group_most(most);
}

fn worth(counting: bool, run: Run, key: u32, id: u32) -> Wide {
    if !holds(run, key, id) { return ZERO; }
    if counting { return Wide(1u, 0u); }
    return weight_of(key);
}

// The number of the tokens of a run, or their weight.
fn worth_of(counting: bool, run: Run) -> Wide {
    var sum = ZERO;
    let end = min(listed, p.s.cols);
    for (var i = lid; i < end; i += GROUP) {
        if listed == ALL {
            sum = plus(sum, worth(counting, run, key_at(i), i));
        } else {
            sum = plus(sum, worth(counting, run, keys[i], ids[i]));
        }
    }
    return group_total(sum);
}

// Hands what each thread has to all; every thread calls it.
fn share_out(own: Wide) {
    workgroupBarrier();
    low_words[lid] = own.x;
    high_words[lid] = own.y;
    workgroupBarrier();
}

// The shortest run that is worth `aim` among tokens that are listed, a thread for each.
fn shortest_listed(counting: bool, aim: Wide, within: Run) -> Run {
    var run = within;
    var own = ZERO;
    if lid < listed {
        run = Run(keys[lid], ids[lid]);
        own = worth(counting, within, run.key, run.id);
    }
    share_out(own);
    if own.x != 0u || own.y != 0u {
        var sum = ZERO;
        for (var i = 0u; i < listed; i++) {
            if holds(run, keys[i], ids[i]) { sum = plus(sum, Wide(low_words[i], high_words[i])); }
        }
        if !less(sum, aim) && less(minus(sum, own), aim) { found[0] = lid; }
    }
    workgroupBarrier();
    return Run(keys[found[0]], ids[found[0]]);
}

// The shortest run that is worth `aim`, where `within` is worth as much.
fn shortest(counting: bool, aim: Wide, within: Run, best_key: u32) -> Run {
    if listed <= GROUP { return shortest_listed(counting, aim, within); }
    var low = within.key;
    var high = best_key + 1u;
    while high - low > 1u {
        let middle = low + (high - low) / 2u;
        if less(worth_of(counting, Run(middle, NO_TOKEN)), aim) { high = middle; } else { low = middle; }
    }
    // of equal logits the lower ids come first
    let end = select(NO_TOKEN, within.id, low == within.key);
    let ties = minus(worth_of(true, Run(low, end)), worth_of(true, Run(low + 1u, NO_TOKEN)));
    if ties.x <= 1u { return Run(low, end); }
    var first = 0u;
    var last = min(end, p.s.cols - 1u);
    while first < last {
        let middle = first + (last - first) / 2u;
        if less(worth_of(counting, Run(low, middle)), aim) { first = middle + 1u; } else { last = middle; }
    }
    return Run(low, first);
}

// A key that at least `k` tokens reach: that of the k-th best of the threads' best tokens.
fn reached_by(k: u32, mine: u32, best_key: u32) -> u32 {
    if k > GROUP { return 0u; }
    var low = 0u;
    var high = best_key + 1u;
    while high - low > 1u {
        let middle = low + (high - low) / 2u;
        if group_total(Wide(select(0u, 1u, mine >= middle), 0u)).x >= k { low = middle; } else { high = middle; }
    }
    return low;
}

// Lists the tokens whose key is at least `least_key`, if they are few.
fn list(least_key: u32) {
    listed = ALL;
    if least_key == 0u && p.s.cols > LIST { return; }
    workgroupBarrier();
    if lid == 0u { atomicStore(&count, 0u); }
    workgroupBarrier();
    for (var i = lid; i < p.s.cols; i += GROUP) {
        let key = key_at(i);
        if key >= least_key {
            let at = atomicAdd(&count, 1u);
            if at < LIST {
                keys[at] = key;
                ids[at] = i;
            }
        }
    }
    workgroupBarrier();
    let listable = atomicLoad(&count);
    if listable <= LIST { listed = listable; }
}

// The distance of a logit to the best one before penalties.
fn below(key: u32, raw_key: u32) -> u32 {
    if key == raw_key { return 0u; }
    if key <= KEY_NONE { return BITS_NONE; }
    return bitcast<u32>(logit_of(key) - logit_of(raw_key));
}

// Lists the best tokens, with their distance to the best one; nothing past the last token.
fn list_tops(at: u32, raw_key: u32) {
    var place = Wide(0xFFFFFFFFu, 0xFFFFFFFFu);
    for (var i = 0u; i < p.s.tops; i++) {
        place = next_best(place);
        if lid == 0u {
            let any = place.x != 0u || place.y != 0u;
            out3[at + 2u * i] = select(NO_TOKEN, ~place.x, any);
            out3[at + 2u * i + 1u] = select(BITS_NONE, below(place.y, raw_key), any);
        }
    }
}

// Lists tokens among which a run that is worth `aim` ends, if there are such that are few: those that weigh 2^-8 of the
// best one and more, then lighter ones, down to 2^`lightest`. Returns the run of what is listed, or `otherwise`.
fn narrow(lightest: f32, aim: Wide, best_key: u32, otherwise: Run) -> Run {
    // nothing weighs less than 2^-41
    for (var step = 1u; step <= 6u; step++) {
        let weight = -8.0 * f32(step);
        let last = weight <= lightest;
        let heavy = Run(key_of(bitcast<u32>(best + max(weight, lightest) / scale)), NO_TOKEN);
        if heavy.key > best_key || heavy.key <= KEY_NONE { return otherwise; }
        list(heavy.key);
        if listed == ALL { return otherwise; }
        if !less(worth_of(false, heavy), aim) { return heavy; }
        listed = ALL;
        if last { return otherwise; }
    }
    return otherwise;
}

// Draws from a run whose tokens are listed, a thread for each, as `draw` does.
fn draw_listed(run: Run, least: Wide, uniform: u32) {
    var own = ZERO;
    if lid < listed { own = worth(false, run, keys[lid], ids[lid]); }
    if less(own, least) { own = ZERO; }
    share_out(own);
    if own.x != 0u || own.y != 0u {
        var total = ZERO;
        var before = ZERO;
        for (var i = 0u; i < listed; i++) {
            let w = Wide(low_words[i], high_words[i]);
            total = plus(total, w);
            if ids[i] < ids[lid] { before = plus(before, w); }
        }
        let aim = part_of(total, uniform);
        if !less(aim, before) && less(aim, plus(before, own)) { found[0] = ids[lid]; }
    }
    workgroupBarrier();
}

// Draws from a run: the first token, by id, at which the cumulated weight passes a part of the sum. Each thread
// has neighbouring tokens, and the one that has the token writes it to `found`.
fn draw(run: Run, least: Wide, uniform: u32) {
    let share = (p.s.cols + GROUP - 1u) / GROUP;
    let first = min(lid * share, p.s.cols);
    let end = min(first + share, p.s.cols);
    var own = ZERO;
    for (var i = first; i < end; i++) {
        let w = worth(false, run, key_at(i), i);
        if !less(w, least) { own = plus(own, w); }
    }
    share_out(own);
    for (var behind = 1u; behind < GROUP; behind *= 2u) {
        workgroupBarrier();
        var before = ZERO;
        if lid >= behind { before = Wide(low_words[lid - behind], high_words[lid - behind]); }
        workgroupBarrier();
        let sum = plus(Wide(low_words[lid], high_words[lid]), before);
        low_words[lid] = sum.x;
        high_words[lid] = sum.y;
    }
    workgroupBarrier();
    let aim = part_of(Wide(low_words[GROUP - 1u], high_words[GROUP - 1u]), uniform);
    let after = Wide(low_words[lid], high_words[lid]);
    var sum = minus(after, own);
    if !less(aim, sum) && less(aim, after) {
        for (var i = first; i < end; i++) {
            let w = worth(false, run, key_at(i), i);
            if !less(w, least) { sum = plus(sum, w); }
            if less(aim, sum) {
                found[0] = i;
                break;
            }
        }
    }
    workgroupBarrier();
}

// Applies the penalties of entries of the history, and leaves the logits as they were in their place.
fn penalise(first: u32, end: u32, up: f32, down: f32) {
    storageBarrier();
    workgroupBarrier();
    for (var e = first + lid; e < end; e += GROUP) {
        let id = out1[p.to1 + 2u * e];
        if id < p.s.cols {
            let bits = bits_at(id);
            let key = key_of(bits);
            let logit = bitcast<f32>(bits);
            let less_by = bitcast<f32>(out1[p.to1 + 2u * e + 1u]);
            out1[p.to1 + 2u * e + 1u] = bits;
            if key > KEY_NONE && key != KEY_WRONG {
                let factor = select(up, down, key > 0x80000000u);
                out0[start + id] = bitcast<u32>(product(logit, factor) - less_by);
            }
        }
    }
    storageBarrier();
    workgroupBarrier();
}

// The end of what `top_p` keeps of a run.
fn keep_top_p(within: Run, top_p: u32, best_key: u32) -> Run {
    var run = within;
    let total = worth_of(false, run);
    var aim = part_of(total, top_p);
    if aim.x == 0u && aim.y == 0u { aim = Wide(1u, 0u); }
    if listed == ALL && run.key == 0u {
        // Tokens that weigh less than this weigh less than the rest together, so that the run ends before them.
        // The sum decides, whatever rounding does to the logit.
        let rest = minus(total, aim);
        let lightest = (f32(rest.y) * 4294967296.0 + f32(rest.x)) / f32(p.s.cols) * 4.5474735e-13f;
        run = narrow(select(-64.0, log2(lightest), lightest > 1e-30), aim, best_key, run);
    }
    return shortest(false, aim, run, best_key);
}

// logits [rows, cols], history [entries, 2], out [rows, 4], top [rows, tops, 2]; parameters [rows, 8],
// history_start [rows + 1]
@compute @workgroup_size(GROUP)
fn sample(thread: Thread) {
    let row = group_of(thread);
    if row >= p.s.rows { return; }
    lid = thread.id;
    start = p.to0 + row * p.s.cols;
    let words = p.at0 + row * 8u;
    let out = p.to2 + row * 4u;
    let top = p.to3 + row * p.s.tops * 2u;
    let logprobs = (b0[words + 7u] & 1u) == 1u;
    listed = ALL;
    scale = LOG2_E;

    var mine = thread_best();
    var most = group_most(mine);
    let raw_key = most.y;
    best = logit_of(raw_key);
    var sum = ZERO;
    if logprobs {
        sum = worth_of(false, Run(0u, NO_TOKEN));
        if p.s.tops > 0u {
            list(reached_by(p.s.tops, mine.y, raw_key));
            list_tops(top, raw_key);
            listed = ALL;
        }
    }

    var entry = 0u;
    var entries_end = 0u;
    if p.s.entries > 0u {
        entry = b1[p.at1 + row];
        entries_end = min(b1[p.at1 + row + 1u], p.s.entries);
    }
    if entry < entries_end {
        penalise(entry, entries_end, bitcast<f32>(b0[words + 4u]), bitcast<f32>(b0[words + 5u]));
        mine = thread_best();
        most = group_most(mine);
    }
    let best_key = most.y;
    let ended = best_key == KEY_WRONG || best_key <= KEY_NONE;
    if lid == 0u && (ended || !logprobs) {
        for (var i = 0u; i < p.s.tops; i++) {
            out3[top + 2u * i] = NO_TOKEN;
            out3[top + 2u * i + 1u] = BITS_NONE;
        }
    }
    if ended {
        if lid == 0u {
            let wrong = best_key == KEY_WRONG;
            out2[out] = select(NO_TOKEN, ~most.x, wrong);
            out2[out + 1u] = select(BITS_NONE, BITS_NAN, wrong);
            out2[out + 2u] = 0u;
            out2[out + 3u] = 0u;
        }
        return;
    }

    if (b0[words] & 0x7FFFFFFFu) == 0u {
        if lid == 0u { found[0] = ~most.x; }
    } else {
        best = logit_of(best_key);
        scale = bitcast<f32>(b0[words]);
        var run = Run(0u, NO_TOKEN);
        let top_k = b0[words + 1u];
        if top_k > 0u && top_k < p.s.cols {
            run.key = reached_by(top_k, mine.y, best_key);
            list(run.key);
            run = shortest(true, Wide(top_k, 0u), run, best_key);
        }
        let top_p = b0[words + 2u];
        if top_p != 0xFFFFFFFFu { run = keep_top_p(run, top_p, best_key); }
        let min_p = b0[words + 3u];
        var least = fixed_of(min(min_p, 0x3F800000u), 0);
        if (min_p & 0x80000000u) != 0u { least = ZERO; }
        if listed <= GROUP { draw_listed(run, least, b0[words + 6u]); } else { draw(run, least, b0[words + 6u]); }
    }

    workgroupBarrier();
    let id = found[0];
    if lid == 0u { found[1] = bits_at(id); }
    workgroupBarrier();
    for (var e = entry + lid; e < entries_end; e += GROUP) {
        if out1[p.to1 + 2u * e] == id { found[1] = out1[p.to1 + 2u * e + 1u]; }
    }
    workgroupBarrier();
    if lid == 0u {
        out2[out] = id;
        out2[out + 1u] = below(key_of(found[1]), raw_key);
        out2[out + 2u] = sum.x;
        out2[out + 3u] = sum.y;
    }
}

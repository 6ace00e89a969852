// The choice of experts, and its order by expert. EXPERTS, ACTIVE and GROUPS are the sizes of a token's lists.

struct Shape {
    tokens: u32, bias: u32, sigmoid: u32, groups_active: u32, group_best: u32, normalise: u32, scale: f32,
}

const NONE = 0xFFFFFFFFu;
const SIZE = EXPERTS / GROUPS;
// the least number that is not -inf, below every key
const LEAST = -3.402823e38;

var<workgroup> keys: array<f32, EXPERTS>;
var<workgroup> scores: array<f32, GROUPS>;
var<workgroup> open: array<u32, GROUPS>;
var<workgroup> picked: array<u32, ACTIVE>;
var<workgroup> found: array<u32, GROUP>;
var<workgroup> values: array<f32, GROUP>;
var<workgroup> counts: array<u32, EXPERTS + 1u>;

fn logit(token: u32, expert: u32) -> f32 { return bitcast<f32>(b0[p.at0 + token * EXPERTS + expert]); }

fn sigmoid(v: f32) -> f32 { return 1.0 / (1.0 + exp(-v)); }

// The largest or the sum of a value of each thread; every thread of the group calls it.
fn whole(thread: Thread, own: f32, adds: bool) -> f32 {
    workgroupBarrier();
    values[thread.id] = own;
    for (var half = GROUP / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if thread.id < half {
            let other = values[thread.id + half];
            values[thread.id] = select(max(values[thread.id], other), values[thread.id] + other, adds);
        }
    }
    workgroupBarrier();
    return values[0];
}

// Whether key i comes after the one of `last`, by key and then by number.
fn is_after(i: u32, last: u32) -> bool {
    if last == NONE { return true; }
    return keys[i] < keys[last] || (keys[i] == keys[last] && i > last);
}

// The best expert of open groups after `last`; every thread of the group calls it.
fn best_after(thread: Thread, last: u32) -> u32 {
    var best = NONE;
    for (var i = thread.id; i < EXPERTS; i += GROUP) {
        if open[i / SIZE] == 0u || !is_after(i, last) { continue; }
        if best == NONE || keys[i] > keys[best] { best = i; }
    }
    workgroupBarrier();
    found[thread.id] = best;
    for (var half = GROUP / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if thread.id < half {
            let a = found[thread.id];
            let b = found[thread.id + half];
            if b != NONE {
                if a == NONE || keys[b] > keys[a] || (keys[b] == keys[a] && b < a) { found[thread.id] = b; }
            }
        }
    }
    workgroupBarrier();
    return found[0];
}

// The sum of the best keys of a group of experts.
fn group_score(group: u32) -> f32 {
    var sum = 0.0;
    var last = NONE;
    for (var b = 0u; b < p.s.group_best; b++) {
        var best = NONE;
        for (var i = group * SIZE; i < (group + 1u) * SIZE; i++) {
            if !is_after(i, last) { continue; }
            if best == NONE || keys[i] > keys[best] { best = i; }
        }
        sum += keys[min(best, EXPERTS - 1u)];
        last = best;
    }
    return sum;
}

@compute @workgroup_size(GROUP)
fn route(thread: Thread) {
    let token = group_of(thread);
    if token >= p.s.tokens { return; }
    var own = LEAST;
    for (var i = thread.id; i < EXPERTS; i += GROUP) { own = max(own, logit(token, i)); }
    let highest = whole(thread, own, false);
    own = 0.0;
    for (var i = thread.id; i < EXPERTS; i += GROUP) { own += exp(logit(token, i) - highest); }
    let total = whole(thread, own, true);
    let by_logits = GROUPS == 1u && p.s.bias == 0u;
    for (var i = thread.id; i < EXPERTS; i += GROUP) {
        let v = logit(token, i);
        var key = v;
        if !by_logits {
            if p.s.sigmoid != 0u { key = sigmoid(v); } else { key = exp(v - highest) / total; }
        }
        if p.s.bias != 0u { key += bitcast<f32>(b1[p.at1 + i]); }
        keys[i] = max(key, LEAST); // a NaN is as low as any
    }
    workgroupBarrier();
    for (var g = thread.id; g < GROUPS; g += GROUP) {
        scores[g] = 0.0;
        if GROUPS > 1u { scores[g] = group_score(g); }
    }
    workgroupBarrier();
    for (var g = thread.id; g < GROUPS; g += GROUP) {
        var better = 0u;
        for (var h = 0u; h < GROUPS; h++) {
            if scores[h] > scores[g] || (scores[h] == scores[g] && h < g) { better++; }
        }
        open[g] = select(0u, 1u, better < p.s.groups_active);
    }
    workgroupBarrier();
    var expert = NONE;
    for (var a = 0u; a < ACTIVE; a++) {
        expert = best_after(thread, expert);
        if thread.id == 0u { picked[a] = min(expert, EXPERTS - 1u); }
    }
    workgroupBarrier();
    if thread.id != 0u { return; }
    var most = LEAST;
    for (var a = 0u; a < ACTIVE; a++) { most = max(most, logit(token, picked[a])); }
    let start = select(highest, most, p.s.normalise != 0u);
    var sum = 0.0;
    for (var a = 0u; a < ACTIVE; a++) {
        let v = logit(token, picked[a]);
        if p.s.sigmoid != 0u { sum += sigmoid(v); } else { sum += exp(v - start); }
    }
    if p.s.sigmoid != 0u { sum += 1e-20; }
    for (var a = 0u; a < ACTIVE; a++) {
        let v = logit(token, picked[a]);
        var score = exp(v - start);
        if p.s.sigmoid != 0u { score = sigmoid(v); }
        if p.s.normalise != 0u {
            score /= sum;
        } else if p.s.sigmoid == 0u {
            score /= total;
        }
        out0[p.to0 + token * ACTIVE + a] = picked[a];
        out1[p.to1 + token * ACTIVE + a] = bitcast<u32>(score * p.s.scale);
    }
}

// One group for all choices; a thread counts and places those of its experts.
@compute @workgroup_size(GROUP)
fn route_order(thread: Thread) {
    let choices = p.s.tokens * ACTIVE;
    for (var e = thread.id; e < EXPERTS; e += GROUP) {
        var count = 0u;
        for (var c = 0u; c < choices; c++) {
            if b0[p.at0 + c] == e { count++; }
        }
        counts[e + 1u] = count;
    }
    workgroupBarrier();
    if thread.id == 0u {
        counts[0] = 0u;
        for (var e = 0u; e < EXPERTS; e++) { counts[e + 1u] += counts[e]; }
        out1[p.to1 + EXPERTS] = choices;
    }
    workgroupBarrier();
    for (var e = thread.id; e < EXPERTS; e += GROUP) {
        var at = counts[e];
        out1[p.to1 + e] = at;
        for (var c = 0u; c < choices; c++) {
            if b0[p.at0 + c] == e {
                out0[p.to0 + at] = c;
                at++;
            }
        }
    }
}

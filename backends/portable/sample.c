// sample: draws a token from each row of logits, one group per row; VEC, which divides rows.
//
// A logit's order is that of its key, an integer. What a filter keeps is a run of the order (by key, then by
// id), so it is found by its end: bisected by sums over the group, which are of integers and thus exact in any
// order. Where few tokens can matter they are listed first, so that not every step reads the row again.

#ifdef __OPENCL_VERSION__
#pragma OPENCL FP_CONTRACT OFF
#endif

#if GROUP == 1 // a thread has the row to itself
#undef BARRIER
#undef BARRIER_ALL
#define BARRIER()
#define BARRIER_ALL()
#endif

#define KEY_WRONG 0xFFFFFFFFu // of NaN and +infinity
#define KEY_NONE 0x007FFFFFu  // of -infinity
#define NO_TOKEN 0xFFFFFFFFu
#define BITS_NONE 0xFF800000u
#define BITS_NAN 0x7FC00000u
#define ONE ((ulong)1 << 40)
#define LOG2_E 1.442695041f
// tokens that are listed at most, and what stands for all of the row
#define LIST 1024u
#define ALL 0xFFFFFFFFu

DEVICE uint key_of(float logit) {
    const uint bits = FLOAT_BITS(logit), size = bits & 0x7FFFFFFFu;
    if (size > 0x7F800000u || bits == 0x7F800000u) return KEY_WRONG;
    if (size == 0u) return 0x80000000u;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

DEVICE float logit_of(uint key) { return BITS_FLOAT(key >> 31 ? key & 0x7FFFFFFFu : ~key); }

// A positive normal number times 2^(40 + n), rounded down.
DEVICE ulong fixed_of(float v, int n) {
    const uint bits = FLOAT_BITS(v);
    const ulong digits = (bits & 0x7FFFFFu) | 0x800000u;
    const int shift = (int)(bits >> 23) - 110 + n;
    if (shift >= 0) return digits << shift;
    return shift > -24 ? digits >> -shift : 0;
}

// 2^(difference * scale), as hal/src/sample.rs has it: every product and every sum is rounded.
DEVICE ulong weight_of(float difference, float scale) {
    const float y = PRODUCT(difference, scale);
    if (!(y > -41.0f)) return 0;
    const float n = FLOOR(y + 0.5f), f = y - n;
    float p = PRODUCT(0.00015353362f, f) + 0.0013398875f;
    p = PRODUCT(p, f) + 0.009618437f;
    p = PRODUCT(p, f) + 0.055503324f;
    p = PRODUCT(p, f) + 0.24022648f;
    p = PRODUCT(p, f) + 0.6931472f;
    return fixed_of(PRODUCT(p, f) + 1.0f, (int)n);
}

DEVICE ulong part_of(ulong total, uint fraction) {
    return (total >> 32) * fraction + (((total & 0xFFFFFFFFu) * fraction) >> 32);
}

DEVICE ulong group_total(ulong v, IN_LOCAL ulong* scratch) {
    const uint lid = THREAD;
    BARRIER();
    scratch[lid] = v;
    for (uint half_group = GROUP / 2; half_group > 0; half_group /= 2) {
        BARRIER();
        if (lid < half_group) scratch[lid] += scratch[lid + half_group];
    }
    BARRIER();
    return scratch[0];
}

DEVICE ulong group_most(ulong v, IN_LOCAL ulong* scratch) {
    const uint lid = THREAD;
    BARRIER();
    scratch[lid] = v;
    for (uint half_group = GROUP / 2; half_group > 0; half_group /= 2) {
        BARRIER();
        if (lid < half_group && scratch[lid + half_group] > scratch[lid]) scratch[lid] = scratch[lid + half_group];
    }
    BARRIER();
    return scratch[0];
}

// A row, and where its tokens are found: in the list, or one by one.
typedef struct {
    GLOBAL float* logits;
    uint cols;
    IN_LOCAL uint* keys;
    IN_LOCAL uint* ids;
    uint listed;
    IN_LOCAL ulong* scratch;
    // what weights are relative to
    float best;
    float scale;
} Row;

// The tokens of the order up to this one.
typedef struct {
    uint key;
    uint id;
} Run;

DEVICE bool holds(Run run, uint key, uint id) { return key > run.key || (key == run.key && id <= run.id); }

// A token's place in the order; the better, the larger.
#define RANK(key, id) ((ulong)(key) << 32 | (uint) ~(id))

// The best token of this thread's.
DEVICE ulong thread_best(const Row* row) {
    float v[VEC];
    uint best = 0, at = NO_TOKEN;
    for (uint i = THREAD * VEC; i < row->cols; i += GROUP * VEC) {
        LOAD_VEC(f32, row->logits, i, v);
        for (uint j = 0; j < VEC; ++j) {
            const uint key = key_of(v[j]);
            if (key > best) {
                best = key;
                at = i + j;
            }
        }
    }
    return RANK(best, at);
}

// The best token that comes after `before`; 0 if there is none.
DEVICE ulong next_best(const Row* row, ulong before) {
    float v[VEC];
    ulong best = 0;
    if (row->listed != ALL) {
        for (uint i = THREAD; i < row->listed; i += GROUP) {
            const ulong rank = RANK(row->keys[i], row->ids[i]);
            if (rank < before && rank > best) best = rank;
        }
    } else {
        for (uint i = THREAD * VEC; i < row->cols; i += GROUP * VEC) {
            LOAD_VEC(f32, row->logits, i, v);
            for (uint j = 0; j < VEC; ++j) {
                const ulong rank = RANK(key_of(v[j]), i + j);
                if (rank < before && rank > best) best = rank;
            }
        }
    }
    return group_most(best, row->scratch);
}

DEVICE ulong worth(const Row* row, bool counting, Run run, uint key, uint id) {
    if (!holds(run, key, id)) return 0;
    return counting ? 1 : weight_of(logit_of(key) - row->best, row->scale);
}

// The number of the tokens of a run, or their weight.
DEVICE ulong worth_of(const Row* row, bool counting, Run run) {
    float v[VEC];
    ulong sum = 0;
    if (row->listed != ALL) {
        for (uint i = THREAD; i < row->listed; i += GROUP) {
            sum += worth(row, counting, run, row->keys[i], row->ids[i]);
        }
    } else {
        for (uint i = THREAD * VEC; i < row->cols; i += GROUP * VEC) {
            LOAD_VEC(f32, row->logits, i, v);
            for (uint j = 0; j < VEC; ++j) sum += worth(row, counting, run, key_of(v[j]), i + j);
        }
    }
    return group_total(sum, row->scratch);
}

// The shortest run that is worth `target` among tokens that are listed, a thread for each.
DEVICE Run shortest_listed(const Row* row, bool counting, ulong target, Run within, IN_LOCAL uint* found) {
    const uint lid = THREAD, count = row->listed;
    IN_LOCAL ulong* parts = row->scratch;
    ulong own = 0;
    Run run = within;
    BARRIER();
    if (lid < count) {
        run.key = row->keys[lid];
        run.id = row->ids[lid];
        own = worth(row, counting, within, run.key, run.id);
    }
    parts[lid] = own;
    BARRIER();
    if (own > 0) {
        ulong sum = 0;
        for (uint i = 0; i < count; ++i) {
            if (holds(run, row->keys[i], row->ids[i])) sum += parts[i];
        }
        if (sum >= target && sum - own < target) *found = lid;
    }
    BARRIER();
    run.key = row->keys[*found];
    run.id = row->ids[*found];
    return run;
}

// The shortest run that is worth `target`, where `within` is worth as much.
DEVICE Run shortest(const Row* row, bool counting, ulong target, Run within, uint best, IN_LOCAL uint* found) {
    if (row->listed <= GROUP) return shortest_listed(row, counting, target, within, found);
    Run run;
    uint low = within.key, high = best + 1;
    while (high - low > 1) {
        run.key = low + (high - low) / 2;
        run.id = NO_TOKEN;
        if (worth_of(row, counting, run) >= target) {
            low = run.key;
        } else {
            high = run.key;
        }
    }
    // of equal logits the lower ids come first
    const Run better = {low + 1, NO_TOKEN};
    run.key = low;
    run.id = low == within.key ? within.id : NO_TOKEN;
    if (worth_of(row, true, run) - worth_of(row, true, better) <= 1) return run;
    uint first = 0, last = run.id < row->cols ? run.id : row->cols - 1;
    while (first < last) {
        run.id = first + (last - first) / 2;
        if (worth_of(row, counting, run) >= target) {
            last = run.id;
        } else {
            first = run.id + 1;
        }
    }
    run.id = first;
    return run;
}

// A key that at least `k` tokens reach: that of the k-th best of the threads' best tokens.
DEVICE uint reached_by(const Row* row, uint k, uint mine, uint best) {
    if (k > GROUP) return 0;
    uint low = 0, high = best + 1;
    while (high - low > 1) {
        const uint middle = low + (high - low) / 2;
        if (group_total(mine >= middle, row->scratch) >= k) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// Lists the tokens whose key is at least `least`, if they are few.
DEVICE void list(Row* row, uint least, IN_LOCAL uint* count) {
    float v[VEC];
    row->listed = ALL;
    if (least == 0 && row->cols > LIST) return;
    BARRIER();
    if (THREAD == 0) *count = 0;
    BARRIER();
    for (uint i = THREAD * VEC; i < row->cols; i += GROUP * VEC) {
        LOAD_VEC(f32, row->logits, i, v);
        for (uint j = 0; j < VEC; ++j) {
            const uint key = key_of(v[j]);
            if (key < least) continue;
            const uint at = COUNT_UP(count);
            if (at < LIST) {
                row->keys[at] = key;
                row->ids[at] = i + j;
            }
        }
    }
    BARRIER();
    row->listed = *count <= LIST ? *count : ALL;
}

// Lists tokens among which a run that is worth `target` ends, if there are such that are few: those that weigh 2^-8 of
// the best one and more, then lighter ones, down to 2^`lightest`. `run` becomes the run of what is listed.
DEVICE void narrow(Row* row, Run* run, float lightest, ulong target, uint best, IN_LOCAL uint* count) {
    // nothing weighs less than 2^-41
    for (uint step = 1; step <= 6; ++step) {
        const float weight = -8.0f * (float)step;
        const bool last = !(weight > lightest);
        const Run heavy = {key_of(row->best + (last ? lightest : weight) / row->scale), NO_TOKEN};
        if (heavy.key > best || heavy.key <= KEY_NONE) return;
        list(row, heavy.key, count);
        if (row->listed == ALL) return;
        if (worth_of(row, false, heavy) >= target) {
            *run = heavy;
            return;
        }
        row->listed = ALL;
        if (last) return;
    }
}

// Lists the best tokens, with their distance to the best one; nothing past the last token.
DEVICE void list_tops(const Row* row, GLOBAL uint* top, uint tops) {
    ulong rank = ~(ulong)0;
    for (uint i = 0; i < tops; ++i) {
        if (rank != 0) rank = next_best(row, rank);
        if (THREAD == 0) {
            const float logit = logit_of((uint)(rank >> 32));
            top[2 * i] = rank ? ~(uint)rank : NO_TOKEN;
            top[2 * i + 1] = rank ? (logit == row->best ? 0u : FLOAT_BITS(logit - row->best)) : BITS_NONE;
        }
    }
}

// The sum of what the threads before this one have; `sums` has those up to each thread then.
DEVICE ulong sum_before(ulong own, IN_LOCAL ulong* sums) {
    const uint lid = THREAD;
    BARRIER();
    sums[lid] = own;
    for (uint behind = 1; behind < GROUP; behind *= 2) {
        BARRIER();
        const ulong more = lid >= behind ? sums[lid - behind] : 0;
        BARRIER();
        sums[lid] += more;
    }
    BARRIER();
    return sums[lid] - own;
}

// Draws from a run: the first token, by id, at which the cumulated weight passes a part of the sum. Each
// thread has neighbouring tokens; the token is written to `found`.
DEVICE void draw(const Row* row, Run run, ulong least, uint uniform, IN_LOCAL uint* found) {
    const uint lid = THREAD, share = (row->cols + GROUP * VEC - 1) / (GROUP * VEC) * VEC;
    const uint first = lid * share, end = first + share < row->cols ? first + share : row->cols;
    float v[VEC];
    ulong own = 0;
    for (uint i = first; i < end; i += VEC) {
        LOAD_VEC(f32, row->logits, i, v);
        for (uint j = 0; j < VEC; ++j) {
            const ulong w = worth(row, false, run, key_of(v[j]), i + j);
            if (w >= least) own += w;
        }
    }
    IN_LOCAL ulong* sums = row->scratch;
    const ulong before = sum_before(own, sums), target = part_of(sums[GROUP - 1], uniform);
    // the thread that has the token hands its tokens to all, some to each
    if (before <= target && target < sums[lid]) found[0] = lid;
    BARRIER();
    const uint owner = found[0], begin = owner * share, stop = begin + share < row->cols ? begin + share : row->cols;
    const ulong rest = owner > 0 ? target - sums[owner - 1] : target;
    const uint each = (share + GROUP - 1) / GROUP, at = begin + lid * each;
    ulong weights = 0;
    for (uint i = at; i < at + each && i < stop; ++i) {
        const ulong w = worth(row, false, run, key_of(row->logits[i]), i);
        if (w >= least) weights += w;
    }
    ulong sum = sum_before(weights, sums);
    if (sum <= rest && rest < sums[lid]) {
        for (uint i = at; i < stop && sum <= rest; ++i) {
            const ulong w = worth(row, false, run, key_of(row->logits[i]), i);
            if (w >= least) sum += w;
            if (sum > rest) found[0] = i;
        }
    }
    BARRIER();
}

// The same of a run whose tokens are listed, a thread for each.
DEVICE void draw_listed(const Row* row, Run run, ulong least, uint uniform, IN_LOCAL uint* found) {
    const uint lid = THREAD, count = row->listed;
    IN_LOCAL ulong* weights = row->scratch;
    ulong own = 0;
    BARRIER();
    if (lid < count) own = worth(row, false, run, row->keys[lid], row->ids[lid]);
    if (own < least) own = 0;
    weights[lid] = own;
    BARRIER();
    if (own > 0) {
        ulong total = 0, before = 0;
        for (uint i = 0; i < count; ++i) {
            total += weights[i];
            if (row->ids[i] < row->ids[lid]) before += weights[i];
        }
        const ulong target = part_of(total, uniform);
        if (before <= target && target < before + own) *found = row->ids[lid];
    }
    BARRIER();
}

// One group to a multiprocessor, so that it has the registers that it needs: there are only as many as rows.
KERNEL_OF(GROUP, 1) sample(WRITES(f32, logits), READS(u32, parameters), READS(u32, history_start),
                           WRITES(u32, history), WRITES(u32, out), WRITES(u32, top), uint rows, uint cols,
                           uint entries, uint tops) {
    LOCAL ulong scratch[GROUP];
    LOCAL uint keys[LIST], ids[LIST];
    LOCAL uint found[2]; // the token, and the bits of its logit before penalties
    START(logits);
    START(parameters);
    START(history_start);
    START(history);
    START(out);
    START(top);
    const uint lid = THREAD;
    const float scale = BITS_FLOAT(parameters[GROUP_X * 8]), min_p = BITS_FLOAT(parameters[GROUP_X * 8 + 3]);
    const uint top_k = parameters[GROUP_X * 8 + 1], top_p = parameters[GROUP_X * 8 + 2];
    const uint uniform = parameters[GROUP_X * 8 + 6];
    const bool logprobs = parameters[GROUP_X * 8 + 7] & 1u;
    out += GROUP_X * 4;
    top += (ulong)GROUP_X * tops * 2;
    Row row = {logits + (ulong)GROUP_X * cols, cols, keys, ids, ALL, scratch, 0.0f, LOG2_E};

    ulong mine = thread_best(&row), best = group_most(mine, scratch);
    const float raw_best = logit_of((uint)(best >> 32));
    ulong sum = 0;
    row.best = raw_best;
    if (logprobs) {
        const Run all = {0, NO_TOKEN};
        sum = worth_of(&row, false, all);
        if (tops) {
            list(&row, reached_by(&row, tops, (uint)(mine >> 32), (uint)(best >> 32)), found);
            list_tops(&row, top, tops);
            row.listed = ALL;
        }
    }

    // penalties, with the logits as they were left in the history
    uint entry = entries ? history_start[GROUP_X] : 0, entries_end = entries ? history_start[GROUP_X + 1] : 0;
    if (entries_end > entries) entries_end = entries;
    if (entry < entries_end) {
        const float up = BITS_FLOAT(parameters[GROUP_X * 8 + 4]), down = BITS_FLOAT(parameters[GROUP_X * 8 + 5]);
        BARRIER_ALL();
        for (uint e = entry + lid; e < entries_end; e += GROUP) {
            const uint id = history[2 * (ulong)e];
            if (id >= cols) continue;
            const float logit = row.logits[id], less = BITS_FLOAT(history[2 * (ulong)e + 1]);
            history[2 * (ulong)e + 1] = FLOAT_BITS(logit);
            row.logits[id] = PRODUCT(logit, logit > 0.0f ? down : up) - less;
        }
        BARRIER_ALL();
        mine = thread_best(&row);
        best = group_most(mine, scratch);
    }

    const uint best_key = (uint)(best >> 32);
    if (best_key == KEY_WRONG || best_key <= KEY_NONE) {
        if (lid == 0) {
            out[0] = best_key == KEY_WRONG ? ~(uint)best : NO_TOKEN;
            out[1] = best_key == KEY_WRONG ? BITS_NAN : BITS_NONE;
            out[2] = out[3] = 0;
        }
    } else if (scale == 0.0f) {
        if (lid == 0) found[0] = ~(uint)best;
    } else {
        row.best = logit_of(best_key);
        row.scale = scale;
        Run run = {0, NO_TOKEN};
        if (top_k > 0 && top_k < cols) {
            run.key = reached_by(&row, top_k, (uint)(mine >> 32), best_key);
            list(&row, run.key, found);
            run = shortest(&row, true, top_k, run, best_key, found);
        }
        if (top_p != 0xFFFFFFFFu) {
            const ulong total = worth_of(&row, false, run);
            ulong target = part_of(total, top_p);
            if (target == 0) target = 1;
            if (row.listed == ALL && run.key == 0) {
                // Tokens that weigh less than this weigh less than the rest together, so that the run ends
                // before them. The sum decides, whatever rounding does to the logit.
                const float lightest = (float)(total - target) / (float)cols * 4.5474735e-13f;
                narrow(&row, &run, LOG2(lightest), target, best_key, found);
            }
            run = shortest(&row, false, target, run, best_key, found);
        }
        const uint min_bits = FLOAT_BITS(min_p);
        const ulong least = min_bits >> 31 ? 0 : min_bits >= 0x3F800000u ? ONE : fixed_of(min_p, 0);
        if (row.listed <= GROUP) {
            draw_listed(&row, run, least, uniform, found);
        } else {
            draw(&row, run, least, uniform, found);
        }
    }
    if (logprobs == false || best_key == KEY_WRONG || best_key <= KEY_NONE) {
        if (lid == 0) {
            for (uint i = 0; i < tops; ++i) {
                top[2 * i] = NO_TOKEN;
                top[2 * i + 1] = BITS_NONE;
            }
        }
    }
    if (best_key == KEY_WRONG || best_key <= KEY_NONE) return;

    BARRIER();
    const uint id = found[0];
    if (lid == 0) found[1] = FLOAT_BITS(row.logits[id]);
    BARRIER();
    for (uint e = entry + lid; e < entries_end; e += GROUP) {
        if (history[2 * (ulong)e] == id) found[1] = history[2 * (ulong)e + 1];
    }
    BARRIER();
    if (lid == 0) {
        const float raw = BITS_FLOAT(found[1]);
        out[0] = id;
        out[1] = raw == raw_best ? 0u : FLOAT_BITS(raw - raw_best);
        out[2] = (uint)sum;
        out[3] = (uint)(sum >> 32);
    }
}

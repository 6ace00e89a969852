// The choice of experts, and its order by expert. EXPERTS, ACTIVE and GROUPS are the sizes of a token's lists.

#define NONE 0xFFFFFFFFu

// The best of n keys after the one of `last`, by key and then by number; all threads get it. Those of closed
// groups of `size` keys are passed over.
DEVICE uint best_after(
    IN_LOCAL const float* keys, uint n, uint last, IN_LOCAL const uint* open, uint size,
    IN_LOCAL float* found_keys, IN_LOCAL uint* found
) {
    const uint lid = THREAD;
    uint best = NONE;
    for (uint i = lid; i < n; i += GROUP) {
        const int after = last == NONE || keys[i] < keys[last] || (keys[i] == keys[last] && i > last);
        if (open[i / size] && after && (best == NONE || keys[i] > keys[best])) best = i;
    }
    BARRIER();
    found[lid] = best;
    found_keys[lid] = best == NONE ? -INFINITY : keys[best];
    for (uint half_group = GROUP / 2; half_group > 0; half_group /= 2) {
        BARRIER();
        if (lid < half_group) {
            const uint a = found[lid], b = found[lid + half_group];
            const float u = found_keys[lid], v = found_keys[lid + half_group];
            if (b != NONE && (a == NONE || v > u || (v == u && b < a))) {
                found[lid] = b;
                found_keys[lid] = v;
            }
        }
    }
    BARRIER();
    return found[0];
}

DEVICE float sigmoid(float v) { return 1.0f / (1.0f + EXP(-v)); }

// One group of threads for each token.
KERNEL(GROUP) route(
    READS(f32, logits), READS(f32, bias), WRITES(u32, chosen), WRITES(f32, weights), uint has_bias,
    uint by_sigmoid, uint groups_active, uint group_best, uint normalise, float scale
) {
    LOCAL float keys[EXPERTS];
    LOCAL float sums[GROUPS];
    LOCAL uint open[GROUPS];
    LOCAL uint all[1];
    LOCAL uint picked[ACTIVE];
    LOCAL float scratch[GROUP];
    LOCAL uint found[GROUP];
    START(logits);
    START(bias);
    START(chosen);
    START(weights);
    const uint lid = THREAD, size = EXPERTS / GROUPS;
    const ulong token = GROUP_X;
    const ulong row = token * EXPERTS;
    float highest = -INFINITY;
    for (uint i = lid; i < EXPERTS; i += GROUP) highest = FMAX(highest, logits[row + i]);
    highest = group_max(highest, scratch);
    float total = 0.0f;
    for (uint i = lid; i < EXPERTS; i += GROUP) total += EXP(logits[row + i] - highest);
    total = group_sum(total, scratch);
    const uint by_logits = GROUPS == 1 && !has_bias;
    for (uint i = lid; i < EXPERTS; i += GROUP) {
        const float logit = logits[row + i];
        float key = logit;
        if (!by_logits) key = by_sigmoid ? sigmoid(logit) : EXP(logit - highest) / total;
        if (has_bias) key += bias[i];
        keys[i] = key == key ? key : -INFINITY;
    }
    for (uint g = lid; g < GROUPS; g += GROUP) open[g] = GROUPS == 1;
    if (lid == 0) all[0] = 1;
    BARRIER();
#if GROUPS > 1
    for (uint g = lid; g < GROUPS; g += GROUP) {
        float sum = 0.0f;
        uint last = NONE;
        for (uint b = 0; b < group_best; ++b) {
            uint best = NONE;
            for (uint i = g * size; i < (g + 1) * size; ++i) {
                const int after = last == NONE || keys[i] < keys[last] || (keys[i] == keys[last] && i > last);
                if (after && (best == NONE || keys[i] > keys[best])) best = i;
            }
            sum += keys[best];
            last = best;
        }
        sums[g] = sum;
    }
    uint group = NONE;
    for (uint a = 0; a < groups_active; ++a) {
        BARRIER();
        group = best_after(sums, GROUPS, group, all, GROUPS, scratch, found);
        if (lid == 0) open[group] = 1;
    }
    BARRIER();
#endif
    uint expert = NONE;
    for (uint a = 0; a < ACTIVE; ++a) {
        BARRIER();
        expert = best_after(keys, EXPERTS, expert, open, size, scratch, found);
        if (lid == 0) picked[a] = expert;
    }
    BARRIER();
    if (lid == 0) {
        float most = -INFINITY, sum = 0.0f;
        for (uint a = 0; a < ACTIVE; ++a) most = FMAX(most, logits[row + picked[a]]);
        const float from = normalise ? most : highest;
        for (uint a = 0; a < ACTIVE; ++a) {
            const float logit = logits[row + picked[a]];
            sum += by_sigmoid ? sigmoid(logit) : EXP(logit - from);
        }
        if (by_sigmoid) sum += 1e-20f;
        for (uint a = 0; a < ACTIVE; ++a) {
            const float logit = logits[row + picked[a]];
            const float score = by_sigmoid ? sigmoid(logit) : EXP(logit - from);
            const float share = normalise ? score / sum : by_sigmoid ? score : score / total;
            chosen[token * ACTIVE + a] = picked[a];
            weights[token * ACTIVE + a] = share * scale;
        }
    }
}

// One group for all choices; a thread counts and places those of its experts.
KERNEL(GROUP) route_order(READS(u32, chosen), WRITES(u32, order), WRITES(u32, starts), uint choices) {
    LOCAL uint counts[EXPERTS + 1];
    START(chosen);
    START(order);
    START(starts);
    const uint lid = THREAD;
    for (uint e = lid; e < EXPERTS; e += GROUP) {
        uint count = 0;
        for (uint c = 0; c < choices; ++c) count += chosen[c] == e;
        counts[e + 1] = count;
    }
    BARRIER();
    if (lid == 0) {
        counts[0] = 0;
        for (uint e = 0; e < EXPERTS; ++e) counts[e + 1] += counts[e];
    }
    BARRIER();
    for (uint e = lid; e < EXPERTS; e += GROUP) {
        uint at = counts[e];
        for (uint c = 0; c < choices; ++c) {
            if (chosen[c] == e) order[at++] = c;
        }
        starts[e] = counts[e];
    }
    if (lid == 0) starts[EXPERTS] = choices;
}

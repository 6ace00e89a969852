/* Operations of more families of models, which example.c includes: latent attention, sinks, mixtures of experts.
 * They came later than the others; a library without them says 0 for their kinds. */

static void rope_part(const struct MixfleetOp *op) {
    struct MixfleetRopePart s = op->shape.rope_part;
    size_t pairs = s.length / 2, apart = s.interleaved ? 1 : pairs;
    for (size_t row = 0; row < (size_t)s.tokens * s.heads; row++)
        for (size_t i = 0; i < pairs; i++) {
            size_t at = row * s.head_dim + s.first + (s.interleaved ? 2 * i : i), angle = row / s.heads * s.length + i;
            float a = load(arg(op, 0), at, s.x), b = load(arg(op, 0), at + apart, s.x);
            float cosine = load(arg(op, 1), angle, MIXFLEET_F32), sine = load(arg(op, 1), angle + pairs, MIXFLEET_F32);
            store(arg(op, 0), at, s.x, a * cosine - b * sine);
            store(arg(op, 0), at + apart, s.x, a * sine + b * cosine);
        }
}

static void copy_columns(const struct MixfleetOp *op) {
    struct MixfleetColumns s = op->shape.columns;
    for (size_t row = 0; row < s.rows; row++)
        memcpy(arg(op, 1) + (row * s.to_row + s.to_first) * element(s.x),
               arg(op, 0) + (row * s.from_row + s.from_first) * element(s.x), s.cols * element(s.x));
}

static void clamped_swiglu(const struct MixfleetOp *op) {
    struct MixfleetClampedSwiglu s = op->shape.clamped_swiglu;
    for (size_t i = 0; i < s.elements; i++) {
        double gate = fminf(load(arg(op, 0), 2 * i, s.x), s.limit);
        double up = fmaxf(fminf(load(arg(op, 0), 2 * i + 1, s.x), s.limit), -s.limit);
        store(arg(op, 1), i, s.x, (float)((up + 1) * gate / (1 + exp(-s.alpha * gate))));
    }
}

/* Takes the place of the highest of `count` keys, of equal ones the first, which then is out; NaN is never above
 * another. */
static size_t take_best(float *keys, unsigned char *out, size_t count) {
    size_t best = count;
    for (size_t i = 0; i < count; i++)
        if (!out[i] && (best == count || keys[i] > keys[best] || (isnan(keys[best]) && !isnan(keys[i])))) best = i;
    out[best] = 1;
    return best;
}

/* Keys of experts in groups that are not among the best become -infinity. */
static void close_groups(struct MixfleetRoute s, float *keys, float *sums, unsigned char *out) {
    size_t size = s.experts / s.groups;
    memset(out, 0, s.experts);
    for (size_t group = 0; group < s.groups; group++) {
        sums[group] = 0;
        for (size_t i = 0; i < s.group_best; i++)
            sums[group] += keys[group * size + take_best(keys + group * size, out + group * size, size)];
    }
    memset(out, 0, s.groups);
    for (size_t i = 0; i < s.groups_active; i++) take_best(sums, out, s.groups);
    for (size_t expert = 0; expert < s.experts; expert++)
        if (!out[expert / size]) keys[expert] = -INFINITY;
}

static void put_word(const struct MixfleetOp *op, int operand, size_t i, size_t value) {
    uint32_t one = (uint32_t)value;
    memcpy(arg(op, operand) + 4 * i, &one, 4);
}

static int route(const struct MixfleetOp *op, struct MixfleetError *error) {
    struct MixfleetRoute s = op->shape.route;
    int at = s.bias ? 2 : 1;
    float *scores = malloc(s.experts * (3 * sizeof *scores + 1));
    if (!scores) return fail(error, MIXFLEET_OUT_OF_MEMORY, "the host has no memory");
    float *keys = scores + s.experts, *sums = keys + s.experts;
    unsigned char *out = (unsigned char *)(sums + s.experts);
    for (size_t token = 0; token < s.tokens; token++) {
        double max = -INFINITY, sum = 0;
        for (size_t e = 0; e < s.experts; e++) {
            keys[e] = load(arg(op, 0), token * s.experts + e, MIXFLEET_F32);
            max = fmax(max, keys[e]);
        }
        for (size_t e = 0; e < s.experts; e++) sum += exp(keys[e] - max);
        for (size_t e = 0; e < s.experts; e++) {
            scores[e] = (float)(s.scoring ? 1 / (1 + exp(-(double)keys[e])) : exp(keys[e] - max) / sum);
            if (s.bias) keys[e] = scores[e] + load(arg(op, 1), e, MIXFLEET_F32);
            else if (s.groups > 1) keys[e] = scores[e]; /* else logits, which order experts alike */
        }
        if (s.groups > 1) close_groups(s, keys, sums, out);
        memset(out, 0, s.experts);
        double all = s.scoring ? 1e-20 : 0;
        for (size_t i = token * s.active; i < (token + 1) * s.active; i++) {
            size_t best = take_best(keys, out, s.experts);
            put_word(op, at, i, best);
            all += scores[best];
        }
        for (size_t i = token * s.active; i < (token + 1) * s.active; i++)
            store(arg(op, at + 1), i, MIXFLEET_F32, (float)(scores[word(op, at, i)] / (s.normalise ? all : 1) * s.scale));
    }
    size_t next = 0, choices = (size_t)s.tokens * s.active;
    for (size_t expert = 0; expert < s.experts; expert++) {
        put_word(op, at + 3, expert, next);
        for (size_t choice = 0; choice < choices; choice++)
            if (word(op, at, choice) == expert) put_word(op, at + 2, next++, choice);
    }
    put_word(op, at + 3, s.experts, next);
    free(scores);
    return MIXFLEET_OK;
}

static int grouped_gemm(const struct MixfleetOp *op, struct MixfleetError *error) {
    struct MixfleetGroupedGemm s = op->shape.grouped_gemm;
    int at = s.bias ? 3 : 2;
    for (size_t expert = 0; expert < s.experts; expert++) {
        size_t first = word(op, at + 1, expert), end = word(op, at + 1, expert + 1);
        if (first > end || end > s.choices) return fail(error, MIXFLEET_INVALID, "an expert's rows are beyond all choices");
        for (size_t i = first; i < end; i++) {
            size_t choice = word(op, at, i);
            if (choice >= s.choices) return fail(error, MIXFLEET_INVALID, "a choice is beyond all choices");
            for (size_t n = 0; n < s.n; n++) {
                size_t row = expert * s.n + n;
                float sum = dot(arg(op, 0), choice / s.fan * s.k, s.x, arg(op, 1), row * s.k, s.weight, s.k);
                if (s.bias) sum += load(arg(op, 2), row, s.weight);
                store(arg(op, at + 2), choice * s.n + n, s.out, sum);
            }
        }
    }
    return MIXFLEET_OK;
}

static void combine(const struct MixfleetOp *op) {
    struct MixfleetCombine s = op->shape.combine;
    for (size_t i = 0; i < (size_t)s.tokens * s.cols; i++) {
        size_t choice = i / s.cols * s.active;
        float sum = 0;
        for (size_t end = choice + s.active; choice < end; choice++)
            sum += load(arg(op, 1), choice, MIXFLEET_F32) * load(arg(op, 0), choice * s.cols + i % s.cols, s.x);
        store(arg(op, 2), i, MIXFLEET_F32, sum + (s.accumulate ? load(arg(op, 2), i, MIXFLEET_F32) : 0));
    }
}

static int run_more(const struct MixfleetOp *op, struct MixfleetError *error) {
    const struct MixfleetLatentPrefill *prefill = &op->shape.latent_prefill;
    const struct MixfleetLatentDecode *decode = &op->shape.latent_decode;
    switch (op->kind) {
    case MIXFLEET_ROPE_PART: return rope_part(op), MIXFLEET_OK;
    case MIXFLEET_COPY_COLUMNS: return copy_columns(op), MIXFLEET_OK;
    case MIXFLEET_LATENT_WRITE: case MIXFLEET_LATENT_GATHER: case MIXFLEET_LATENT_SCATTER:
        return kv_move(op, op->kind == MIXFLEET_LATENT_WRITE, op->kind == MIXFLEET_LATENT_GATHER, 1, error);
    case MIXFLEET_LATENT_PREFILL:
        return attention(op, &prefill->attention, NULL, (struct Values){prefill->rank, prefill->scale, 1, 0}, error);
    case MIXFLEET_LATENT_DECODE:
        return attention(op, NULL, &decode->attention, (struct Values){decode->rank, decode->scale, 1, 0}, error);
    case MIXFLEET_SINK_PREFILL:
        return attention(op, &op->shape.attn_prefill, NULL, (struct Values){.sinks = 1}, error);
    case MIXFLEET_SINK_MERGE: return attn_merge(op, op->shape.sink_merge.sinks), MIXFLEET_OK;
    case MIXFLEET_CLAMPED_SWIGLU: return clamped_swiglu(op), MIXFLEET_OK;
    case MIXFLEET_ROUTE: return route(op, error);
    case MIXFLEET_GROUPED_GEMM: return grouped_gemm(op, error);
    case MIXFLEET_COMBINE: return combine(op), MIXFLEET_OK;
    default: return run_one(op, error);
    }
}

static int32_t support_more(struct MixfleetDevice *device, const struct MixfleetOp *op) {
    const union MixfleetShape *s = &op->shape;
    const struct MixfleetAttnPrefill *sinks = &s->attn_prefill, *prefill = &s->latent_prefill.attention;
    const struct MixfleetAttnDecode *decode = &s->latent_decode.attention;
    switch (op->kind) {
    case MIXFLEET_ROPE_PART: return known(s->rope_part.x);
    case MIXFLEET_COPY_COLUMNS: return known(s->columns.x);
    case MIXFLEET_LATENT_WRITE: return known(s->kv_write.x) && known(s->kv_write.kv.dtype);
    case MIXFLEET_LATENT_GATHER: case MIXFLEET_LATENT_SCATTER: return known(s->kv_move.wire) && known(s->kv_move.kv.dtype);
    case MIXFLEET_LATENT_PREFILL: return known(prefill->x) && known(prefill->kv.dtype) && s->latent_prefill.rank <= HEAD_MAX;
    case MIXFLEET_LATENT_DECODE: return known(decode->x) && known(decode->kv.dtype) && s->latent_decode.rank <= HEAD_MAX;
    case MIXFLEET_SINK_PREFILL: return known(sinks->x) && known(sinks->kv.dtype) && sinks->kv.head_dim <= HEAD_MAX;
    case MIXFLEET_SINK_MERGE: return known(s->sink_merge.merge.out);
    case MIXFLEET_CLAMPED_SWIGLU: return known(s->clamped_swiglu.x);
    case MIXFLEET_ROUTE: return s->route.scoring <= 1;
    case MIXFLEET_GROUPED_GEMM: return known(s->grouped_gemm.x) && known(s->grouped_gemm.weight) && known(s->grouped_gemm.out);
    case MIXFLEET_COMBINE: return known(s->combine.x);
    default: return support(device, op);
    }
}

//! Explanations of small operations, groups, flags, and other terms that cards and comparisons print.

use super::Metric;

const fn word(
    name: &'static str,
    meaning: &'static str,
    method: &'static str,
    decides: &'static str,
    typical: &'static str,
) -> Metric {
    Metric { name, meaning, method, decides, typical }
}

const PLACE: &str =
    "Commands in one batch; activations stay in place, weights and tables are others each time.";
const SMALL: &str = "A small part of each layer; at few rows the launch and not the work decides.";

pub(super) const OPERATIONS: &[Metric] = &[
    Metric {
        name: "route",
        meaning: "Time for each of t tokens to choose a of e experts, and for the choices to be sorted by expert.",
        method: "As rms_norm.",
        decides: "A small part of every layer with experts.",
        typical: "A few microseconds for a decode step.",
    },
    Metric {
        name: "combine",
        meaning: "Time to add up what a experts made of each of t tokens, h elements each, into the residual stream.",
        method: "As rms_norm.",
        decides: "A small part of every layer with experts.",
        typical: "The rate of memory_copy.",
    },
    Metric {
        name: "clamped_swiglu",
        meaning: "Time of gpt-oss's activation over e elements.",
        method: "As silu_mul.",
        decides: "A small part of every layer with experts.",
        typical: "As silu_mul.",
    },
    Metric {
        name: "soft_cap",
        meaning: "Time to bound e logits smoothly, as Gemma 2 does.",
        method: "As silu_mul.",
        decides: "A small part of every step.",
        typical: "As silu_mul.",
    },
    Metric {
        name: "gelu_mul",
        meaning: "Time of gelu(gate) * up over e elements: the activation of Gemma's MLP.",
        method: "As silu_mul.",
        decides: "A small part of every layer.",
        typical: "As silu_mul.",
    },
    word(
        "rms_norm",
        "Time to norm t rows of the f32 residual stream, of length h, into activations.",
        PLACE,
        SMALL,
        "Microseconds for a decode step; near memory_copy's rate for long prompts.",
    ),
    word(
        "rope",
        "Time to rotate the queries or keys of t tokens: h heads of length d.",
        PLACE,
        SMALL,
        "Microseconds for a decode step; CPUs are bound by sine and cosine where they compute them anew.",
    ),
    word(
        "silu_mul",
        "Time of silu(gate) * up over e elements: the MLP's activation.",
        PLACE,
        SMALL,
        "Near memory_copy's rate on GPUs; CPUs are bound by the exponential.",
    ),
    word(
        "add",
        "Time to add e elements to e others in place.",
        PLACE,
        SMALL,
        "Near memory_copy's rate; quicker while the caches hold the operands.",
    ),
    word(
        "embed",
        "Time to fetch t tokens' rows of length h from a table of v rows into the f32 residual stream.",
        PLACE,
        "Once a step, before the first layer; never the bottleneck.",
        "Microseconds for a decode step.",
    ),
    word(
        "sample",
        "Time to draw a token from v logits in each of t rows, at temperature 1 and top-p 0.95.",
        PLACE,
        "Once a step, after the last layer; greedy sampling takes less.",
        "10 to 200 us for 32 rows; parts that reduce a row with one unit are slower.",
    ),
    word(
        "attn_merge",
        "Time to merge p partial attentions of t rows (sequences times heads) of length d into one.",
        PLACE,
        "What it costs to compute attention on other devices than the projections, or in several parts.",
        "Microseconds; it reads little.",
    ),
];

const ONLY: &str =
    "A part of the profile and an argument of --only; `mixfleet explain POINT` explains one of its points.";

pub(super) const PARTS: &[Metric] = &[
    Metric {
        name: "experts",
        meaning: "Group of grouped_gemm, route and combine.",
        method: "Each point says how many experts have rows.",
        decides: "What the MLP of a mixture of experts costs.",
        typical: "See grouped_gemm.",
    },
    word(
        "memory",
        "Bandwidth over working sets from 64 KiB on: memory_read, memory_write, memory_copy. The card shows the largest.",
        ONLY,
        "The roofline's slope; where the caches end.",
        "See memory_read.",
    ),
    word(
        "links",
        "Copies to the device, from it, and within it: copy_h2d, copy_d2h, copy_d2d. `+ 10 us` on the card is what \
         each transfer costs at any size.",
        ONLY,
        "Loading weights, and moving KV between devices.",
        "See copy_h2d.",
    ),
    word(
        "small",
        "Norms, rope, activation, addition, embedding, draws, merge.",
        ONLY,
        "What a decode step costs beside products and attention.",
        "A tenth of a step or less on good parts.",
    ),
    word(
        "kv",
        "Writing KV pages, and moving them to and from the wire layout: kv_write, kv_gather, kv_scatter.",
        ONLY,
        "How fast KV can leave one device and land on another.",
        "See kv_gather.",
    ),
    word(
        "decode",
        "Attention of one new token per sequence: attn_decode.",
        ONLY,
        "See attn_decode.",
        "See attn_decode.",
    ),
    word(
        "prefill",
        "Attention of many new tokens: attn_prefill.",
        ONLY,
        "See attn_prefill.",
        "See attn_prefill.",
    ),
    word(
        "attention",
        "The parts decode and prefill together; on the card, the best rate of each.",
        ONLY,
        "How time grows with context.",
        "See attn_decode and attn_prefill.",
    ),
    word(
        "compute",
        "FLOP/s of the best product of each dtype, at the median of its samples.",
        "Over the points of gemm with more than 8 FLOP per byte; `CV 12 %` beside it says that this point was noisy.",
        "The roofline's height; the time of prefill.",
        "60 to 85 % of the datasheet's dense rate.",
    ),
    word(
        "capacity",
        "Bytes of memory for each $/h of rent.",
        "The device's memory over --usd-per-hour.",
        "How many sequences' KV a dollar holds.",
        "About 20 to 60 GiB for a GPU's $/h, ten times that for a CPU's.",
    ),
];

const QUIET: &str = "Quiet the machine, measure again: docs/how-to/measure-a-device.md, 'A quiet machine'.";

pub(super) const FLAGS: &[Metric] = &[
    word(
        "noisy",
        "Flag: the coefficient of variation of the samples is above 5 %.",
        "Standard deviation over mean of all samples of the point.",
        "How far the point can be trusted; comparisons take the spread into account.",
        "Absent on a quiet machine. docs/how-to/measure-a-device.md says how to get one.",
    ),
    word(
        "unsteady",
        "Flag: three samples in a row never agreed within 3 %.",
        "30 runs, or half of the point's time, before the samples begin.",
        "Whether the median is of a warm part. Clocks that hunt need to be fixed.",
        QUIET,
    ),
    word(
        "few-samples",
        "Flag: fewer samples than the level wants, for lack of time.",
        "Each part has a share of the level's time.",
        "How far the median can be trusted.",
        "Absent with --full, or with --only and these points.",
    ),
    word(
        "throttled",
        "Flag: the clock fell by more than 10 %.",
        "The device's clock before and after, where it tells it.",
        "Whether the numbers hold for the part, or for its cooling and power limit.",
        "Absent with good cooling.",
    ),
    word(
        "other-load",
        "Flag: something else used the machine or the device.",
        "The cores were more than 10 % busy before it began.",
        "The part cannot be judged before the others stop.",
        QUIET,
    ),
    word(
        "emulated",
        "Flag: the device converts and computes in another dtype.",
        "The device says so.",
        "Nothing: a fact about the part, and no doubt about the number.",
        "bf16, f16 and fp8 on CPUs without instructions for them.",
    ),
    word(
        "memory-errors",
        "Flag: the device counted memory errors while it was measured.",
        "Counters of corrected and uncorrected errors before and after.",
        "Whether the part may serve at all: run `mixfleet validate`.",
        "Absent.",
    ),
];

pub(super) const OTHERS: &[Metric] = &[
    word(
        "drifted",
        "Verdict of `profile compare`: the points differ, and so do the controls beside them.",
        "A product and a read are measured again every four seconds through a profile.",
        "The machine changed and not the part; measure again before you conclude anything.",
        QUIET,
    ),
    word(
        "dependence_s",
        "What a command of a model's layer costs beyond `a command`, negative where the device joins some; `more in a layer` on the card.",
        "A chain of norm, gate, up, activation, product, against the same commands alone.",
        "Predictions of a step add it to each command: serving is chains.",
        "CPUs: 1 to 5 us, for data that another core has written; GPUs: -1 to 3 us.",
    ),
    word(
        "ratio",
        "Speed of the second profile over the first: 2 is twice as fast.",
        "Median over median.",
        "--fail-below compares it, noise taken into account.",
        "0.97 to 1.03 for the same part on a quiet machine.",
    ),
];

pub(super) const SERVING: &[Metric] = &[
    word(
        "ttft",
        "Time to first token: from the arrival of a request to the first token of its answer.",
        "By serve, from the first byte of the request to the first token sent (time_to_first_token); by simulate and \
         plan, waiting + the prompt's computation or the pull of its KV + what of a hand-off is not hidden.",
        "Whether --ttft-slo is kept: a request whose predicted TTFT is over it is turned away early. Arithmetic \
         decides it (gemm at large m, attn_prefill), and waiting under load.",
        "Objectives of 1 to 30 s at the 90th or 99th percentile, by the length of prompts.",
    ),
    word(
        "tbt",
        "Time between tokens: from one token of an answer to the next one; the time of a decode step.",
        "By serve, of every pair of tokens (inter_token_latency); by simulate and plan, of the steps that the batcher \
         forms, with prompts computed beside decodes.",
        "Whether --tbt-slo is kept. Bandwidth decides it: weights are read once a step, KV once a sequence \
         (gemm at small m, attn_decode).",
        "Objectives of 20 to 100 ms. TPOT is the same as the mean over an answer.",
    ),
    word(
        "goodput",
        "Requests per second, or tokens, that are answered within all objectives.",
        "By simulate and bench: those with a TTFT within --ttft-slo, and a TBT within --tbt-slo at the requested \
         percentile, over the time of the load. A rejected request counts as missed.",
        "What a fleet is worth: plan minimises dollars per hour at a given goodput.",
        "Beyond the load that a fleet sustains it falls, where throughput goes on rising.",
    ),
];

"""From samples to tables: medians, spreads, and ratios of figures of the same round."""

import json
import statistics
import struct
from collections import defaultdict

import contestants

PEERS = ("llama.cpp", "torch")
LOST_CORES_MAX = 0.1
BUSY = " (**busy: these figures compare nothing**)"
MB = 1e6
GIB = 2**30
OVERHEAD_BYTES_MAX = 300 * MB


def model_facts(folder):
    """Bytes and parameters of a checkpoint, from its headers."""
    config = json.loads((folder / "config.json").read_text())
    shapes, weights_bytes = {}, 0
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            head = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        head.pop("__metadata__", None)
        shapes |= {name: entry["shape"] for name, entry in head.items()}
        weights_bytes += path.stat().st_size
    count = {name: shape[0] * (shape[1] if len(shape) > 1 else 1) for name, shape in shapes.items()}
    layers = sum(n for name, n in count.items() if ".layers." in name and len(shapes[name]) == 2)
    table = count["model.embed_tokens.weight"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {
        "name": folder.name,
        "weights_bytes": weights_bytes,
        # one row of the embedding table is read per token, and all of the output matrix, tied or not
        "decode_bytes": 2 * (sum(count.values()) - (table if "lm_head.weight" in count else 0)),
        "kv_bytes_per_token": 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim,
        "layer_flops_per_token": 2 * layers,
        "attention_flops_per_pair": 4 * config["num_hidden_layers"] * config["num_attention_heads"] * head_dim,
        "output_flops": 2 * table,
    }


def label(record):
    return f"round {record['round'] + 1}, {record['who']} {record['step']}"


def progress(record):
    """A line about one record."""
    figures = ", ".join(f"{k} {v:.4g}" for k, v in record["values"].items() if not isinstance(v, str))
    usage = record["usage"]
    spent = f"{usage['wall_s']:.0f} s, others {usage['others']:.2f} cores, stolen {usage['stolen']:.2f}"
    return f"{label(record)}: {figures} [{spent}]"


def markdown(facts, records):
    """The whole report."""
    rounds = defaultdict(dict)  # (who, measure) -> {round: value}
    for record in records:
        for measure, value in record["values"].items():
            rounds[record["who"], measure][record["round"]] = value
    model = facts["model"]
    sections = [
        head(facts, rounds),
        speed(rounds),
        limits(rounds, model),
        memory(rounds, model),
        disturbance(records),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def head(facts, rounds):
    model = facts["model"]
    lines = [
        f"{facts['date']}, {facts['machine']}, {facts['threads']} threads.",
        f"Load average before the start: {facts['load_before']:.2f}{BUSY if facts['busy'] else ''}.",
        f"Model {model['name']}, bf16, {model['weights_bytes'] / MB:.0f} MB.",
    ]
    for peer in PEERS:
        lines += [f"{peer}: {version}." for version in list(rounds.get((peer, "version"), {}).values())[:1]]
    return "\n".join([*lines, f"`{' '.join(facts['command'])}`"])


def speed(rounds):
    """Tokens per second beside the peers."""
    goals = {"decode": ("decode, batch 1 (`generate`)", "llama.cpp")}
    for tokens in contestants.PREFILL_TOKENS:
        goals[f"prefill_{tokens}"] = (f"prefill {tokens} (`serve`, warm)", "torch")
    lines = [
        "| tokens/s | mixfleet | llama.cpp | torch | over llama.cpp | over torch | wanted |",
        "|---|---|---|---|---|---|---|",
    ]

    def add(title, ours, measure, rival=None):
        theirs = {peer: rounds.get((peer, measure)) for peer in PEERS}
        ratios = {peer: ratio(ours, theirs[peer]) for peer in PEERS}
        goal = verdict(ratios[rival], 1.0, f"1.0 x {rival}") if rival else ""
        lines.append(row(title, *map(spread, (ours, *theirs.values(), *ratios.values())), goal))

    for measure, (title, rival) in goals.items():
        add(title, rounds.get(("mixfleet", measure)), measure, rival)
    for tokens in contestants.PREFILL_TOKENS:
        ours = rounds.get(("mixfleet", f"cold_prefill_{tokens}"))
        add(f"prefill {tokens} (`generate`, first use)", ours, f"prefill_{tokens}")
    return "\n".join(lines)


def limits(rounds, model):
    """How far from the machine's own limits, and what a batch and a start cost."""
    lines = ["| | measured | limit | share | wanted |", "|---|---|---|---|---|"]

    def add(title, measured, limit, unit, scale, wanted):
        share = ratio(measured, limit)
        goal = verdict(share, wanted, f"{wanted}") if wanted else ""
        figures = [spread(scaled(values, scale), unit) for values in (measured, limit)]
        lines.append(row(title, *figures, spread(share), goal))

    read, dot = rounds.get(("limits", "read_bytes_per_s")), rounds.get(("limits", "dot_flops"))
    context = contestants.DECODE_PROMPT_TOKENS + contestants.GENERATED_TOKENS / 2
    token_bytes = model["decode_bytes"] + context * model["kv_bytes_per_token"]
    for who, wanted in (("mixfleet", 0.9), ("llama.cpp", None)):
        rate = scaled(rounds.get((who, "decode")), 1 / token_bytes)
        add(f"{who} decode, batch 1: bytes read", rate, read, " GB/s", 1e9, wanted)
    for who in ("mixfleet", *PEERS):
        for tokens in contestants.PREFILL_TOKENS:
            pairs = tokens * (tokens + 1) / 2
            flops = tokens * model["layer_flops_per_token"] + pairs * model["attention_flops_per_pair"]
            rate = scaled(rounds.get((who, f"prefill_{tokens}")), tokens / (flops + model["output_flops"]))
            add(f"{who} prefill {tokens}: arithmetic", rate, dot, " GFLOP/s", 1e9, None)
    batch = contestants.BATCH
    one, many = (rounds.get(("mixfleet", f"decode_{count}")) for count in (1, batch))
    add(f"decode, batch {batch} over batch 1 (`serve`, tokens/s)", many, one, "", 1, 4.0)
    start = rounds.get(("mixfleet", "start_s"))
    first = f"start to first token, {contestants.START_PROMPT_TOKENS}-token prompt (whole process)"
    lines.append(row(first, spread(start, " s"), "3 s", "", verdict(start, 3.0, "under 3 s", at_most=True)))
    return "\n".join(lines)


def memory(rounds, model):
    """Resident memory of `serve` after the batched run."""
    lines = [
        "| MB after the batched run | RSS | anonymous | file | shared | peak RSS | weights + KV + 300 MB | fits |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for title, prefix, devices in (("one device", "", 1), ("prefill and decode on two devices", "split_", 2)):
        budget = model["weights_bytes"] + devices * GIB + OVERHEAD_BYTES_MAX
        names = ("VmRSS", "RssAnon", "RssFile", "RssShmem", "VmHWM")
        values = [rounds.get(("mixfleet", prefix + name)) for name in names]
        fits = verdict(values[0], budget, "", at_most=True)
        cells = [spread(scaled(value, MB)) for value in values]
        lines.append(row(title, *cells, f"{budget / MB:.0f}", fits))
    return "\n".join(lines)


def disturbance(records):
    """What else ran. Nothing is left out of the figures for it."""
    def lost(record):
        return record["usage"]["others"] + record["usage"]["stolen"]

    if not records:
        return ""
    noisy, worst = [r for r in records if lost(r) > LOST_CORES_MAX], max(records, key=lost)
    return (
        f"{len(noisy)} of {len(records)} steps lost more than {LOST_CORES_MAX} cores to other processes or to the "
        f"host (most: {lost(worst):.2f} in {label(worst)})."
    )


def ratio(ours, theirs):
    """Per round."""
    if not ours or not theirs:
        return {}
    return {i: ours[i] / theirs[i] for i in ours.keys() & theirs.keys()}


def scaled(values, divisor):
    return {i: value / divisor for i, value in (values or {}).items()}


def spread(values, unit=""):
    """Median, and from lowest to highest."""
    if not values:
        return "-"
    numbers = sorted(values.values())
    shown = (statistics.median(numbers), numbers[0], numbers[-1])
    middle, low, high = (f"{n:.0f}" if n >= 1000 else f"{n:.3g}" for n in shown)
    return f"**{middle}{unit}** ({low} to {high})" if len(numbers) > 1 else f"**{middle}{unit}**"


def verdict(values, wanted, text, at_most=False):
    """Whether the median meets a goal."""
    if not values:
        return f"{text}: not measured" if text else "not measured"
    middle = statistics.median(values.values())
    met = middle <= wanted if at_most else middle >= wanted
    return f"{text}: {'yes' if met else 'NO'}" if text else ("yes" if met else "NO")


def row(*cells):
    return "| " + " | ".join(cells) + " |"

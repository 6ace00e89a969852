#!/usr/bin/env python3
"""Makes the tables of docs/results/{scheduling,split,capacity}.md anew with a simulator, and says what changed.

    hwtests/tables.py [--check] [NAME...]     all tables, or those whose names begin with one of NAME

A table stands between `<!-- table NAME -->` and `<!-- end -->`; what is around it is written by hand. Fleets are those
of docs/results/fleets, varied as a row says. MIXFLEET names the binary (default target/release/mixfleet), TRACES the
directory of the traces (default ../shared/data/traces), JOBS how many simulations run at a time (default: one a core).
Exit status: 0 made (with --check: nothing would change), 1 something would change, 2 usage, 3 could not run.
"""

import concurrent.futures
import csv
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs/results"
FLEETS = PAGES / "fleets"
PROGRAM = os.environ.get("MIXFLEET", str(ROOT / "target/release/mixfleet"))
TRACES = pathlib.Path(os.environ.get("TRACES", ROOT / "../shared/data/traces"))
CONVERSATION = TRACES / "mooncake-conversation.jsonl.zst"
AZURE = TRACES / "AzureLLMInferenceTrace_conv_2023.csv.zst"
# topics that stand on a page with another name
MOVED = {"memory": "scheduling", "replication": "scheduling"}
POLICIES = ["random", "least-loaded", "cache-aware", "kvcache-centric", "per-dollar"]
SEEDS = [1, 2, 3]

pool = concurrent.futures.ThreadPoolExecutor(int(os.environ.get("JOBS", os.cpu_count())))
scratch = tempfile.TemporaryDirectory()


def fleet(name, *changes):
    """A fleet file, changed: (pool or None for any place, key, value); a value of None removes a pool."""
    parts = re.split(r"(?m)^(?=\[\[pool\]\])", (FLEETS / name).read_text())
    for where, key, value in changes:
        for i, part in enumerate(parts):
            named = re.search(r'(?m)^name = "(.*)"', part) if part.startswith("[[pool]]") else None
            if where is not None and (named is None or named.group(1) != where):
                continue
            if key is None:
                parts[i] = ""
            elif re.search(rf"(?m)^{key} = ", part):
                parts[i] = re.sub(rf"(?m)^{key} = \S+", f"{key} = {value}", part)
            elif where is not None:
                parts[i] = part.rstrip("\n") + f"\n{key} = {value}\n"
            elif key == "replicate_gb_per_s" and "[kv]" in part:
                parts[i] = part.replace("[kv]\n", f"[kv]\n{key} = {value}\n")
    with tempfile.NamedTemporaryFile("w", suffix=".toml", dir=scratch.name, delete=False) as file:
        file.write("".join(parts))
    return file.name


def simulate(trace, file, *options):
    """A future of the JSON document of a simulation."""
    command = [PROGRAM, "simulate", "--json", "--trace", str(trace), "--fleet", file, *map(str, options)]

    def run():
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 1 and "--capacity" in command:
            return None
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        return json.loads(done.stdout)

    return pool.submit(run)


def spread(values, digits):
    """The minimum and maximum of some numbers; one of them if they print alike."""
    low, high = (f"{value:.{digits}f}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def table(heads, rows):
    def line(cells):
        return "|" + "".join(f" {cell} |" if cell != "" else " |" for cell in cells)

    return "\n".join([line(heads), "|" + "---|" * len(heads)] + [line(row) for row in rows])


def named(policy):
    return "Algorithm 1, threshold 1" if policy == "kvcache-centric" else policy


def placing(policy):
    return ["--policy", policy] + (["--threshold", "1"] if policy == "kvcache-centric" else [])


def policies():
    file = fleet("conversation.toml")
    runs = [simulate(CONVERSATION, file, "--jitter", "--seed", 1, "--admit", "none", *placing(p)) for p in POLICIES]
    published = ["19.65", "5.27", "3.58", "3.07", "-"]
    rows = []
    for policy, run, figure in zip(POLICIES, runs, published):
        r = run.result()
        ttft = r["ttft_s"]
        rows.append([named(policy), f"{ttft['mean']:.2f}", f"{ttft['p90']:.2f}", f"{r['prefix_hit']['block']:.3f}", figure])
    return table(["", "mean TTFT, s", "90 % below, s", "blocks hit", "figure 5, s"], rows)


def swings(file):
    """Standard deviations of both pools' loads without the beginning and the end, and their correlation."""
    loads = {"prefill": [], "decode": []}
    with open(file) as lines:
        for row in csv.DictReader(lines):
            loads[row["pool"]].append(float(row[row["pool"] + "_load"]))
    count = len(loads["prefill"])
    a, b = (loads[pool][count // 20 : count - count // 10] for pool in ("prefill", "decode"))
    return statistics.pstdev(a), statistics.pstdev(b), statistics.correlation(a, b)


def overload():
    file = fleet("overload.toml")
    runs = {}
    for speed in [2, 3]:
        for admit in ["none", "early", "prediction"]:
            for seed in SEEDS:
                timeline = os.path.join(scratch.name, f"{speed}-{admit}-{seed}.csv")
                options = ["--jitter", "--seed", seed, "--speedup", speed, "--admit", admit, "--drop-late"]
                options += ["--timeline", timeline, "--timeline-interval-s", 5]
                runs[speed, admit, seed] = (simulate(CONVERSATION, file, *options), timeline)
    rows = []
    for speed in [2, 3]:
        for admit in ["none", "early", "prediction"]:
            results, swung = [], []
            for seed in SEEDS:
                run, timeline = runs[speed, admit, seed]
                results.append(run.result())
                swung.append(swings(timeline))
            rows.append([
                speed,
                admit,
                spread([r["goodput_rps"] for r in results], 2),
                spread([sum(r["rejected"].values()) for r in results], 0),
                spread([r["prefill_wasted_s"] for r in results], 0),
                spread([s[0] for s in swung], 3),
                spread([s[2] for s in swung], 2),
            ])
    heads = ["speed-up", "`--admit`", "good requests/s", "turned away"]
    return table(heads + ["prefill seconds wasted", "swing of prefill", "together"], rows)


def split():
    shares = [1, 4, 6, 8, 10, 12, 14, 15]
    runs = {}
    for prefill in shares:
        file = fleet("conversation.toml", ("prefill", "count", prefill), ("decode", "count", 16 - prefill))
        for speed in [1, 1.5]:
            options = ["--jitter", "--seed", 1, "--admit", "none", "--policy", "per-dollar", "--speedup", speed]
            runs[prefill, speed] = simulate(CONVERSATION, file, *options)
    rows = []
    for prefill in shares:
        row = [prefill, 16 - prefill]
        for speed in [1, 1.5]:
            r = runs[prefill, speed].result()
            p90 = r["ttft_s"]["p90"]
            row += [f"{r['slo_attainment']:.3f}", f"{p90:.0f}" if p90 >= 100 else f"{p90:.2f}", f"{r['tbt_s']['mean']:.4f}"]
        rows.append(row)
    heads = ["P", "D", "as recorded: effective ratio", "TTFT p90, s", "TBT mean, s"]
    return table(heads + ["1.5 times as fast: effective ratio", "TTFT p90, s", "TBT mean, s"], rows)


def capacity(trace, file, *policies):
    """A cell of the best of some policies with both admissions, once it is known."""
    conversation = trace == CONVERSATION
    options = ["--seed", 1, "--capacity"] + (["--jitter"] if conversation else [])
    ways = [(policy, admit) for policy in policies for admit in ["none", "prediction"]]
    runs = [simulate(trace, file, "--policy", policy, "--admit", admit, *options) for policy, admit in ways]

    def cell():
        found = [run.result() for run in runs]
        found = [f for f in found if f is not None and f.get("requests_per_usd")]
        if not found:
            return "-"
        best = max(found, key=lambda f: f["requests_per_usd"])
        return f"{best['speedup']:.3g}, {best['requests_per_s']:.3g}, **{best['requests_per_usd']:.0f}**"

    return cell


def capacities(name, roles, alone):
    """Rows of policies over the traces and divisions of a fleet, and of the best policy on fleets of one kind."""
    order = ["per-dollar", "least-loaded", "cache-aware", "kvcache-centric"]
    slo = {AZURE: [], CONVERSATION: [(None, "ttft_s", 10.0), (None, "tbt_s", 0.1)]}
    divided = [(pool, "role", f'"{role}"') for pool, role in roles.items()]
    cells = [
        [
            capacity(trace, fleet(name, *slo[trace], *changes), policy)
            for trace in (AZURE, CONVERSATION)
            for changes in ([], divided)
        ]
        for policy in order
    ]
    others = []
    for label, column, changes in alone:
        made = [capacity(trace, fleet(name, *slo[trace], *changes), *order[:3]) for trace in (AZURE, CONVERSATION)]
        others.append((label, column, made))
    rows = [[policy] + [cell() for cell in row] for policy, row in zip(order, cells)]
    for label, column, made in others:
        azure, conversation = (cell() for cell in made)
        rows.append([f"*{label}*"] + ([azure, "", conversation, ""] if column == "auto" else ["", azure, "", conversation]))
    return table(["", "A conv, auto", "A conv, split", "M conv, auto", "M conv, split"], rows)


def capacity_8b():
    only = lambda pool, count: [(other, None, None) for other in ("h100", "rtx4090", "l40s") if other != pool] + [(pool, "count", count)]
    halves = lambda prefill: [
        ("l40s", None, None),
        ("h100", "role", '"prefill"'),
        ("h100", "count", prefill),
        ("rtx4090", "role", '"decode"'),
        ("rtx4090", "count", 4 - prefill),
        ("rtx4090", "device", '"H100-SXM-80GB"'),
    ]
    return capacities("mixed-8b.toml", {"h100": "prefill", "rtx4090": "decode", "l40s": "decode"}, [
        ("4 H100, auto, $10.76", "auto", only("h100", 4)),
        ("4 H100, 2 prefill + 2 decode", "split", halves(2)),
        ("4 H100, 1 prefill + 3 decode", "split", halves(1)),
        ("27 RTX 4090, auto, $10.26", "auto", only("rtx4090", 27)),
        ("11 L40S, auto, $10.04", "auto", only("l40s", 11)),
    ])


def capacity_70b():
    halves = [
        ("h200", "role", '"prefill"'),
        ("h200", "count", 2),
        ("h20", "role", '"decode"'),
        ("h20", "count", 1),
        ("h20", "device", '"H200-SXM-141GB"'),
    ]
    return capacities("mixed-70b.toml", {"h200": "prefill", "h20": "decode"}, [
        ("3 x 4 H200, auto, $43.08", "auto", [("h20", None, None), ("h200", "count", 3)]),
        ("3 x 4 H200, 2 prefill + 1 decode", "split", halves),
        ("13 x 4 H20, auto, $41.60", "auto", [("h200", None, None), ("h20", "count", 13)]),
    ])


def replication(trace, rates):
    rows, runs = [], {}
    order = ["cache-aware", "kvcache-centric", "per-dollar"]
    for rate in rates:
        for budget in [0, 2]:
            copies = [(None, "replicate_gb_per_s", budget)] if budget else []
            file = fleet("conversation.toml", (None, "nic_gb_per_s", rate), *copies)
            for policy in order:
                options = ["--jitter", "--admit", "none", *placing(policy)]
                runs[policy, rate, budget] = [simulate(trace, file, "--seed", seed, *options) for seed in SEEDS]
    for policy in order:
        for rate in rates:
            for budget in [0, 2]:
                found = [run.result() for run in runs[policy, rate, budget]]
                mean = lambda key: statistics.mean(key(r) for r in found)
                copied = lambda key: f"{mean(lambda r: r['replicated'][key]):.0f}" if budget else ""
                ttft = [r["ttft_s"]["mean"] for r in found]
                rows.append([
                    named(policy),
                    rate,
                    budget,
                    f"{100 * mean(lambda r: r['prefix_hit']['token']):.2f}",
                    f"{statistics.mean(ttft):.3f} ({spread(ttft, 3)})",
                    copied("copies"),
                    f"{mean(lambda r: r['replicated']['bytes']) / 1e9:.1f}" if budget else "",
                ])
    heads = ["policy", "card, GB/s", "budget, GB/s", "hit, %", "mean TTFT, s (of the seeds)", "copies", "GB copied"]
    return table(heads, rows)


def memory(name, trace, speeds, weights, limit):
    """What a weight of KV memory brings at several loads of a fleet; means of the seeds, attainment of each."""
    slo = [] if trace == AZURE else [(None, "ttft_s", 10.0), (None, "tbt_s", 0.1)]
    file = fleet(name, *slo)
    runs = {}
    for admit, speed in [("prediction", speed) for speed in speeds] + [("none", speeds[-1])]:
        for weight in weights:
            options = ["--jitter", "--limit", limit, "--speedup", speed, "--admit", admit, "--kv-weight", weight]
            runs[admit, speed, weight] = [simulate(trace, file, "--seed", seed, *options) for seed in SEEDS]
    rows = []
    for (admit, speed, weight), found in runs.items():
        found = [run.result() for run in found]
        mean = lambda key: statistics.mean(key(r) for r in found)
        rows.append([
            f"`{admit}`",
            speed,
            weight,
            spread([100 * r["slo_attainment"] for r in found], 2),
            f"{mean(lambda r: r['slo_attainment'] * r['requests'] / r['usd_rent']):.0f}",
            f"{mean(lambda r: r['ttft_s']['p90']):.3f}",
        ])
    heads = ["`--admit`", "speed-up", "`--kv-weight`", "within the SLO, %", "good answers per dollar", "TTFT p90, s"]
    return table(heads, rows)


WEIGHTS = [0, 2]

TABLES = {
    "scheduling-policies": policies,
    "scheduling-overload": overload,
    "split": split,
    "capacity-8b": capacity_8b,
    "capacity-70b": capacity_70b,
    "replication-conversation": lambda: replication(CONVERSATION, [10]),
    "memory-auto-conversation": lambda: memory("memory-auto.toml", CONVERSATION, [0.4], WEIGHTS, 1500),
    "memory-split-azure": lambda: memory("memory-split.toml", AZURE, [5], WEIGHTS, 3000),
}


def main(words):
    if "--help" in words:
        print(__doc__.strip())
        return 0
    check = "--check" in words
    wanted = [word for word in words if word != "--check"]
    unknown = [word for word in wanted if not any(name.startswith(word) for name in TABLES)]
    if unknown:
        print(f"tables: no table begins with {unknown[0]!r}; there are {', '.join(TABLES)}", file=sys.stderr)
        return 2
    for path in (pathlib.Path(PROGRAM), TRACES):
        if not path.exists():
            print(f"SKIPPED: tables: there is no {path}", file=sys.stderr)
            return 3
    changed = 0
    for name, make in TABLES.items():
        if wanted and not any(name.startswith(word) for word in wanted):
            continue
        topic = name.split("-")[0]
        page = PAGES / f"{MOVED.get(topic, topic)}.md"
        begin, end = f"<!-- table {name} -->\n", "<!-- end -->"
        if begin not in page.read_text():
            print(f"tables: {page} has no table {name}", file=sys.stderr)
            return 3
        new = make() + "\n"
        # read after the simulations, which take long enough for a concurrent edit of the page
        before, rest = page.read_text().split(begin, 1)
        old, after = rest.split(end, 1)
        lines = [line for line in new.splitlines() if line not in old.splitlines()]
        print(f"{name}: {len(lines)} of {len(new.splitlines())} lines changed", flush=True)
        for line in lines:
            print(f"  {line}", flush=True)
        changed += len(lines)
        if not check:
            page.write_text(before + begin + new + end + after)
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

#!/usr/bin/env python3
"""`mixfleet plan` beside aiconfigurator, on aiconfigurator's parts: the dollars of both picks, and what one simulator
and published runs say of them.

    python3 -m venv target/peers/aic && target/peers/aic/bin/pip install aiconfigurator==0.12.0
    hwtests/peers/planners.py --published ../shared/data/measured/e2e-silicon-dev.csv.zst

For each load and part both are asked for the fewest dollars: one part's price is one number, so that the fewest devices
of aiconfigurator are its cheapest. Both fleets become a FLEET.toml, and `mixfleet simulate` runs the same requests on
them, with TBT as the mean of a request's longest tenth of gaps, which `plan` plans for, and as the mean of all, which
is aiconfigurator's TPOT. `repaired` is aiconfigurator's shape with the fewest copies that hold in that simulator.
`published` is the cheapest fleet of whole requests by published closed-loop runs of the same model, part, engine and
lengths; it needs `zstd`. What is not installed is reported as SKIPPED, and then the exit code is 3. Prints the tables,
and writes OUT/planners.json and OUT/planners.md.
"""

import argparse
import collections
import csv
import dataclasses
import json
import math
import pathlib
import subprocess
import sys
import time

# On-demand offers of one provider on one day, USD per hour of a device.
PRICES = {"H100-SXM-80GB": 3.85, "H200-SXM-141GB": 4.50}
PRICES_FROM = "Nebius, on demand, 2026-09-25"
SYSTEMS = {"H100-SXM-80GB": "h100_sxm", "H200-SXM-141GB": "h200_sxm"}
ENGINE = "vllm"
ATTAIN = 0.99
COPIES_MAX = 64
RUN_S_MAX = 3600
NOT_RUN = 3


@dataclasses.dataclass(frozen=True)
class Load:
    """Requests of one size for one model; `published` is the model's name in published runs."""

    name: str
    model: str
    theirs: str
    dtype: str
    input_tokens: int
    output_tokens: int
    rate: float
    ttft_s: float
    tbt_s: float
    published: str = ""

    def objectives(self):
        return f"TTFT {self.ttft_s:g} s, TBT {1000 * self.tbt_s:g} ms"

    def output_million_per_hour(self):
        return self.rate * self.output_tokens * 3600 / 1e6


LOADS = (
    Load("70B", "llama-3.1-70b", "nvidia/Llama-3.1-70B-Instruct-FP8", "fp8", 8192, 1024, 2, 3, 0.05,
         "meta-llama/Llama-3.1-70B"),
    Load("70B-short", "llama-3.1-70b", "nvidia/Llama-3.1-70B-Instruct-FP8", "fp8", 1024, 1024, 8, 1, 0.03,
         "meta-llama/Llama-3.1-70B"),
    Load("32B", "qwen3-32b", "Qwen/Qwen3-32B-FP8-Static-PerTensor", "fp8", 4000, 1000, 4, 2, 0.03),
    Load("8B", "llama-3.1-8b", "meta-llama/Meta-Llama-3.1-8B", "bf16", 4000, 500, 10, 2, 0.03),
)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiconfigurator", type=pathlib.Path, default="target/peers/aic/bin/aiconfigurator")
    parser.add_argument("--mixfleet", type=pathlib.Path, default="target/release/mixfleet")
    parser.add_argument("--published", type=pathlib.Path, help="table of published runs (.csv or .csv.zst)")
    parser.add_argument("--out", type=pathlib.Path, default="target/peers/planners")
    parser.add_argument("--only", help=f"some loads ({', '.join(load.name for load in LOADS)}), with commas")
    parser.add_argument("--parts", help=f"some parts ({', '.join(PRICES)}), with commas")
    parser.add_argument("--budget-s", type=int, default=1200, help="time of a plan's simulations")
    return parser.parse_args()


def output(command, folder=None):
    """Standard output of a command in `folder`, which must succeed."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=RUN_S_MAX, cwd=folder)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


@dataclasses.dataclass(frozen=True)
class Pool:
    role: str
    count: int
    devices: int

    def words(self):
        role = "" if self.role == "auto" else f" {self.role}"
        return f"{self.count} x {self.devices}{role}"


@dataclasses.dataclass
class Fleet:
    """Pools of one part; `says` is the planner's own prediction of output tokens per second, if it makes one."""

    who: str
    part: str
    pools: list
    policy: str = "least-loaded"
    says: float | None = None

    def usd_per_hour(self):
        return PRICES[self.part] * sum(pool.count * pool.devices for pool in self.pools)

    def words(self):
        return " + ".join(pool.words() for pool in self.pools)

    def text(self, load, metric):
        """As FLEET.toml."""
        lines = ["version = 1", "[model]", f'name = "{load.model}"', f'dtype = "{load.dtype}"', "[slo]",
                 f"ttft_s = {load.ttft_s:.6f}", f"tbt_s = {load.tbt_s:.6f}", f'tbt_metric = "{metric}"',
                 "[engine]", f'name = "{ENGINE}"', "[scheduling]", f'policy = "{self.policy}"']
        for at, pool in enumerate(self.pools):
            lines += ["[[pool]]", f'name = "pool{at}"', f'role = "{pool.role}"', f"count = {pool.count}",
                      f'device = "{self.part}"', f"devices_per_instance = {pool.devices}",
                      f"usd_per_hour = {PRICES[self.part] * pool.devices:.4f}"]
        return "\n".join(lines) + "\n"


class Ours:
    """`mixfleet plan`, and the simulator that judges all fleets."""

    def __init__(self, args):
        self.program, self.out, self.budget_s = args.mixfleet, args.out, args.budget_s
        self.prices = args.out / "prices.csv"
        rows = "".join(f"{part},{price}\n" for part, price in PRICES.items())
        self.prices.write_text("device_id,price_hourly\n" + rows)

    def plan(self, load, part):
        """The cheapest fleet of `part`, its time, and the bound; leaves the requests in the folder."""
        folder = self.folder(load, part)
        command = [self.program, "plan", "--model", load.model, "--dtype", load.dtype, "--engine", ENGINE, "--rate",
                   load.rate, "--input-tokens", load.input_tokens, "--output-tokens", load.output_tokens, "--ttft",
                   load.ttft_s, "--tbt", load.tbt_s, "--attain", ATTAIN, "--prices", self.prices, "--parts", part,
                   "--budget-s", self.budget_s, "--out", folder, "--json"]
        start = time.monotonic()
        found = json.loads(output(command))
        took_s = time.monotonic() - start
        best = found["fleets"][0]
        pools = [Pool(pool["role"], pool["count"], pool["devices_per_instance"]) for pool in best["pools"]]
        return Fleet("mixfleet", part, pools, best["policy"]), took_s, found

    def folder(self, load, part):
        return self.out / f"{load.name}-{part}"

    def simulated(self, fleet, load, metric):
        """The results of a fleet on the load's requests."""
        folder = self.folder(load, fleet.part)
        file = folder / f"{fleet.who}-{metric}.toml"
        file.write_text(fleet.text(load, metric))
        command = [self.program, "simulate", "--fleet", file, "--trace", folder / "load.jsonl", "--policy",
                   fleet.policy, "--json"]
        return json.loads(output(command))

    def attained(self, fleet, load, metric="longest10"):
        return self.simulated(fleet, load, metric)["slo_attainment"]

    def repaired(self, fleet, load):
        """The fleet's unit as often as the simulator needs, or None up to COPIES_MAX."""
        unit = math.gcd(*(pool.count for pool in fleet.pools))
        one = [dataclasses.replace(pool, count=pool.count // unit) for pool in fleet.pools]

        def of(copies):
            pools = [dataclasses.replace(pool, count=pool.count * copies) for pool in one]
            return dataclasses.replace(fleet, who="repaired", pools=pools, says=None)

        holds = {}

        def held(copies):
            if copies not in holds:
                holds[copies] = self.attained(of(copies), load) >= ATTAIN
            return holds[copies]

        copies = unit
        while not held(copies):
            copies += max(1, copies // 4)
            if copies > COPIES_MAX:
                return None
        while copies > 1 and held(copies - 1):
            copies -= 1
        return of(copies)


class Theirs:
    """aiconfigurator's command line; it has no prices, and minimises devices for a rate."""

    def __init__(self, args):
        self.program, self.out = args.aiconfigurator.absolute(), args.out
        self.version = next((line for line in output([self.program, "version"]).splitlines() if line), "?")

    def pick(self, load, part):
        """The fleet of the fewest devices of its two modes, whole requests and prompts apart from decoding."""
        folder = self.out / f"{load.name}-{part}"
        command = [self.program, "cli", "default", "--model", load.theirs, "--system", SYSTEMS[part], "--backend",
                   ENGINE, "--isl", load.input_tokens, "--osl", load.output_tokens, "--ttft", 1000 * load.ttft_s,
                   "--tpot", 1000 * load.tbt_s, "--strict-sla", "--target-request-rate", load.rate, "--save-dir",
                   "aiconfigurator", "--log-level", "ERROR"]
        start = time.monotonic()
        output(command, folder)  # it writes below the current folder alone
        took_s = time.monotonic() - start
        picks = [self.fleet(part, row) for row in map(first_row, sorted(folder.rglob("best_config_topn.csv"))) if row]
        if not picks:
            raise RuntimeError(f"aiconfigurator wrote no configuration below {folder}")
        return min(picks, key=Fleet.usd_per_hour), took_s

    @staticmethod
    def fleet(part, row):
        copies = int(row["replicas_needed"])
        if row.get("(p)workers"):
            pools = [Pool(role, copies * int(row[f"({key})workers"]), int(row[f"({key})tp"]))
                     for role, key in (("prefill", "p"), ("decode", "d"))]
        else:
            pools = [Pool("auto", copies, int(row["tp"]))]
        return Fleet("aiconfigurator", part, pools, says=copies * float(row["tokens/s"]))


def first_row(path):
    with path.open(newline="") as file:
        return next(csv.DictReader(file), None)


class Published:
    """Closed-loop runs: clients, and the times that they saw."""

    def __init__(self, path):
        text = output(["zstd", "-dc", path]) if path.suffix == ".zst" else path.read_text()
        lines = (line for line in text.splitlines() if not line.startswith("#"))
        self.rows = [row for row in csv.DictReader(lines) if row["mode"] == "agg" and row["backend"] == ENGINE]

    def rates(self, load, part):
        """Requests per second of an instance within the objectives, by devices of an instance. Between two runs the
        times are interpolated; beyond the last one nothing is assumed."""
        curves = collections.defaultdict(list)
        for row in self.rows:
            same = (row["model_path"], row["system"], row["precision"], int(row["isl"]), int(row["osl"]))
            if same == (load.published, SYSTEMS[part], load.dtype, load.input_tokens, load.output_tokens):
                times = float(row["silicon_ttft_ms"]) / 1e3, float(row["silicon_tpot_ms"]) / 1e3
                curves[int(float(row["tp_size"]))].append((float(row["batch_size"]), *times))
        rates = {devices: best_rate(sorted(curve), load) for devices, curve in curves.items()}
        return {devices: rate for devices, rate in sorted(rates.items()) if rate > 0}

    def cheapest(self, load, part):
        fleets = [Fleet("published", part, [Pool("auto", math.ceil(load.rate / rate), devices)])
                  for devices, rate in self.rates(load, part).items()]
        return min(fleets, key=Fleet.usd_per_hour, default=None)


def best_rate(curve, load):
    """The highest rate of clients / (TTFT + decoding) on a curve where both times are within the objectives."""
    points = list(curve)
    for a, b in zip(curve, curve[1:]):
        points += [tuple(x + share / 100 * (y - x) for x, y in zip(a, b)) for share in range(1, 100)]
    held = [clients / (ttft + (load.output_tokens - 1) * tpot) for clients, ttft, tpot in points
            if ttft <= load.ttft_s and tpot <= load.tbt_s]
    return max(held, default=0.0)


def cell(load, part, ours, theirs, published):
    """A row for each fleet of one load on one part."""
    plan, plan_s, document = ours.plan(load, part)
    pick, pick_s = theirs.pick(load, part)
    rates = published.rates(load, part) if published and load.published else {}
    fleets = [(plan, plan_s), (pick, pick_s), (ours.repaired(pick, load), None)]
    fleets.append((published.cheapest(load, part) if rates else None, None))
    rows = []
    for fleet, took_s in fleets:
        if fleet is None:
            continue
        longest = ours.simulated(fleet, load, "longest10")
        whole = all(pool.role == "auto" for pool in fleet.pools) and all(pool.devices in rates for pool in fleet.pools)
        rows.append({
            "load": load.name, "part": part, "who": fleet.who, "fleet": fleet.words(), "policy": fleet.policy,
            "usd_per_hour": fleet.usd_per_hour(),
            "usd_per_million_output": fleet.usd_per_hour() / load.output_million_per_hour(),
            "says_tokens_per_s": fleet.says, "wanted_tokens_per_s": load.rate * load.output_tokens,
            "attained_longest10": longest["slo_attainment"], "attained_mean": ours.attained(fleet, load, "mean"),
            "ttft_p99_s": longest["ttft_s"]["p99"], "tpot_mean_s": longest["tpot_s"]["mean"],
            "published_tokens_per_s": sum(pool.count * rates[pool.devices] for pool in fleet.pools)
            * load.output_tokens if whole else None,
            "took_s": took_s, "complete": document["complete"] if fleet is plan else None,
        })
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def tables(rows):
    """Markdown."""
    lines = []
    for load in LOADS:
        own = [row for row in rows if row["load"] == load.name]
        if not own:
            continue
        lines += [f"{load.model} in {load.dtype}, {load.rate:g} requests/s of {load.input_tokens} tokens to "
                  f"{load.output_tokens}, {load.objectives()}:", "",
                  "| part | whose | fleet | $/h | $/Mt out | held, longest tenth | held, mean | its own tokens/s | "
                  "by published runs |", "|---|---|---|---|---|---|---|---|---|"]
        for row in own:
            own_rate, runs = row["says_tokens_per_s"], row["published_tokens_per_s"]
            lines.append(
                f"| {row['part']} | {row['who']} | {row['fleet']} | {row['usd_per_hour']:.2f} | "
                f"{row['usd_per_million_output']:.2f} | {100 * row['attained_longest10']:.1f} % | "
                f"{100 * row['attained_mean']:.1f} % | {'-' if own_rate is None else round(own_rate)} | "
                f"{'-' if runs is None else round(runs)} |")
        lines.append("")
    return "\n".join(lines)


def main():
    args = arguments()
    missing = [path for path in (args.aiconfigurator, args.mixfleet) if not path.exists()]
    if missing:
        print(f"SKIPPED: there is no {' and no '.join(map(str, missing))}", file=sys.stderr)
        return NOT_RUN
    published = None
    if args.published is None or not args.published.exists():
        print(f"SKIPPED: published runs: there is no {args.published or '--published'}", file=sys.stderr)
    else:
        published = Published(args.published)
    args.out.mkdir(parents=True, exist_ok=True)
    ours, theirs = Ours(args), Theirs(args)
    loads = [load for load in LOADS if not args.only or load.name in args.only.split(",")]
    parts = [part for part in PRICES if not args.parts or part in args.parts.split(",")]
    rows = []
    for load in loads:
        for part in parts:
            for folder in ours.folder(load, part).glob("aiconfigurator"):
                print(f"{folder} is of an earlier run: give another --out", file=sys.stderr)
                return 2
            rows += cell(load, part, ours, theirs, published)
            document = {"aiconfigurator": theirs.version, "prices": PRICES, "prices_from": PRICES_FROM, "rows": rows}
            (args.out / "planners.json").write_text(json.dumps(document, indent=1) + "\n")
            (args.out / "planners.md").write_text(tables(rows))
    print(tables(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Plans the cheapest fleet and the cheapest of one part for models, loads, objectives and price lists, and proves
both by simulation.

    hwtests/claims.py PRICES [--cells WORDS] [--budget-s S] [--json FILE]

PRICES is neocloud, hyperscaler or spot: the median price of each part in that column of
../shared/data/price-per-device.csv. Only parts whose kernel times were published are candidates: of others the likely
error is unknown. Prints a row per cell and a summary. WORDS, separated by commas, keep the cells whose name
(model, trace, tight or loose) holds all of them. MIXFLEET names the binary (default target/release/mixfleet).
Exit status: 0 done, 2 usage, 3 could not run.
"""

import argparse
import csv
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = os.environ.get("MIXFLEET", str(ROOT / "target/release/mixfleet"))
DATA = pathlib.Path(os.environ.get("DATA", ROOT / "../shared/data"))
PARTS = ["RTX-4090", "L40S", "RTX-PRO-6000-SE", "A100-SXM-80GB", "H100-SXM-80GB", "H200-SXM-141GB", "B200-SXM"]
MODELS = ["llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b"]
# file, requests, speed-up for each model so that a fleet costs tens of dollars per hour, times of first tokens
TRACES = {
    "azure-conversation": ("AzureLLMInferenceTrace_conv_2023.csv.zst", 9000, [10, 3, 10], [1.0, 5.0]),
    "mooncake-conversation": ("mooncake-conversation.jsonl.zst", 3000, [2, 1, 2], [5.0, 15.0]),
    "servegen-m-large": ("servegen-m-large-1h.csv.zst", 8000, [4, 2, 4], [1.0, 5.0]),
    "servegen-r1": ("servegen-r1-1h.csv.zst", 14000, [4, 1, 4], [2.0, 8.0]),
}
# traces whose arrivals are rounded to ticks, over which they are spread
TICKS = ["mooncake-conversation"]
TBT = [0.05, 0.1]
SEEDS = [1, 2, 3]
ATTAIN = 0.99


def run(command):
    done = subprocess.run([PROGRAM, *map(str, command)], capture_output=True, text=True)
    try:
        return json.loads(done.stdout)
    except json.JSONDecodeError:
        return {"error": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit {done.returncode}"}


def price_list(column, directory):
    """The medians of one column as a file for --prices."""
    with open(DATA / "price-per-device.csv") as lines:
        rows = [(row["device_id"], row[f"{column}_median"]) for row in csv.DictReader(lines)]
    file = directory / f"{column}.csv"
    file.write_text(
        "device_id,price_hourly\n" + "".join(f"{part},{usd}\n" for part, usd in rows if usd and part in PARTS)
    )
    return file


def words(fleet):
    roles = {"prefill": " prefill", "decode": " decode"}
    pools = (p for p in fleet["pools"] if p["count"])
    return " + ".join(
        f'{p["count"]} x {p["devices_per_instance"]} {p["part"]}{shares(p)}{roles.get(p["role"], "")}' for p in pools
    )


def shares(pool):
    """How the devices of an instance share the model, where it is not by tensors alone."""
    text = f' in {pool["pipeline_stages"]} stages' if pool["pipeline_stages"] > 1 else ""
    text += " by experts" if pool["expert_parallel"] else ""
    text += " as ep:" if pool["experts_by_member"] else ""
    others = pool["attention"]
    return text + (f' with {others["devices"]} {others["part"]} for attention' if others else "")


def attained(file, load):
    """The least share of requests that meet the objectives in runs whose arrivals are spread by other seeds."""
    runs = [run(["simulate", "--json", "--fleet", file, *load, "--seed", seed]) for seed in SEEDS]
    return min(r.get("slo_attainment") or 0.0 for r in runs)


def cost(plan, fleet):
    """Rent that goes into prompts and into answers, in USD per hour."""
    load, halves = plan["load"], ["input", "output"]
    return [
        fleet[f"usd_per_million_{half}_tokens"] * load["requests_per_s"] * load[f"mean_{half}_tokens"] * 3.6e-3
        for half in halves
    ]


def cell(model, trace, tight, prices, budget_s, directory):
    name, requests, speeds, ttfts = TRACES[trace]
    load = ["--trace", DATA / "traces" / name, "--speedup", speeds[MODELS.index(model)], "--limit", requests]
    if trace in TICKS:
        load.append("--jitter")
    out = directory / "plan"
    goal = ["--ttft", ttfts[not tight], "--tbt", TBT[not tight], "--attain", ATTAIN]
    plan = run(
        [
            "plan",
            "--json",
            "--model",
            model,
            "--engine",
            "vllm",
            *load,
            *goal,
            "--prices",
            prices,
            "--budget-s",
            budget_s,
            "--out",
            out,
        ]
    )
    row = {
        "model": model,
        "trace": trace,
        "rate": plan.get("load", {}).get("requests_per_s"),
        "ttft_s": ttfts[not tight],
    }
    row["tbt_s"] = TBT[not tight]
    if not plan.get("fleets"):
        return row | {"error": plan.get("error") or "no fleet meets the objectives"}
    best, one = plan["fleets"][0], plan["homogeneous"]
    row |= {"usd": best["usd_per_hour"], "fleet": words(best), "attained": attained(out / "FLEET.toml", load)}
    row |= {"bound": plan["lower_bound_usd_per_hour"], "complete": plan["complete"]}
    if one:
        row |= {
            "one_usd": one["usd_per_hour"],
            "one": words(one),
            "one_attained": row["attained"] if row["fleet"] == words(one) else attained(out / "homogeneous.toml", load),
        }
        row |= {"gain": 1 - best["usd_per_hour"] / one["usd_per_hour"], "tied": one["tied_with_first"]}
        errors = [e for e in (best["likely_error"], one["likely_error"]) if e is not None]
        row["error_of_gain"] = sum(e * e for e in errors) ** 0.5 if len(errors) == 2 else None
        row["mix"] = row["fleet"] != row["one"]
        row["saved"] = [cost(plan, one)[half] - cost(plan, best)[half] for half in range(2)]
    return row


def line(row):
    head = f'| {row["model"]} | {row["trace"]} | {row["rate"] or 0:.1f} | {row["ttft_s"]:g}, {row["tbt_s"]:g} |'
    if "usd" not in row:
        return f'{head} - | {row["error"]} | | | | | |'
    share = f'{100 * row["attained"]:.1f}'
    text = f'{head} {row["usd"]:.2f} | {row["fleet"]} | {share} |'
    if "one" not in row:
        return f"{text} | | | |"
    if not row["mix"]:
        return f'{text} the same | | | {100 * (row["usd"] / row["bound"] - 1):.0f} |'
    error = row["error_of_gain"]
    beyond = "**" if error is not None and row["gain"] > error and not row["tied"] else ""
    gain = (
        f'{beyond}{100 * row["gain"]:.0f}{beyond} ± {100 * error:.0f}'
        if error is not None
        else f'{100 * row["gain"]:.0f} ± ?'
    )
    one = f'{row["one_usd"]:.2f}: {row["one"]} ({100 * row["one_attained"]:.1f})'
    saved = " ".join(f"{usd:+.2f}" for usd in row["saved"])
    return f'{text} {one} | {gain} | {saved} | {100 * (row["usd"] / row["bound"] - 1):.0f} |'


COLUMNS = [
    "model",
    "trace",
    "requests/s",
    "TTFT, TBT, s",
    "$/h",
    "cheapest fleet",
    "met, %",
    "best of one part (met, %)",
    "gain, %",
    "saved on prompts and on answers, $/h",
    "above the bound, %",
]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("prices", choices=["neocloud", "hyperscaler", "spot"])
    parser.add_argument("--cells", default="", metavar="WORDS")
    parser.add_argument("--budget-s", type=float, default=60)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    for path in (pathlib.Path(PROGRAM), DATA / "price-per-device.csv"):
        if not path.exists():
            print(f"SKIPPED: claims: there is no {path}", file=sys.stderr)
            return 3
    kept = [word for word in args.cells.split(",") if word]
    rows = []
    print(f'| {" | ".join(COLUMNS)} |\n|{"---|" * len(COLUMNS)}', flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        directory = pathlib.Path(scratch)
        prices = price_list(args.prices, directory)
        for model in MODELS:
            for trace in TRACES:
                for tight in (True, False):
                    name = f'{model} {trace} {"tight" if tight else "loose"}'
                    if all(word in name for word in kept):
                        rows.append(cell(model, trace, tight, prices, args.budget_s, directory))
                        print(line(rows[-1]), flush=True)
                        if args.json:
                            pathlib.Path(args.json).write_text(json.dumps(rows, indent=1))
    known = [row for row in rows if "one" in row]
    beyond = [
        r
        for r in known
        if r["mix"] and not r["tied"] and r["error_of_gain"] is not None and r["gain"] > r["error_of_gain"]
    ]
    mixes = [r for r in known if r["mix"]]
    close = [r for r in known if r["usd"] <= 1.1 * r["bound"]]
    held = [r for r in known if r["attained"] >= ATTAIN]
    print(
        f"\n{len(rows)} cells: a fleet in {len(known)}; a mix is cheapest in {len(mixes)}, beyond the likely errors in "
        f"{len(beyond)};"
    )
    print(f"within 10 % of the bound in {len(close)}; with other seeds the objectives held in {len(held)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

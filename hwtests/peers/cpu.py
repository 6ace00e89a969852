#!/usr/bin/env python3
"""mixfleet beside llama.cpp and torch on this machine's CPU, in one run, with ratios.

Runs every contestant once per round, in an order that turns with the round, so that a disturbance of the
machine does not fall on one side. Writes cpu.json (every sample) and cpu.md (the tables) into --out.
`README.md` beside this file says how to install the peers.
"""

import argparse
import datetime
import json
import os
import pathlib
import sys

import contestants
import machine
import report

CONTESTANTS = (contestants.Mixfleet, contestants.LlamaCpp, contestants.Torch)
LOAD_MAX = 1.0


def parsed():
    target = pathlib.Path(__file__).parents[2] / "target"
    peers = target / "peers"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    path = {"type": pathlib.Path, "metavar": "PATH"}
    parser.add_argument("--model", required=True, help="bf16 Llama checkpoint, Hugging Face layout", **path)
    parser.add_argument("--mixfleet", default=target / "release/mixfleet", **path)
    parser.add_argument("--throughput", default=target / "release/examples/throughput", **path)
    parser.add_argument("--llama-bench", default=peers / "llama-bench", **path)
    parser.add_argument("--gguf", default=peers / "model.gguf", help="the same model for llama-bench", **path)
    parser.add_argument("--python", default=peers / "venv/bin/python", help="has torch and transformers", **path)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="some of: limits, mixfleet, llama.cpp, torch (comma-separated)")
    parser.add_argument("--step", default="", help="of these only the steps whose name holds this")
    parser.add_argument("--even-if-busy", action="store_true", help=f"start although the load is above {LOAD_MAX}")
    parser.add_argument("--out", default=peers / "results", **path)
    args = parser.parse_args()
    if args.threads > os.cpu_count():
        parser.error(f"--threads {args.threads}: this machine has {os.cpu_count()} cores")
    args.device = "cpu" if args.threads == os.cpu_count() else f"cpu@{contestants.cores(0, args.threads)}"
    known = [c.name for c in (contestants.Limits, *CONTESTANTS)]
    args.only = args.only.split(",") if args.only else known
    if not set(args.only) <= set(known):
        parser.error(f"--only takes some of {', '.join(known)}")
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def present(args):
    """The requested contestants that are installed; reports the others."""
    for kind in (contestants.Limits, *CONTESTANTS):
        if kind.name not in args.only:
            continue
        needed = [getattr(args, kind.key), *([args.gguf] if kind is contestants.LlamaCpp else [])]
        missing = [str(path) for path in needed if not path.exists()]
        if missing:
            print(f"SKIPPED: {kind.name}: there is no {' and no '.join(missing)}", file=sys.stderr)
        else:
            yield kind(args)


def order(entrants, round_index):
    """The limits first, then the others, each round starting with the next."""
    first = [e for e in entrants if isinstance(e, contestants.Limits)]
    rest = [e for e in entrants if not isinstance(e, contestants.Limits)]
    shift = round_index % max(1, len(rest))
    return first + rest[shift:] + rest[:shift]


def run(args, entrants):
    """One record per round, contestant and step."""
    for round_index in range(args.rounds):
        for entrant in order(entrants, round_index):
            for step, measure in entrant.steps():
                if args.step not in step:
                    continue
                with machine.watched() as usage:
                    values = measure(contestants.seeded(round_index, step))
                record = {"round": round_index, "who": entrant.name, "step": step, "values": values}
                yield record | {"usage": vars(usage)}


def main():
    args = parsed()
    load = machine.load_average()
    if load > LOAD_MAX and not args.even_if_busy:
        sys.exit(f"the load average is {load:.2f}: figures would mean little. Wait, or use --even-if-busy")
    entrants = list(present(args))
    for entrant in entrants:
        if isinstance(entrant, contestants.Mixfleet):
            # The page cache and the kept calibration are part of what "start" is defined with.
            entrant.complete(contestants.seeded("warm", ""), contestants.START_PROMPT_TOKENS, 1)
    facts = {
        "machine": machine.description(),
        "date": datetime.date.today().isoformat(),
        "load_before": load,
        "busy": load > LOAD_MAX,
        "threads": args.threads,
        "command": ["hwtests/peers/cpu.py", *sys.argv[1:]],
        "model": report.model_facts(args.model),
    }
    records = []
    for record in run(args, entrants):
        records.append(record)
        print(report.progress(record), file=sys.stderr, flush=True)
        (args.out / "cpu.json").write_text(json.dumps({"facts": facts, "records": records}, indent=1))
    text = report.markdown(facts, records)
    (args.out / "cpu.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

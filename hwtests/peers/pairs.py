#!/usr/bin/env python3
"""Decode at batch 1 of mixfleet and llama.cpp, in turn, from the same weights: pairs, and their median per round.

    hwtests/peers/pairs.py --model target/peers/model.gguf
    hwtests/peers/pairs.py --model MODEL_DIR --gguf target/peers/model.gguf

In every other pair llama.cpp is first. A round begins with what two limits are just then: a plain read by one thread
per core, and the bf16 dot product. Exit code 1 if a round's median ratio is below --at-least.
"""

import argparse
import json
import os
import pathlib
import statistics
import sys

import contestants
import machine


def arguments():
    peers = pathlib.Path(__file__).parents[2] / "target/peers"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    path = {"type": pathlib.Path, "metavar": "PATH"}
    parser.add_argument("--model", required=True, help="checkpoint directory, or a GGUF file for both", **path)
    parser.add_argument("--gguf", help="the same weights for llama-bench [--model]", **path)
    parser.add_argument("--mixfleet", default="target/release/mixfleet", **path)
    parser.add_argument("--throughput", default="target/release/examples/throughput", **path)
    parser.add_argument("--llama-bench", default=peers / "llama-bench", **path)
    parser.add_argument("--activations", default="bf16")
    parser.add_argument("--tokens", type=int, default=32, help="tokens generated per figure")
    parser.add_argument("--pairs", type=int, default=9, help="pairs per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-least", type=float, default=1.0, help="median ratio that a round must have")
    args = parser.parse_args()
    args.gguf = args.gguf or args.model
    for needed in (args.model, args.gguf, args.mixfleet, args.throughput, args.llama_bench):
        if not pathlib.Path(needed).exists():
            parser.error(f"there is no {needed}; README.md beside this script says how to get it")
    args.device = "cpu"
    return args


def ours(args):
    command = [args.mixfleet, "bench", "--model", args.model, "--device", args.device, "--repeat", 1, "--json"]
    command += ["--activations", args.activations, "--prompt-tokens", 32, "--answer-tokens", args.tokens]
    tests = json.loads(contestants.output(command))["tests"]
    return next(test["tokens_per_s"] for test in tests if test["test"].startswith("tg"))


def theirs(args):
    command = [args.llama_bench, "-m", args.gguf, "-t", os.cpu_count(), "-p", 0, "-n", args.tokens, "-r", 1]
    return json.loads(contestants.output([*command, "-o", "json"]))[0]["avg_ts"]


def main():
    args = arguments()
    medians = []
    for _ in range(2):  # so that both files are in the page cache, and a calibration is kept
        ours(args), theirs(args)
    for round_index in range(args.rounds):
        limits = contestants.Limits(args).measure(None)
        pairs = []
        with machine.watched() as usage:
            for pair in range(args.pairs):
                figures = {}
                for run in (ours, theirs) if pair % 2 == 0 else (theirs, ours):
                    figures[run] = run(args)
                pairs.append((figures[ours], figures[theirs]))
        medians.append(statistics.median(ours / theirs for ours, theirs in pairs))
        read = limits["read_bytes_per_s"] / 1e9
        print(f"round {round_index + 1}: plain read {read:.1f} GB/s; others used {usage.others:.2f} cores")
        print("  mixfleet  ", " ".join(f"{ours:6.2f}" for ours, _ in pairs))
        print("  llama.cpp ", " ".join(f"{theirs:6.2f}" for _, theirs in pairs))
        print("  ratio     ", " ".join(f"{ours / theirs:6.2f}" for ours, theirs in pairs), f"median {medians[-1]:.2f}")
        sys.stdout.flush()
    sys.exit(any(median < args.at_least for median in medians))


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Greedy tokens of small checkpoints on any devices of this machine, against their golden tokens.

    hwtests/golden.py --fixtures ../shared/fixtures cuda cuda,cpu cpu,cuda

Each argument is a device, or a device that prefills and one that decodes. Runs the binary from outside, in f32,
for every case of every fixture. Exit code 1 if one token differs, 3 if nothing could be run.
"""

import argparse
import json
import pathlib
import subprocess
import sys

TIMEOUT_S = 120


def generate(binary, checkpoint, prefill, decode, case):
    """The token ids, or why there are none."""
    ids = ",".join(map(str, case["prompt_ids"]))
    command = [binary, "generate", "--model", checkpoint, "--prefill", prefill, "--decode", decode]
    command += ["--prompt-ids", ids, "--max-tokens", str(len(case["greedy_ids"])), "--ignore-eos"]
    command += ["--activations", "f32", "--kv-dtype", "f32", "--kv-memory", "0.05", "--json"]
    try:
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None, f"no answer in {TIMEOUT_S} s"
    if done.returncode != 0:
        return None, done.stderr.strip()[-300:]
    return json.loads(done.stdout)["ids"], ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("devices", nargs="+", help="DEV or PREFILL,DECODE")
    parser.add_argument("--fixtures", type=pathlib.Path, default="../shared/fixtures")
    parser.add_argument("--mixfleet", type=pathlib.Path, default="target/release/mixfleet")
    args = parser.parse_args()
    goldens = sorted(args.fixtures.glob("*/golden.json"))
    if not goldens:
        sys.stderr.write(f"golden.py: no fixtures in {args.fixtures}; name their folder with --fixtures\n")
        sys.exit(3)
    runs = bad = 0
    for golden in goldens:
        cases = json.loads(golden.read_text())["cases"]
        for devices in args.devices:
            prefill, _, decode = devices.partition(",")
            for case in cases:
                ids, trouble = generate(args.mixfleet, golden.parent, prefill, decode or prefill, case)
                runs += 1
                if ids != case["greedy_ids"]:
                    bad += 1
                    same = 0
                    while ids and same < len(ids) and ids[same] == case["greedy_ids"][same]:
                        same += 1
                    found = trouble or f"first {same} tokens equal"
                    print(f"BAD {golden.parent.name} on {devices}, {len(case['prompt_ids'])} prompt tokens: {found}")
    print(f"{runs} runs, {bad} bad")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()

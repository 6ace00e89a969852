#!/usr/bin/env python3
"""Greedy tokens of small checkpoints on any devices of this machine, against their golden tokens.

    hwtests/golden.py --fixtures ../shared/fixtures cuda cuda,cpu cpu,cuda

Each argument is a device, several as one instance (tp:A,B), or a device that prefills and one that decodes. One process of the binary runs every case of
every fixture, in f32, so that a device compiles its kernels once; each result is printed as it comes. A fixture whose
family is not served is skipped. Exit code 1 if one token differs, 3 if nothing could be run.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

# Logits in f32 are off by less than half of this: cases whose best two are closer may differ.
MARGIN_MIN = 1e-4


def run_of(checkpoint, prefill, decode, case):
    """The arguments of `mixfleet generate` for a case."""
    ids = ",".join(map(str, case["prompt_ids"]))
    words = ["--model", str(checkpoint), "--prefill", prefill, "--decode", decode]
    words += ["--prompt-ids", ids, "--max-tokens", str(len(case["greedy_ids"])), "--ignore-eos"]
    return words + ["--activations", "f32", "--kv-dtype", "f32", "--kv-memory", "0.05"]


def equal_tokens(found, wanted):
    same = 0
    while same < min(len(found), len(wanted)) and found[same] == wanted[same]:
        same += 1
    return same


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("devices", nargs="+", help="DEV, tp:DEV,DEV or PREFILL,DECODE")
    parser.add_argument("--fixtures", type=pathlib.Path, default="../shared/fixtures")
    parser.add_argument("--mixfleet", type=pathlib.Path, default="target/release/mixfleet")
    args = parser.parse_args()
    runs = []
    for golden in sorted(args.fixtures.glob("*/golden.json")):
        for devices in args.devices:
            # the commas of `tp:A,B` belong to one instance
            is_group = devices.startswith(("tp:", "pp:", "attn:"))
            prefill, _, decode = (devices, "", "") if is_group else devices.partition(",")
            for case in json.loads(golden.read_text())["cases"]:
                gguf = golden.parent / "model.gguf"
                model = gguf if gguf.exists() else golden.parent
                runs.append((golden.parent, devices, case, run_of(model, prefill, decode or prefill, case)))
    if not runs:
        sys.stderr.write(f"golden.py: no fixtures in {args.fixtures}; name their folder with --fixtures\n")
        sys.exit(3)
    counts = dict.fromkeys(["good", "close", "bad", "skipped"], 0)
    with tempfile.NamedTemporaryFile("w", suffix=".runs") as file:
        file.write("".join(json.dumps(words) + "\n" for *_, words in runs))
        file.flush()
        command = [str(args.mixfleet), "generate", "--each", file.name]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        answers = 0
        for (fixture, devices, case, _), line in zip(runs, process.stdout):
            answers += 1
            answer = json.loads(line)
            found, wanted = answer.get("ids", []), case["greedy_ids"]
            same, margin = equal_tokens(found, wanted), case["min_margin"]
            if "not supported; supported:" in answer.get("error", ""):
                verdict = "skipped"
            elif found == wanted:
                verdict = "good"
            else:
                verdict = "close" if len(found) == len(wanted) and margin < MARGIN_MIN else "bad"
            counts[verdict] += 1
            why = answer.get("error", f"{same} of {len(wanted)} tokens, margin {margin:.1e}")
            place = f"{fixture.name} on {devices}, {len(case['prompt_ids'])} prompt tokens"
            print(f"{verdict:7} {place}: {why}", flush=True)
        process.wait()
    missing = len(runs) - answers
    crashed = missing > 0 or process.returncode not in (0, 1)
    if crashed:
        print(f"the binary ended with {missing} runs left, exit code {process.returncode}")
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + f", {missing} not run")
    if counts["good"] == 0 and counts["bad"] == 0:
        sys.exit(3)
    sys.exit(1 if counts["bad"] or crashed else 0)


if __name__ == "__main__":
    main()

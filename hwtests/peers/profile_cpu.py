#!/usr/bin/env python3
"""Holds what `mixfleet profile` says of this machine's CPU against peers in the same run: OpenBLAS (numpy) and the
crate `gemm` for f32 products, a plain read loop and the bf16 dot product in registers (`throughput`) for the limits.

    cargo build --release -p mixfleet
    cargo build --release -p mixfleet-cpu --example throughput
    cargo build --release --manifest-path backends/cpu/peers/Cargo.toml
    python3 -m venv target/numpy && target/numpy/bin/pip install numpy
    target/numpy/bin/python hwtests/peers/profile_cpu.py

Every round asks everyone once; the figures are medians over the rounds, the ratios those of the same round.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

import machine

M, N, K = 512, 4096, 4096
POINTS = {  # name -> (point of the profile, unit)
    "f32 product": f"gemm.f32.m{M}.n{N}.k{K}",
    "bf16 product": f"gemm.bf16.m{M}.n{N}.k{K}",
    "read": "memory_read.1GiB",
}


def output(*command):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed with {done.returncode}: {done.stderr[-1000:]}")
    return done.stdout


def profiled(args):
    """Median rates of the points, in FLOP/s or bytes/s, and how long the call took."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "profile.json"
        output(args.mixfleet, "profile", "--device", "cpu", "--full", "--only", ",".join(POINTS.values()), "--out", file)
        document = json.loads(file.read_text())
    by_id = {point["id"]: point for point in document["points"]}
    rates = {}
    for name, point in POINTS.items():
        found = by_id[point]
        if found["status"] != "ok":
            raise RuntimeError(f"{point}: {found['status']}: {found.get('reason')}")
        rates[name] = (found["flops"] or found["bytes"]) / found["seconds"]["median"]
    return rates


def openblas():
    import numpy
    x, weight = (numpy.random.default_rng(1).standard_normal((rows, K), dtype="f4") for rows in (M, N))
    out, rates = numpy.empty((M, N), dtype="f4"), []
    begin_s = time.perf_counter()
    while time.perf_counter() - begin_s < 3 or len(rates) < 5:
        start_s = time.perf_counter()
        numpy.matmul(x, weight.T, out=out)
        rates.append(2 * M * N * K / (time.perf_counter() - start_s))
    return statistics.median(rates[1:])


def gemm_crate(args):
    rates = [float(line) * 1e9 for line in output(args.gemm, M, N, K, 3).split()]
    return statistics.median(rates)


def limits(args):
    found = re.search(r"read ([\d.]+) GB/s, bf16 dot (\d+) GFLOP/s", output(args.throughput, "cpu", "limits"))
    return {"plain read": float(found[1]) * 1e9, "bf16 dot": float(found[2]) * 1e9}


def main():
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", "target"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixfleet", type=pathlib.Path, default=target / "release/mixfleet")
    parser.add_argument("--throughput", type=pathlib.Path, default=target / "release/examples/throughput")
    parser.add_argument("--gemm", type=pathlib.Path, default="backends/cpu/peers/target/release/gemm-peer")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rounds = []
    for index in range(args.rounds):
        with machine.watched() as usage:
            found = profiled(args) | limits(args) | {"OpenBLAS": openblas(), "gemm crate": gemm_crate(args)}
        rounds.append(found)
        print(f"round {index + 1}: others took {usage.others:.2f} cores", file=sys.stderr)
    print(f"{machine.description()}; medians of {args.rounds} rounds\n")
    print("| | GFLOP/s or GB/s | lowest | highest |\n|---|---|---|---|")
    for name in rounds[0]:
        values = sorted(r[name] / 1e9 for r in rounds)
        print(f"| {name} | {statistics.median(values):.1f} | {values[0]:.1f} | {values[-1]:.1f} |")
    print("\n| ratio in the same round | median | lowest | highest |\n|---|---|---|---|")
    ratios = {
        "f32 product / best of OpenBLAS and the gemm crate":
            lambda r: r["f32 product"] / max(r["OpenBLAS"], r["gemm crate"]),
        "bf16 product / bf16 dot in registers": lambda r: r["bf16 product"] / r["bf16 dot"],
        "read / plain read loop": lambda r: r["read"] / r["plain read"],
    }
    for name, ratio in ratios.items():
        values = sorted(map(ratio, rounds))
        print(f"| {name} | {statistics.median(values):.3f} | {values[0]:.3f} | {values[-1]:.3f} |")


if __name__ == "__main__":
    main()

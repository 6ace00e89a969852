#!/usr/bin/env python3
"""What was reached on the GPU beside torch and the part's own limits, as tables, from what gpu.sh measured."""

import json
import pathlib
import sys


def read(path):
    return json.loads(path.read_text()) if path.exists() else None


def share(part, whole):
    return f"{part / whole:.2f}" if part and whole else "-"


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: report.py DIRECTORY")
    folder = pathlib.Path(sys.argv[1])
    goals, peers = read(folder / "goals.json"), read(folder / "peers.json")
    if goals is None or peers is None:
        sys.stderr.write(f"report.py: {folder} lacks goals.json or peers.json: run the steps goals and peers\n")
        sys.exit(3)
    points = {p["id"]: p for p in goals["points"]}
    found = [p for p in peers["points"] if "median_s" in p]

    def ours(point, what):
        measured = points.get(point)
        if measured is None or measured["status"] != "ok":
            return None
        return measured[what] / measured["seconds"]["median"]

    def best(what, **wanted):
        rates = [p[what] / p["median_s"] for p in found if all(p.get(k) == v for k, v in wanted.items())]
        return max(rates, default=None)

    def tera(rate):
        return "-" if rate is None else f"{rate / 1e12:.2f}"

    print(f"{peers['device']}, torch {peers['torch']}\n")
    print("| bf16 product | mixfleet TFLOP/s | torch TFLOP/s | ratio |\n|---|---|---|---|")
    for peer in found:
        if peer["name"] == "gemm":
            m, n, k = peer["m"], peer["n"], peer["k"]
            rate, theirs = ours(f"gemm.bf16.m{m}.n{n}.k{k}", "flops"), peer["flops"] / peer["median_s"]
            if rate:
                print(f"| {m} x {n} x {k} | {tera(rate)} | {tera(theirs)} | {share(rate, theirs)} |")
    plain = max(filter(None, [best("bytes", name="plain_read"), ours("memory_read.1GiB", "bytes")]), default=None)
    print(f"\nplain read: {tera(plain)} TB/s\n")
    print("| decode attention, GQA 8, 16384 keys | mixfleet TB/s | of the plain read | torch's best TB/s | ratio |")
    print("|---|---|---|---|---|")
    for batch in (1, 32):
        rate = ours(f"attn_decode.bf16.b{batch}.c16384.gqa8", "bytes")
        theirs = best("bytes", name="attn_decode", batch=batch, keys=16384)
        print(f"| batch {batch} | {tera(rate)} | {share(rate, plain)} | {tera(theirs)} | {share(rate, theirs)} |")
    product = max(filter(None, (ours(i, "flops") for i in points if i.startswith("gemm."))), default=None)
    print("\n| prefill attention, causal | mixfleet TFLOP/s | of its best product | torch's best | ratio |")
    print("|---|---|---|---|---|")
    for tokens in (2048, 8192):
        rate = ours(f"attn_prefill.bf16.t{tokens}.c0.gqa4", "flops")
        theirs = best("flops", name="attn_prefill", queries=tokens)
        print(f"| {tokens} tokens | {tera(rate)} | {share(rate, product)} | {tera(theirs)} | {share(rate, theirs)} |")


if __name__ == "__main__":
    main()

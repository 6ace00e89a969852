#!/usr/bin/env python3
"""Writes tables from the measurements of gpu.sh: correctness, and rates beside torch and the part's limits. Those that
docs/results/cuda.md cites are copied there.

    hwtests/gpu/report.py gpu-1.tar.gz gpu-2.tar.gz gpu-3.tar.gz > tables.md

Each argument is an archive of a call or a folder with its files; of a file that is in several, the last one counts.
What is not there is reported as not measured. Exit code 3 if there is nothing at all.
"""

import json
import pathlib
import sys
import tarfile

# Per step, of the shape that gpu.sh decodes with: bytes of all matrices but the embedding, and of a token's KV.
DECODED = {"random:llama-3.1-8b": {"weight_bytes": 2 * 7_504_658_432, "kv_bytes_per_token": 131_072}}


def gather(paths):
    """The content of every file by its name, and the lines of all steps."""
    files, steps = {}, {}
    for path in map(pathlib.Path, paths):
        if path.is_dir():
            found = {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}
        else:
            with tarfile.open(path) as archive:
                members = [m for m in archive.getmembers() if m.isfile()]
                found = {m.name.removeprefix("./"): archive.extractfile(m).read() for m in members}
        for line in found.pop("steps.tsv", b"").decode().splitlines():
            step, *rest = line.split("\t")
            steps[step] = rest
        files |= found
    return {name: content.decode(errors="replace") for name, content in files.items()}, steps


def share(part, whole):
    return f"{part / whole:.2f}" if part and whole else "-"


def tera(rate):
    return "-" if rate is None else f"{rate / 1e12:.2f}"


def number(value, digits=1):
    return "-" if value is None else f"{value:,.{digits}f}"


def lines(text):
    """The JSON documents among the lines; a last one that was cut off is left out."""
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


class Report:
    def __init__(self, paths):
        self.files, self.steps = gather(paths)

    def json(self, name):
        try:
            return json.loads(self.files[name])
        except (KeyError, ValueError):
            return None

    def missing(self, step):
        state, _, why = (self.steps.get(step) or ["not run", "", ""])[:3]
        print(f"Not measured: step `{step}`, {state}{': ' + why if why else ''}.\n")

    def head(self):
        found = self.json("devices.json") or {}
        devices = [device for device in found.get("devices", []) if device.get("backend") == "cuda"]
        print("# The CUDA backend on a GPU\n")
        print("Written by `hwtests/gpu/report.py` from the archives of `hwtests/gpu.sh` ([cuda.md](../reference/cuda.md)).\n")
        for device in devices:
            notes = "".join(f", {key} {value}" for key, value in device.get("notes", []) if key in NOTES)
            print(f"- {device['name']}{notes}")
        for line in self.files.get("nvidia-smi.txt", "").splitlines():
            if "Driver Version" in line:
                print("-", " ".join(line.strip("| ").split()))
        print("\n| step | result | seconds | |\n|---|---|---|---|")
        for step, (state, seconds, *why) in self.steps.items():
            print(f"| {step} | {state} | {seconds} | {' '.join(why)} |")
        print()

    def correctness(self):
        print("## Correctness\n")
        sanitized = sorted({name.split("/")[0] for name in self.files if name.startswith("sanitizer-") and "/" in name})
        if not sanitized:
            self.missing("sanitizer")
        for name, what in [("validation", "conformance"), *((name, name) for name in sanitized)]:
            results, journal = self.json(f"{name}/results.json"), self.files.get(f"{name}/log.jsonl")
            if results is not None:
                counts = {}
                for level in results["levels"]:
                    for status, count in level["counts"].items():
                        counts[status] = counts.get(status, 0) + count
                counts = ", ".join(f"{count} {status}" for status, count in counts.items())
                print(f"- {what}: {counts}; verdict {results['verdict']}")
            elif journal is not None:
                print(f"- {what}: ended early, after {max(0, len(journal.splitlines()) - 1)} cases")
            else:
                print(f"- {what}: not measured")
            for line in sorted({x for x in self.files.get(f"{what}.log", "").splitlines() if "SUMMARY:" in x}):
                print(f"  - `{line.strip('= ')}`")
        golden = self.files.get("golden.log", "").splitlines()
        print(f"- golden tokens: {golden[-1] if golden else 'not measured'}")
        print("".join(f"  - {line}\n" for line in golden if line.startswith("bad")))

    def reached(self):
        print("## Beside torch\n")
        goals, peers = self.json("goals.json"), lines(self.files.get("peers.jsonl", ""))
        points = {p["id"]: p for p in goals["points"]} if goals else {}
        found = [p for p in peers if "median_s" in p]

        def ours(point, what):
            measured = points.get(point)
            if measured is None or measured["status"] != "ok":
                return None
            return measured[what] / measured["seconds"]["median"]

        def best(what, **wanted):
            rates = [p[what] / p["median_s"] for p in found if all(p.get(k) == v for k, v in wanted.items())]
            return max(rates, default=None)

        if not points:
            self.missing("goals")
        if found:
            print(f"{peers[0]['device']}, torch {peers[0]['torch']}, CUDA {peers[0]['cuda']}\n")
        else:
            self.missing("peers")
        plain = max(filter(None, [best("bytes", name="plain_read"), ours("memory_read.1GiB", "bytes")]), default=None)
        if not points:
            return plain
        print("| bf16 product | mixfleet TFLOP/s | torch TFLOP/s | ratio |\n|---|---|---|---|")
        for point in points:
            if point.startswith("gemm.bf16.m"):
                m, n, k = (int(part[1:]) for part in point.split(".")[2:5])
                rate, theirs = ours(point, "flops"), best("flops", name="gemm", m=m, n=n, k=k)
                print(f"| {m} x {n} x {k} | {tera(rate)} | {tera(theirs)} | {share(rate, theirs)} |")
        print(f"\nPlain read: {tera(plain)} TB/s.\n")
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
            ratios = f"{share(rate, product)} | {tera(theirs)} | {share(rate, theirs)}"
            print(f"| {tokens} tokens | {tera(rate)} | {ratios} |")
        print()
        return plain

    def decode(self, plain):
        """Whole tokens; the roofline is the time to read weights and KV once at the rate of the plain read."""
        model = self.files.get("decode-model.txt", "").strip()
        print(f"## Decode{f': {model}' if model else ''}\n")
        rows = []
        for name in ("greedy", "sampled"):
            runs, answers = (lines(self.files.get(f"decode-{name}.{kind}", "")) for kind in ("runs", "log"))
            for run, answer in zip(runs, answers):
                batch, tokens = (int(run[run.index(flag) + 1]) for flag in ("--batch", "--max-tokens"))
                if "error" in answer:
                    rows.append((name, batch, f"| {name} | {batch} | {answer['error']} | | | |"))
                    continue
                context, bound_s = len(answer["prompt_ids"]) + tokens / 2, None
                if model in DECODED and plain:
                    shape = DECODED[model]
                    bound_s = (shape["weight_bytes"] + batch * context * shape["kv_bytes_per_token"]) / plain
                tbt_s = answer["tbt_s"]
                cells = [name, batch, number(answer["tokens_per_s"]), number(tbt_s and tbt_s * 1e3, 2),
                         number(answer["ttft_s"] and answer["ttft_s"] * 1e3), share(bound_s, tbt_s)]
                rows.append((name, batch, "| " + " | ".join(map(str, cells)) + " |"))
        if not rows:
            return self.missing("decode-greedy")
        print("| sampling | batch | tokens/s | time between tokens, ms | first token, ms | of the roofline |")
        print("|---|---|---|---|---|---|")
        for *_, row in sorted(rows):
            print(row)
        print()

    def members(self):
        """Several devices as one instance beside one; nothing where the step was not asked for."""
        runs, answers = (lines(self.files.get(f"members.{kind}", "")) for kind in ("runs", "log"))
        if not answers:
            return
        print("## Several devices as one instance\n")
        golden = self.files.get("members-golden.log", "").splitlines()
        print(f"Golden tokens: {golden[-1] if golden else 'not measured'}.\n")
        print("| devices | batch | tokens/s | time between tokens, ms | first token, ms |\n|---|---|---|---|---|")
        for run, answer in zip(runs, answers):
            device, batch = (run[run.index(flag) + 1] for flag in ("--device", "--batch"))
            if "error" in answer:
                print(f"| `{device}` | {batch} | {answer['error']} | | |")
                continue
            tbt_s, ttft_s = answer["tbt_s"], answer["ttft_s"]
            rates = f"{number(answer['tokens_per_s'])} | {number(tbt_s and tbt_s * 1e3, 2)} | {number(ttft_s and ttft_s * 1e3)}"
            print(f"| `{device}` | {batch} | {rates} |")
        print()

    def profile(self):
        print("## Profile\n")
        document = self.json("profile.json")
        if document is None:
            return self.missing("profile")
        measured = [p for p in document["points"] if p["status"] == "ok"]
        print(f"{len(measured)} of {len(document['points'])} points measured. The card:\n")
        print("```text\n" + self.files.get("profile.log", "").strip() + "\n```")


NOTES = ("compute capability", "driver", "cublaslt")


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    report = Report(sys.argv[1:])
    if not report.steps:
        sys.stderr.write("report.py: no step was recorded there; run hwtests/gpu.sh 1 first\n")
        sys.exit(3)
    report.head()
    report.correctness()
    report.decode(report.reached())
    report.members()
    report.profile()


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""How well a profile predicts serving: TTFT and TBT of `mixfleet serve` on a device, and on the simulated device
that obeys the device's profile, in interleaved rounds.

    hwtests/peers/predict.py --model target/1b

Each round profiles the device (the launches, and what has the model's own shapes; or takes --profile), then starts
both servers one after the other and asks both for the same prompts. Prompt lengths and batch sizes are such that a
profile lacks them (but for batch 1, at a length that it lacks). The figure is the median over the rounds of
(predicted / measured). Exit code 1 if one is off by more than --within.
"""

import argparse
import json
import pathlib
import statistics
import sys
import types

import contestants
import machine

PREFILL_TOKENS = (90, 300, 700, 1500)
DECODE = ((5, 40), (7, 300), (10, 40), (1, 900))  # (sequences, prompt tokens)
GENERATED_TOKENS = 40
WARM_UP_TOKENS = 128


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True, help="checkpoint directory")
    parser.add_argument("--profile", type=pathlib.Path, help="what `mixfleet profile` wrote [one per round]")
    parser.add_argument("--device", default="cpu", help="the device that was profiled")
    parser.add_argument("--mixfleet", type=pathlib.Path, default="target/release/mixfleet")
    parser.add_argument("--out", type=pathlib.Path, default="target/peers/predict")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--within", type=float, default=0.15, help="largest deviation of a median ratio")
    return parser.parse_args()


def gap_s(times):
    """Mean time between tokens while all sequences decode."""
    return len(times) / contestants.streams.steady_rate(times)


def measure(mixfleet, device, round_index):
    rng = contestants.seeded(round_index, "predict")
    values = {}
    with contestants.Server(mixfleet, [device]) as server:
        server.stream(rng, 1, WARM_UP_TOKENS, 2)
        for tokens in PREFILL_TOKENS:
            values[f"TTFT, {tokens} tokens"] = server.stream(rng, 1, tokens, 1)[0][0]
        for count, tokens in DECODE:
            times = server.stream(rng, count, tokens, GENERATED_TOKENS)
            values[f"TBT, batch {count} after {tokens} tokens"] = gap_s(times)
    return values


def own_shapes(model):
    """Names of the points with the shapes of the model in directory `model`, for `mixfleet profile --only`."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner, heads = (config[f"{name}_size" if name != "heads" else "num_attention_heads"]
                            for name in ("hidden", "intermediate", "heads"))
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim") or hidden // heads
    q, kv = heads * head_dim, kv_heads * head_dim
    products = {(q, hidden), (hidden, q), (kv, hidden), (config["vocab_size"], hidden)}
    mixture = []
    if config.get("num_local_experts"):
        mixture = ["experts"]  # a router's product is among the small ones
    else:
        products |= {(inner, hidden), (hidden, inner)}
    return ["launch", "small", "memory_read.*", *(f"gemm.bf16.*.n{n}.k{k}*" for n, k in sorted(products)), *mixture,
            f"attn_*.gqa{heads // kv_heads}.kv{kv_heads}.d{head_dim}"]


def profile(args):
    """Profiles the device; returns the file."""
    path = args.out / "profile.json"
    names = ",".join(own_shapes(args.model))
    contestants.output([args.mixfleet, "profile", "--device", args.device, "--model", args.model, "--only", names,
                        "--out", path])
    return path


def main():
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    mixfleet = contestants.Mixfleet(types.SimpleNamespace(
        mixfleet=args.mixfleet.resolve(), device=args.device, out=args.out, threads=1, model=args.model))
    rounds = []
    for index in range(args.rounds):
        with machine.watched() as usage:
            simulated = f"sim:{(args.profile or profile(args)).resolve()}"
            rounds.append([measure(mixfleet, device, index) for device in (args.device, simulated)])
        print(f"round {index + 1}: others took {usage.others:.2f} cores", file=sys.stderr)
    print(f"{machine.description()}; {args.model.name}; {args.rounds} rounds\n")
    print("| | measured, ms | predicted, ms | predicted / measured | lowest | highest |")
    print("|---|---|---|---|---|---|")
    worst = 0.0
    for name in rounds[0][0]:
        measured, predicted = ([pair[which][name] for pair in rounds] for which in (0, 1))
        ratios = sorted(p / m for m, p in zip(measured, predicted))
        ratio = statistics.median(ratios)
        worst = max(worst, abs(ratio - 1))
        print(f"| {name} | {statistics.median(measured) * 1e3:.1f} | {statistics.median(predicted) * 1e3:.1f} "
              f"| {ratio:.3f} | {ratios[0]:.3f} | {ratios[-1]:.3f} |")
    (args.out / f"{args.model.name}.json").write_text(json.dumps({"rounds": rounds}, indent=1))
    print(f"\nworst median: {worst:.1%} off")
    sys.exit(worst > args.within)


if __name__ == "__main__":
    main()

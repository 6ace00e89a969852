"""What the picker adds to requests, and how it balances; see ../epp.sh. Prints tables and one JSON document a row."""

import argparse
import asyncio
import json
import os
import pathlib
import random
import subprocess
import sys
import time

from envoy import Envoy
from picker import Picker, Server, call, free_port

# what a request computes: a fast server and one of a third of its speed, in ms a token
FAST_MS, SLOW_MS = 0.05, 0.15
TURNS = [500, 900, 1300, 1700]


def quantile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def pick_quantile(metrics, before, share):
    """An upper bound of a quantile of the picks since `before`, in ms, by the bounds of the histogram."""
    counts = [(bound, count - before.get(bound, 0)) for bound, count in metrics.items()]
    total = counts[-1][1]
    return next(bound * 1e3 for bound, count in counts if count >= share * total)


def picks(picker):
    text = call(picker.metrics, "GET", "/metrics")[2]
    lines = [line for line in text.splitlines() if line.startswith("mixfleet_pick_seconds_bucket")]
    return {float(line.split('le="')[1].split('"')[0]): float(line.rsplit(" ", 1)[1]) for line in lines}


class Workers:
    """The fake engines of the load generator, which cost next to nothing."""

    def __init__(self, load):
        ports = [free_port() for _ in range(2)]
        self.addresses = [f"127.0.0.1:{port}" for port in ports]
        self.process = subprocess.Popen([load, "workers", *map(str, ports)])


class Named:
    def __init__(self, address):
        self.address = address


def latency(program, envoy, load, seconds, rounds):
    workers = Workers(load)
    time.sleep(0.5)
    picker = Picker(program, [Named(address) for address in workers.addresses])
    fronts = {name: f"127.0.0.1:{free_port()}" for name in ("picked", "plain", "admin")}
    kinds = {fronts["picked"]: "picker", fronts["plain"]: "round_robin"}
    gate = Envoy(envoy, kinds, workers.addresses, picker.listen, fronts["admin"], concurrency=2)
    picker.wait_for("get requests")
    print("| body, bytes | way | whole | TTFT p50, ms | p99 | pick p50, ms, at most | p99, at most |")
    print("|---|---|---|---|---|---|---|")
    try:
        for body in (8_000, 220_000):
            for _ in range(rounds):
                for way in ("direct", "plain", "picked"):
                    urls = ",".join(f"http://{one}" for one in (workers.addresses if way == "direct" else [fronts[way]]))
                    before = picks(picker)
                    words = [load, "rate", urls, "200", str(seconds), str(body), "16", "5"]
                    seen = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
                    ttft, after = seen["ttft_ms"], picks(picker)
                    took = [pick_quantile(after, before, share) for share in (0.5, 0.99)] if way == "picked" else None
                    shown = " | ".join(f"{ms:.2g}" for ms in took) if took else "| "
                    print(f"| {body} | {way} | {seen.get('whole')} | {ttft['p50']:.1f} | {ttft['p99']:.1f} | {shown} |", flush=True)
                    print(json.dumps({"body": body, "way": way, "pick_ms": took, **seen}), file=sys.stderr, flush=True)
    finally:
        gate.stop()
        picker.stop()
        workers.process.kill()


async def first_byte(address, body, due):
    """Time from when a request was due to its first token."""
    await asyncio.sleep(max(0.0, due - time.monotonic()))
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    text = json.dumps(body)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
    writer.write((head + text).encode())
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(status.decode())
    await reader.readuntil(b"\r\n\r\n")
    await reader.readuntil(b"data: ")
    ttft = time.monotonic() - due
    await reader.read(-1)
    writer.close()
    return ttft


async def conversations(address, rate, seconds, seed):
    """Conversations of four turns whose prompts grow; a turn follows the first token of the one before after a pause."""
    chance, began, times = random.Random(seed), time.monotonic() + 0.1, []

    async def converse(due, pauses):
        for tokens, pause in zip(TURNS, pauses):
            body = {"model": "m", "prompt": "x" * (4 * tokens), "max_tokens": 8, "stream": True}
            times.append(await first_byte(address, body, due))
            due = time.monotonic() + pause

    tasks, at = [], 0.0
    while (at := at + chance.expovariate(rate / len(TURNS))) < seconds:
        tasks.append(converse(began + at, [chance.expovariate(2) for _ in TURNS]))
    await asyncio.gather(*tasks)
    return times


def balance(program, envoy, seconds, seeds):
    servers = [Server(token_ms=FAST_MS, pace_ms=1), Server(token_ms=SLOW_MS, pace_ms=1)]
    addresses = [server.address for server in servers]
    picker = Picker(program, servers)
    kinds = ("picker", "round_robin", "least_request")
    fronts = {kind: f"127.0.0.1:{free_port()}" for kind in (*kinds, "admin")}
    gate = Envoy(envoy, {fronts[kind]: kind for kind in kinds}, addresses, picker.listen, fronts["admin"])
    picker.wait_for("get requests")
    mean_tokens = sum(TURNS) / len(TURNS)
    capacity = sum(1e3 / (each * mean_tokens) for each in (FAST_MS, SLOW_MS))
    print(f"capacity {capacity:.1f} requests a second; {seeds} seeds of {seconds:.0f} s")
    print("| share of capacity | policy | requests | mean TTFT, ms | p99 | mean over the better of Envoy's | p99 over |")
    print("|---|---|---|---|---|---|---|")
    try:
        for share in (0.6, 0.8):
            seen = {kind: [] for kind in kinds}
            for seed in range(seeds):
                for kind in kinds:
                    seen[kind] += asyncio.run(conversations(fronts[kind], share * capacity, seconds, seed))
            mean = {kind: sum(times) / len(times) for kind, times in seen.items()}
            tail = {kind: quantile(times, 0.99) for kind, times in seen.items()}
            for kind in kinds:
                over = ""
                if kind == "picker":
                    best = [min(of["round_robin"], of["least_request"]) for of in (mean, tail)]
                    over = f"{mean[kind] / best[0]:.2f} | {tail[kind] / best[1]:.2f}"
                print(f"| {share} | {kind} | {len(seen[kind])} | {mean[kind] * 1e3:.0f} | {tail[kind] * 1e3:.0f} | {over or '| '} |", flush=True)
    finally:
        gate.stop()
        picker.stop()
        for server in servers:
            server.kill()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("envoy")
    parser.add_argument("load")
    parser.add_argument("--short", action="store_true", help="fewer seeds, less time")
    given = parser.parse_args()
    print(f"load of the machine before: {os.getloadavg()[0]:.2f}, cores: {os.cpu_count()}")
    latency(str(pathlib.Path(given.program)), given.envoy, given.load, 4 if given.short else 8, 1 if given.short else 2)
    balance(given.program, given.envoy, *((10, 2) if given.short else (12, 5)))
    print(f"load of the machine after: {os.getloadavg()[0]:.2f}")


main()

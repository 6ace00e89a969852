"""What the picker adds to requests, and how it balances; see ../epp.sh. Prints tables and one JSON document a row."""

import argparse
import asyncio
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import time

from envoy import Envoy
from picker import Picker, Server, Setup, call

# what a request computes: a fast server and one of a third of its speed, in ms a token
FAST_MS, SLOW_MS = 0.1, 0.3
# tokens of the prompts of a conversation, each of which begins with the one before
TURNS = [500, 900, 1300, 1700]
POLICIES = ("picker", "round_robin", "least_request")


def table(*columns):
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)


def quantile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def pick_quantile(metrics, before, share):
    """An upper bound of a quantile of the picks since `before`, in ms, by the bounds of the histogram."""
    counts = [(bound, count - before.get(bound, 0)) for bound, count in sorted(metrics.items())]
    total = counts[-1][1]
    return next(bound * 1e3 for bound, count in counts if count >= share * total)


def picks(picker):
    text = call(picker.metrics, "GET", "/metrics")[2]
    lines = [line for line in text.splitlines() if line.startswith("mixfleet_pick_seconds_bucket")]
    return {float(line.split('le="')[1].split('"')[0]): float(line.rsplit(" ", 1)[1]) for line in lines}


class Workers:
    """The fake engines of the load generator, which cost next to nothing. They start again if a port was taken."""

    def __init__(self, load):
        for _ in range(10):
            held = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
            ports = [one.getsockname()[1] for one in held]
            for one in held:
                one.close()
            self.addresses = [f"127.0.0.1:{port}" for port in ports]
            self.process = subprocess.Popen([load, "workers", *map(str, ports)], stderr=subprocess.DEVNULL)
            if self.are_up():
                return
            self.stop()
        sys.exit("the fake engines do not start")

    def are_up(self):
        until = time.monotonic() + 10
        while time.monotonic() < until and self.process.poll() is None:
            try:
                return all(call(address, "GET", "/version")[0] == 200 for address in self.addresses)
            except OSError:
                time.sleep(0.02)
        return False

    def stop(self):
        self.process.kill()
        self.process.wait()


class Named:
    def __init__(self, address):
        self.address = address


def latency(program, envoy, load, seconds, rounds):
    with Setup() as setup:
        workers = setup.add(Workers(load))
        # the fake engines cannot be measured at the start, so the file says what they are
        labels = [{"mixfleet.dev/part": "H100-SXM-80GB", "mixfleet.dev/shape": "llama-3.1-8b"}] * 2
        picker = setup.add(Picker(program, [Named(address) for address in workers.addresses], labels=labels))
        kinds = {"picked": "picker", "plain": "round_robin"}
        gate = setup.add(Envoy(envoy, kinds, workers.addresses, picker.listen, concurrency=2))
        picker.wait_for("get requests")
        table("body, bytes", "requests a second", "way", "whole", "failed", "TTFT p50, ms", "p99", "picker's CPU ms a request",
              "pick p50, ms, at most", "p99, at most")
        for body in (8_000, 220_000):
            for rate in (50, 200):
                for _ in range(rounds):
                    for way in ("direct", "plain", "picked"):
                        addresses = workers.addresses if way == "direct" else [gate.fronts[way]]
                        one_latency(load, addresses, {"body": body, "rate": rate, "way": way}, seconds, picker)


def cpu_s(process):
    fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def one_latency(load, addresses, row, seconds, picker):
    """An answer has 16 tokens, 5 ms apart."""
    before, busy = picks(picker), cpu_s(picker.process)
    urls = ",".join(f"http://{address}" for address in addresses)
    words = [load, "rate", urls, str(row["rate"]), str(seconds), str(row["body"]), "16", "5"]
    ran = subprocess.run(words, capture_output=True, text=True, check=True)
    seen, after = json.loads(ran.stdout), picks(picker)
    cpu_ms = (cpu_s(picker.process) - busy) * 1e3 / seen["asked"]
    if not seen["whole"]:
        sys.exit(f"no request is answered: {seen['first_fault']}")
    ttft = seen["ttft_ms"]
    is_picked = row["way"] == "picked"
    took = [pick_quantile(after, before, share) for share in (0.5, 0.99)] if is_picked else None
    shown = f"{cpu_ms:.2f} | {took[0]:.2g} | {took[1]:.2g}" if is_picked else "| | "
    head = " | ".join(map(str, [*row.values(), seen["whole"], seen["failed"]]))
    print(f"| {head} | {ttft['p50']:.1f} | {ttft['p99']:.1f} | {shown} |", flush=True)
    print(json.dumps({**row, "pick_ms": took, "cpu_ms": cpu_ms, **seen}), file=sys.stderr, flush=True)


async def first_byte(address, body, due):
    """Time from when a request was due to its first token."""
    await asyncio.sleep(max(0.0, due - time.monotonic()))
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    text = json.dumps(body)
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(text)}\r\n\r\n{text}".encode())
    status = await reader.readline()
    if b" 200 " not in status:
        raise RuntimeError(status.decode())
    await reader.readuntil(b"\r\n\r\n")
    await reader.readuntil(b"data: ")
    ttft = time.monotonic() - due
    await reader.read(-1)
    writer.close()
    return ttft


async def converse(address, name, due, pauses, times):
    """Four turns; each follows the first token of the one before after a pause."""
    words = random.Random(name)
    text = ""
    for tokens, pause in zip(TURNS, pauses):
        while len(text) < 4 * tokens:
            text += f"{words.getrandbits(32):08x} "
        body = {"model": "m", "prompt": text[:4 * tokens], "user": name, "max_tokens": 8, "stream": True}
        times.append(await first_byte(address, body, due))
        due = time.monotonic() + pause


async def conversations(address, rate, seconds, name):
    """TTFT of all turns of conversations that begin within `seconds`, `rate` turns a second."""
    chance, began, times = random.Random(name), time.monotonic() + 0.1, []
    tasks, at = [], 0.0
    while (at := at + chance.expovariate(rate / len(TURNS))) < seconds:
        pauses = [chance.expovariate(2) for _ in TURNS]
        tasks.append(converse(address, f"{name}-{len(tasks)}", began + at, pauses, times))
    await asyncio.gather(*tasks)
    return times


async def beside(fronts, rate, seconds, name):
    """The same conversations under each policy at the same time, so that the machine is the same for all."""
    return await asyncio.gather(*(conversations(fronts[kind], rate, seconds, name) for kind in POLICIES))


def balance(program, envoy, seconds, seeds):
    """Each policy has two servers of its own."""
    with Setup() as setup:
        servers = {kind: [setup.add(Server(token_ms=ms, pace_ms=1)) for ms in (FAST_MS, SLOW_MS)]
                   for kind in POLICIES}
        addresses = {kind: [server.address for server in pair] for kind, pair in servers.items()}
        picker = setup.add(Picker(program, servers["picker"]))
        gate = setup.add(Envoy(envoy, {kind: kind for kind in POLICIES}, addresses, picker.listen))
        picker.wait_for("get requests")
        table("capacity counts", "share of it", "turns a second", "policy", "turns", "mean TTFT, ms", "p99",
              "mean over the better of Envoy's", "p99 over")
        new = [tokens - before for tokens, before in zip(TURNS, [0, *TURNS])]
        for counts, computed in (("whole prompts", TURNS), ("new tokens", new)):
            capacity = sum(1e3 / (ms * sum(computed) / len(TURNS)) for ms in (FAST_MS, SLOW_MS))
            for share in (0.6, 0.8):
                runs = []
                for seed in range(seeds):
                    name = f"{counts}-{share}-{seed}"
                    runs.append(asyncio.run(beside(gate.fronts, share * capacity, seconds, name)))
                show_balance(f"{counts} | {share} | {share * capacity:.1f}", runs)


def show_balance(row, runs):
    seen = {kind: sum((run[at] for run in runs), []) for at, kind in enumerate(POLICIES)}
    mean = {kind: sum(times) / len(times) for kind, times in seen.items()}
    tail = {kind: quantile(times, 0.99) for kind, times in seen.items()}
    for kind in POLICIES:
        over = "| "
        if kind == "picker":
            best = [min(of["round_robin"], of["least_request"]) for of in (mean, tail)]
            over = f"{mean[kind] / best[0]:.2f} | {tail[kind] / best[1]:.2f}"
        print(f"| {row} | {kind} | {len(seen[kind])} | {mean[kind] * 1e3:.0f} | {tail[kind] * 1e3:.0f} | {over} |", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("envoy")
    parser.add_argument("load")
    parser.add_argument("--short", action="store_true", help="fewer seeds, less time")
    parser.add_argument("--only", choices=("latency", "balance"))
    given = parser.parse_args()
    print(f"load of the machine before: {os.getloadavg()[0]:.2f}, cores: {os.cpu_count()}")
    if given.only != "balance":
        latency(given.program, given.envoy, given.load, *((3, 1) if given.short else (4, 2)))
    if given.only != "latency":
        balance(given.program, given.envoy, *((4, 2) if given.short else (6, 5)))
    print(f"load of the machine after: {os.getloadavg()[0]:.2f}")


main()

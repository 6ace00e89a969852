#!/usr/bin/env python3
"""What loading a prefix from host memory takes of a stream beside it, on a real device: `serve` on `cpu` with device
memory for little more than one prompt, so that a prompt that returns comes from host memory. Measures, in turns: a
stream alone; the stream beside the load; the load alone; the same length computed anew. Prints the stream's gaps and
the TTFT of the prompt. Exit status: 0 measured, 2 usage, 3 could not run (says SKIPPED and why).

    hwtests/loads.py [ROUNDS, default 3]

MIXFLEET names the binary (default target/release/mixfleet), MODEL the model (random:qwen3-0.6b), TOKENS the length of
the prompt (4000), TBT the objective of `--tbt-slo` in seconds (none by default).
"""
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

MODEL = os.environ.get("MODEL", "random:qwen3-0.6b")
TOKENS = int(os.environ.get("TOKENS", "4000"))
STREAM_TOKENS, STREAM_PROMPT = 200, 32
# before the load begins, so that the stream decodes
LEAD_TOKENS = 20


def skip(why):
    print(f"SKIPPED: loads: {why}", file=sys.stderr)
    sys.exit(3)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    def __init__(self, program, log, kv_gib):
        address = f"127.0.0.1:{free_port()}"
        self.url = f"http://{address}"
        command = [program, "serve", "--model", MODEL, "--device", "cpu", "--listen", address,
                   "--kv-memory", str(kv_gib), "--kv-dram", "3", "--sequences", "4"]
        if "TBT" in os.environ:
            command += ["--tbt-slo", os.environ["TBT"]]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        for _ in range(1200):
            try:
                with urllib.request.urlopen(f"{self.url}/v1/models", timeout=1) as answer:
                    self.model = json.load(answer)["data"][0]["id"]
                    return
            except OSError:
                if self.process.poll() is not None:
                    break
                time.sleep(0.1)
        self.stop()
        skip(f"'{' '.join(command)}' does not come up")

    def stop(self):
        self.process.kill()
        self.process.wait()

    def stream(self, prompt, tokens, began=None):
        """The time of each token from the request on, and the reused tokens. `began` is set at the 20th token."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True,
                "stream_options": {"include_usage": True}}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        start, times, reused = time.monotonic(), [], 0
        with urllib.request.urlopen(request, timeout=600) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if event.get("choices") and event["choices"][0].get("text"):
                    times.append(time.monotonic() - start)
                    if began is not None and len(times) == LEAD_TOKENS:
                        began.set()
                if event.get("usage"):
                    reused = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        return times, reused


def gaps_of(times):
    """Gaps from the token on at which a load may begin, in ms: median, 99th percentile, longest."""
    gaps = sorted(1000 * (b - a) for a, b in zip(times[LEAD_TOKENS:], times[LEAD_TOKENS + 1:]))
    return statistics.median(gaps), gaps[len(gaps) * 99 // 100], gaps[-1]


def main():
    if len(sys.argv) > 2 or (len(sys.argv) == 2 and not sys.argv[1].isdigit()):
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    rounds = int(sys.argv[1]) if len(sys.argv) == 2 else 3
    program = os.environ.get("MIXFLEET", "target/release/mixfleet")
    if not os.access(program, os.X_OK):
        skip(f"no {program}; build it with cargo build --release")
    draw = random.Random(20261130)
    tokens = lambda count: [draw.randrange(100, 200) for _ in range(count)]
    prompts = [tokens(TOKENS) for _ in range(2)]
    kv_gib = float(os.environ.get("KV_GIB", "0.75"))
    print("| round | stream | median gap, ms | p99, ms | longest, ms | TTFT of the prompt, s | reused |\n"
          "|---|---|---|---|---|---|---|")
    show = lambda *cells: print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)
    with tempfile.TemporaryFile() as log:
        server = Server(program, log, kv_gib)
        try:
            for prompt in prompts:  # each of them evicts the other one
                server.stream(prompt, 1)
            for number in range(1, rounds + 1):
                alone, _ = server.stream(tokens(STREAM_PROMPT), STREAM_TOKENS)
                show(number, "alone", *(f"{gap:.1f}" for gap in gaps_of(alone)), "", "")
                for which, prompt in (("a load", prompts[0]), ("nothing", prompts[1])):
                    beside, loaded = [], []
                    began = threading.Event()
                    if which == "a load":
                        run = lambda: beside.append(server.stream(tokens(STREAM_PROMPT), STREAM_TOKENS, began)[0])
                        thread = threading.Thread(target=run)
                        thread.start()
                        began.wait()
                    loaded = server.stream(prompt, 1)
                    if which == "a load":
                        thread.join()
                        show(number, "beside the load", *(f"{gap:.1f}" for gap in gaps_of(beside[0])),
                             f"{loaded[0][0]:.3f}", loaded[1])
                    else:
                        show(number, "none", "", "", "", f"{loaded[0][0]:.3f}", loaded[1])
                fresh, reused = server.stream(tokens(TOKENS), 1)
                show(number, "none, computed anew", "", "", "", f"{fresh[0]:.3f}", reused)
                for prompt in prompts:  # what was computed has evicted them from the device
                    server.stream(prompt, 1)
        finally:
            server.stop()


if __name__ == "__main__":
    main()

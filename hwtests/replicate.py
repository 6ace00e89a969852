#!/usr/bin/env python3
"""What copies of hot prefixes ahead of demand save, live: `serve` on three simulated parts, with and without
`--replicate-gb-per-s`, in turns. Documents become hot one after the other: each is asked about by a crowd within
seconds, beside requests without a common prefix. Prints for each run the mean and the 90th percentile of the time that
the crowd's short answers take, in seconds of the parts' clock, and the share of its prompt tokens that were reused.
Exit status: 0 measured, 2 usage, 3 could not run (says SKIPPED and why).

    hwtests/replicate.py [PAIRS, default 3]

MIXFLEET names the binary (default target/release/mixfleet).
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

DILATION = 4
DEVICES = 3
DOCUMENTS, DOCUMENT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 4, 6000, 100, 16
CROWD, CROWD_S, BETWEEN_S = 30, 6.0, 9.0
OTHERS_PER_S, OTHER_TOKENS = 2.0, 1500


def skip(why):
    print(f"SKIPPED: replicate: {why}", file=sys.stderr)
    sys.exit(3)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    def __init__(self, program, log, replicates):
        self.url = f"http://127.0.0.1:{free_port()}"
        command = [program, "serve", "--model", "random:llama-3.2-1b", "--listen", self.url.removeprefix("http://")]
        for number in range(DEVICES):
            command += ["--device", f"sim:L4#{number},dilation:{DILATION}"]
        if replicates:
            command += ["--replicate-gb-per-s", "10"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        for _ in range(600):
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

    def ask(self, prompt):
        """The time of the answer in seconds of the parts' clock, and the reused tokens."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "stream": True,
                "stream_options": {"include_usage": True}}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        began, reused = time.monotonic(), 0
        with urllib.request.urlopen(request, timeout=300) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                usage = json.loads(line[6:]).get("usage")
                if usage:
                    reused = usage["prompt_tokens_details"]["cached_tokens"]
        return (time.monotonic() - began) / DILATION, reused


def load(seed):
    """Requests as (time, whether it is of a crowd, prompt), in order of time."""
    draw = random.Random(seed)
    tokens = lambda count: [draw.randrange(100, 30000) for _ in range(count)]
    requests = []
    for number in range(DOCUMENTS):
        document, begins = tokens(DOCUMENT_TOKENS), number * (CROWD_S + BETWEEN_S)
        requests += [(begins + CROWD_S * draw.random(), True, document + tokens(QUESTION_TOKENS)) for _ in range(CROWD)]
    at, end = 0.0, DOCUMENTS * (CROWD_S + BETWEEN_S)
    while (at := at + draw.expovariate(OTHERS_PER_S)) < end:
        requests.append((at, False, tokens(OTHER_TOKENS)))
    return sorted(requests, key=lambda request: request[0])


def run(program, log, replicates, seed):
    server, crowd, errors = Server(program, log, replicates), [], []

    def ask(prompt, of_crowd):
        try:
            answer = server.ask(prompt)
            if of_crowd:
                crowd.append((*answer, len(prompt)))
        except OSError as error:
            errors.append(error)

    try:
        began, threads = time.monotonic(), []
        for at, of_crowd, prompt in load(seed):
            time.sleep(max(0.0, began + at * DILATION - time.monotonic()))
            threads.append(threading.Thread(target=ask, args=(prompt, of_crowd)))
            threads[-1].start()
        for thread in threads:
            thread.join()
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        copies = sum(float(line.split()[-1]) for line in lines if line.startswith("mixfleet_prefix_copies_total"))
    finally:
        server.stop()
    if errors:
        skip(f"{len(errors)} requests failed: {errors[0]}")
    times_s = sorted(time_s for time_s, _, _ in crowd)
    reused = sum(reused for _, reused, _ in crowd) / sum(length for _, _, length in crowd)
    return statistics.mean(times_s), times_s[len(times_s) * 9 // 10], reused, copies


def main():
    if len(sys.argv) > 2 or (len(sys.argv) == 2 and not sys.argv[1].isdigit()):
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    pairs = int(sys.argv[1]) if len(sys.argv) == 2 else 3
    program = os.environ.get("MIXFLEET", "target/release/mixfleet")
    if not os.access(program, os.X_OK):
        skip(f"no {program}; build it with cargo build --release")
    print("| pair | copies | mean, s | p90, s | reused |\n|---|---|---|---|---|")
    with tempfile.TemporaryFile() as log:
        for pair in range(1, pairs + 1):
            for replicates in (False, True):
                mean_s, high_s, reused, copies = run(program, log, replicates, pair)
                what = f"{copies:.0f}" if replicates else "off"
                print(f"| {pair} | {what} | {mean_s:.3f} | {high_s:.3f} | {reused:.3f} |", flush=True)


if __name__ == "__main__":
    main()

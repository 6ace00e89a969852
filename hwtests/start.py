#!/usr/bin/env python3
"""Times from the start of `mixfleet serve` to its "ready" line and to the first token of a request, of two builds.

    hwtests/start.py OLD NEW MODEL [PAIRS [COPIES]]     OLD, NEW: stripped binaries; MODEL: a checkpoint

Starts both in turn, PAIRS times (default 60), and prints the ratios NEW/OLD of pairs. How the page cache holds a
file's pages moves a start by up to 10 %, so this is done with COPIES (default 6) fresh copies of both, read anew; the
last line is the median of their medians. Runs in real-time order and drops the page cache where it may.
"""
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time

BODY = json.dumps({"model": "m", "prompt": "x", "max_tokens": 1, "stream": True}).encode()
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(BODY)
)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(binary, model):
    """Milliseconds to readiness, and to the first token."""
    port = free_port()
    began = time.perf_counter()
    words = [binary, "serve", "--model", model, "--name", "m", "--device", "cpu", "--listen", f"127.0.0.1:{port}"]
    server = subprocess.Popen(words, stderr=subprocess.PIPE)
    try:
        for line in server.stderr:
            if b"ready: http" in line:
                break
        else:
            sys.exit(f"{binary} ended before it was ready (exit status {server.wait()})")
        ready = time.perf_counter() - began
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(REQUEST + BODY)
            answer = b""
            while b"data:" not in answer:
                piece = connection.recv(65536)
                if not piece:
                    sys.exit(f"{binary} sent no token: {answer!r}")
                answer += piece
        return 1e3 * ready, 1e3 * (time.perf_counter() - began)
    finally:
        server.kill()
        server.wait()


def compare(old, new, model, pairs):
    """Medians of both and of the ratios of pairs, for readiness and the first token."""
    times = {old: [], new: []}
    for binary in (old, new):
        start(binary, model)
    for pair in range(pairs):
        for binary in ((old, new) if pair % 2 == 0 else (new, old)):
            times[binary].append(start(binary, model))
    ratios = []
    for kind, name in enumerate(("ready", "first token")):
        before, after = ([both[kind] for both in times[binary]] for binary in (old, new))
        of_pairs = statistics.quantiles([b / a for a, b in zip(before, after)], n=4)
        ratios.append(of_pairs[1])
        print(f"{name:12} {statistics.median(before):6.1f} -> {statistics.median(after):6.1f} ms, "
              f"ratio of pairs {of_pairs[1]:.3f} (quartiles {of_pairs[0]:.3f}, {of_pairs[2]:.3f})", flush=True)
    return ratios


def main():
    if len(sys.argv) not in (4, 5, 6):
        sys.exit(__doc__)
    old, new, model = sys.argv[1:4]
    for path in (old, new, model):
        if not os.path.exists(path):
            sys.exit(f"start: there is no {path}")
    numbers = sys.argv[4:] + ["60", "6"][len(sys.argv) - 4:]
    if not all(word.isdigit() for word in numbers) or int(numbers[0]) < 2 or int(numbers[1]) < 1:
        sys.exit(f"start: expected PAIRS of 2 or more and COPIES of 1 or more, not {' '.join(numbers)}")
    pairs, copies = map(int, numbers)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))
    except PermissionError:
        print("no real-time order: other programs disturb the times", file=sys.stderr)
    ratios = []
    for _ in range(copies):
        with tempfile.TemporaryDirectory() as scratch:
            both = [shutil.copy(binary, os.path.join(scratch, name)) for binary, name in ((old, "old"), (new, "new"))]
            os.sync()
            try:
                with open("/proc/sys/vm/drop_caches", "w") as caches:
                    caches.write("3")
            except OSError:
                pass
            ratios.append(compare(*both, model, pairs))
    for name, of_copies in zip(("ready", "first token"), zip(*ratios)):
        print(f"{name}: {statistics.median(of_copies):.3f} (of {copies} copies {min(of_copies):.3f} to {max(of_copies):.3f})")


if __name__ == "__main__":
    main()

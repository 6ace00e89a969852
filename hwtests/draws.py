#!/usr/bin/env python3
"""What sampling costs a batch: the time between tokens of greedy requests and of sampled ones, in turns, on a server.

    mixfleet serve --model random:llama-3.2-1b --device cpu &
    hwtests/draws.py [--url http://127.0.0.1:8000] [--clients 64] [--tokens 16] [--rounds 3]

Sampled: temperature 1, top-p 0.95, all three penalties. Prints a line a round, then the ratio of the medians as JSON.
Exit status: 0 measured, 2 usage, 3 could not run.
"""

import argparse
import http.client
import json
import statistics
import sys
import threading
import time
import urllib.parse

SAMPLED = {
    "temperature": 1.0,
    "top_p": 0.95,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.1,
}


def stream(url, model, client, tokens, sampling, times):
    """Asks for a completion, and notes when each of its tokens came."""
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=600)
    body = {
        "model": model,
        "prompt": [5 + client % 200] * 32,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "seed": client,
        **sampling,
    }
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {answer.read()[:300]}")
    for line in answer:
        if line.startswith(b"data: {"):
            times.append(time.monotonic())


def steps(url, model, clients, tokens, sampling):
    """The gaps between tokens, in seconds, while all clients decode."""
    times = [[] for _ in range(clients)]
    threads = [
        threading.Thread(target=stream, args=(url, model, client, tokens, sampling, times[client]))
        for client in range(clients)
    ]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    if not all(times):
        raise RuntimeError("a request failed")
    begin, end = max(of[0] for of in times), min(of[-1] for of in times)
    return [b - a for of in times for a, b in zip(of, of[1:]) if begin <= a and b <= end]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    url = urllib.parse.urlparse(args.url)
    try:
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=10)
        connection.request("GET", "/v1/models")
        model = json.load(connection.getresponse())["data"][0]["id"]
        gaps = {"greedy": [], "sampled": []}
        for number in range(args.rounds):
            for name, sampling in (("greedy", {"temperature": 0}), ("sampled", SAMPLED)):
                found = steps(url, model, args.clients, args.tokens, sampling)
                gaps[name].append(statistics.median(found))
                print(f"round {number}: {name}: {gaps[name][-1] * 1e3:.1f} ms between tokens ({len(found)})")
    except (OSError, RuntimeError, KeyError, ValueError, statistics.StatisticsError) as error:
        print(f"draws.py: {error}", file=sys.stderr)
        return 3
    greedy, sampled = (statistics.median(gaps[name]) for name in ("greedy", "sampled"))
    print(json.dumps({"greedy_s": greedy, "sampled_s": sampled, "ratio": sampled / greedy}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

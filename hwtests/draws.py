#!/usr/bin/env python3
"""What sampling costs a batch: the time of a step of greedy requests and of sampled ones, in turns, on a server.

    mixfleet serve --model random:llama-3.2-1b --device cpu &
    hwtests/draws.py [--url http://127.0.0.1:8000] [--clients 64] [--tokens 100] [--rounds 3]

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


def watch(url, done, seen):
    """Notes the number of steps that devices have run, until it is told to end."""
    while not done.wait(0.05):
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=60)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        count = sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("mixfleet_device_steps"))
        seen.append((time.monotonic(), count))


def step_s(url, model, clients, tokens, sampling):
    """The mean time of a step in which all clients decode. (Text comes in pieces of several tokens at times.)"""
    times, done, seen = [[] for _ in range(clients)], threading.Event(), []
    watcher = threading.Thread(target=watch, args=(url, done, seen))
    threads = [
        threading.Thread(target=stream, args=(url, model, client, tokens, sampling, times[client]))
        for client in range(clients)
    ]
    watcher.start()
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    done.set()
    watcher.join()
    if not all(times):
        raise RuntimeError("a request failed")
    begin, end = max(of[0] for of in times), min(of[-1] for of in times)
    within = [(at, count) for at, count in seen if begin <= at <= end]
    if len(within) < 2 or within[-1][1] - within[0][1] < 5:
        raise RuntimeError("the first client ended about when the last one began: ask for more --tokens")
    # From one change of the count to another.
    changes = [now for before, now in zip(within, within[1:]) if now[1] != before[1]]
    return (changes[-1][0] - changes[0][0]) / (changes[-1][1] - changes[0][1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    url = urllib.parse.urlparse(args.url)
    try:
        connection = http.client.HTTPConnection(url.hostname, url.port, timeout=10)
        connection.request("GET", "/v1/models")
        model = json.load(connection.getresponse())["data"][0]["id"]
        taken = {"greedy": [], "sampled": []}
        for number in range(args.rounds):
            for name, sampling in (("greedy", {"temperature": 0}), ("sampled", SAMPLED)):
                taken[name].append(step_s(url, model, args.clients, args.tokens, sampling))
                print(f"round {number}: {name}: {taken[name][-1] * 1e3:.1f} ms a step", flush=True)
    except (OSError, RuntimeError, KeyError, ValueError, statistics.StatisticsError) as error:
        print(f"draws.py: {error}", file=sys.stderr)
        return 3
    greedy, sampled = (statistics.median(taken[name]) for name in ("greedy", "sampled"))
    print(json.dumps({"greedy_s": greedy, "sampled_s": sampled, "ratio": sampled / greedy}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

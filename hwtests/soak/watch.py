"""What a process holds, and how soon it says that it lives."""

import asyncio
import os
import socket
import time

SAMPLE_S = 5
LIVE_S = 0.05
LIVE = b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
LIVE_PATIENCE_S = 10


def descriptors(pids):
    """What the descriptors of processes are, by kind, the most numerous first."""
    kinds = {}
    for pid in pids:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                kind = os.readlink(f"/proc/{pid}/fd/{name}").split(":[")[0]
            except OSError:
                continue
            kinds[kind] = kinds.get(kind, 0) + 1
    return sorted(kinds.items(), key=lambda item: -item[1])


def sample(pids):
    """What processes hold together, and the memory of each."""
    total = {"rss_mb": 0.0, "threads": 0, "descriptors": 0, "rss_mb_of_each": []}
    for pid in pids:
        with open(f"/proc/{pid}/status") as file:
            status = dict(line.split(":", 1) for line in file if ":" in line)
        rss_mb = int(status["VmRSS"].split()[0]) * 1024 / 1e6
        total["rss_mb_of_each"].append(round(rss_mb, 1))
        total["rss_mb"] = round(total["rss_mb"] + rss_mb, 1)
        total["threads"] += int(status["Threads"])
        total["descriptors"] += len(os.listdir(f"/proc/{pid}/fd"))
    return total


async def samples(pids, report, stop):
    began = time.monotonic()
    while not stop.is_set():
        try:
            report.series.append({"minute": round((time.monotonic() - began) / 60, 3), **sample(pids)})
        except (OSError, KeyError):
            return
        try:
            await asyncio.wait_for(stop.wait(), SAMPLE_S)
        except TimeoutError:
            pass


def slope(series, name, after_minutes, of=None):
    """Growth per minute by least squares, of the samples after a time; None for less than a minute. `of` is an index."""
    points = [(s["minute"], s[name] if of is None else s[name][of]) for s in series if s["minute"] >= after_minutes]
    if len(points) < 3 or points[-1][0] - points[0][0] < 1:
        return None
    mean_x, mean_y = (sum(p[axis] for p in points) / len(points) for axis in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return round(sum((x - mean_x) * (y - mean_y) for x, y in points) / spread, 3)


def ask(address):
    with socket.create_connection(address, timeout=LIVE_PATIENCE_S) as connection:
        connection.sendall(LIVE)
        got = b""
        while piece := connection.recv(4096):
            got += piece
    return got.startswith(b"HTTP/1.1 200")


def live(name, address, end, queue):
    """In a child process: repeats a request until the end, each time over a new connection."""
    took_ms, failed = [], 0
    while not end.is_set():
        began = time.monotonic()
        try:
            failed += not ask(address)
        except OSError:
            failed += 1
        took_ms.append((time.monotonic() - began) * 1000)
        end.wait(max(0.0, LIVE_S - (time.monotonic() - began)))
    took_ms.sort()
    at = lambda share: round(took_ms[min(len(took_ms) - 1, int(len(took_ms) * share))], 2) if took_ms else None
    queue.put((name, {"asked": len(took_ms), "failed": failed, "p50_ms": at(0.5), "p99_ms": at(0.99), "max_ms": at(1.0)}))

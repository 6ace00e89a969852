"""Takes a server's log away: its reader leaves, it is not read, or its disk is full. The server goes on and counts."""

import os
import signal
import socket
import subprocess
import tempfile
import time

from common import WAIT_S, Checks, Server, program_and_full

PROGRAM, FULL = program_and_full()
REQUESTS_MAX = 2000 if FULL else 400
# Each choice logs a line.
CHOICES = 64
END_S = 60


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Logger(Server):
    """A server whose standard error is given, with a log of every request."""

    def __init__(self, stderr, *words):
        self.address = f"127.0.0.1:{free_port()}"
        self.directory = tempfile.TemporaryDirectory(prefix="mixfleet-attack-")
        environment = {**os.environ, "XDG_CACHE_HOME": self.directory.name, "RUST_LOG": "trace"}
        words = [PROGRAM, "serve", "--listen", self.address, "--kv-memory", "0.05", "--drain-s", "1", *words]
        self.process = subprocess.Popen(words, stdout=stderr, stderr=stderr, env=environment)
        self.log = []

    def is_ready(self):
        deadline = time.monotonic() + WAIT_S
        while self.alive() and time.monotonic() < deadline:
            if self.ask("GET", "/health", timeout=5)[0] == 200:
                return True
            time.sleep(0.05)
        return False


def attack(checks, what, stderr, lose=lambda: None):
    """Loses a server's log, lets it log much, and asserts that it answers, counts and ends."""
    server = Logger(stderr)
    try:
        if not checks.check(server.is_ready(), f"{what}: the server starts"):
            return
        lose()
        body = {"model": "mixfleet-random", "prompt": "hello", "max_tokens": 1, "ignore_eos": True, "n": CHOICES}
        dropped, asked, status = 0, 0, 200
        while dropped == 0 and asked < REQUESTS_MAX and status == 200:
            status, text = server.ask("POST", "/v1/completions", body, timeout=30)
            asked += 1
            if asked % 10 == 0 and status == 200:
                dropped = server.metric("mixfleet_log_lines_dropped_total")
        status, text = server.ask("POST", "/v1/completions", body, timeout=30)
        checks.check(status == 200, f"{what}: answers after {asked} requests that log ({status} {text[:80]})")
        checks.check(dropped > 0, f"{what}: mixfleet_log_lines_dropped_total is {dropped:.0f}")
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        try:
            code = server.process.wait(END_S)
        except subprocess.TimeoutExpired:
            code = "none"
        checks.check(code == 0, f"{what}: ends by SIGTERM in {time.monotonic() - began:.1f} s with code {code}")
    finally:
        server.stop()


def main():
    checks = Checks()
    reader, writer = os.pipe()
    attack(checks, "the reader leaves", writer, lambda: (os.close(reader), os.close(writer)))
    reader, writer = os.pipe()
    attack(checks, "unread", writer)
    os.close(reader)
    os.close(writer)
    if os.path.exists("/dev/full"):
        with open("/dev/full", "wb") as full:
            attack(checks, "the disk is full", full)
    else:
        print("SKIPPED: attack: no /dev/full", flush=True)
    checks.end()


main()

"""Asks for long answers with log-probabilities and reads nothing: what waits for such clients is bounded."""

import json
import socket
import time

from common import WAIT_S, Checks, Pauses, Server, program_and_full

PROGRAM, FULL = program_and_full()
CLIENTS = 60 if FULL else 16
CHOICES = 16
GROWTH_MB_MAX = 400
WATCH_S = 40 if FULL else 15


def stalled(server, body):
    """A client that sends a request and never reads."""
    host, port = server.address.split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(WAIT_S)
    connection.connect((host, int(port)))
    text = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
    connection.sendall(head.encode() + text)
    return connection


def main():
    checks = Checks()
    server = Server(PROGRAM, "--kv-memory", "0.5", "--requests", "4096")
    reader = Pauses(server, max_tokens=500)
    reader.first.wait(WAIT_S)
    before = server.rss_mb()
    for stream in (True, False):
        body = {"model": "mixfleet-random", "messages": [{"role": "user", "content": "hello"}], "n": CHOICES, "stream": stream,
                "logprobs": True, "top_logprobs": 20, "ignore_eos": True}
        clients = [stalled(server, body) for _ in range(CLIENTS)]
        most, deadline = before, time.monotonic() + WATCH_S
        while time.monotonic() < deadline:
            most = max(most, server.rss_mb())
            time.sleep(0.2)
        kind = "streams" if stream else "whole answers"
        checks.check(most - before < GROWTH_MB_MAX, f"{CLIENTS} x {CHOICES} {kind}: {most - before:.0f} MB more")
        for client in clients:
            client.close()
    checks.check(reader.error is None, f"a client that reads goes on: {reader.tokens} tokens ({reader.error})")
    checks.check(server.ask("GET", "/live")[0] == 200, "the server answers")
    reader.end()
    server.stop()
    checks.end()


main()

"""Closes the sending side after a request: the answer comes whole; a client that has left is noticed all the same."""

import json
import socket
import time

from common import WAIT_S, Checks, Server, program_and_full

PROGRAM, FULL = program_and_full()
ROUNDS = 200 if FULL else 20


def request(body, version="1.1"):
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
    return head.encode() + text


def connect(server):
    host, port = server.address.split(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def half_closed(server, sent):
    """All that the server sends to a client that has closed its sending side."""
    with connect(server) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        received = b""
        while piece := connection.recv(1 << 16):
            received += piece
        return received


def final_response(received):
    """Head and body of the response behind interim ones."""
    while received.startswith(b"HTTP/1.1 100"):
        received = received.partition(b"\r\n\r\n")[2]
    head, _, body = received.partition(b"\r\n\r\n")
    return head, body


def main():
    checks = Checks()
    server = Server(PROGRAM, "--kv-memory", "0.2")
    body = {"model": "mixfleet-random", "prompt": "hello", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    expected = json.loads(server.ask("POST", "/v1/completions", body)[1])["choices"][0]["text"]
    for version in ("1.1", "1.0"):
        whole = 0
        for _ in range(ROUNDS):
            head, text = final_response(half_closed(server, request(body, version)))
            whole += head.startswith(b"HTTP/1.") and b" 200 " in head and json.loads(text)["choices"][0]["text"] == expected
        checks.check(whole == ROUNDS, f"HTTP/{version}: {whole} of {ROUNDS} half-closed clients get their answer")
    streamed = 0
    for _ in range(ROUNDS):
        _, text = final_response(half_closed(server, request({**body, "stream": True})))
        events = [line for line in text.replace(b"\r\n", b"\n").split(b"\n") if line.startswith(b"data: {")]
        said = "".join(json.loads(event[6:])["choices"][0]["text"] for event in events)
        streamed += said == expected and b"data: [DONE]" in text
    checks.check(streamed == ROUNDS, f"{streamed} of {ROUNDS} half-closed clients get their stream")
    for stream in (False, True):
        with connect(server) as connection:
            connection.sendall(request({**body, "max_tokens": 1500, "stream": stream}))
            time.sleep(0.3)
        began = time.monotonic()
        cancelled = 'mixfleet_requests_total{endpoint="completions",outcome="cancelled"}'
        while cancelled not in server.ask("GET", "/metrics")[1] and time.monotonic() - began < 30:
            time.sleep(0.05)
        checks.check(cancelled in server.ask("GET", "/metrics")[1], f"a client that leaves is noticed, stream {stream}")
    checks.check(server.alive(), "the server lives")
    server.stop()
    checks.end()


main()

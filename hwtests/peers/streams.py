"""Concurrent streams from a server, with the arrival time of every token.

One thread and no parsing while tokens come: the client shares its cores with what it measures.
"""

import json
import selectors
import socket
import time

SILENCE_S_MAX = 300


class Stream:
    """One answer of /v1/completions."""

    def __init__(self, address, model, prompt_ids, max_tokens):
        body = {"model": model, "prompt": prompt_ids, "max_tokens": max_tokens}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True}
        data = json.dumps(body).encode()
        # HTTP/1.0: the body ends with the connection, so events are not mixed with chunk sizes
        head = "POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
        self.request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        self.socket = socket.create_connection(address)
        self.parts = []  # (seconds, bytes)
        self.start_s = None

    def send(self):
        self.start_s = time.monotonic()
        self.socket.sendall(self.request)
        self.socket.setblocking(False)

    def receive(self):
        """False at the end."""
        data = self.socket.recv(1 << 16)
        self.parts.append((time.monotonic(), data))
        return bool(data)

    def token_times_s(self):
        """When each token with text had arrived, since the request was sent."""
        head, _, body = b"".join(data for _, data in self.parts).partition(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise RuntimeError(f"the server answered {(head + body)[:500]!r}")
        ends, times_s, at = [], [], -len(head) - 4
        for seconds, data in self.parts:
            at += len(data)
            ends.append((at, seconds))
        position, part = 0, 0
        for event in body.split(b"\n\n")[:-1]:
            position += len(event) + 2
            while ends[part][0] < position:
                part += 1
            payload = event.removeprefix(b"data: ")
            if payload == b"[DONE]":
                return times_s
            document = json.loads(payload)
            if "error" in document:
                raise RuntimeError(f"the server answered {document['error']}")
            if any(choice["text"] for choice in document["choices"]):
                times_s.append(ends[part][1] - self.start_s)
        raise RuntimeError("the stream ended before [DONE]")


def run(address, model, prompts, max_tokens):
    """Streams all prompts at once; returns when each token came, in seconds since the first request.

    `result[stream][token]`; every stream has `max_tokens`.
    """
    streams = [Stream(address, model, prompt, max_tokens) for prompt in prompts]
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            stream.send()
            selector.register(stream.socket, selectors.EVENT_READ, stream)
        while selector.get_map():
            ready = selector.select(timeout=SILENCE_S_MAX)
            if not ready:
                raise RuntimeError(f"the server sent nothing for {SILENCE_S_MAX} s")
            for key, _ in ready:
                if not key.data.receive():
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
    zero_s = streams[0].start_s
    times = [[t + s.start_s - zero_s for t in s.token_times_s()] for s in streams]
    for got in times:
        if len(got) != max_tokens:
            raise RuntimeError(f"only {len(got)} of {max_tokens} tokens came as chunks with text")
    return times


def steady_rate(times):
    """Tokens per second of all streams, from when each has its second token until the first is complete."""
    begin_s = max(stream[1] for stream in times)
    end_s = min(stream[-1] for stream in times)
    rate = 0.0
    for stream in times:
        within = [t for t in stream if begin_s <= t <= end_s]
        if len(within) < 8:
            raise RuntimeError(f"the streams overlap for {len(within)} tokens only")
        rate += (len(within) - 1) / (within[-1] - within[0])
    return rate

"""Clients that mean harm, with a key or without, each in its own way; all are bounded in number and rate."""

import asyncio
import json
import random

from good import exchange, request

MODEL = "mixfleet-random"
PATIENCE_S = 100
# Strangers have addresses of their own, as they would: an address has its share of the connections.
KEYED, KEYLESS = ("127.0.0.2", 0), ("127.0.0.3", 0)
# Connections that are only held: silent ones, and half of a request.
HOLDERS = {"silent": (1010, b"", "127.0.0.4"), "half-open": (1024, b"GET /live HTTP/1.1\r\nhost: localhost\r\nx: ", "127.0.0.5")}

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def completion(**more):
    return {"model": MODEL, "prompt": "x", "max_tokens": 4, **more}


def ballast():
    """7.9 MB of unused small values, which take much more memory as a tree."""
    entries = ",".join(f'"k{number}":[{number},{{}}]' for number in range(370_000))
    return f'{{"model":"{MODEL}","prompt":"x","max_tokens":2,"metadata":{{{entries}}}}}'.encode()


def bodies():
    hostile = lambda path, body, **more: request(path, body, key="hostile-key", **more)
    messages = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": ""}] * 250_000}
    return {
        "ballast": hostile(COMPLETIONS, ballast()),
        "empty messages": hostile(CHAT, json.dumps(messages, separators=(",", ":")).encode()),
        "broken JSON": hostile(COMPLETIONS, b'{"model": "mixfleet-random", "prompt": [[[' + b"[" * 5000),
        "no UTF-8": hostile(COMPLETIONS, b'{"model":"\xff\xfe"}'),
        "huge n": hostile(COMPLETIONS, completion(n=10**9)),
        "many choices": hostile(COMPLETIONS, completion(n=128, max_tokens=2, temperature=1)),
        "huge max_tokens": hostile(COMPLETIONS, completion(max_tokens=10**12)),
        "strange ids": hostile(COMPLETIONS, completion(prompt=[10**6, 2**32 - 1])),
        "foreign host": hostile(COMPLETIONS, completion(), host="rebound.example"),
        "foreign page": hostile(COMPLETIONS, completion(), more="origin: https://evil.example\r\n"),
        "no key": request(COMPLETIONS, completion(), key=None),
        "wrong key": request(COMPLETIONS, completion(), key="guessed"),
        "bad escape": b"GET /v1/models/%ff%zz HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer hostile-key\r\nconnection: close\r\n\r\n",
        "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
        "long headers": b"GET /live HTTP/1.1\r\nhost: localhost\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
    }


LEAVER = request(COMPLETIONS, completion(prompt="leave " * 350_000), key="hostile-key")
STREAM = request(COMPLETIONS, completion(max_tokens=400, ignore_eos=True, stream=True, logprobs=5), key="hostile-key")
METRICS = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n" * 400
SLOW_BODY = request(COMPLETIONS, b" " * 1000, key="hostile-key")[:-990]


async def asks(address, kind, sent):
    source = KEYLESS if "key" in kind else KEYED
    return (await exchange(address, sent, source, PATIENCE_S))[0]


async def held(address, sent, source, seconds, reads=0):
    """Sends, reads a little, holds on, lets go."""
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(*address, local_addr=source, limit=1 << 14)
        try:
            writer.write(sent)
            for _ in range(int(seconds)):
                if reads and not await reader.read(reads):
                    return "closed"
                await asyncio.sleep(1)
            return "held"
        finally:
            writer.transport.abort()


async def one(address, kind, sent, pause):
    match kind:
        case "leaves at once":
            return await held(address, LEAVER, KEYED, 0)
        case "leaves a stream":
            return await held(address, STREAM, KEYED, 1, 64)
        case "slow reader":
            return await held(address, STREAM, KEYED, pause.uniform(5, 20), 16)
        case "never reads":
            return await held(address, METRICS, KEYLESS, pause.uniform(5, 40))
        case "slow body":
            return await held(address, SLOW_BODY, KEYED, pause.uniform(5, 20))
        case _:
            return await asks(address, kind, sent)


async def client(address, number, report, stop):
    """One kind after another, from another one than its neighbour's."""
    pause = random.Random(f"hostile {number}")
    sent = ALL
    kinds = [*sent, "leaves at once", "leaves a stream", "slow reader", "never reads", "slow body"]
    turn = number
    while not stop.is_set():
        kind = kinds[turn % len(kinds)]
        turn += 1
        try:
            outcome = await one(address, kind, sent.get(kind), pause)
        except TimeoutError:
            outcome = "no answer"
        except (OSError, asyncio.IncompleteReadError, ValueError, KeyError, asyncio.LimitOverrunError):
            outcome = "cut off"
        report.count(kind, outcome)
        # large bodies are dear to this machine's other half, the clients
        dear = kind in ("ballast", "empty messages", "leaves at once")
        await asyncio.sleep(pause.uniform(2, 6) if dear else pause.uniform(0.2, 2))


async def holder(address, kind, stop, report):
    """Keeps this many idle connections open, and reopens closed ones."""
    count, sent, ip = HOLDERS[kind]
    open_ones = []
    while not stop.is_set():
        # what the server has closed is at its end
        still = [(reader, writer) for reader, writer in open_ones if not (reader.at_eof() or writer.is_closing())]
        for _, writer in (pair for pair in open_ones if pair not in still):
            writer.close()
        open_ones = still
        for _ in range(min(200, count - len(open_ones))):
            try:
                async with asyncio.timeout(5):
                    reader, writer = await asyncio.open_connection(*address, local_addr=(ip, 0), limit=1 << 10)
                if sent:
                    writer.write(sent)
                open_ones.append((reader, writer))
                report.count(kind, "opened")
            except (OSError, TimeoutError):
                report.count(kind, "not let in")
        await asyncio.sleep(0.5)
    for _, writer in open_ones:
        writer.transport.abort()


ALL = bodies()

"""Clients that mean well: each answer is compared with the one that the same request got alone."""

import asyncio
import json
import random

PATIENCE_S = 120
SOURCE = ("127.0.0.1", 0)
TRIES = 30


def request(path, body, host="127.0.0.1", key="good-key", more=""):
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-type: application/json\r\n"
    key = f"authorization: Bearer {key}\r\n" if key else ""
    return f"{head}{key}{more}content-length: {len(payload)}\r\n\r\n".encode() + payload


async def exchange(address, sent, source=SOURCE, patience=PATIENCE_S):
    """Status, headers and body of one request; raises where there is no whole answer."""
    async with asyncio.timeout(patience):
        reader, writer = await asyncio.open_connection(*address, local_addr=source, limit=1 << 24)
        try:
            async def send():
                # a request refused early may be cut off in the middle of its body
                try:
                    writer.write(sent)
                    await writer.drain()
                except OSError:
                    pass

            sending = asyncio.create_task(send())
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                lines = head.split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
                if headers.get("transfer-encoding") == "chunked":
                    body = b""
                    while size := int((await reader.readuntil(b"\r\n")).strip(), 16):
                        body += (await reader.readexactly(size + 2))[:-2]
                else:
                    body = await reader.readexactly(int(headers["content-length"]))
                return int(lines[0].split(" ")[1]), headers, body
            finally:
                sending.cancel()
        finally:
            writer.close()


async def status(address, path):
    sent = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()
    return (await exchange(address, sent))[0]


def text_of(case, body):
    """The text of an answer; None of a stream that says it failed."""
    if not case["stream"]:
        choice = json.loads(body)["choices"][0]
        return choice["message"]["content"] if case["chat"] else choice["text"]
    text, done = "", False
    for block in body.decode().split("\n\n"):
        data = block.removeprefix("data: ")
        if data == "[DONE]":
            done = True
        elif data:
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(f"in the stream: {event['error']}")
            for choice in event["choices"]:
                text += (choice["delta"].get("content") or "") if case["chat"] else choice["text"]
    if not done:
        raise RuntimeError("the stream ended without [DONE]")
    return text


def make(number):
    chat, stream, tokens = number % 3 == 0, number % 2 == 0, 8 + number % 5 * 6
    words = random.Random(number)
    prompt = " ".join(words.choice(["mixed", "fleet", "prefill", "decode", "memory", "of", "parts"]) for _ in range(8 + number * 7 % 60))
    body = {"model": "mixfleet-random", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
    body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return {"number": number, "chat": chat, "stream": stream, "path": path, "body": body, "by_grammar": number % 5 == 4, "text": None}


def sent(case):
    """The bytes of a case. Its grammar, if it has one, is another one each time, so that it is compiled, and allows the same answer."""
    body = case["body"]
    if case["by_grammar"]:
        body = {name: value for name, value in body.items() if name != "ignore_eos"}
        body |= {"structured_outputs": {"regex": f"[a-z ]{{100}}{random.getrandbits(32)}"}}
    return request(case["path"], body)


async def cases(address):
    """Requests, and what each is answered alone."""
    made = [make(number) for number in range(16)]
    for case in made:
        got, _, body = await exchange(address, sent(case))
        if got != 200:
            raise RuntimeError(f"a request alone was answered {got}: {body[:300]!r}")
        case["text"] = text_of(case, body)
    return made


async def once(address, case, report):
    """One answer: retries for a while if the server says to retry."""
    for _ in range(TRIES):
        try:
            got, headers, body = await exchange(address, sent(case))
            if got in (429, 503):
                report.count("good", got)
                if "retry-after" not in headers:
                    report.broken.append(f"case {case['number']}: {got} without retry-after")
                await asyncio.sleep(min(2.0, float(headers.get("retry-after", 1))))
                continue
            if got != 200:
                report.broken.append(f"case {case['number']}: {got} {body[:200]!r}")
            elif (text := text_of(case, body)) != case["text"]:
                report.wrong.append(f"case {case['number']}: {text!r} is not {case['text']!r}")
            else:
                report.count("good", "whole")
                return
        except (OSError, asyncio.IncompleteReadError, TimeoutError, RuntimeError, ValueError, KeyError) as error:
            report.broken.append(f"case {case['number']}: {type(error).__name__}: {error}")
        report.count("good", "not whole")
        return
    report.count("good", "turned away each time")


async def client(address, cases, number, report, stop):
    pause = random.Random(f"good {number}")
    while not stop.is_set():
        await once(address, pause.choice(cases), report)
        await asyncio.sleep(pause.uniform(0.5, 3))

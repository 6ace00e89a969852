"""Engines that are killed and come back every minute, under load; see ../engines.sh.

Every answer is compared with what it must be, word by word. What is asked and when engines die follow from a seed.
"""

import argparse
import asyncio
import json
import pathlib
import random
import statistics
import subprocess
import sys
import time

import told
from common import Gateway, call, check, free_port

HERE = pathlib.Path(__file__).parent
# Longer than any answer takes, wherever it was cut.
HUNG_S = 45


class Engine:
    def __init__(self, port, pace_ms):
        self.command = [sys.executable, "-B", str(HERE / "told.py"), str(port), str(pace_ms)]
        self.address = f"127.0.0.1:{port}"
        self.start()

    def start(self):
        self.process = subprocess.Popen(self.command)

    def kill(self):
        self.process.kill()
        self.process.wait()


async def ask(address, kind, prompt, tokens):
    """An answer's text, or what went wrong."""
    stream = kind != "whole"
    body = {"model": told.MODEL, "max_tokens": tokens, "stream": stream, "temperature": 0}
    path = "/v1/completions" if kind == "text" else "/v1/chat/completions"
    if kind == "text":
        body["prompt"] = prompt + "\n"
    else:
        body["messages"] = [{"role": "user", "content": prompt}]
    text = json.dumps(body)
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\n\r\n"
        writer.write((head + text).encode())
        await writer.drain()
        raw = (await reader.read(-1)).decode()
    finally:
        writer.close()
    head, _, rest = raw.partition("\r\n\r\n")
    status = int(head.split(" ")[1])
    if status != 200:
        return f"refused with {status}", ""
    if not stream:
        return None, json.loads(rest)["choices"][0]["message"]["content"]
    said, done = "", False
    for line in rest.splitlines():
        if not line.startswith("data: "):
            continue
        if done:
            return None, said + "(more behind the end)"
        if line == "data: [DONE]":
            done = True
            continue
        event = json.loads(line[6:])
        if "error" in event:
            return "ended with: " + event["error"]["message"], ""
        for choice in event["choices"]:
            said += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    # a stream that ends in order without its last event says nothing of what is missing
    return (None, said) if done else (None, said + "(cut without a word)")


class Soak:
    def __init__(self, options):
        self.options, self.chance = options, random.Random(options.seed)
        self.engines = [Engine(free_port(), options.pace_ms) for _ in range(options.engines)]
        self.until = time.monotonic() + 60 * options.minutes
        self.restarts, self.wrong, self.times, self.counts, self.errors = 0, [], [], {}, {}

    async def restart(self):
        """Each engine once a minute, at a moment of its own, so that sometimes several are away."""
        while time.monotonic() < self.until:
            began = time.monotonic()
            for after, engine in sorted((self.chance.uniform(0, 55), at) for at in range(len(self.engines))):
                await asyncio.sleep(max(0, began + after - time.monotonic()))
                if time.monotonic() > self.until:
                    return
                engine = self.engines[engine]
                engine.kill()
                await asyncio.sleep(self.chance.uniform(0.5, 4))
                engine.start()
                self.restarts += 1
            await asyncio.sleep(max(0, began + 60 - time.monotonic()))

    async def client(self, number, address):
        asked = 0
        while time.monotonic() < self.until:
            asked += 1
            kind, tokens = self.chance.choice(["chat", "text", "whole"]), self.chance.randint(5, 300)
            prompt = f"question {number}.{asked} " + "word " * self.chance.randint(0, 200)
            began = time.monotonic()
            try:
                error, text = await asyncio.wait_for(ask(address, kind, prompt, tokens), HUNG_S)
            except asyncio.TimeoutError:
                error, text = "hung", ""
            except (OSError, ValueError, IndexError) as broken:
                error, text = None, f"(no answer: {broken})"
            self.times.append(time.monotonic() - began)
            self.counts[kind] = self.counts.get(kind, 0) + 1
            if error:
                self.errors[error] = self.errors.get(error, 0) + 1
                await asyncio.sleep(0.1)
            elif text != told.answer(prompt, tokens):
                self.wrong.append((kind, prompt[:30], text[-60:]))

    async def run(self, gateway):
        clients = [self.client(number, gateway.address) for number in range(self.options.clients)]
        await asyncio.gather(self.restart(), *clients)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--pace-ms", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lie", action="store_true", help="plants a wrong word, which must be found")
    options = parser.parse_args()
    print(f"seed {options.seed}")
    soak = Soak(options)
    words = ",part=H100-SXM-80GB,shape=llama-3.1-8b,usd=1"
    gateway = Gateway(options.program, [f"vllm:http://{engine.address}{words}" for engine in soak.engines])
    if options.lie:
        true, told.answer = told.answer, lambda prompt, tokens: true(prompt, tokens).replace("a", "b", 1)
    try:
        asyncio.run(soak.run(gateway))
        metrics = call(gateway.address, "GET", "/metrics")[2]
        left = gateway.metric("mixfleet_requests_running")
    finally:
        alive = gateway.process.poll() is None
        gateway.process.kill()
        [engine.kill() for engine in soak.engines]
    faults = sum(float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line.startswith("mixfleet_engine_faults_total"))
    asked, times = sum(soak.counts.values()), sorted(soak.times)
    print(json.dumps({
        "minutes": options.minutes, "engines": options.engines, "restarts": soak.restarts, "clients": options.clients,
        "answers": asked, "by_kind": soak.counts, "engine_faults": faults, "wrong": len(soak.wrong), "errors": soak.errors,
        "took_s": {"p50": round(statistics.median(times), 2), "p99": round(times[int(0.99 * len(times))], 2), "max": round(times[-1], 2)},
    }))
    for wrong in soak.wrong[:5]:
        print("wrong:", wrong)
    if options.lie:
        check(len(soak.wrong) > asked / 2, "a planted wrong word is found")
        return
    check(alive and left == 0, "the gateway lives, and no abandoned request is in progress")
    check(soak.restarts >= options.engines * int(options.minutes - 1), f"{soak.restarts} restarts")
    check(faults > 0, f"{faults:.0f} requests met an engine that died")
    check(not soak.wrong, f"0 wrong of {asked}")
    check("hung" not in soak.errors, "0 hung")
    check(sum(soak.errors.values()) <= asked / 1000, f"answers refused with a clear error: {soak.errors or 0}")


if __name__ == "__main__":
    main()

"""A request that kills its engine is sent again and again, beside others that are innocent, and engines die for other reasons."""

import asyncio
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import threading
import time

sys.path.append(str(pathlib.Path(__file__).parent.parent / "engines"))
import told
from common import WAIT_S, Checks, Server, program_and_full

ENGINES, RETRIES, INNOCENTS = 4, 20, 12
TOKENS = 120
# Requests that kill their engine at once, and behind some tokens.
AT_ONCE, LATER = "poison", "venom"


def be_an_engine(port):
    """Serves as told.py does, and exits on a poisoned prompt."""
    word = told.word

    def deadly(prompt, number):
        if AT_ONCE in prompt or (LATER in prompt and number % 10 == 3):
            os._exit(1)
        return word(prompt, number)

    told.word = deadly
    asyncio.run(told.main(port, 0.01))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Engine:
    def __init__(self):
        self.port = free_port()
        self.start()

    def start(self):
        self.process = subprocess.Popen([sys.executable, "-B", __file__, "--engine", str(self.port)])

    def is_alive(self):
        return self.process.poll() is None

    def stop(self):
        self.process.kill()
        self.process.wait()


class Fleet:
    """Engines behind one gateway."""

    def __init__(self, program):
        self.engines = [Engine() for _ in range(ENGINES)]
        words = ",part=H100-SXM-80GB,shape=llama-3.1-8b,usd=1"
        self.gateway = Server(program, *[f"--worker-engine=vllm:http://127.0.0.1:{engine.port}{words}" for engine in self.engines])
        until = time.monotonic() + WAIT_S
        while self.gateway.metric("mixfleet_instances") < ENGINES and time.monotonic() < until:
            time.sleep(0.1)

    def dead(self):
        return sum(not engine.is_alive() for engine in self.engines)

    def stop(self):
        self.gateway.stop()
        for engine in self.engines:
            engine.stop()


def body_of(prompt, kind, tokens=TOKENS):
    body = {"model": told.MODEL, "max_tokens": tokens, "stream": kind != "whole", "temperature": 0}
    if kind == "text":
        return "/v1/completions", {**body, "prompt": prompt + "\n"}
    return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": prompt}]}


def text_of(document):
    """The text of an answer, streamed or not; an error's message."""
    if not document.startswith("data: "):
        answer = json.loads(document)
        return answer["error"]["message"] if "error" in answer else answer["choices"][0]["message"]["content"]
    text = ""
    for line in document.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            return event["error"]["message"]
        text += "".join(choice.get("text") or (choice.get("delta") or {}).get("content") or "" for choice in event["choices"])
    return text


class Innocent(threading.Thread):
    """Asks one thing after the other, and keeps what was not answered as it must be."""

    def __init__(self, fleet, number, questions):
        super().__init__(daemon=True)
        self.fleet, self.number, self.questions, self.wrong, self.answered = fleet, number, questions, [], 0
        self.chance = random.Random(number)
        self.start()

    def run(self):
        for question in range(self.questions):
            prompt, kind = f"innocent {self.number}.{question}", self.chance.choice(["chat", "text", "whole"])
            status, document = self.fleet.gateway.ask("POST", *body_of(prompt, kind))
            try:
                said = text_of(document) if status else document
            except (ValueError, KeyError) as error:
                said = f"{error}: {document[:80]}"
            if status == 200 and said == told.answer(prompt, TOKENS):
                self.answered += 1
            else:
                self.wrong.append((prompt, kind, status, said[-160:]))


def innocents_of(fleet, questions):
    return [Innocent(fleet, number, questions) for number in range(INNOCENTS)]


def check_innocents(checks, innocents, what):
    for innocent in innocents:
        innocent.join(WAIT_S)
    wrong = [one for innocent in innocents for one in innocent.wrong]
    answered = sum(innocent.answered for innocent in innocents)
    expected = sum(innocent.questions for innocent in innocents)
    checks.check(not wrong and answered == expected, f"{what}: {answered} of {expected} innocent requests are answered {wrong[:3]}")


def attack(checks, program, prompt, dead_max):
    """Sends one deadly request again and again, in all its spellings, beside innocent ones."""
    fleet = Fleet(program)
    innocents = innocents_of(fleet, 3)
    time.sleep(0.5)
    last = (0, "")
    for retry in range(RETRIES):
        path, body = body_of(prompt, "chat")
        body = {**body, "user": f"u{retry}", "seed": retry, "stream": bool(retry % 3)}
        last = fleet.gateway.ask("POST", path, json.dumps(body, indent=retry % 2 or None, sort_keys=retry % 2 == 0))
    checks.check(fleet.dead() <= dead_max, f"{prompt}: {fleet.dead()} of {ENGINES} engines died of {RETRIES} tries")
    check_innocents(checks, innocents, prompt)
    status, document = last
    says = "engines ended while they worked on this request" in document and "request_quarantined" in document
    checks.check(status >= 500 and says, f"{prompt}: the last try is told why: {status} {document[:150]}")
    status, document = fleet.gateway.ask("POST", *body_of("after it", "chat"))
    checks.check(status == 200 and text_of(document) == told.answer("after it", TOKENS), f"{prompt}: others are answered afterwards")
    fleet.stop()


def kill_unrelated(checks, program, kills):
    """Engines that die while they answer what is not at fault: nothing is lost."""
    fleet = Fleet(program)
    innocents = innocents_of(fleet, kills)
    chance, killed = random.Random(7), 0
    while killed < kills and any(innocent.is_alive() for innocent in innocents):
        time.sleep(chance.uniform(1.4, 2.2))
        engine = chance.choice(fleet.engines)
        engine.stop()
        killed += 1
        time.sleep(chance.uniform(0.2, 0.6))
        engine.start()
    check_innocents(checks, innocents, f"{killed} kills of engines")
    checks.check(killed >= kills // 2, f"{killed} engines were killed under load")
    fleet.stop()


def main():
    program, full = program_and_full()
    checks = Checks()
    attack(checks, program, AT_ONCE, 2)
    attack(checks, program, LATER, 3)
    kill_unrelated(checks, program, 25 if full else 6)
    checks.end()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        be_an_engine(int(sys.argv[2]))
    else:
        main()

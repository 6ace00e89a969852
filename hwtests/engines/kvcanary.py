"""Damages KV between two vLLM servers behind `mixfleet serve`, which must notice; see ../engines.sh.

The fault is planted in the engine that pulls (kv_faults/sitecustomize.py). KVCANARY_CLEAN is the number of canaries
without a fault (default 300), KVCANARY_DTYPE the engines' dtype (default float32).
"""

import json
import os
import pathlib
import random
import statistics
import sys
import time

from common import Gateway, call, check
from vllm import Engine

FAULTS = ["flip", "truncate", "stale", "other", "swap"]
CLEAN = int(os.environ.get("KVCANARY_CLEAN", "300"))
DTYPE = os.environ.get("KVCANARY_DTYPE", "float32")
# Times of vLLM are predicted, so that nothing is measured before the first request.
PART = "part=H100-SXM-80GB,shape=llama-3.1-8b"


class Faults:
    def __init__(self, file):
        self.file, self.log = pathlib.Path(file), pathlib.Path(str(file) + ".done")
        self.log.write_text("")
        self.set("")

    def set(self, fault):
        self.file.write_text(fault)

    def count(self):
        return len(self.log.read_text().splitlines())


class Pair:
    """A server in front of both engines, which knows nothing of them yet."""

    def __init__(self, program, engines, source):
        names = [f"vllm:http://{engine.address}={role},{PART},kv-events=off" for engine, role in zip(engines, ["prefill", "decode"])]
        self.gateway, self.engines, self.source, self.asked, self.wrong = Gateway(program, names, "--kv-canary=1"), engines, source, 0, 0
        check(self.gateway.wait_for("mixfleet_instances ", 2), "both engines serve")

    def canaries(self):
        return self.gateway.metric("mixfleet_canaries_total")

    def compared(self):
        lines = call(self.gateway.address, "GET", "/metrics")[2].splitlines()
        lines = [line for line in lines if line.startswith("mixfleet_canaries_total{") and "inconclusive" not in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def quarantined(self):
        return self.gateway.metric("mixfleet_canary_quarantines_total") > 0

    def ask(self, waits=True):
        """A request, and its canary. Its answer is compared with that of one engine, under a salt of its own."""
        before = self.canaries()
        self.asked += 1
        prompt = [self.source.randrange(5, 500) for _ in range(self.source.randrange(40, 600))]
        body = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answers = []
        for address, more in ((self.gateway.address, {}), (self.engines[0].address, {"cache_salt": f"alone {self.asked}"})):
            status, _, text = call(address, "POST", "/v1/completions", body | more, 300)
            if status != 200:
                sys.exit(f"a request is not answered: {status} {text}")
            answers.append(json.loads(text)["choices"][0]["token_ids"])
        self.wrong += answers[0] != answers[1]
        until = time.monotonic() + 60
        # a canary is a copy of the request before
        while waits and self.asked > 1 and self.canaries() == before and time.monotonic() < until:
            time.sleep(0.01)

    def prove(self):
        while self.gateway.metric("mixfleet_canary_shares{") == 0 and self.asked < 100:
            self.ask()
        check(self.gateway.metric("mixfleet_canary_shares{") == 1, f"without a fault they are proven after {self.asked} requests")

    def stop(self):
        self.gateway.stop()
        # what damaged transfers left in prefix caches is no part of what comes next
        for engine in self.engines:
            call(engine.address, "POST", "/reset_prefix_cache")


def main(program, model, work):
    faults, source = Faults(f"{work}/kv-fault"), random.Random(5)
    first = Engine(model, f"{work}/canary-1.log", hands_off=True, dtype=DTYPE)
    more = {"PYTHONPATH": str(pathlib.Path(__file__).parent / "kv_faults"), "KV_FAULT_FILE": str(faults.file.absolute())}
    second = Engine(model, f"{work}/canary-2.log", hands_off=True, dtype=DTYPE, environment=more)
    engines = [first, second]
    try:
        for engine in engines:
            engine.wait()
        run(program, engines, faults, source)
    finally:
        for engine in engines:
            engine.kill()


def run(program, engines, faults, source):
    print(f"        two vLLM engines, {DTYPE}", flush=True)
    began = time.perf_counter()
    clean = Pair(program, engines, source)
    clean.prove()
    while clean.compared() < CLEAN and not clean.quarantined() and clean.asked < 2 * CLEAN:
        clean.ask()
    drift = clean.gateway.metric("mixfleet_canary_drift_nats")
    took = (time.perf_counter() - began) / clean.asked
    print(f"        learned drift {drift:.6f} nats (median); {took:.2f} s for a request, its comparison and its canary", flush=True)
    check(faults.count() == 0 and clean.wrong == 0, f"without a fault {clean.wrong} of {clean.asked} answers differ from one engine's")
    check(not clean.quarantined(), f"{clean.compared():.0f} canaries without a fault raise no alarm")
    tokens = clean.gateway.metric("mixfleet_canary_tokens_total")
    check(tokens > 0, f"their cost is shown: {tokens / clean.compared():.0f} tokens a canary")
    clean.stop()
    found_new, found_proven = [], []
    for fault in FAULTS:
        new = Pair(program, engines, source)
        # the transfer before one is what `stale` and `other` are made of
        new.ask()
        new.ask()
        before = faults.count()
        faults.set(fault)
        while new.asked < 100 and not new.quarantined():
            new.ask()
        found_new.append(new.asked - 2)
        check(faults.count() > before, f"{fault}: {faults.count() - before} transfers were damaged")
        check(new.quarantined(), f"{fault}, a new pair: found after {found_new[-1]} requests")
        check(new.wrong == 0, f"{fault}, a new pair: no client has a wrong answer")
        faults.set("")
        new.stop()
        pair = Pair(program, engines, source)
        pair.prove()
        began = pair.compared()
        faults.set(fault)
        while pair.compared() < began + 100 and not pair.quarantined():
            pair.ask()
        found_proven.append(pair.compared() - began)
        check(pair.quarantined(), f"{fault}, a proven pair: found after {found_proven[-1]:.0f} canaries, {pair.wrong} wrong answers before")
        wrong = pair.wrong
        for _ in range(5):
            pair.ask(waits=False)
        check(pair.wrong == wrong, f"{fault}: 5 answers behind it are one engine's")
        faults.set("")
        pair.stop()
    print(f"        requests until a new pair is quarantined: {found_new}; canaries of a proven one: {found_proven}"
          f" (median {statistics.median(found_proven):.0f})", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

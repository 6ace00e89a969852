"""Damages KV between two engines that check nothing: a canary finds it, before clients do where the pair is new.

The engines are none: KV is a hash for each block and layer, and log-probabilities follow from it, with drift. They
answer as two vLLM with a connector do. Both have a prefix cache, in which damaged KV stays damaged.
"""

import json
import math
import random
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from common import Checks, Server, program_and_full

BLOCKS, LAYERS, VOCABULARY, RANKED = 8, 4, 24, 5
FAULTS = ["flip", "truncate", "stale", "other prompt", "swapped layers"]
PART = "part=H100-SXM-80GB,shape=llama-3.1-8b"
DRIFT = 0.02


class World:
    """What both engines share: KV that waits to be pulled, and what happens to it."""

    def __init__(self, seed):
        self.lock, self.random = threading.Lock(), random.Random(seed)
        self.kept, self.before, self.count, self.fault = {}, None, 0, None

    def keep(self, kv):
        with self.lock:
            self.count += 1
            self.kept[self.count] = kv
            return self.count

    def pull(self, number):
        with self.lock:
            kv = list(self.kept.pop(number))
            before, self.before = self.before or kv_of("another prompt"), kv
            return damaged(self.fault, kv, before)


def kv_of(prompt):
    source = random.Random(f"{prompt}")
    return [source.getrandbits(48) for _ in range(BLOCKS * LAYERS)]


def damaged(fault, kv, before):
    kv = list(kv)
    if fault == "flip":
        for layer in range(LAYERS):
            kv[2 * LAYERS + layer] ^= 1 << 40
    elif fault == "truncate":
        kv[6 * LAYERS:] = [0] * (2 * LAYERS)
    elif fault == "stale":
        kv[3 * LAYERS:5 * LAYERS] = before[3 * LAYERS:5 * LAYERS]
    elif fault == "other prompt":
        kv = list(before)
    elif fault == "swapped layers":
        for block in range(BLOCKS):
            at = block * LAYERS
            kv[at], kv[at + 1] = kv[at + 1], kv[at]
    return kv


def logprobs(kv, number, noise=None):
    """Of an answer's token with this number: each block and layer adds a vector of its own."""
    logits = [0.0] * VOCABULARY
    for at, value in enumerate(kv):
        source = random.Random(value * 1000 + at * 10 + number)
        for token in range(VOCABULARY):
            logits[token] += source.gauss(0, 3.0 / math.sqrt(len(kv)))
    if noise:
        # prompts differ in how far apart two engines are
        scale = DRIFT * math.exp(noise.gauss(0, 0.5))
        logits = [logit + noise.gauss(0, scale) for logit in logits]
    most = max(logits)
    total = most + math.log(sum(math.exp(logit - most) for logit in logits))
    return [logit - total for logit in logits]


def said(kv, tokens):
    chances = [logprobs(kv, number) for number in range(tokens)]
    return " ".join(f"w{max(range(VOCABULARY), key=one.__getitem__)}" for one in chances)


class Fake:
    """An engine that is none."""

    def __init__(self, world):
        self.cache = {}

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # else each answer waits for an acknowledgement of its head
            disable_nagle_algorithm = True

            def log_message(self, *_):
                pass

            def say(self, document, status=200):
                text = (document if isinstance(document, str) else json.dumps(document)).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def do_GET(self):
                facts = 'vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="1000"} 1.0\n'
                load = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:nixl_xfer_time_seconds_count 0\n"
                known = {
                    "/health": {}, "/version": {"version": "0.32.0"}, "/metrics": facts + load,
                    "/v1/models": {"object": "list", "data": [{"id": "m", "max_model_len": 4096}]},
                }
                self.say(known.get(self.path, {}), 200 if self.path in known else 404)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if self.path != "/v1/completions":
                    self.say({}, 404)
                elif body.get("priority"):
                    self.say({"error": {"message": "Priority scheduling is not enabled."}}, 400)
                else:
                    self.say(fake.answer(world, body))

        fake = self
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, world, body):
        way = body.get("kv_transfer_params") or {}
        key = (body.get("cache_salt"), body["prompt"])
        if way.get("do_remote_prefill"):
            self.cache[key] = world.pull(way["remote_block_ids"][0][0])
        kv = self.cache.setdefault(key, kv_of(body["prompt"]))
        if len(self.cache) > 2000:
            self.cache.clear()
        tokens = body["max_tokens"]
        choice = {"index": 0, "text": said(kv, tokens) if not body.get("logprobs") else "", "finish_reason": "length"}
        if body.get("logprobs"):
            noise = random.Random(world.random.getrandbits(64))
            rows = [logprobs(kv, number, noise) for number in range(tokens)]
            order = [sorted(range(VOCABULARY), key=lambda token: -row[token])[:RANKED] for row in rows]
            choice["logprobs"] = {
                "tokens": [f"token_id:{best[0]}" for best in order],
                "token_logprobs": [row[best[0]] for row, best in zip(rows, order)],
                "top_logprobs": [{f"token_id:{token}": row[token] for token in best} for row, best in zip(rows, order)],
            }
        usage = {"prompt_tokens": BLOCKS * 16, "completion_tokens": tokens, "total_tokens": BLOCKS * 16 + tokens}
        document = {"id": "a", "created": 5, "model": "m", "choices": [choice], "usage": usage}
        if way.get("do_remote_decode"):
            document["kv_transfer_params"] = {
                "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[world.keep(kv)]],
                "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "h", "remote_port": 1,
            }
        return document

    def stop(self):
        self.server.shutdown()
        self.server.server_close()


class Pair:
    """A server in front of an engine for prompts and one for answers."""

    def __init__(self, program, seed, *words):
        self.world = World(seed)
        self.engines = [Fake(self.world), Fake(self.world)]
        names = [f"--worker-engine=vllm:{engine.url}={role},{PART}" for engine, role in zip(self.engines, ["prefill", "decode"])]
        self.server = Server(program, *names, *words)
        self.asked, self.wrong = 0, 0

    def canaries(self):
        return self.server.metric("mixfleet_canaries_total")

    def quarantined(self):
        return self.server.metric("mixfleet_canary_quarantines_total") > 0

    def ask(self, wait):
        """A request, and then its canary, if `wait` says that there is one."""
        before = self.canaries() if wait else 0
        self.asked += 1
        prompt = f"prompt {self.asked} of {id(self)}"
        status, text = self.server.ask("POST", "/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 4})
        is_right = status == 200 and json.loads(text)["choices"][0]["text"] == said(kv_of(prompt), 4)
        self.wrong += not is_right
        until = time.monotonic() + 5
        # a canary is a copy of the request before
        while wait and self.asked > 1 and self.canaries() == before and time.monotonic() < until:
            time.sleep(0.005)

    def prove(self, most=100):
        """Sends requests until the two engines share them; how many it took, or None."""
        for count in range(1, most + 1):
            self.ask(True)
            if self.server.metric("mixfleet_canary_shares") > 0:
                return count
        return None

    def stop(self):
        self.server.stop()
        [engine.stop() for engine in self.engines]


def has_canaries(program):
    words = [program, "serve", "--kv-canary=1", f"--worker-engine=vllm:http://127.0.0.1:1,{PART}", "--dry-run"]
    return subprocess.run(words, capture_output=True).returncode == 0


def main():
    program, is_full = program_and_full()
    checks = Checks()
    # each divided request of a proven pair is a canary, so that these take seconds; an old build knows none
    knows = has_canaries(program)
    words = ["--kv-canary=1"] if knows else []
    for seed, fault in enumerate(FAULTS):
        new = Pair(program, seed, *words)
        new.world.fault = fault
        while new.asked < 100 and not new.quarantined():
            new.ask(knows)
        checks.check(new.wrong == 0, f"{fault}, a new pair: {new.wrong} of {new.asked} answers are wrong")
        checks.check(new.quarantined(), f"{fault}, a new pair: found after {new.asked} requests")
        new.stop()
    for seed, fault in enumerate(FAULTS):
        pair = Pair(program, seed, *words)
        took = pair.prove()
        if not checks.check(took is not None, f"a pair without a fault is proven after {took} requests"):
            pair.stop()
            continue
        began, pair.world.fault = pair.canaries(), fault
        while pair.canaries() < began + 100 and not pair.quarantined():
            pair.ask(True)
        found = pair.canaries() - began
        what = f"{fault}, a proven pair: found after {found:.0f} canaries, {pair.wrong} wrong answers before that"
        checks.check(pair.quarantined(), what)
        # the pair is suspended, and clients have one engine's answers
        wrong = pair.wrong
        [pair.ask(False) for _ in range(10)]
        checks.check(pair.wrong == wrong, f"{fault}: 10 answers behind it are right")
        pair.stop()
    clean, canaries = Pair(program, 99, *words), 10_000 if is_full else 300
    while knows and clean.canaries() < canaries and not clean.quarantined():
        clean.ask(True)
    checks.check(clean.canaries() >= canaries, f"{clean.canaries():.0f} canaries without a fault were compared")
    checks.check(not clean.quarantined() and clean.wrong == 0, f"they raise no alarm; drift {DRIFT} nats")
    clean.stop()
    checks.end()


if __name__ == "__main__":
    main()

"""KV between mixfleet and vLLM in float32: one computes a prompt, the other one answers, with a bit flipped on the way and
without; see ../engines.sh. It runs in vLLM's own environment.
"""

import json
import pathlib
import random
import re
import socket
import statistics
import sys
import threading
import time

from common import Gateway, call, check
# the file beside this one
from vllm import BLOCK, Engine, check_quietly

TOKENS = 24
# between the best token and the next one, so that the order of sums in two engines decides nothing
MARGIN = 2e-3
CLOSE = 1e-3
EACH = 8
MAGIC = b"mxfKVblk"
WAYS = (("mixfleet computes the prompt and vLLM answers", "by_mixfleet", "by_vllm"),
        ("vLLM computes the prompt and mixfleet answers", "by_vllm", "by_mixfleet"))


class Bent:
    """Relays bytes between a client and a port, and flips one bit of KV on request: of the exponent of a
    number in the second frame that goes that way."""

    def __init__(self):
        self.port, self.armed = None, None
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            near, _ = self.listener.accept()
            try:
                far = socket.create_connection(("127.0.0.1", self.port))
            except OSError:
                near.close()
                continue
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, sink, way in ((near, far, "to mixfleet"), (far, near, "from mixfleet")):
                threading.Thread(target=self.carry, args=(source, sink, way), daemon=True).start()

    def carry(self, source, sink, way):
        passed, tail, target = 0, b"", None
        try:
            while data := source.recv(1 << 16):
                if self.armed == way:
                    found = (tail + data).find(MAGIC)
                    if target is None and found >= 0:
                        # the trailer of the first frame; numbers are aligned as it is
                        target = passed - len(tail) + found + 176 + 40_003
                    if target is not None and passed <= target < passed + len(data):
                        data = bytearray(data)
                        data[target - passed] ^= 0x40
                        self.armed = None
                    tail = bytes(data[-7:])
                passed += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass


class Pair:
    """A mixfleet and a vLLM with one model, which exchange KV."""

    def __init__(self, program, model, folder, name):
        self.way, self.model = Bent(), pathlib.Path(model)
        connector = {"kv_connector": "MixfleetConnector", "kv_connector_module_path": "mixfleet_connector",
                     "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                     "kv_connector_extra_config": {"urls": [self.way.url], "timeout_s": 10}}
        self.log = f"{folder}/{name}.log"
        self.vllm = Engine(model, self.log, connector=connector, context=1024)
        self.mixfleet = Gateway(program, [], "--model", model, "--name", "m", "--device", "cpu", "--activations", "f32",
                                "--kv-dtype", "f32", "--kv-memory", "0.25", "--kv-dram", "0.25", "--kv-exchange", self.way.url)
        self.way.port = int(self.mixfleet.address.rsplit(":", 1)[1])
        self.words = json.loads((self.model / "tokenizer.json").read_text())["model"]["vocab"]
        self.source = random.Random(30)

    def stop(self):
        self.mixfleet.stop()
        self.vllm.kill()

    def prompt(self, length):
        return [self.source.randrange(5, 500) for _ in range(length)]

    def ask(self, address, prompt, tokens=TOKENS, params=None):
        body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "logprobs": 2}
        if address == self.vllm.address:
            body["return_tokens_as_token_ids"] = True
        if params is not None:
            body["kv_transfer_params"] = params
        status, _, text = call(address, "POST", "/v1/completions", body, 120)
        check_quietly(status == 200, f"a completion is not answered: {status} {text}")
        return json.loads(text)

    def by_vllm(self, prompt, tokens=TOKENS, params=None):
        call(self.vllm.address, "POST", "/reset_prefix_cache")
        return self.ask(self.vllm.address, prompt, tokens, params)

    def by_mixfleet(self, prompt, tokens=TOKENS, params=None):
        return self.ask(self.mixfleet.address, prompt, tokens, params)

    def through(self, first, second, prompt):
        """The answer of one engine to a prompt that the other one computed."""
        told = first(prompt, 1, {"do_remote_decode": True})["kv_transfer_params"]
        whole = len(prompt) // BLOCK * BLOCK
        check_quietly(told["do_remote_prefill"] and told["remote_num_tokens"] == whole, f"it is told where KV is: {told}")
        return second(prompt, TOKENS, told)

    def lines(self, text):
        return [line for line in pathlib.Path(self.log).read_text().splitlines() if text in line]


def logprobs(answer):
    return answer["choices"][0]["logprobs"]


def margin(answer):
    """The least difference between the best token and the next one."""
    return min(max(top.values()) - min(top.values()) for top in logprobs(answer)["top_logprobs"])


def ids(pair, answer):
    """The ids of an answer's tokens."""
    named = logprobs(answer)["tokens"]
    return [int(word[9:]) if word.startswith("token_id:") else pair.words.get(word) for word in named]


def external(pair):
    return pair.vllm.metric("vllm:external_prefix_cache_hits_total")


def refused(pair):
    return pair.mixfleet.metric('mixfleet_kv_exchange_blocks_total{direction="in",outcome="refused"}')


def times(pair, what):
    """Bytes and milliseconds of transfers by the connector's log."""
    found = [re.search(r"(\d+) bytes in ([\d.]+) ms", line) for line in pair.lines(what)]
    return [(int(one[1]), float(one[2])) for one in found if one]


def cached(answer):
    return (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def run(pair):
    ways = {what: (getattr(pair, first), getattr(pair, second)) for what, first, second in WAYS}
    prompts = []
    while len(prompts) < 2 * EACH + 4:
        prompt = pair.prompt(pair.source.randrange(70, 700))
        alone = pair.by_vllm(prompt)
        if margin(alone) >= MARGIN:
            prompts.append((prompt, ids(pair, alone)))
    for what, (first, second) in ways.items():
        right, hits, used, lengths = 0, external(pair), 0, 0
        for _ in range(EACH):
            prompt, alone = prompts.pop()
            answer = pair.through(first, second, prompt)
            right += ids(pair, answer) == alone
            used += cached(answer)
            lengths += (len(prompt) - 1) // BLOCK * BLOCK
        used = external(pair) - hits if second == pair.by_vllm else used
        check(right == EACH, f"{what}: {right} of {EACH} answers have the {TOKENS} tokens of one engine's")
        check(used == lengths, f"  {used:.0f} of {lengths} tokens of their prompts were not computed again")
    check(refused(pair) == 0 and not pair.lines("is computed here"), "no KV was refused")
    for what, (first, second) in zip(("came from", "went to"), ways.values()):
        for _ in range(5):
            pair.through(first, second, pair.prompt(900))
        sizes, took = zip(*times(pair, what)[-5:])
        print(f"        KV of 900 tokens {what} mixfleet: {sizes[0] / 1e6:.2f} MB in {statistics.median(took):.1f} ms "
              f"(median of 5, {min(took):.1f} to {max(took):.1f})", flush=True)
    for way, (what, (first, second)) in zip(("from mixfleet", "to mixfleet"), ways.items()):
        prompt, alone = prompts.pop()
        while len(prompt) < 200:
            prompt, alone = prompts.pop()
        pair.way.armed = way
        answer = pair.through(first, second, prompt)
        check(ids(pair, answer) == alone and pair.way.armed is None, f"{what}, a bit is flipped on the way: the right tokens")
        if second == pair.by_vllm:
            said = [line.split("] ")[-1] for line in pair.lines("does not match its checksum")]
            check(len(said) == 1 and "is computed here from block 1 on" in said[0], f"  vLLM noticed: {said}")
        else:
            check(refused(pair) == 1 and cached(answer) < (len(prompt) - 1) // BLOCK * BLOCK, f"  mixfleet noticed "
                  f"({refused(pair):.0f} block refused), and computed all but {cached(answer)} of {len(prompt)} tokens")
    prompt = pair.prompt(300)
    told = pair.by_mixfleet(prompt, 1, {"do_remote_decode": True})["kv_transfer_params"]
    alone = ids(pair, pair.by_vllm(prompt))
    pair.mixfleet.stop()
    answer = pair.by_vllm(prompt, TOKENS, told)
    check(ids(pair, answer) == alone, "mixfleet ends before its KV is read: vLLM computes the prompt")
    for _ in range(2):
        pair.by_vllm(pair.prompt(100), 1, {"do_remote_decode": True})
    check(len(pair.lines("is not taken by")) == 2, "and before KV is written: vLLM answers, and leaves it alone for a while")


def run_divided(pair, program):
    """A gateway has one compute the prompt and the other one answer."""
    for prefill, decode in (("mixfleet", "vllm"), ("vllm", "mixfleet")):
        names = [f"{kind}:http://{getattr(pair, kind).address}={role}" for kind, role in ((prefill, "prefill"), (decode, "decode"))]
        gateway = Gateway(program, names)
        try:
            check(gateway.wait_for("mixfleet_instances ", 2), f"{prefill} for prompts and {decode} for answers stand behind a gateway")
            right, hits, used, lengths, asked = 0, external(pair), 0, 0, 0
            while asked < EACH:
                prompt = pair.prompt(pair.source.randrange(70, 700))
                alone = pair.by_vllm(prompt)
                if margin(alone) < MARGIN:
                    continue
                call(pair.vllm.address, "POST", "/reset_prefix_cache")
                body = {"model": "m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 2}
                if decode == "vllm":
                    body["return_tokens_as_token_ids"] = True
                status, _, text = call(gateway.address, "POST", "/v1/completions", body, 120)
                check_quietly(status == 200, f"a completion is not answered: {status} {text}")
                answer = json.loads(text)
                right, used, asked = right + (ids(pair, answer) == ids(pair, alone)), used + cached(answer), asked + 1
                lengths += (len(prompt) - 1) // BLOCK * BLOCK
            used = external(pair) - hits if decode == "vllm" else used
            check(right == EACH, f"  {right} of {EACH} divided answers have the {TOKENS} tokens of one engine's")
            count = gateway.metric("mixfleet_hand_offs_total")
            check(count == EACH and used == lengths, f"  {count:.0f} began with the other's KV: {used:.0f} of {lengths} tokens")
        finally:
            gateway.stop()


def run_close(pair):
    """A model whose tokens are close together: log-probabilities are compared."""
    for what, first, second in WAYS:
        first, second = getattr(pair, first), getattr(pair, second)
        worst, ties, positions, hits, used = 0.0, 0, 0, external(pair), 0
        for length in (80, 200, 333, 500):
            prompt = pair.prompt(length)
            alone = pair.by_vllm(prompt)
            answer = pair.through(first, second, prompt)
            used += cached(answer)
            one, two = logprobs(alone), logprobs(answer)
            for at in range(TOKENS):
                top = one["top_logprobs"][at].values()
                mine, its = one["token_logprobs"][at], two["token_logprobs"][at]
                worst, positions = max(worst, abs(mine - its)), positions + 1
                if max(top) - min(top) < CLOSE:
                    # the other token may be drawn, and then all that follows is another text
                    ties += 1
                    break
        used = external(pair) - hits if second == pair.by_vllm else used
        check(worst < CLOSE and used > 0, f"{what}, {pair.model.name}: log-probabilities differ by {worst:.1e} at most, over "
              f"{positions} tokens of 4 answers ({ties} end in a tie), for which {used:.0f} tokens were not computed again")


def main(program, model, close_model, folder):
    for name, its, steps in (("vllm-kv", model, run), ("vllm-close", close_model, run_close)):
        pair = Pair(program, its, folder, name)
        try:
            pair.vllm.wait()
            if steps is run:
                run_divided(pair, program)
            steps(pair)
        except BaseException:
            print("".join(pair.mixfleet.log[-20:]), file=sys.stderr)
            print("".join(pathlib.Path(pair.log).read_text()[-3000:]), file=sys.stderr)
            raise
        finally:
            pair.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])

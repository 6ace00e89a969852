"""A real Envoy in front of model servers that are none, with `mixfleet epp` as its picker; see ../epp.sh."""

import concurrent.futures
import hashlib
import json
import sys
import time

from chaos import restarts, two_pickers
from envoy import Envoy
from picker import Answered, Picker, Server, Setup

sys.path.insert(0, "hwtests/engines")
from common import check  # noqa: E402


def chat(text="What is a fleet?", **more):
    return {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 12, **more}


def until(holds, limit_s=20):
    end = time.monotonic() + limit_s
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


class Bench:
    def __init__(self, setup, program, envoy):
        # unlike ones: the first computes prompts three times as fast
        self.servers = [setup.add(Server(token_ms=ms, pace_ms=4)) for ms in (0.02, 0.06, 0.06)]
        self.picker = setup.add(Picker(program, self.servers, objectives={"batch": -1}))
        addresses = [server.address for server in self.servers]
        fronts = {"picked": "picker", "subset": ("picker", addresses[2:]), "foreign": ("picker", ["10.9.9.9:1"]),
                  "plain": "round_robin"}
        self.envoy = setup.add(Envoy(envoy, fronts, addresses, self.picker.listen, self.picker.health))
        self.fronts = self.envoy.fronts

    def ask(self, front, body, path="/v1/chat/completions", **headers):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return Answered(self.fronts[front], path, body, named)


def placements(bench):
    answers = [bench.ask("picked", chat(f"question {number}")) for number in range(8)]
    places = [(answer.headers["x-served-by"], bench.picker.placement(answer.headers["x-request-id"])[0]) for answer in answers]
    check(all(answer.status == 200 for answer in answers), "chats are answered through Envoy and the picker")
    check(all(served == placed for served, placed in places), "who answers is who /debug/placement says")
    stream = bench.ask("picked", chat(stream=True, stream_options={"include_usage": True}), x_mixfleet_explain="1")
    check(stream.body.endswith(b"data: [DONE]\n\n"), "a stream is complete")
    check(stream.headers["x-mixfleet-placement"] == stream.headers["x-request-id"]
          and float(stream.headers["x-mixfleet-predicted-ttft-ms"]) > 0, "an answer tells its placement when asked")
    models = Answered(bench.fronts["picked"], "/v1/models", b"")
    check(models.status == 200 and b'"m"' in models.body, "a request without a body is placed")


def bodies(bench):
    """Every request body arrives as it was sent, and every answer as it was given."""
    large = chat("x" * 220_000)
    for body in (chat(), chat("ünïcode — 火", stream=True), large, chat(stream=True, stream_options={"include_usage": True}, odd={"a": [1.0]})):
        raw = json.dumps(body, ensure_ascii=False).encode()
        digest = hashlib.sha256(raw).hexdigest()
        picked, plain = (Answered(bench.fronts[front], "/v1/chat/completions", raw) for front in ("picked", "plain"))
        same = picked.headers.get("x-body-sha256") == digest == plain.headers.get("x-body-sha256")
        check(same and picked.body == plain.body and picked.status == plain.status == 200,
              f"{len(raw)} bytes pass unchanged, and so do {len(plain.body)} of the answer")


def many(bench):
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        asked = lambda number: bench.ask("picked", chat(f"client {number % 32} " + "x" * 4000, stream=number % 2 == 0))
        answers = list(pool.map(asked, range(256)))
    check(all(answer.status == 200 for answer in answers), "256 requests of 32 clients are answered")
    counts = [sum(answer.headers["x-served-by"] == server.address for answer in answers) for server in bench.servers]
    check(min(counts) > 0 and counts[0] == max(counts), f"the fast one gets most of them, and all get some: {counts}")
    check(until(lambda: bench.picker.metric('mixfleet_requests_total{endpoint="chat_completions",outcome="success"}') >= 256),
          "their answers are counted as complete")
    corrected = bench.picker.metric('mixfleet_prediction_error_ratios_count')
    check(corrected > 0, f"{corrected:.0f} measured times corrected predictions")


def first_bytes(bench):
    """The answer takes 60 tokens; its first byte must not wait for the others."""
    answers = [bench.ask("picked", chat(max_tokens=60, stream=True)) for _ in range(5)]
    shares = [answer.first_s / answer.whole_s for answer in answers]
    check(sorted(shares)[2] < 0.5, f"a stream's first byte comes after {sorted(shares)[2]:.0%} of its time")


def refusals(bench):
    offered = bench.servers[2].address
    answers = [bench.ask("subset", chat()) for _ in range(4)]
    check(all(answer.headers["x-served-by"] == offered for answer in answers), "only an offered endpoint is picked")
    none = bench.ask("foreign", chat())
    check(none.status == 503 and b"none of the endpoints" in none.body, "503 with a reason where none that is offered is there")


def fallbacks(bench):
    before = bench.picker.metric("mixfleet_picks_served_total{")
    bench.ask("picked", chat())
    check(until(lambda: bench.picker.metric("mixfleet_picks_served_total{") == before + 1), "Envoy tells who served, and it is counted")
    bench.servers[0].kill()
    # one that is placed on the killed server before its probe fails goes to the next in the list
    answers = [bench.ask("picked", chat(f"again {number} " + "x" * 4000)) for number in range(6)]
    check(all(answer.status == 200 for answer in answers), "after a kill every request is answered by a fallback")
    fallen = 'choice="fallback"'
    text = Answered(bench.picker.metrics, "/metrics", b"").body.decode()
    served = [line for line in text.splitlines() if line.startswith("mixfleet_picks_served_total") and fallen in line]
    check(served, f"fallbacks are counted: {served}")
    device = served[0].split('device="')[1].split('"')[0].removeprefix("vllm:")
    check(device in [server.address for server in bench.servers[1:]], "by the next endpoint in the list")
    bench.servers[1].kill()
    bench.servers[2].kill()
    gone = lambda: bench.ask("picked", chat()).status == 503 and bench.picker.metric("mixfleet_instances") == 0
    check(until(gone), "503 once nothing is ready")
    check(b"unavailable" in bench.ask("picked", chat()).body, "with a reason")
    for server in bench.servers:
        server.start()
    check(until(lambda: bench.ask("picked", chat()).status == 200), "and 200 once they are back")


def admission(setup, program, envoy):
    server = setup.add(Server(token_ms=1, pace_ms=20))
    picker = setup.add(Picker(program, [server], ["--requests", "1"]))
    gate = setup.add(Envoy(envoy, {"picked": "picker"}, [server.address], picker.listen))
    picker.wait_for("get requests")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        asked = lambda _: Answered(gate.fronts["picked"], "/v1/chat/completions", chat(max_tokens=40))
        answers = list(pool.map(asked, range(4)))
    refused = [answer for answer in answers if answer.status == 429]
    check(len(refused) == 3 and all(int(answer.headers["retry-after"]) >= 1 for answer in refused),
          "429 with retry-after where admission refuses")
    check(b"rate_limit_exceeded" in refused[0].body, "with a reason")


def main():
    program, envoy = sys.argv[1:]
    with Setup() as setup:
        bench = Bench(setup, program, envoy)
        healthy = lambda: all(bench.envoy.healthy().values()) and len(bench.envoy.healthy()) == 3
        check(until(healthy), "the three health services are healthy")
        bench.picker.wait_for("get requests")
        placements(bench)
        bodies(bench)
        many(bench)
        first_bytes(bench)
        refusals(bench)
        fallbacks(bench)
        check(bench.picker.process.poll() is None, "the picker is still there")
    with Setup() as setup:
        admission(setup, program, envoy)
    with Setup() as setup:
        restarts(setup, program, envoy, chat, check, until)
    with Setup() as setup:
        two_pickers(setup, program, envoy, chat, check)


main()

"""Pickers that end and come back under load, and two at once; see ../epp.sh."""

import concurrent.futures
import http.client
import threading
import time

from envoy import Envoy
from picker import Answered, Picker, Server


class Load(threading.Thread):
    """Requests one after the other, until it is stopped."""

    def __init__(self, address, body):
        super().__init__(daemon=True)
        self.address, self.body, self.seen, self.is_over = address, body, [], False
        self.start()

    def run(self):
        while not self.is_over:
            began = time.monotonic()
            try:
                answer = Answered(self.address, "/v1/chat/completions", self.body)
                whole = answer.body.endswith(b"data: [DONE]\n\n") if self.body.get("stream") else b"usage" in answer.body
                seen = (answer.status, answer.headers.get("x-served-by"), whole)
            except (OSError, http.client.HTTPException):
                seen = (0, None, False)
            self.seen.append((began, time.monotonic() - began, *seen))

    def stop(self):
        self.is_over = True
        self.join(30)
        return not self.is_alive()

    def since(self, began, until=float("inf")):
        return [one for one in self.seen if began <= one[0] < until]


def restarts(setup, program, envoy, chat, check, until):
    """The picker is killed and started again under load, with failure_mode_allow and without."""
    servers = [setup.add(Server(token_ms=0.02, pace_ms=2)) for _ in range(2)]
    addresses = [server.address for server in servers]
    picker = setup.add(Picker(program, servers))
    fronts = {"open": ("picker", None, True), "closed": ("picker", None, False)}
    gate = setup.add(Envoy(envoy, fronts, addresses, picker.listen))
    picker.wait_for("get requests")
    loads = {name: [Load(gate.fronts[name], chat(stream=number % 2 == 0)) for number in range(3)] for name in fronts}
    time.sleep(1.5)
    killed = time.monotonic()
    picker.kill()
    time.sleep(2)
    # Envoy lets only requests without a body pass: it streams bodies to the picker before it knows of the failure
    models = {name: Answered(gate.fronts[name], "/v1/models", b"").status for name in fronts}
    picker.start()
    answers = lambda: all(Answered(gate.fronts[name], "/v1/chat/completions", chat()).status == 200 for name in fronts)
    check(until(answers), "both fronts answer again once the picker is back")
    back = time.monotonic()
    time.sleep(1)
    ended = all([load.stop() for of in loads.values() for load in of])
    check(ended, "no request hangs")
    seen = {name: [one for load in of for one in load.since(0)] for name, of in loads.items()}
    apart = {name: [one for one in of if killed + 0.2 < one[0] < killed + 1.8] for name, of in seen.items()}
    # an answer of the picker's time that is cut ends, and is not whole
    for name, of in seen.items():
        steady = [one for one in of if one[0] + one[1] < killed or one[0] > back]
        check(steady and all(one[2] == 200 and one[4] for one in steady), f"{name}: all are answered while the picker is there")
        wrong = [one for one in of if one[2] == 200 and one[3] not in addresses]
        check(not wrong, f"{name}: no answer comes from elsewhere")
        check(max(one[1] for one in of) < 12, f"{name}: the longest takes {max(one[1] for one in of):.1f} s")
    for name, of in apart.items():
        statuses = sorted({one[2] for one in of})
        passes = lambda one: one[2] == 200 and one[4] and name == "open"
        check(of and all(500 <= one[2] <= 504 or passes(one) for one in of), f"{name}: {len(of)} with a body get {statuses} in the picker's absence")
    check(models["open"] == 200 and models["closed"] >= 500, f"without a body: {models}")


def shares(fronts, chat, fast, turns=40):
    """The share that the fast server answers of requests that four clients have in progress."""
    addresses = [address for address in fronts for _ in range(4 // len(fronts))]
    with concurrent.futures.ThreadPoolExecutor(len(addresses)) as pool:
        def client(number, address):
            answers = [Answered(address, "/v1/chat/completions", chat(f"{number} {turn} " + "x" * 8000, max_tokens=4)) for turn in range(turns)]
            return [answer.headers["x-served-by"] == fast for answer in answers]
        served = sum(pool.map(client, range(len(addresses)), addresses), [])
    return sum(served) / len(served)


def two_pickers(setup, program, envoy, chat, check):
    # prompts of 100 and 300 ms: a picker sees what the other one sent every 200 ms
    servers = [setup.add(Server(token_ms=ms, pace_ms=1)) for ms in (0.05, 0.15)]
    addresses = [server.address for server in servers]
    pickers = [setup.add(Picker(program, servers)) for _ in range(2)]
    for picker in pickers:
        picker.wait_for("get requests")
    fronts = [setup.add(Envoy(envoy, {"picked": "picker"}, addresses, picker.listen)).fronts["picked"] for picker in pickers]
    def learned(of):
        # a short run corrects predictions
        return [shares(of, chat, addresses[0], turns) for turns in (10, 40)][1]

    alone, together = learned(fronts[:1]), learned(fronts)
    check(abs(alone - together) < 0.1, f"the fast server gets {alone:.0%} by one picker, {together:.0%} by two at once")

"""Two llama.cpp servers behind `mixfleet serve`; see ../engines.sh."""

import json
import pathlib
import signal
import statistics
import subprocess
import sys
import threading
import time

from common import WAIT_S, Gateway, Stream, call, check, free_port

HERE = pathlib.Path(__file__).parent
TOKENS = 1500
STREAMS = 6


class Engine:
    def __init__(self, model, port, *more):
        self.address = f"127.0.0.1:{port}"
        command = [sys.executable, "-B", str(HERE / "server.py"), model, str(port), *map(str, more)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + WAIT_S
        while True:
            try:
                if call(self.address, "GET", "/health")[0] == 200:
                    return
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() > until:
                sys.exit("a llama.cpp server does not start")
            time.sleep(0.05)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def chat(tokens, **more):
    messages = [{"role": "user", "content": "What is a fleet?"}]
    return {"model": "m", "messages": messages, "max_tokens": tokens, "temperature": 0.8, **more}


def characters_only(address):
    """What keeps a model with random weights from bytes that are no characters, which no text can carry on."""
    banned = []
    for token in range(512):
        text = json.loads(call(address, "POST", "/detokenize", {"tokens": [token]})[2])["content"]
        if not (text.isascii() and text.isprintable()):
            banned.append([token, False])
    return banned


def added_ms(direct, gateway):
    """Median times of a short answer, straight from an engine and through the gateway, in turn."""
    times = {direct: [], gateway: []}
    for _ in range(60):
        for address, list_of in times.items():
            began = time.perf_counter()
            call(address, "POST", "/v1/chat/completions", chat(1))
            list_of.append(1e3 * (time.perf_counter() - began))
    return [statistics.median(list_of) for list_of in times.values()]


def main(program, model):
    engines = [Engine(model, free_port()) for _ in range(2)]
    words = [f"llamacpp:http://{engine.address}" for engine in engines]
    gateway = Gateway(program, words, "--policy", "round-robin")
    try:
        run(engines, gateway, model)
    except BaseException:
        print("".join(gateway.log[-40:]), file=sys.stderr)
        raise
    finally:
        gateway.process.kill()
        for engine in engines:
            engine.process.kill()


def run(engines, gateway, model):
    check(gateway.wait_for("mixfleet_instances ", 2), "two engines serve")
    status, headers, text = call(gateway.address, "POST", "/v1/chat/completions", chat(12))
    answer = json.loads(text)
    check(status == 200 and answer["usage"]["completion_tokens"] == 12, "a chat is answered, with its lengths")
    status, _, text = call(gateway.address, "GET", "/debug/placement/" + headers["x-request-id"])
    candidates = json.loads(text)["candidates"]
    ttft = candidates[0]["terms"]["ttft_s"]
    check(status == 200 and ttft > 0, f"its placement is explained: first token predicted in {1e3 * ttft:.2f} ms")
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    format_ = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    text = call(gateway.address, "POST", "/v1/chat/completions", chat(40, response_format=format_))[2]
    content = json.loads(text)["choices"][0]["message"]["content"]
    check(content.lstrip().startswith("{"), "a schema passes to the engine and holds there")
    status, _, text = call(gateway.address, "POST", "/v1/chat/completions", chat(4, messages=7))
    check(status == 400 and "error" in json.loads(text), "the engine's refusal of a request comes back")

    options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    options["logit_bias"] = characters_only(engines[0].address)
    started = threading.Semaphore(0)
    streams = [Stream(gateway.address, chat(TOKENS, **options), started) for _ in range(STREAMS)]
    for _ in range(40 * STREAMS):
        started.acquire(timeout=WAIT_S)
    lengths = [len(stream.text) for stream in streams]
    running = [stream for stream in streams if not stream.done]
    engines[0].kill()
    for stream in streams:
        stream.join(timeout=2 * WAIT_S)
    check(len(running) == STREAMS, f"an engine was killed while all answers ran, {min(lengths)} to {max(lengths)} characters long")
    for stream in streams:
        whole = stream.done and stream.finish == "length" and stream.usage["completion_tokens"] == TOKENS
        check(whole and len(stream.ids) == 1, f"a whole answer: {stream.usage}, {len(stream.text)} characters {stream.error or ''}")
    placed_again = sum("an engine gave no answer" in line for line in gateway.log)
    check(placed_again >= 1, f"{placed_again} of them went on at the other engine")
    check(gateway.wait_for("mixfleet_instances ", 1), "one engine is left")
    check(gateway.metric('mixfleet_requests_total{endpoint="chat_completions",outcome="failed"') == 0, "no request failed")

    engines[0] = Engine(model, int(engines[0].address.rsplit(":", 1)[1]))
    check(gateway.wait_for("mixfleet_instances ", 2), "the killed one is started again and serves")
    direct, through = added_ms(engines[1].address, gateway.address)
    print(f"        a token takes {direct:.2f} ms at an engine and {through:.2f} ms through the gateway (medians of 60)")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

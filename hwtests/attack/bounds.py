"""A key with a token limit requests more in every spelling, from engines that read each body as generously as possible."""

import json
import os
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from common import Checks, Server, program_and_full

BOUND, MORE = 16, 4096
MODEL = "m"
LENGTHS = ["max_tokens", "max_completion_tokens", "n_predict", "max_output_tokens", "max_new_tokens", "max_length", "num_predict"]
MULTIPLES = ["best_of", "n_cmpl", "use_beam_search"]


class GenerousEngine(BaseHTTPRequestHandler):
    """Answers with as many tokens as a body names under any name, at any depth, first or last."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *words):
        pass

    def say(self, document, kind="application/json"):
        text = (document if isinstance(document, str) else json.dumps(document)).encode()
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self):
        self.say({
            "/v1/models": {"data": [{"id": MODEL, "max_model_len": 65536, "meta": {"n_ctx": 65536}}]},
            "/metrics": "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n",
            "/props": {"default_generation_settings": {"n_ctx": 65536}, "total_slots": 4},
            "/version": {"version": "0.32.0"},
        }.get(self.path, {}))

    def do_POST(self):
        text = self.rfile.read(int(self.headers["content-length"])).decode()
        wanted = []

        def pairs(fields):
            for name, value in fields:
                if name.lower() in LENGTHS and isinstance(value, (int, float, str)):
                    number = float(value)
                    wanted.append(MORE if number < 0 else number)
                if name in MULTIPLES and value not in (False, 1):
                    wanted.append(MORE)
            return dict(fields)

        body = json.loads(text, object_pairs_hook=pairs)
        # without a length: all that the context leaves
        tokens = int(max(wanted)) if wanted else MORE
        usage = {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": tokens + 3}
        choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "text": "x", "finish_reason": "length"}
        self.say({"id": "a", "created": 1, "model": body.get("model"), "choices": [choice], "usage": usage})


def spelled(name):
    """The name with a letter as an escape."""
    return name.replace("t", "\\u0074", 1) if "t" in name else f"\\u{ord(name[0]):04x}{name[1:]}"


def spellings():
    """Fields, as JSON text, that ask for more than the bound."""
    yield ""
    for name in LENGTHS:
        for value in [MORE, -1, float(MORE), "1e4", f'"{MORE}"', "null"]:
            yield f'"{name}":{value}'
        yield f'"{spelled(name)}":{MORE}'
        yield f'"{name.upper()}":{MORE}'
        yield f'"max_tokens":4,"{name}":{MORE}'
        yield f'"{name}":{MORE},"max_tokens":4'
        yield f'"max_completion_tokens":4,"{name}":{MORE}'
        yield f'"{name}":4,"{name}":{MORE}'
        yield f'"{name}":{MORE},"{name}":4'
        yield f'"{name}":{MORE},"{spelled(name)}":null'
        yield f'"max_tokens":4,"extra_body":{{"{name}":{MORE}}}'
        yield f'"max_tokens":4,"sampling_params":{{"{name}":{MORE}}}'
    for extra in ['"best_of":9', '"n_cmpl":9', '"use_beam_search":true', f'"min_tokens":{MORE}', '"ignore_eos":true']:
        yield f'"max_tokens":4,{extra}'


def main():
    program, _ = program_and_full()
    checks = Checks()
    engine = ThreadingHTTPServer(("127.0.0.1", 0), GenerousEngine)
    threading.Thread(target=engine.serve_forever, daemon=True).start()
    with tempfile.NamedTemporaryFile("w", suffix=".toml", delete=False) as keys:
        keys.write(f"[[tenant]]\nname = 'small'\nkey = 'k'\nmax_tokens = {BOUND}\n")
    words = ",part=H100-SXM-80GB,shape=llama-3.1-8b,usd=1"
    for kind in ["vllm", "llamacpp"]:
        server = Server(program, "--api-keys", keys.name, f"--worker-engine={kind}:http://127.0.0.1:{engine.server_port}{words}")
        answered, refused, passed = 0, 0, []
        for path, prompt in [("/v1/chat/completions", '"messages":[{"role":"user","content":"hi"}]'), ("/v1/completions", '"prompt":"hi"')]:
            for fields in spellings():
                text = f'{{"model":"{MODEL}",{prompt}{"," + fields if fields else ""}}}'
                status, document = server.ask("POST", path, text, {"authorization": "Bearer k"})
                if status == 200:
                    answered += 1
                    if json.loads(document)["usage"]["completion_tokens"] > BOUND:
                        passed.append(fields)
                elif status == 400:
                    refused += 1
                else:
                    passed.append(f"{fields}: {status} {document[:120]}")
        checks.check(not passed, f"{kind}: {answered} answered within {BOUND} tokens, {refused} refused, {len(passed)} past the bound {passed[:6]}")
        checks.check(answered > 20 and refused > 20, f"{kind}: some are answered and some refused")
        server.stop()
    engine.shutdown()
    os.unlink(keys.name)
    checks.end()


if __name__ == "__main__":
    main()

"""Runs mixfleet and its peers. Every function returns {measure: value}; rates are tokens per second."""

import contextlib
import json
import os
import pathlib
import random
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request

import machine
import streams

HERE = pathlib.Path(__file__).parent
PREFILL_TOKENS = (512, 2048)
DECODE_PROMPT_TOKENS = 32
GENERATED_TOKENS = 64
BATCH = 8
START_PROMPT_TOKENS = 128
RUN_S_MAX = 1800
LOAD_S_MAX = 300


def output(command):
    """Standard output of a command, which must succeed."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=RUN_S_MAX)
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


class Limits:
    """What the cores can do: a plain read, and the bf16 dot product in registers."""

    name, key = "limits", "throughput"

    def __init__(self, args):
        self.command = [args.throughput, args.device, "limits"]

    def steps(self):
        yield "read and dot", self.measure

    def measure(self, _random):
        found = re.search(r"read ([\d.]+) GB/s, bf16 dot (\d+) GFLOP/s", output(self.command))
        return {"read_bytes_per_s": float(found[1]) * 1e9, "dot_flops": float(found[2]) * 1e9}


class LlamaCpp:
    """llama-bench: every test is warmed up, decoding starts at context 0."""

    name, key = "llama.cpp", "llama_bench"

    def __init__(self, args):
        lengths = ",".join(map(str, PREFILL_TOKENS))
        self.command = [args.llama_bench, "-m", args.gguf, "-t", args.threads, "-p", lengths]
        self.command += ["-n", GENERATED_TOKENS, "-r", 1, "-o", "jsonl"]

    def steps(self):
        yield "llama-bench", self.measure

    def measure(self, _random):
        rates = {}
        for line in output(self.command).splitlines():
            test = json.loads(line)
            name = "decode" if test["n_gen"] else f"prefill_{test['n_prompt']}"
            rates[name] = test["avg_ts"]
            rates["version"] = f"build {test['build_number']} ({test['build_commit']}), {test['model_type']}"
        return rates


class Torch:
    """transformers on torch."""

    name, key = "torch", "python"

    def __init__(self, args):
        self.command = [args.python, HERE / "torch_bench.py", args.model, args.threads, GENERATED_TOKENS]
        self.command += PREFILL_TOKENS

    def steps(self):
        yield "torch_bench.py", self.measure

    def measure(self, _random):
        return json.loads(output(self.command).splitlines()[-1])


class Mixfleet:
    """The `mixfleet` binary, from outside."""

    name, key = "mixfleet", "mixfleet"

    def __init__(self, args):
        self.binary, self.device, self.out = args.mixfleet, args.device, args.out
        self.threads, half = args.threads, args.threads // 2
        self.split = [f"cpu@{cores(0, half)}=prefill", f"cpu@{cores(half, args.threads)}=decode"]
        config = json.loads((args.model / "config.json").read_text())
        self.vocab = config["vocab_size"]
        self.model = covered(args.model, args.out / "model", self.vocab)
        self.command = [self.binary, "generate", "--model", self.model, "--device", self.device]

    def steps(self):
        yield "generate", self.generate
        yield "start", self.start
        yield "serve", self.serve
        if self.threads > 1:
            yield "serve split", self.serve_split

    def ids(self, rng, tokens):
        return [rng.randrange(2, self.vocab) for _ in range(tokens)]

    def complete(self, rng, tokens, max_tokens):
        ids = ",".join(map(str, self.ids(rng, tokens)))
        arguments = ["--prompt-ids", ids, "--max-tokens", max_tokens, "--ignore-eos", "--json"]
        return json.loads(output(self.command + arguments).splitlines()[-1])

    def generate(self, rng):
        """A process per figure, so everything that is done once per process is in the first token."""
        values = {"decode": 1 / self.complete(rng, DECODE_PROMPT_TOKENS, GENERATED_TOKENS)["tbt_s"]}
        for tokens in PREFILL_TOKENS:
            values[f"cold_prefill_{tokens}"] = tokens / self.complete(rng, tokens, 1)["ttft_s"]
        return values

    def start(self, rng):
        """From starting the process to its end after one token."""
        start_s = time.monotonic()
        ttft_s = self.complete(rng, START_PROMPT_TOKENS, 1)["ttft_s"]
        return {"start_s": time.monotonic() - start_s, "start_ttft_s": ttft_s}

    def serve(self, rng):
        with Server(self, [self.device]) as server:
            server.stream(rng, 1, PREFILL_TOKENS[0], 2)
            values = {}
            for tokens in PREFILL_TOKENS:
                values[f"prefill_{tokens}"] = tokens / server.stream(rng, 1, tokens, 1)[0][0]
            for count in (1, BATCH):
                times = server.stream(rng, count, DECODE_PROMPT_TOKENS, GENERATED_TOKENS)
                values[f"decode_{count}"] = streams.steady_rate(times)
            return values | server.memory()

    def serve_split(self, rng):
        with Server(self, self.split) as server:
            times = server.stream(rng, BATCH, DECODE_PROMPT_TOKENS, GENERATED_TOKENS)
            return {f"split_decode_{BATCH}": streams.steady_rate(times)} | server.memory("split_")


class Server:
    """A running `mixfleet serve`."""

    def __init__(self, mixfleet, devices):
        self.mixfleet, self.devices = mixfleet, devices

    def __enter__(self):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.address = probe.getsockname()
        listen = ":".join(map(str, self.address))
        command = [self.mixfleet.binary, "serve", "--model", self.mixfleet.model, "--name", "bench"]
        command += ["--listen", listen] + [word for device in self.devices for word in ("--device", device)]
        self.log = self.mixfleet.out / "serve.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log)
        try:
            self.wait_until_ready(f"http://{listen}/health")
        except BaseException:
            self.__exit__()
            raise
        return self

    def wait_until_ready(self, url):
        deadline_s = time.monotonic() + LOAD_S_MAX
        while time.monotonic() < deadline_s and self.process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                with urllib.request.urlopen(url, timeout=5):
                    return
            time.sleep(0.05)
        raise RuntimeError(f"mixfleet serve did not become ready: {self.log.read_text()[-2000:]}")

    def __exit__(self, *_error):
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def stream(self, rng, count, tokens, max_tokens):
        prompts = [self.mixfleet.ids(rng, tokens) for _ in range(count)]
        return streams.run(self.address, "bench", prompts, max_tokens)

    def memory(self, prefix=""):
        return {prefix + name: value for name, value in machine.memory_bytes(self.process.pid).items()}


def cores(begin, end):
    """A set of cores as mixfleet names it; at least one."""
    return str(begin) if end - begin < 2 else f"{begin}-{end - 1}"


def covered(model, folder, vocab):
    """The checkpoint by links, with a tokenizer that has a text for every id.

    A server sends no chunk for a token without text, and random weights may generate any id.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for path in model.iterdir():
        if path.suffix == ".safetensors" or path.name in ("config.json", "model.safetensors.index.json"):
            (folder / path.name).symlink_to(os.path.abspath(path))
    words = {f"t{token}": token for token in range(vocab)}
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def seeded(round_index, step):
    """The same prompts for the same round and step in every run; no two alike, so no prefix is found cached."""
    return random.Random(f"{round_index} {step}")

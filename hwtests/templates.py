#!/usr/bin/env python3
"""Renders published chat templates as mixfleet serves them and as transformers does, and compares the bytes.

    hwtests/templates.py [--tenth] [--write TABLE.md]

The templates are those of models/templates in the sources that llama-cpp-python carries, which are downloaded from
PyPI into target/templates if they are not there. For each of them a checkpoint of a few kilobytes is served, whose
tokenizer has a token for each byte, and /tokenize returns the prompts of conversations with a system message,
tools, calls, results and reasoning. --tenth takes every tenth template and the project's own (in CI); nightly takes
all. The exit status is 1 if one of them differs where the reference renders it.

Environment: MIXFLEET (target/release/mixfleet), TEMPLATES_DIR. Needs a Python with transformers and jinja2.
"""
import argparse
import copy
import glob
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request

os.environ["TZ"] = "UTC"
time.tzset()

RELEASE = "llama_cpp_python-0.3.36"
HERE = os.path.dirname(os.path.abspath(__file__))
FOLDER = os.environ.get("TEMPLATES_DIR") or os.path.join(HERE, "..", "target", "templates")
MIXFLEET = os.environ.get("MIXFLEET") or os.path.join(HERE, "..", "target", "release", "mixfleet")
SPECIALS = {256: "<s>", 257: "</s>"}
VOCABULARY, HIDDEN = 320, 64

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": 'The "weather" of a <city> & more',
    "parameters": {"type": "object", "properties": {
        "zip": {"type": "string", "description": "Zip – é"},
        "city": {"type": "string", "enum": ["b", "a"]},
        "days": {"type": "integer", "default": 3},
        "opts": {"type": "object", "properties": {"unit": {"type": ["string", "null"]}}},
        "tags": {"type": "array", "items": {"type": "string"}}}, "required": ["zip"]}}}
ADD = {"type": "function", "function": {
    "name": "add", "description": "", "parameters": {"type": "object", "properties": {}}}}


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(number, name, arguments):
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(number, name, text):
    return {"role": "tool", "tool_call_id": number, "name": name, "content": text}


SYSTEM = {"role": "system", "content": "Be brief.\n"}
FIRST, SECOND = "abcdefgh1", "abcdefgh2"
ONE_CALL = answer("", tool_calls=[call(FIRST, "get_weather", {"zip": "1", "city": "b"})])
FULL_CALL = answer("", tool_calls=[
    call(FIRST, "get_weather", {"zip": "1", "days": 3, "opts": {"unit": None}, "tags": ["x", True]})])
TWO_CALLS = answer("", tool_calls=[call(FIRST, "get_weather", {"zip": "1"}), call(SECOND, "add", {})])

# name: messages, tools, further variables of the template
CHATS = {
    "plain": ([user("Hi <b>"), answer("Hello"), user('And "you"?\n')], None, {}),
    "system": ([SYSTEM, user(" Hi ")], None, {}),
    "tools": ([user("weather?")], [WEATHER, ADD], {}),
    "system and tools": ([SYSTEM, user("weather?")], [WEATHER], {}),
    "call": ([user("weather?"), ONE_CALL, result(FIRST, "get_weather", '{"t": 1.5}')], [WEATHER], {}),
    "call and answer": ([SYSTEM, user("weather?"), FULL_CALL, result(FIRST, "get_weather", "20 degrees"),
                         answer("It is 20."), user("ok")], [WEATHER, ADD], {}),
    "two calls": ([user("weather?"), TWO_CALLS, result(FIRST, "get_weather", "a"), result(SECOND, "add", "b")],
                  [WEATHER, ADD], {}),
    "text and call": ([user("weather?"), answer("Let me see.", tool_calls=[call(FIRST, "get_weather", {"zip": "é"})]),
                       result(FIRST, "get_weather", "x"), user("then?")], [WEATHER], {}),
    "reasoning": ([user("1+1"), answer("2", reasoning_content="easy"), user("2+2")], None, {}),
    "reasoning and call": ([user("w"), {**ONE_CALL, "reasoning_content": "need it"},
                            result(FIRST, "get_weather", "x")], [WEATHER], {}),
    "thought in the text": ([user("1+1"), answer("<think>\neasy\n</think>\n\n2"), user("2+2")], None, {}),
    "no thinking": ([SYSTEM, user("weather?")], [WEATHER], {"enable_thinking": False}),
}

# templates of the project itself, in which the two engines differed
OWN = {
    "own: order and JSON": "{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools | tojson(indent=2) if tools }}",
    "own: slices and operators": "{% for m in messages[::-1] %}{{ '%-9s|' % m.role }}{{ m.content[:3] ~ loop.index % 2 }}{% endfor %}",
    "own: lines": "{% for m in messages %}\r\n  {%- if m.content %}\r\n<{{ m.role }}>\r\n{% endif %}\r\n{% endfor %}",
    "own: undefined": "{{ tools is none }}{{ (messages[0].tool_calls | length) }}{{ x | default('y', true) }}{{ messages[9] }}",
}


def download():
    """The folder with the published templates."""
    folder = os.path.join(FOLDER, RELEASE, "vendor", "llama.cpp", "models", "templates")
    if not os.path.isdir(folder):
        os.makedirs(FOLDER, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "scikit-build-core==1.1.2", "cmake==4.4.4", "ninja"], check=True)
        subprocess.run([*pip, "download", "--no-binary", ":all:", "--no-deps", "--no-build-isolation", "--dest", FOLDER,
                        RELEASE.replace("llama_cpp_python-", "llama-cpp-python==")], check=True)
        with tarfile.open(os.path.join(FOLDER, RELEASE + ".tar.gz")) as sources:
            wanted = [member for member in sources if "/models/templates/" in member.name]
            sources.extractall(FOLDER, members=wanted, filter="data")
    return folder


def byte_symbols():
    """The visible character that byte-level tokenizers have for each byte."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    symbols, more = {byte: chr(byte) for byte in visible}, 0
    for byte in range(256):
        if byte not in symbols:
            symbols[byte] = chr(256 + more)
            more += 1
    return symbols


def write_checkpoint(folder):
    """A model of one layer whose tokens are bytes. Its weights are zero: nothing is generated."""
    vocabulary = {symbol: byte for byte, symbol in byte_symbols().items()}
    vocabulary.update({text: number for number, text in SPECIALS.items()})
    added = [{"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True} for number, text in SPECIALS.items()]
    levels = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
                 "pre_tokenizer": levels, "post_processor": None, "decoder": levels,
                 "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                           "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                           "ignore_merges": False, "vocab": vocabulary, "merges": []}}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
              "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
              "head_dim": 16, "vocab_size": VOCABULARY, "max_position_embeddings": 65536, "rms_norm_eps": 1e-6,
              "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
              "bos_token_id": 256, "eos_token_id": 257}
    with open(os.path.join(folder, "tokenizer.json"), "w") as file:
        json.dump(tokenizer, file)
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)
    with open(os.path.join(folder, "tokenizer_config.json"), "w") as file:
        json.dump({"bos_token": "<s>", "eos_token": "</s>"}, file)
    layer = "model.layers.0."
    shapes = {"model.embed_tokens.weight": [VOCABULARY, HIDDEN], "model.norm.weight": [HIDDEN],
              "lm_head.weight": [VOCABULARY, HIDDEN], layer + "input_layernorm.weight": [HIDDEN],
              layer + "post_attention_layernorm.weight": [HIDDEN], layer + "self_attn.q_proj.weight": [64, HIDDEN],
              layer + "self_attn.k_proj.weight": [32, HIDDEN], layer + "self_attn.v_proj.weight": [32, HIDDEN],
              layer + "self_attn.o_proj.weight": [HIDDEN, 64], layer + "mlp.gate_proj.weight": [32, HIDDEN],
              layer + "mlp.up_proj.weight": [32, HIDDEN], layer + "mlp.down_proj.weight": [HIDDEN, 32]}
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + bytes(end))


class Server:
    """A mixfleet that serves the checkpoint in a folder."""

    def __init__(self, folder):
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        command = [MIXFLEET, "serve", "--model", folder, "--name", "m", "--device", "cpu@0", "--listen", "127.0.0.1:0"]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)
        self.url, deadline = None, time.monotonic() + 60
        while self.url is None and time.monotonic() < deadline and self.process.poll() is None:
            found = re.search(r"ready: (http://\S+)/v1", self.text())
            self.url = found and found.group(1)
            time.sleep(0.02)

    def text(self):
        with open(self.log.name) as file:
            return file.read()

    def rendered(self, messages, tools, variables):
        """The prompt of a conversation, or why there is none."""
        if self.url is None:
            return None, self.text().strip().rsplit("\n", 1)[-1]
        messages = copy.deepcopy(messages)
        for message in messages:
            for made in message.get("tool_calls", []):
                made["function"]["arguments"] = json.dumps(made["function"]["arguments"], ensure_ascii=False)
        body = {"model": "m", "messages": messages, "chat_template_kwargs": variables}
        if tools is not None:
            body["tools"] = tools
        request = urllib.request.Request(self.url + "/tokenize", json.dumps(body).encode(),
                                         {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                tokens = json.load(reply)["tokens"]
        except urllib.error.HTTPError as error:
            return None, json.load(error)["error"]["message"]
        parts = [SPECIALS[token].encode() if token in SPECIALS else bytes([token]) for token in tokens]
        return b"".join(parts).decode("utf-8", "replace"), None

    def close(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


def reference(source, messages, tools, variables):
    """The prompt as transformers renders it, or why it does not."""
    from transformers.utils.chat_template_utils import render_jinja_template
    try:
        rendered, _ = render_jinja_template(
            [copy.deepcopy(messages)], tools=tools, chat_template=source, add_generation_prompt=True,
            bos_token="<s>", eos_token="</s>", **variables)
        return rendered[0], None
    except Exception as error:  # noqa: BLE001 - whatever a template does
        return None, f"{type(error).__name__}: {error}"


def compare(name, source, folder):
    """The outcome of each conversation: equal, differs, or the reference fails."""
    with open(os.path.join(folder, "chat_template.jinja"), "w", newline="") as file:
        file.write(source)
    server, counts = Server(folder), {"equal": 0, "differs": 0, "reference fails": 0}
    for chat, (messages, tools, variables) in CHATS.items():
        right, why = reference(source, messages, tools, variables)
        ours, refused = server.rendered(messages, tools, variables)
        outcome = "reference fails" if right is None else "equal" if ours == right else "differs"
        counts[outcome] += 1
        if outcome == "differs":
            at = next((at for at, (a, b) in enumerate(zip(right, ours or "")) if a != b), min(len(right), len(ours or "")))
            said = refused or f"{ours[max(0, at - 30):at + 40]!r} in place of {right[max(0, at - 30):at + 40]!r}"
            print(f"  {name}, {chat}: {said}", file=sys.stderr)
    server.close()
    return counts


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    arguments.add_argument("--tenth", action="store_true", help="every tenth template and the project's own")
    arguments.add_argument("--write", metavar="FILE", help="write the table into a file as well")
    arguments = arguments.parse_args()
    sources = {}
    for path in sorted(glob.glob(os.path.join(download(), "*.jinja"))):
        with open(path, newline="") as file:
            sources[os.path.basename(path)] = file.read()
    if arguments.tenth:
        sources = dict(list(sources.items())[::10])
    sources |= OWN
    folder = tempfile.mkdtemp()
    write_checkpoint(folder)
    lines, differing = ["| template | equal | differs | reference fails |", "|---|---|---|---|"], 0
    for name, source in sources.items():
        counts = compare(name, source, folder)
        differing += counts["differs"] > 0
        lines.append(f"| {name} | {' | '.join(str(count) for count in counts.values())} |")
        print(lines[-1], flush=True)
    shutil.rmtree(folder)
    total = f"{len(sources) - differing} of {len(sources)} templates equal in all conversations that the reference renders"
    print(total)
    if arguments.write:
        with open(arguments.write, "w") as file:
            file.write("\n".join([*lines, "", total, ""]))
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()

"""Files of a checkpoint, and others that are read, recurse, allocate, hang, or write to the terminal"""

import json
import os
import shutil
import subprocess
import tempfile
import time

from common import Checks, program_and_full, skip

FIXTURES = os.environ.get("MIXFLEET_FIXTURES") or os.path.join(
    os.path.dirname(os.path.abspath(__file__)), "..", "..", "..", "shared", "fixtures")
CHECKPOINT = os.path.join(FIXTURES, "llama-gqa-f32")
TEMPLATES = {
    "prints a namespace of itself": "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
    "compares a namespace of itself":
        "{% set a = namespace() %}{% set b = namespace() %}{% set a.x = b %}{% set b.x = a %}{{ [a] == [b] }}",
    "writes a namespace of itself as JSON": "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns | tojson }}",
    "doubles a text": "{% set ns = namespace(s='x' * 1000) %}"
        "{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s | length }}",
    "nests a list": "{% set ns = namespace(a=[]) %}{% for i in range(12000) %}{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a }}",
    "formats with a width": "{{ '%9999999999s' | format('x') }}",
}
DEEP = "[" * 100000 + "]" * 100000


def run(program, *words, timeout=200):
    began = time.monotonic()
    try:
        ended = subprocess.run([program, *words], capture_output=True, timeout=timeout, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return None, b"", time.monotonic() - began
    return ended.returncode, ended.stdout + ended.stderr, time.monotonic() - began


def copied(home, name):
    directory = os.path.join(home, name)
    os.makedirs(directory)
    for file in os.listdir(CHECKPOINT):
        os.symlink(os.path.abspath(os.path.join(CHECKPOINT, file)), os.path.join(directory, file))
    return directory


def replace(directory, name, text):
    path = os.path.join(directory, name)
    if os.path.lexists(path):
        os.unlink(path)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def main():
    program, full = program_and_full()
    if not os.path.isdir(CHECKPOINT):
        skip(f"no fixtures at {FIXTURES}")
    checks = Checks()

    def ends_well(what, code, said, seconds):
        """The process exited by itself, soon, with a message, without a signal or a panic."""
        shown = said[-300:].decode(errors="replace")
        checks.check(code in (0, 1, 2, 3) and seconds < 150 and b"panicked" not in said,
                     f"{what}: exit {code} after {seconds:.1f} s: {shown}")

    with tempfile.TemporaryDirectory(prefix="mixfleet-attack-") as home:
        for at, (what, template) in enumerate(TEMPLATES.items()):
            directory = copied(home, f"template-{at}")
            replace(directory, "chat_template.jinja", template)
            code, said, seconds = run(program, "models", "--check", directory)
            ends_well(f"a template that {what}", code, said, seconds)
            if not what.startswith("formats"):
                checks.check(code == 1, f"a template that {what} is refused: exit {code}")
            if full or at == 0:
                words = ["generate", "--model", directory, "--prompt", "a", "--max-tokens", "1"]
                ends_well(f"generate with a template that {what}", *run(program, *words))
        tokenizer = json.load(open(os.path.join(CHECKPOINT, "tokenizer.json"), encoding="utf-8"))
        for at, normalizer in enumerate([
            {"type": "Replace", "pattern": {"String": "a"}, "content": "x" * 1000000},
            {"type": "Prepend", "prepend": "x" * 1000000},
            {"type": "Sequence", "normalizers":
                [{"type": "Replace", "pattern": {"String": "a"}, "content": "aaaa"}] * 16},
        ]):
            directory = copied(home, f"tokenizer-{at}")
            replace(directory, "tokenizer.json", json.dumps({**tokenizer, "normalizer": normalizer}))
            code, said, seconds = run(program, "models", "--check", directory)
            # one of them takes all memory of the child before its growth is noticed
            is_refused = b"longer" in said or b"takes more than" in said
            checks.check(code == 1 and is_refused, f"a normalizer that multiplies text: exit {code}: {said[-200:]}")
        for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]:
            directory = copied(home, f"deep-{name}")
            replace(directory, name, '{"a": ' + DEEP + "}")
            ends_well(f"deep JSON in {name}", *run(program, "models", "--check", directory))
        for name in ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
                     "generation_config.json", "model.safetensors"]:
            for kind in ["fifo", "device", "directory", "loop"]:
                directory = copied(home, f"{kind}-{name}")
                lay(os.path.join(directory, name), kind)
                code, said, seconds = run(program, "models", "--check", directory, timeout=20)
                checks.check(code == 1, f"a {kind} as {name}: exit {code} after {seconds:.1f} s: {said[-200:]}")
        fifo = os.path.join(home, "fifo")
        os.mkfifo(fifo)
        for words in [
            ["serve", "--api-keys", fifo, "--listen", "127.0.0.1:0"], ["compare", "--model", "llama-3.1-8b", "--prices", fifo],
            ["simulate", "--trace", fifo, "--fleet", fifo], ["trace", "stats", fifo], ["profile", "check", fifo],
            ["replay", fifo], ["validate", "diff", fifo, fifo],
            ["generate", "--model", fifo, "--prompt", "a"],
        ]:
            code, said, seconds = run(program, *words, timeout=20)
            checks.check(code not in (None, 0), f"a pipe for {words}: exit {code} after {seconds:.1f} s: {said[-200:]}")
        name = "\x1b]0;owned\x07\x1b[31m\u009b31m\u202etxt"
        directory = os.path.join(home, name)
        shutil.copytree(copied(home, "plain"), directory, symlinks=False)
        replace(directory, "config.json", json.dumps({"model_type": name}))
        code, said, _ = run(program, "models", "--check", directory)
        shown = said.decode()
        bad = [letter for letter in shown if letter in "\x1b\x07\u009b\u202e"]
        checks.check(code == 1 and not bad, f"a name with escapes is printed without them: {bad} in {shown!r}")
    checks.end()


def lay(path, kind):
    if os.path.lexists(path):
        os.unlink(path)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        os.mkdir(path)
    elif kind == "device":
        os.symlink("/dev/zero", path)
    else:
        os.symlink(path, path)


main()

#!/usr/bin/env python3
"""Compares tokenizers of GGUF files with llama.cpp's.

    hwtests/vocabularies.py FOLDER [--texts 2000] [--out target/vocabularies] [--only NAME,...]

FOLDER has `ggml-vocab-*.gguf`, as vendor/llama.cpp/models of PyPI's source package llama-cpp-python has it
(`hwtests/ggml.sh` unpacks it). Each vocabulary that is no encoder's becomes a tiny
model, which the server in PyPI's xllamacpp loads and tokenises generated texts with: scripts, emoji, code, white
space, digits. The vocabulary of GPT-2 is also given every other name of `tokenizer.ggml.pre`. Texts and ids go to
OUT, one JSON file for each; a test of the runtime compares ours with them. hwtests/ggml.sh runs both. Needs python3 with
numpy, gguf and xllamacpp.
"""
import argparse, functools, json, pathlib, random, re, subprocess, sys, urllib.request

SCRIPTS = [(0x20, 0x7E), (0xA0, 0xFF), (0x100, 0x24F), (0x250, 0x2AF), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x4FF),
           (0x531, 0x58F), (0x5D0, 0x5EA), (0x600, 0x6FF), (0x900, 0x97F), (0x980, 0x9FF), (0xB80, 0xBFF), (0xE00, 0xE5B),
           (0x10A0, 0x10FF), (0x1780, 0x17FF), (0x1E00, 0x1EFF), (0x2000, 0x206F), (0x20A0, 0x20BF), (0x2100, 0x214F),
           (0x2190, 0x21FF), (0x2460, 0x24FF), (0x3000, 0x303F), (0x3040, 0x30FF), (0x3131, 0x318E), (0x4E00, 0x9FFF),
           (0xAC00, 0xD7A3), (0xFB00, 0xFB06), (0xFF01, 0xFF5E), (0x1D400, 0x1D7FF), (0x1F300, 0x1FAFF), (0x20000, 0x2A6DF)]
WORDS = ("the quick brown fox I'll they've it's DON'T we're He'd Hello WORLD HTTPServer camelCase snake_case naïve café "
         "Übergröße Straße ÉCOLE français 12 123 1234 1234567 3.14159 0x7F 1,234,567 ½ ² ١٢٣ १२ 你好 世界 日本語 ひらがな カタカナ "
         "한국어 안녕 привет Мир γειά مرحبا שלום नमस्ते สวัสดี 😀 👩‍🚀 🇫🇷 ✅ → ∑ … “quote” ‘x’ — ™ © def return fn main() {} [] "
         "=> != === && || :: ; // # /* */ <b> </b> \\n $x ${y} @home #tag %d a.b.c foo(bar) \"s\" 'c' `code`").split()
SPACES = [" ", "  ", "   ", "    ", "\t", "\n", "\n\n", "\r\n", " \n", "\n ", "\t\t", "\u00a0", "\u3000", "\u2003", "        "]


def texts(count):
    draw = random.Random(52)
    out = ["", " ", "\n", "\t\n  x", "a", "Hello, world!", "1" * 17, " " * 33 + "x", "\n" * 9, "'S 'Re 'LL", "x\u0301y\u0301"]
    while len(out) < count:
        parts = []
        for _ in range(draw.randrange(1, 14)):
            kind = draw.random()
            if kind < 0.5:
                parts.append(draw.choice(WORDS))
            elif kind < 0.62:
                parts.append("".join(draw.choice("0123456789") for _ in range(draw.randrange(1, 12))))
            else:
                low, high = draw.choice(SCRIPTS)
                parts.append("".join(chr(draw.randrange(low, high + 1)) for _ in range(draw.randrange(1, 9))))
            if draw.random() < 0.8:
                parts.append(" " if draw.random() < 0.6 else draw.choice(SPACES))
        out.append("".join(parts))
    return out


@functools.cache
def keys(source):
    """The keys of a vocabulary: name, value, and its type."""
    import gguf
    fields = gguf.GGUFReader(source).fields.items()
    return [(name, field.contents(), field.types) for name, field in fields if name.startswith("tokenizer.")]


def tiny(source, target, pre=None):
    """A model of one small layer with the vocabulary of `source`."""
    import gguf, numpy as np
    writer = gguf.GGUFWriter(target, "llama")
    for name, value, kinds in keys(source):
        if not (pre and name == "tokenizer.ggml.pre"):
            inner = kinds[-1] if kinds[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, value, kinds[0], sub_type=inner)
    if pre:
        writer.add_tokenizer_pre(pre)
    vocab = next(len(value) for name, value, _ in keys(source) if name == "tokenizer.ggml.tokens")
    hidden = 32
    writer.add_context_length(4096); writer.add_embedding_length(hidden); writer.add_block_count(1)
    writer.add_feed_forward_length(32); writer.add_head_count(2); writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5); writer.add_rope_dimension_count(16); writer.add_vocab_size(vocab)
    zeros = lambda *shape: np.zeros(shape, np.float16)
    writer.add_tensor("token_embd.weight", zeros(vocab, hidden))
    for name in ["output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"]:
        writer.add_tensor(name + ".weight", np.ones(hidden, np.float32))
    for name in ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]:
        writer.add_tensor(f"blk.0.{name}.weight", zeros(hidden, hidden))
    writer.write_header_to_file(); writer.write_kv_data_to_file(); writer.write_tensors_to_file(); writer.close()


def ask(model, cases):
    """llama.cpp's tokens of the texts in `cases`; in a child process."""
    import xllamacpp
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup, params.n_parallel, params.verbosity = model, 256, False, 1, -1
    params.port = 0
    server = xllamacpp.Server(params)
    address = server.listening_address
    address = address() if callable(address) else address
    all_texts, found = json.load(open(cases)), []
    for text in all_texts:
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        request = urllib.request.Request(address + "/tokenize", body, {"content-type": "application/json"})
        found.append([text, json.load(urllib.request.urlopen(request))["tokens"]])
    json.dump(found, open(cases, "w"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder"); parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--out", default="target/vocabularies"); parser.add_argument("--only")
    parser.add_argument("--ask", nargs=2)
    args = parser.parse_args()
    if args.ask:
        return ask(*args.ask)
    here, out = pathlib.Path(__file__).resolve().parent, pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    rules = (here / "../runtime/src/model/gguf/pre.rs").read_text()
    table = rules[rules.index("const ALL"):rules.index("/// The rules of a name")]
    names = [name for group in re.findall(r"&\[\s*((?:\"[a-z0-9._-]+\",?\s*)+)\]", table, re.I) for name in re.findall(r'"([^"]+)"', group)]
    sources = sorted(pathlib.Path(args.folder).glob("ggml-vocab-*.gguf"))
    if not sources:
        sys.exit(f"no ggml-vocab-*.gguf in {args.folder}")
    jobs = [(file.stem.removeprefix("ggml-vocab-"), file, None) for file in sources if "bert" not in file.name]
    gpt2 = next(file for file in sources if file.stem.endswith("gpt-2"))
    jobs += [(f"pre-{name}", gpt2, name) for name in names if name not in ("gemma4", "granite-embed-multi-311m", "sarvam-moe")]
    failed = 0
    for name, file, pre in jobs:
        if args.only and name not in args.only.split(","):
            continue
        model, cases = out / f"{name}.gguf", out / f"{name}.json"
        tiny(file, model, pre)
        cases.write_text(json.dumps(texts(args.texts if not pre else max(args.texts // 4, 50))))
        done = subprocess.run([sys.executable, __file__, args.folder, "--ask", str(model), str(cases)], capture_output=True, text=True)
        if done.returncode:
            failed += 1
            cases.unlink()
            print(f"{name}: llama.cpp does not load it: {done.stderr.strip().splitlines()[-1:]}", flush=True)
        else:
            print(f"{name}: {len(json.loads(cases.read_text()))} texts", flush=True)
    print(f"{failed} not compared")


if __name__ == "__main__":
    main()

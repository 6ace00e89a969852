#!/usr/bin/env python3
"""Log-likelihoods that the package lm-eval gets from `mixfleet serve`, beside those that NumPy computes from the
same GGUF file in float32. hwtests/lm_eval.sh runs it."""
import argparse, glob, json, os, subprocess, sys, tempfile, time
import numpy as np
from served import serve

CAPITALS = [("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Germany", "Berlin"), ("Japan", "Tokyo"), ("China", "Beijing"),
            ("Russia", "Moscow"), ("Egypt", "Cairo"), ("Greece", "Athens"), ("Austria", "Vienna"), ("Ireland", "Dublin"), ("Peru", "Lima")]
SENTENCES = [("Once upon a time there was", " a little girl who lived in a village."), ("Water boils at", " 100 degrees Celsius, or 212 degrees Fahrenheit."),
             ("def fibonacci(n):\n", "    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n"),
             ("Die Hauptstadt von Deutschland", " ist Berlin."), ("The first ten prime numbers are", " 2, 3, 5, 7, 11, 13, 17, 19, 23 and 29."),
             ("Long: " + "the fleet moves on. " * 60, "The fleet rests.")]
TASK = """task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: "{file}"}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{{target}}}}}"
{choices}metric_list:
  - metric: {metric}
    aggregation: {aggregation}
    higher_is_better: true
"""


class Reference:
    """A model of llama's architecture in float32, whole sequences at a time."""

    def __init__(self, path):
        import gguf
        self.reader = gguf.GGUFReader(path)
        self.tensors = {t.name: gguf.dequantize(t.data, t.tensor_type).astype(np.float32) for t in self.reader.tensors}
        field = lambda name: self.reader.fields["llama." + name].contents()
        self.layers, self.heads, self.kv_heads = field("block_count"), field("attention.head_count"), field("attention.head_count_kv")
        self.epsilon, self.theta = field("attention.layer_norm_rms_epsilon"), field("rope.freq_base")

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.epsilon) * self.tensors[name]

    def turn(self, x):
        """Rotates neighbouring pairs, as GGUF files of this architecture are laid out: [tokens, heads, size]."""
        size = x.shape[-1]
        angle = np.arange(x.shape[0])[:, None] * self.theta ** (-np.arange(0, size, 2) / size)
        cos, sin = np.cos(angle)[:, None].astype(np.float32), np.sin(angle)[:, None].astype(np.float32)
        even, odd = x[..., ::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)

    def logprobs(self, ids):
        """log p of each token but the first, and whether it is the likeliest."""
        weight = self.tensors
        x = weight["token_embd.weight"][ids]
        count = len(ids)
        mask = np.triu(np.full((count, count), -np.inf, np.float32), 1)
        for layer in range(self.layers):
            of = lambda name: weight[f"blk.{layer}.{name}.weight"]
            h = self.norm(x, f"blk.{layer}.attn_norm.weight")
            split = lambda y, heads: y.reshape(count, heads, -1)
            q, k = self.turn(split(h @ of("attn_q").T, self.heads)), self.turn(split(h @ of("attn_k").T, self.kv_heads))
            v = split(h @ of("attn_v").T, self.kv_heads)
            group = self.heads // self.kv_heads
            k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
            scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(q.shape[-1]) + mask
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            scores /= scores.sum(-1, keepdims=True)
            x = x + np.einsum("hts,shd->thd", scores, v).reshape(count, -1) @ of("attn_output").T
            h = self.norm(x, f"blk.{layer}.ffn_norm.weight")
            gate = h @ of("ffn_gate").T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ of("ffn_up").T)) @ of("ffn_down").T
        logits = (self.norm(x, "output_norm.weight") @ weight.get("output.weight", weight["token_embd.weight"]).T).astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        return [(row[token], row.argmax() == token) for row, token in zip(logits, ids[1:])]

    def tokenizer(self, folder):
        """Writes the file's vocabulary as a tokenizer of transformers'."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        field = lambda name: self.reader.fields["tokenizer.ggml." + name].contents()
        tokens, kinds = field("tokens"), field("token_type")
        merges = [tuple(merge.split(" ", 1)) for merge in field("merges")]
        tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds) if kind == 3])
        tokenizer.save(os.path.join(folder, "tokenizer.json"))
        end = tokens[field("eos_token_id")]
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "bos_token": tokens[field("bos_token_id")], "model_max_length": 2048}
        json.dump(config, open(os.path.join(folder, "tokenizer_config.json"), "w"))
        return tokenizer


def write_tasks(folder):
    names = [name for _, name in CAPITALS]
    rows = [{"text": f"The capital of {country} is", "choices": [" " + names[(at + step) % len(names)] for step in (0, 1, 5, 7)], "gold": 0}
            for at, (country, _) in enumerate(CAPITALS)]
    texts = [{"text": text, "target": target} for text, target in SENTENCES]
    for name, content, more in [("capitals", rows, {"kind": "multiple_choice", "target": "gold", "choices": 'doc_to_choice: "{{choices}}"\n', "metric": "acc", "aggregation": "mean"}),
                                ("sentences", texts, {"kind": "loglikelihood", "target": "target", "choices": "", "metric": "perplexity", "aggregation": "perplexity"})]:
        file = os.path.join(folder, name + ".jsonl")
        with open(file, "w") as out:
            out.writelines(json.dumps(row) + "\n" for row in content)
        text = TASK.format(name=name, file=file, **more)
        if name == "sentences":
            text = text.replace("higher_is_better: true", "higher_is_better: false")
        open(os.path.join(folder, name + ".yaml"), "w").write(text + 'target_delimiter: ""\n')


def evaluate(folder, address, limit_s=1200):
    environment = dict(os.environ, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=os.path.join(folder, "hf"))
    arguments = f"model=m,base_url={address}/v1/completions,tokenizer={folder},num_concurrent=2,max_retries=1"
    out = os.path.join(folder, "out")
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments, "--tasks", "capitals,sentences",
               "--include_path", folder, "--output_path", out, "--log_samples", "--batch_size", "2"]
    subprocess.run(command, check=True, env=environment, timeout=limit_s)
    results = json.load(open(glob.glob(out + "/*/results_*.json")[0]))["results"]
    samples = {}
    for name in ["capitals", "sentences"]:
        with open(glob.glob(out + f"/*/samples_{name}_*.jsonl")[0]) as lines:
            samples[name] = [json.loads(line) for line in lines]
    return results, samples


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True); parser.add_argument("--device", action="append", default=[])
    parser.add_argument("--tolerance", type=float, default=0.15, help="largest difference of a log-likelihood, in nats per token")
    args = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="lm-eval-")
    reference = Reference(args.model)
    tokenizer = reference.tokenizer(folder)
    write_tasks(folder)
    process, address, _log = serve(args.model, args.device or ["cpu"])
    try:
        began = time.time()
        results, samples = evaluate(folder, address)
        took_s = time.time() - began
    finally:
        process.terminate()
        process.wait()
    # the served scores beside those of the reference, request by request
    worst, requests, best_of, greedy, near = 0.0, 0, [], 0, 0
    for name, rows in samples.items():
        for row in rows:
            scores = []
            arguments = row["arguments"].values() if isinstance(row["arguments"], dict) else row["arguments"]
            responses = [r[0] if isinstance(r[0], (list, tuple)) else r for r in row["resps"]]
            for argument, (served, is_greedy) in zip(arguments, responses):
                context, target = argument.values() if isinstance(argument, dict) else argument
                whole, given = tokenizer.encode(context + target).ids, len(tokenizer.encode(context).ids)
                expected = reference.logprobs(whole)[given - 1:]
                total, tokens = sum(value for value, _ in expected), len(expected)
                served, is_greedy = float(served), str(is_greedy) == "True"
                off = abs(served - total) / tokens
                worst, requests = max(worst, off), requests + 1
                greedy += is_greedy == all(best for _, best in expected)
                scores.append(total)
                if off > args.tolerance:
                    print(f"FAIL  {name}: {target!r}: {served:.4f} served, {total:.4f} computed, {tokens} tokens")
                    near += 1
            if name == "capitals":
                best_of.append(int(np.argmax(scores) == 0))
    acc, expected = results["capitals"]["acc,none"], float(np.mean(best_of))
    print(f"{requests} requests in {took_s:.1f} s; largest difference {worst:.5f} nats per token; "
          f"likeliest or not: {greedy} equal; capitals: {acc:.4f} served, {expected:.4f} computed; "
          f"sentences: perplexity {results['sentences']['perplexity,none']:.4f}")
    if near or abs(acc - expected) > 1e-9 or requests != 4 * len(CAPITALS) + len(SENTENCES):
        sys.exit("FAIL: the part's scores differ from the computed ones")
    print("PASS")


main()

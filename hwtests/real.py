#!/usr/bin/env python3
"""Greedy answers of `mixfleet serve` beside llama.cpp's, from one GGUF file. hwtests/real.sh runs it."""
import argparse, json, os, urllib.request
from served import serve

# llama.cpp rounds activations to eight bits: two logits nearer than this may change places. On 12 of these prompts they
# moved by up to 0.58, where the weights in f32 give all tokens of ours.
MARGIN = 0.6
TEXTS = ["The capital of France is", "Once upon a time there was a small fleet of", "def fibonacci(n):\n    ", "The first 10 prime numbers are 2, 3, 5,",
         "Die Hauptstadt von Deutschland ist", "La capitale de l'Italie est", "SELECT name, COUNT(*) FROM", "Water boils at",
         "In 1969, the first man walked on", "To make pancakes you need flour,", "今日は", "Le chat est sur la", "1, 2, 4, 8, 16,", "#include <stdio.h>\nint main(",
         "Q: What is 2 + 2?\nA:", "The opposite of hot is", "Roses are red,", "A long time ago in a galaxy", "The mitochondria is", "import numpy as np\n"]
CHATS = ["What is the capital of France?", "Write a haiku about the sea.", "Count from one to ten.", "What is 17 + 25?", "Name three colours.",
         "Explain what a compiler does in one sentence.", "Translate 'good morning' to Spanish.", "Who wrote Hamlet?", "Give me a short poem about rain.",
         "What do bees make?"]


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=300))


def reference(model):
    import xllamacpp
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.verbosity, params.port = model, 2048, 1, -1, 0
    params.use_jinja = True
    return xllamacpp.Server(params)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model"); parser.add_argument("--device", action="append", default=[])
    parser.add_argument("--prompts", type=int, default=20); parser.add_argument("--tokens", type=int, default=32)
    args = parser.parse_args()
    server = reference(args.model)
    address = server.listening_address
    address = address() if callable(address) else address
    process, ours, _log = serve(args.model, args.device or ["cpu"])
    equal = near = 0
    wrong = []
    try:
        chats = CHATS[:max(args.prompts // 3, 1)]
        jobs = [("chat", text) for text in chats] + [("text", text) for text in TEXTS[:args.prompts - len(chats)]]
        for kind, text in jobs:
            prompt = text
            if kind == "chat":
                messages = [{"role": "user", "content": text}]
                prompt = post(address + "/apply-template", {"messages": messages})["prompt"]
            their = post(address + "/completion", {"prompt": prompt, "n_predict": args.tokens, "temperature": 0, "top_k": 1, "n_probs": 2, "cache_prompt": False,
                                                   "return_tokens": True, "samplers": ["top_k"]})
            if kind == "chat":
                answer = post(ours + "/v1/chat/completions", {"model": "m", "messages": messages, "max_tokens": args.tokens, "temperature": 0})
                found = answer["choices"][0]["message"]["content"]
            else:
                answer = post(ours + "/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": args.tokens, "temperature": 0})
                found = answer["choices"][0]["text"]
            expected = their["content"]
            if found == expected:
                equal += 1
                print(f"equal  {kind}  {text!r}: {found[:60]!r}", flush=True)
                continue
            # the token of llama.cpp's at which the texts part, and how far its second best was
            at, common = 0, os.path.commonprefix([found, expected])
            for at, token in enumerate(their["completion_probabilities"]):
                if not common.startswith("".join(t["token"] for t in their["completion_probabilities"][:at + 1])):
                    break
            best = sorted((p["logprob"] for p in their["completion_probabilities"][at]["top_logprobs"]), reverse=True)
            margin = best[0] - best[1]
            near += margin < MARGIN
            if margin >= MARGIN:
                wrong.append(text)
            print(f"{'near ' if margin < MARGIN else 'WRONG'}  {kind}  {text!r}: token {at}, margin {margin:.3f}: {found[len(common):][:30]!r}, "
                  f"llama.cpp {expected[len(common):][:30]!r}", flush=True)
    finally:
        process.terminate()
        process.wait()
    print(f"{equal} of {len(jobs)} equal, {near} differ where llama.cpp's margin is below {MARGIN}, {len(wrong)} wrong", flush=True)
    os._exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

"""Prefill and decode of transformers on torch, bf16, on the CPU; prints one JSON object of tokens per second.

    python torch_bench.py CHECKPOINT_DIR THREADS GENERATED PROMPT_TOKENS...

Each length is run once unmeasured first, as llama-bench does. Decoding continues a prompt of 32 tokens.
"""

import json
import sys
import time

import torch
import transformers

DECODE_PROMPT_TOKENS = 32
DECODE_WARM_TOKENS = 4


def prefill(model, tokens):
    ids = torch.randint(model.config.vocab_size, (1, tokens))
    start_s = time.perf_counter()
    model(ids, use_cache=True, logits_to_keep=1)
    return tokens / (time.perf_counter() - start_s)


def decode(model, generated):
    cache = transformers.DynamicCache(config=model.config)
    ids = torch.randint(model.config.vocab_size, (1, DECODE_PROMPT_TOKENS))
    for step in range(DECODE_WARM_TOKENS + generated):
        if step == DECODE_WARM_TOKENS:
            start_s = time.perf_counter()
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits  # [1, 1, vocab]
        ids = logits.argmax(-1)  # [1, 1]
    return generated / (time.perf_counter() - start_s)


def main():
    folder, threads, generated, lengths = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), map(int, sys.argv[4:])
    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    rates = {"version": f"torch {torch.__version__}, transformers {transformers.__version__}"}
    with torch.inference_mode():
        for tokens in lengths:
            prefill(model, tokens)
            rates[f"prefill_{tokens}"] = prefill(model, tokens)
        rates["decode"] = decode(model, generated)
    print(json.dumps(rates))


if __name__ == "__main__":
    main()

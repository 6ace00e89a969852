"""Writes a bf16 Mixtral checkpoint with cheap random weights, for speed and memory tests.

    python make_mixture.py OUT_DIR --tokenizer CHECKPOINT_DIR [--experts 8] [--active 2] [--layers 16] [--seed 1]

By default 8 experts in models of 0.2 B parameters each: 1.5 B in all, 3 GB. The text that comes out means
nothing; its tokenizer is that of any checkpoint with at most 32,000 tokens. Needs `numpy`.
"""

import argparse
import json
import pathlib
import shutil
import struct

import numpy

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCABULARY = 1024, 3584, 16, 4, 32000


def tensors(layers, experts):
    """(name, shape) of every tensor."""
    kv_columns = HIDDEN // HEADS * KV_HEADS
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(layers):
        stem = f"model.layers.{layer}."
        yield stem + "input_layernorm.weight", (HIDDEN,)
        yield stem + "self_attn.q_proj.weight", (HIDDEN, HIDDEN)
        yield stem + "self_attn.k_proj.weight", (kv_columns, HIDDEN)
        yield stem + "self_attn.v_proj.weight", (kv_columns, HIDDEN)
        yield stem + "self_attn.o_proj.weight", (HIDDEN, HIDDEN)
        yield stem + "post_attention_layernorm.weight", (HIDDEN,)
        yield stem + "block_sparse_moe.gate.weight", (experts, HIDDEN)
        for expert in range(experts):
            of = f"{stem}block_sparse_moe.experts.{expert}."
            yield of + "w1.weight", (INTERMEDIATE, HIDDEN)
            yield of + "w2.weight", (HIDDEN, INTERMEDIATE)
            yield of + "w3.weight", (INTERMEDIATE, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def bits(rng, shape):
    """bf16 patterns: ones for a norm, else magnitudes from 2^-7 to 2^-3 of either sign."""
    if len(shape) == 1:
        return numpy.full(shape, 0x3F80, numpy.uint16)
    drawn = rng.integers(0, 1 << 16, shape, numpy.uint16)
    exponent = 0x3C00 + ((drawn & 0x0300) >> 8) * 0x80  # 2^-7 .. 2^-4, times 1 to 2
    return (drawn & 0x807F) | exponent.astype(numpy.uint16)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--tokenizer", type=pathlib.Path, required=True, help="where tokenizer.json is")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--active", type=int, default=2)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    shutil.copy(options.tokenizer / "tokenizer.json", options.out)
    header, at = {}, 0
    for name, shape in tensors(options.layers, options.experts):
        size = 2 * int(numpy.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    rng = numpy.random.default_rng(options.seed)
    with open(options.out / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for _, shape in tensors(options.layers, options.experts):
            file.write(bits(rng, shape).tobytes())
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": options.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_local_experts": options.experts,
        "num_experts_per_tok": options.active,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 32768,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (options.out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    print(f"{options.out}: {at / 2e9:.2f} B parameters, {at / 1e9:.2f} GB")


if __name__ == "__main__":
    main()

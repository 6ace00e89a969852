#!/usr/bin/env python3
"""Writes a tiny model with matrices of each ggml type, from random bytes, and the values that the `gguf` package reads.

    hwtests/ggml_types.py [OUT]

OUT (target/ggml-types) gets TYPE.gguf and a file of f32 for each of its matrices; a test of the runtime compares every
weight with ours, bit by bit. hwtests/ggml.sh runs both. Needs python3 with numpy and gguf. Scales that are no numbers,
which no quantiser writes, are kept out.
"""
import pathlib, sys
import gguf, numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as Type
from gguf.quants import dequantize

# where blocks have f16 numbers
HALVES = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2],
          "Q5_K": [0, 2], "Q6_K": [208], "IQ1_S": [0], "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0], "IQ3_XXS": [0], "IQ3_S": [0],
          "IQ4_NL": [0], "IQ4_XS": [0], "TQ1_0": [52], "TQ2_0": [64], "IQ1_M": [], "MXFP4": [], "NVFP4": [], "F32": [], "F16": [], "BF16": []}
HIDDEN, INNER, VOCAB, HEADS = 256, 512, 320, 4


def matrix(draw, kind, rows, columns):
    """Random blocks of a type, as bytes."""
    if kind in ("F32", "F16", "BF16"):
        numbers = draw.normal(0, 0.05, (rows, columns)).astype(np.float32)
        return gguf.quants.quantize(numbers, Type[kind]).view(np.uint8).reshape(rows, -1)
    weights, size = GGML_QUANT_SIZES[Type[kind]]
    blocks = draw.integers(0, 256, (rows * columns // weights, size), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = draw.normal(0, 0.01, len(blocks)).astype(np.float16)
        halves[:4] = [0, 6e-8, -6e-5, 1000]
        blocks[:, at:at + 2] = halves.view(np.uint8).reshape(-1, 2)
    if kind == "IQ1_M":  # the f16 is in the high bits of four words
        blocks[:, 55] = blocks[:, 55] & 0x8F | 0x20
    if kind == "MXFP4":
        blocks[:, 0] = draw.integers(0, 140, len(blocks))
        blocks[:2, 0] = [0, 1]
    if kind == "NVFP4":
        blocks[:, :4][blocks[:, :4] == 0xFF] = 0x7F
    return blocks.reshape(rows, -1)


def write(out, kind):
    draw = np.random.default_rng(7)
    writer = gguf.GGUFWriter(out / f"{kind}.gguf", "llama")
    writer.add_context_length(128); writer.add_embedding_length(HIDDEN); writer.add_block_count(1); writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS); writer.add_head_count_kv(HEADS); writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2"); writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{i}" for i in range(VOCAB)]); writer.add_token_merges(["t0 t1"])
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    expected = {}
    shapes = {"token_embd": (VOCAB, HIDDEN), "output": (VOCAB, HIDDEN), "blk.0.ffn_gate": (INNER, HIDDEN), "blk.0.ffn_up": (INNER, HIDDEN),
              "blk.0.ffn_down": (HIDDEN, INNER), "blk.0.attn_q": (HIDDEN, HIDDEN), "blk.0.attn_k": (HIDDEN, HIDDEN),
              "blk.0.attn_v": (HIDDEN, HIDDEN), "blk.0.attn_output": (HIDDEN, HIDDEN)}
    names = {"token_embd": "model.embed_tokens", "output": "lm_head", "blk.0.ffn_gate": "model.layers.0.mlp.gate_proj",
             "blk.0.ffn_up": "model.layers.0.mlp.up_proj", "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
             "blk.0.attn_q": "model.layers.0.self_attn.q_proj", "blk.0.attn_k": "model.layers.0.self_attn.k_proj",
             "blk.0.attn_v": "model.layers.0.self_attn.v_proj", "blk.0.attn_output": "model.layers.0.self_attn.o_proj"}
    for name, (rows, columns) in shapes.items():
        bytes_ = matrix(draw, kind, rows, columns)
        writer.add_tensor(f"{name}.weight", bytes_, raw_dtype=Type[kind])
        with np.errstate(all="ignore"):
            values = dequantize(bytes_, Type[kind]).astype(np.float32).reshape(rows, columns)
        if name.endswith(("attn_q", "attn_k")):  # pairs of a head become halves
            values = values.reshape(HEADS, HIDDEN // HEADS // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        expected[names[name]] = values
    writer.write_header_to_file(); writer.write_kv_data_to_file(); writer.write_tensors_to_file(); writer.close()
    for name, values in expected.items():
        values.tofile(out / f"{kind}.{name}.f32")


def main():
    out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "target/ggml-types")
    out.mkdir(parents=True, exist_ok=True)
    for kind in HALVES:
        write(out, kind)
    print(f"{len(HALVES)} types in {out}")


if __name__ == "__main__":
    main()

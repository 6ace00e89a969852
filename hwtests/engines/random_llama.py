"""Writes a small Llama with random weights (float32), with the tokenizer of another model.

    random_llama.py TOKENIZER_DIR OUT_DIR [HEAD_DIM, default 64]

Tokens that are not plain characters have the logit 0, which some other token always exceeds: a greedy answer can be
cut anywhere, and its text tokenised again.
"""

import json
import pathlib
import shutil
import sys

import torch
from safetensors.torch import save_file

HIDDEN, LAYERS, HEADS, KV_HEADS, MLP = 512, 4, 8, 4, 1408


def main(source, out, head_dim="64"):
    head_dim = int(head_dim)
    source, out = pathlib.Path(source), pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    for name in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]:
        shutil.copyfile(source / name, out / name)
    old = json.loads((source / "config.json").read_text())
    vocabulary = old["vocab_size"]
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "hidden_act": "silu",
        "hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": head_dim, "vocab_size": vocabulary, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": False,
        "mlp_bias": False, "bos_token_id": old["bos_token_id"], "eos_token_id": old["eos_token_id"],
    }
    (out / "config.json").write_text(json.dumps(config, indent=1))
    generator = torch.Generator().manual_seed(7)

    def random(rows, columns):
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    tensors = {"model.embed_tokens.weight": random(vocabulary, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    head = random(vocabulary, HIDDEN) * 3
    known = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    plain = {at for word, at in known.items() if word.isascii() and word.isprintable() and not word.startswith("<|")}
    head[[at for at in range(vocabulary) if at not in plain]] = 0
    tensors["lm_head.weight"] = head
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, rows, columns in [
            ("self_attn.q_proj", HEADS * head_dim, HIDDEN), ("self_attn.k_proj", KV_HEADS * head_dim, HIDDEN),
            ("self_attn.v_proj", KV_HEADS * head_dim, HIDDEN), ("self_attn.o_proj", HIDDEN, HEADS * head_dim),
            ("mlp.gate_proj", MLP, HIDDEN), ("mlp.up_proj", MLP, HIDDEN), ("mlp.down_proj", HIDDEN, MLP),
        ]:
            tensors[f"{at}.{name}.weight"] = random(rows, columns)
        for name in ["input_layernorm", "post_attention_layernorm"]:
            tensors[f"{at}.{name}.weight"] = torch.ones(HIDDEN)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main(*sys.argv[1:])

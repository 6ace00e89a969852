"""Writes a bf16 Llama or Mixtral checkpoint as GGUF, with a made-up vocabulary, for llama-bench and mixfleet.

    python to_gguf.py CHECKPOINT_DIR OUT.gguf

llama.cpp's own converter refuses a checkpoint whose tokenizer does not cover its vocabulary, as with random
weights. Both measure with token ids alone. Needs `numpy` and `gguf` (PyPI).
"""

import json
import pathlib
import struct
import sys

import gguf
import numpy

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
EXPERT = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def tensors(folder):
    """(name, bf16 bit patterns as mapped uint16) of every tensor."""
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            (head_bytes,) = struct.unpack("<Q", file.read(8))
            head = json.loads(file.read(head_bytes))
        data = numpy.memmap(path, numpy.uint8, "r", offset=8 + head_bytes)
        for name, entry in head.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "BF16":
                sys.exit(f"{path}: {name} is {entry['dtype']}; only BF16 is supported")
            begin, end = entry["data_offsets"]
            yield name, data[begin:end].view(numpy.uint16).reshape(entry["shape"])


def interleaved(weight, heads):
    """Rows of a q or k projection in ggml's order: it rotates neighbours, Hugging Face rotates halves."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)  # [heads, 2, head_dim / 2, hidden]
    return halves.swapaxes(1, 2).reshape(rows, columns)


def add(writer, name, bits):
    if bits.ndim == 1 or "ffn_gate_inp" in name:  # llama.cpp wants norms and routers in f32
        writer.add_tensor(name, (bits.astype(numpy.uint32) << 16).view(numpy.float32))
    else:
        raw = numpy.ascontiguousarray(bits).view(numpy.uint8)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def renamed(name):
    stem = name.removesuffix(".weight")
    if stem in WHOLE:
        return WHOLE[stem] + ".weight"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{LAYER[part]}.weight"


class Experts:
    """Collects the matrices of a layer's experts, which GGUF has as one tensor."""

    def __init__(self, writer, count):
        self.writer, self.count, self.known = writer, count, {}

    def add(self, name, bits):
        layer, _, _, expert, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".")
        together = self.known.setdefault((layer, part), {})
        together[int(expert)] = bits
        if len(together) == self.count:
            stacked = numpy.stack([together[expert] for expert in range(self.count)])
            add(self.writer, f"blk.{layer}.{EXPERT[part]}.weight", stacked)
            del self.known[layer, part]


def add_vocabulary(writer, size):
    """Byte-level BPE with a text for every id and one pair to merge."""
    letters = [chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144))]
    words = [*letters, "ab", *(f"t{token}" for token in range(len(letters) + 1, size))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    folder, out = pathlib.Path(sys.argv[1]), sys.argv[2]
    config = json.loads((folder / "config.json").read_text())
    known = (["LlamaForCausalLM"], ["MixtralForCausalLM"])
    if config["architectures"] not in known or config.get("rope_scaling"):
        sys.exit(f"{folder}: only LlamaForCausalLM and MixtralForCausalLM without rope scaling are supported")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_name(folder.name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "num_local_experts" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    add_vocabulary(writer, config["vocab_size"])
    experts = Experts(writer, config.get("num_local_experts"))
    for name, bits in tensors(folder):
        if ".experts." in name:
            experts.add(name, bits)
            continue
        if "q_proj" in name:
            bits = interleaved(bits, heads)
        elif "k_proj" in name:
            bits = interleaved(bits, kv_heads)
        add(writer, renamed(name), bits)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Converts the checkpoints of families.py to GGUF files in f32 with llama.cpp's converter.

    v/bin/pip install torch==2.15.0 transformers==5.23.0 gguf==0.19.0
    hwtests/families_gguf.py target/peers/llama_cpp_python-0.3.36/vendor/llama.cpp target/families target/families-gguf

Each folder has `model.gguf` and the `golden.json` of its checkpoint, which transformers made: compare them with
    hwtests/golden.py --fixtures target/families-gguf --mixfleet target/debug/mixfleet cpu
The sources are those that peers/install.sh unpacks. Families whose architecture mixfleet does not read are left out.
"""

import pathlib
import shutil
import sys
import tempfile

FAMILIES = ["llama", "qwen2", "qwen3", "mixtral", "phi3", "phi4-mini", "smollm3", "granite", "granite-tied",
            "olmo2", "olmo3", "olmoe", "glm4", "exaone4", "gemma-tied", "gemma2-tied", "gemma3-six", "granite-moe", "granite-shared",
            "granite4", "minimax-m2", "ernie4_5", "seed-oss", "ministral3"]


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    sources, checkpoints, out = map(pathlib.Path, sys.argv[1:])
    sys.path.insert(0, str(sources))
    sys.path.insert(1, str(sources / "gguf-py"))
    import convert_hf_to_gguf
    from conversion import base, gemma, glm, granite, phi

    # the tokenizer of a token per byte has no name there, and prompts are ids
    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    base.TextModel._set_vocab_sentencepiece = base.TextModel._set_vocab_gpt2
    phi.Phi3MiniModel.set_vocab = glm.Glm4Model.set_vocab = base.TextModel._set_vocab_gpt2
    # embeddings beyond the tokenizer's, and names of layers before transformers 5
    gemma.Gemma3Model.modify_tensors = lambda self, tensor, name, block: base.TextModel.modify_tensors(
        self, tensor + self.norm_shift(name), name, block)
    granite.GraniteHybridModel.get_attn_layers = lambda self: list(range(self.block_count))
    for family in FAMILIES:
        folder = out / family
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as scratch:
            sys.argv = ["convert", str(checkpoints / family), "--outtype", "f32", "--outfile", f"{scratch}/model.gguf"]
            convert_hf_to_gguf.main()
            shutil.move(f"{scratch}/model.gguf", folder / "model.gguf")
        shutil.copy(checkpoints / family / "golden.json", folder / "golden.json")
        print(f"{family}: {(folder / 'model.gguf').stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    main()

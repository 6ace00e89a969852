#!/usr/bin/env python3
"""Makes tiny random checkpoints of every family that is served, with transformers' greedy tokens of them.

    python3 -m venv v && v/bin/pip install torch==2.15.0 transformers==5.23.0
    v/bin/python hwtests/families.py target/families [NAME ...]
    hwtests/golden.py --fixtures target/families --mixfleet target/debug/mixfleet cpu

Each folder has what ../shared/fixtures has: a checkpoint in f32 and `golden.json`, with 48 greedy tokens for each
prompt of ids and the least margin between the two best logits. The last line compares them with what a device
generates. A family that mixfleet does not serve is skipped there.
"""

import json
import pathlib
import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB, TOKENS, SEED = 512, 48, 20261126
PROMPT_LENGTHS = [1, 7, 33, 90]
COMMON = dict(
    vocab_size=VOCAB, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=0, eos_token_id=1, initializer_range=0.15,
)
LATENT = dict(num_key_value_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24)
MIXTURE = dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, n_shared_experts=1, first_k_dense_replace=1)


def yarn(**more):
    return dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=64, rope_theta=10000.0, **more)


FAMILIES = {
    "llama": dict(model_type="llama", attention_bias=True, mlp_bias=True),
    "mistral": dict(model_type="mistral", sliding_window=9),
    "qwen2": dict(model_type="qwen2"),
    "qwen3": dict(model_type="qwen3", head_dim=32),
    "qwen2-moe": dict(model_type="qwen2_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48,
                      shared_expert_intermediate_size=96, decoder_sparse_step=2, num_hidden_layers=4),
    "qwen2-moe-normalised": dict(model_type="qwen2_moe", num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48,
                                 shared_expert_intermediate_size=96, norm_topk_prob=True, mlp_only_layers=[1]),
    "qwen3-moe": dict(model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, head_dim=32),
    "mixtral": dict(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2),
    "mixtral-window": dict(model_type="mixtral", num_local_experts=8, num_experts_per_tok=3, sliding_window=9, head_dim=32),
    "gpt-oss": dict(model_type="gpt_oss", num_local_experts=8, num_experts_per_tok=2, intermediate_size=48, head_dim=16,
                    sliding_window=9, num_hidden_layers=4),
    "glm4-moe": dict(model_type="glm4_moe", head_dim=32, attention_bias=True, use_qk_norm=True, routed_scaling_factor=2.5, **MIXTURE),
    "glm4-moe-air": dict(model_type="glm4_moe", attention_bias=True, **MIXTURE),
    "glm4-moe-groups": dict(model_type="glm4_moe", head_dim=32, partial_rotary_factor=0.25, n_group=4, topk_group=2,
                            norm_topk_prob=False, tie_word_embeddings=True, **MIXTURE),
    "glm4-moe-yarn": dict(model_type="glm4_moe", head_dim=32, rope_parameters=yarn(partial_rotary_factor=0.5), **MIXTURE),
    "deepseek-v2-lite": dict(model_type="deepseek_v2", q_lora_rank=None, topk_method="greedy",
                             rope_parameters=yarn(mscale=0.707, mscale_all_dim=0.707), **LATENT, **MIXTURE),
    "deepseek-v2": dict(model_type="deepseek_v2", q_lora_rank=40, topk_method="group_limited_greedy", n_group=4, topk_group=2,
                        routed_scaling_factor=16.0, **LATENT, **MIXTURE),
    "deepseek-v3": dict(model_type="deepseek_v3", q_lora_rank=40, n_group=4, topk_group=2, routed_scaling_factor=2.5,
                        rope_parameters=yarn(mscale=1.0, mscale_all_dim=1.0), **LATENT, **MIXTURE),
    "phi3": dict(model_type="phi3", pad_token_id=None),
    "phi3-window": dict(model_type="phi3", sliding_window=9, pad_token_id=None),
    "phi4-mini": dict(model_type="phi3", tie_word_embeddings=True, pad_token_id=None, original_max_position_embeddings=256,
                      rope_parameters=dict(rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.75,
                                           short_factor=[1.0, 1.05, 1.1, 1.2, 1.4, 1.8], long_factor=[1.0, 2.0, 4.0, 8.0, 12.0, 16.0])),
    "smollm3": dict(model_type="smollm3", num_hidden_layers=4, pad_token_id=None),
    "granite": dict(model_type="granite", embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.015625,
                    logits_scaling=8.0),
    "granite-tied": dict(model_type="granite", attention_bias=True, mlp_bias=True, residual_multiplier=0.5, attention_multiplier=0.3,
                         embedding_multiplier=0.8, tie_word_embeddings=True),
    "granite-moe": dict(model_type="granitemoe", embedding_multiplier=6.0, residual_multiplier=0.4, attention_multiplier=0.2, logits_scaling=3.0,
                        num_local_experts=8, num_experts_per_tok=2, intermediate_size=48, pad_token_id=None),
    "granite-shared": dict(model_type="granitemoeshared", embedding_multiplier=6.0, residual_multiplier=0.4, attention_multiplier=0.2,
                           num_local_experts=8, num_experts_per_tok=2, intermediate_size=48, shared_intermediate_size=56, pad_token_id=None),
    "granite4": dict(model_type="granitemoehybrid", embedding_multiplier=6.0, residual_multiplier=0.4, attention_multiplier=0.2, num_local_experts=0, num_experts_per_tok=0,
                     intermediate_size=80, shared_intermediate_size=80, layer_types=["attention"] * 3, position_embedding_type="rope", pad_token_id=None),
    "granite4-bare": dict(model_type="granitemoehybrid", attention_multiplier=0.3, num_local_experts=8, num_experts_per_tok=2, intermediate_size=48,
                          shared_intermediate_size=80, layer_types=["attention"] * 3, pad_token_id=None),
    "minimax-m2": dict(model_type="minimax_m2", scoring_func="sigmoid", head_dim=32, rotary_dim=16, num_local_experts=8, num_experts_per_tok=2, intermediate_size=48),
    "ernie4_5": dict(model_type="ernie4_5", head_dim=32, pad_token_id=None),
    "ernie4_5-bias": dict(model_type="ernie4_5", head_dim=32, use_bias=True, tie_word_embeddings=False, pad_token_id=None),
    "seed-oss": dict(model_type="seed_oss", head_dim=32, attention_out_bias=True, mlp_bias=True, pad_token_id=None),
    "olmo2": dict(model_type="olmo2", pad_token_id=None),
    "olmo3": dict(model_type="olmo3", num_hidden_layers=5, sliding_window=9, pad_token_id=None, attention_bias=True,
                  rope_parameters=dict(full_attention={**yarn(), "rope_theta": 500000.0},
                                       sliding_attention=dict(rope_type="default", rope_theta=500000.0))),
    "olmoe": dict(model_type="olmoe", num_experts=8, num_experts_per_tok=2, intermediate_size=48, pad_token_id=None),
    "gemma": dict(model_type="gemma", head_dim=32, num_key_value_heads=1, tie_word_embeddings=False, pad_token_id=None),
    "gemma-tied": dict(model_type="gemma", head_dim=32, pad_token_id=None),
    "gemma2": dict(model_type="gemma2", head_dim=32, sliding_window=9, query_pre_attn_scalar=24, num_hidden_layers=4, attn_logit_softcapping=2.0,
                   final_logit_softcapping=20.0, tie_word_embeddings=False, pad_token_id=None),
    "gemma2-tied": dict(model_type="gemma2", head_dim=32, num_hidden_layers=6, sliding_window=9, query_pre_attn_scalar=32, attn_logit_softcapping=2.0,
                        final_logit_softcapping=20.0, pad_token_id=None),
    "gemma3": dict(model_type="gemma3_text", head_dim=32, sliding_window=9, query_pre_attn_scalar=24, num_hidden_layers=4, tie_word_embeddings=False,
                   pad_token_id=None,
                   layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
                   rope_parameters=dict(full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1000000.0),
                                        sliding_attention=dict(rope_type="default", rope_theta=10000.0))),
    "gemma3-six": dict(model_type="gemma3_text", head_dim=32, sliding_window=9, query_pre_attn_scalar=32, num_hidden_layers=6, pad_token_id=None,
                       rope_parameters=dict(full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1000000.0),
                                            sliding_attention=dict(rope_type="default", rope_theta=10000.0))),
    "gemma3-images": dict(model_type="gemma3", text_config=dict(model_type="gemma3_text", head_dim=32, sliding_window=9, tie_word_embeddings=False),
                          tie_word_embeddings=False, mm_tokens_per_image=4, vision_config=dict(
                              hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=8)),
    "glm": dict(model_type="glm", head_dim=32, pad_token_id=None),
    "glm4": dict(model_type="glm4", head_dim=32, pad_token_id=None),
    "exaone4": dict(model_type="exaone4", sliding_window=None, layer_types=["full_attention"] * 3),
    "exaone4-window": dict(model_type="exaone4", num_hidden_layers=5, sliding_window=9),
    "ministral": dict(model_type="ministral", head_dim=32, sliding_window=9,
                      layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
    "ministral3": dict(model_type="ministral3", head_dim=32, rope_parameters=dict(
        rope_type="yarn", factor=8.0, original_max_position_embeddings=256, rope_theta=1000000.0, beta_fast=32.0, beta_slow=1.0,
        mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)),
}


def tokenizer():
    """One token per byte and one more, which nothing here is encoded with."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # GGUF files have merges
    names = ["<|bos|>", "<|end|>", *alphabet, "ab"]
    t = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(names)}, merges=[("a", "b")]))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<|bos|>", eos_token="<|end|>")


@torch.no_grad()
def make(name, folder):
    torch.manual_seed(SEED)
    fields = dict(FAMILIES[name])
    if "text_config" in fields:
        fields["text_config"] = {**COMMON, **fields["text_config"]}
    else:
        fields = {**COMMON, **fields}
    config = AutoConfig.for_model(**fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    for part, p in [*model.named_parameters(), *model.named_buffers()]:
        # noise in what transformers fills with 0 or 1 (norms of Gemma are stored less one), and routers whose scores are well apart
        if "norm" in part and part.endswith("weight"):
            p.normal_(0 if "gemma" in config.model_type else 1, 0.2)
        elif "sinks" in part:
            p.normal_(0, 1)
        elif "bias" in part:
            p.normal_(0, 0.1)
        elif part.endswith(("mlp.gate.weight", "mlp.router.weight")):
            p.normal_(0, 0.3)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


@torch.no_grad()
def golden(folder):
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not any(info.values()), info
    model.eval()
    random, cases = torch.Generator().manual_seed(SEED), []
    for length in PROMPT_LENGTHS:
        prompt = torch.randint(2, VOCAB, (length,), generator=random).tolist()
        ids, margin = list(prompt), float("inf")
        for _ in range(TOKENS):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
            best = logits.topk(2).values
            margin = min(margin, float(best[0] - best[1]))
            ids.append(int(logits.argmax()))
        cases.append(dict(prompt_ids=prompt, greedy_ids=ids[length:], min_margin=margin))
    return dict(cases=cases)


def main():
    if len(sys.argv) < 2 or any(name not in FAMILIES for name in sys.argv[2:]):
        sys.exit(f"{__doc__}\nnames: {', '.join(FAMILIES)}")
    for name in sys.argv[2:] or FAMILIES:
        folder = pathlib.Path(sys.argv[1]) / name
        folder.mkdir(parents=True, exist_ok=True)
        make(name, folder)
        made = golden(folder)
        (folder / "golden.json").write_text(json.dumps(made))
        distinct = [len(set(case["greedy_ids"])) for case in made["cases"]]
        print(f"{name}: least margin {min(case['min_margin'] for case in made['cases']):.1e}, distinct tokens {distinct}", flush=True)


if __name__ == "__main__":
    main()

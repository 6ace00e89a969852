//! Small checkpoints of every family, for tests.

use super::builtin;
use super::random::RandomCheckpoint;
use mixfleet_hal::DType;
use serde_json::{Value, json};

/// [`tiny_variants`] without those of latent attention, which supports no separate attention devices and no
/// KV of eight bits.
pub fn plain_variants() -> Vec<(&'static str, RandomCheckpoint)> {
    let all = tiny_variants().into_iter();
    all.filter(|(_, random)| !random.config.contains_key("kv_lora_rank")).collect()
}

/// The fields that all small checkpoints have.
fn tiny_config(model_type: &str, architecture: &str, layers: u32) -> Value {
    json!({
        "model_type": model_type, "architectures": [architecture], "hidden_act": "silu",
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": layers,
        "num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": builtin::VOCAB,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "bos_token_id": builtin::BOS, "eos_token_id": builtin::EOS,
    })
}

/// Small checkpoints (10 to 40 thousand parameters) of every variant that devices divide like Llama.
///
/// Each has its name; [`styled_variants`] has the other variants.
#[expect(clippy::too_many_lines, reason = "one list of small checkpoints")]
pub fn tiny_variants() -> Vec<(&'static str, RandomCheckpoint)> {
    let common = |model_type: &str, architecture: &str| tiny_config(model_type, architecture, 3);
    let with = |mut config: Value, more: Value| {
        if let (Value::Object(config), Value::Object(more)) = (&mut config, more) {
            config.extend(more);
        }
        config
    };
    let llama = || common("llama", "LlamaForCausalLM");
    let qwen2 = || common("qwen2", "Qwen2ForCausalLM");
    let qwen3 = || common("qwen3", "Qwen3ForCausalLM");
    let mixture = json!({"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40});
    let latent = json!({"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 14});
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64});
    let mut nested = llama3.clone();
    nested["rope_theta"] = json!(500_000.0);
    let yarn = json!({"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64});
    let list = [
        ("llama2", llama(), json!({"num_key_value_heads": null, "torch_dtype": "float32"}), DType::F32),
        (
            "llama3",
            llama(),
            json!({"rope_scaling": llama3, "rope_theta": 500_000.0, "torch_dtype": "bfloat16"}),
            DType::Bf16,
        ),
        (
            "llama3-new-spelling",
            llama(),
            json!({"rope_parameters": nested, "dtype": "bfloat16"}),
            DType::Bf16,
        ),
        (
            "llama-linear-f16",
            llama(),
            json!({"rope_scaling": {"type": "linear", "factor": 4.0}, "torch_dtype": "float16"}),
            DType::F16,
        ),
        ("llama-yarn-head-dim", llama(), json!({"rope_scaling": yarn, "head_dim": 24}), DType::F32),
        (
            "llama-biases",
            llama(),
            json!({"attention_bias": true, "mlp_bias": true, "tie_word_embeddings": true}),
            DType::Bf16,
        ),
        (
            "mistral-window",
            common("mistral", "MistralForCausalLM"),
            json!({"sliding_window": 7}),
            DType::Bf16,
        ),
        ("qwen2", qwen2(), json!({"tie_word_embeddings": true, "rope_theta": 1_000_000.0}), DType::Bf16),
        (
            "qwen2-window",
            qwen2(),
            json!({"use_sliding_window": true, "sliding_window": 5, "max_window_layers": 1}),
            DType::F32,
        ),
        ("qwen3", qwen3(), json!({"head_dim": 32}), DType::Bf16),
        (
            "qwen3-experts",
            with(common("qwen3_moe", "Qwen3MoeForCausalLM"), mixture.clone()),
            json!({"norm_topk_prob": true, "mlp_only_layers": [0], "head_dim": 16}),
            DType::Bf16,
        ),
        (
            "qwen2-experts",
            with(common("qwen2_moe", "Qwen2MoeForCausalLM"), mixture),
            json!({"shared_expert_intermediate_size": 56, "decoder_sparse_step": 2}),
            DType::F32,
        ),
        (
            "gpt-oss",
            common("gpt_oss", "GptOssForCausalLM"),
            json!({"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40, "head_dim": 16,
            "sliding_window": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}),
            DType::Bf16,
        ),
        (
            "deepseek-v3",
            with(common("deepseek_v3", "DeepseekV3ForCausalLM"), latent.clone()),
            json!({"q_lora_rank": 20, "n_group": 3, "topk_group": 2, "n_routed_experts": 6,
            "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 24,
            "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "rope_theta": 10_000.0,
            "rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64,
            "mscale": 1.0, "mscale_all_dim": 1.0}}),
            DType::Bf16,
        ),
        (
            "deepseek-v2",
            with(common("deepseek_v2", "DeepseekV2ForCausalLM"), latent),
            json!({"q_lora_rank": null, "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1,
            "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1,
            "moe_intermediate_size": 40, "first_k_dense_replace": 0, "routed_scaling_factor": 1.5}),
            DType::F32,
        ),
        (
            "glm4-experts",
            common("glm4_moe", "Glm4MoeForCausalLM"),
            json!({"head_dim": 16, "attention_bias": true, "use_qk_norm": true, "n_routed_experts": 6,
            "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 40,
            "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5}),
            DType::Bf16,
        ),
        (
            "mixtral",
            common("mixtral", "MixtralForCausalLM"),
            json!({"num_local_experts": 4, "num_experts_per_tok": 3}),
            DType::Bf16,
        ),
        (
            "qwen3-layer-types",
            qwen3(),
            json!({"head_dim": 16, "attention_bias": true, "use_sliding_window": true, "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
            DType::F16,
        ),
    ];
    let build = |(seed, (name, config, more, dtype)): (u64, (&'static str, Value, Value, DType))| {
        let config = with(config, more).as_object().cloned().unwrap_or_default();
        (name, RandomCheckpoint { config, dtype, seed })
    };
    (1..).zip(list).map(build).collect()
}

/// Small checkpoints of families whose layers differ from Llama's, each with its name. Devices do not divide
/// the layers of all of them.
#[expect(clippy::too_many_lines, reason = "one list of small checkpoints")]
pub fn styled_variants() -> Vec<(&'static str, RandomCheckpoint)> {
    let common = |model_type: &str, architecture: &str| tiny_config(model_type, architecture, 4);
    let long = json!({"type": "longrope", "long_factor": [4.0, 5.0, 6.0], "short_factor": [1.0, 1.1, 1.3]});
    let yarn = json!({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64});
    let scaled = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "rope_theta": 1e6});
    let list = [
        (
            "phi3-longrope",
            common("phi3", "Phi3ForCausalLM"),
            json!({"partial_rotary_factor": 0.75, "rope_scaling": long, "tie_word_embeddings": true,
            "original_max_position_embeddings": 256, "sliding_window": 300}),
            DType::Bf16,
        ),
        (
            "smollm3",
            common("smollm3", "SmolLM3ForCausalLM"),
            json!({"no_rope_layer_interval": 2}),
            DType::Bf16,
        ),
        (
            "granite",
            common("granite", "GraniteForCausalLM"),
            json!({"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0,
            "attention_multiplier": 0.2, "attention_bias": true, "tie_word_embeddings": true}),
            DType::Bf16,
        ),
        ("olmo2", common("olmo2", "Olmo2ForCausalLM"), json!({}), DType::F32),
        (
            "olmo3",
            common("olmo3", "Olmo3ForCausalLM"),
            json!({"sliding_window": 7, "rope_scaling": yarn, "attention_bias": true}),
            DType::Bf16,
        ),
        (
            "olmo-experts",
            common("olmoe", "OlmoeForCausalLM"),
            json!({"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40}),
            DType::Bf16,
        ),
        (
            "granite-experts",
            common("granitemoeshared", "GraniteMoeSharedForCausalLM"),
            json!({"embedding_multiplier": 6.0, "residual_multiplier": 0.4, "logits_scaling": 3.0,
            "attention_multiplier": 0.2, "num_local_experts": 6, "num_experts_per_tok": 2,
            "intermediate_size": 40, "shared_intermediate_size": 56}),
            DType::Bf16,
        ),
        (
            "granite4",
            common("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
            json!({"residual_multiplier": 0.5, "attention_multiplier": 0.3, "num_local_experts": 0,
            "shared_intermediate_size": 72, "layer_types": ["attention", "attention", "attention", "attention"]}),
            DType::F32,
        ),
        (
            "minimax",
            common("minimax_m2", "MiniMaxM2ForCausalLM"),
            json!({"head_dim": 16, "rotary_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2,
            "intermediate_size": 40}),
            DType::Bf16,
        ),
        (
            "ernie",
            common("ernie4_5", "Ernie4_5ForCausalLM"),
            json!({"head_dim": 16, "use_bias": true}),
            DType::Bf16,
        ),
        ("seed", common("seed_oss", "SeedOssForCausalLM"), json!({"head_dim": 16}), DType::Bf16),
        (
            "glm",
            common("glm", "GlmForCausalLM"),
            json!({"head_dim": 16, "attention_bias": true, "partial_rotary_factor": 0.5}),
            DType::F32,
        ),
        (
            "glm4",
            common("glm4", "Glm4ForCausalLM"),
            json!({"head_dim": 16, "attention_bias": false}),
            DType::Bf16,
        ),
        ("exaone4", common("exaone4", "Exaone4ForCausalLM"), json!({"sliding_window": 9}), DType::Bf16),
        (
            "gemma",
            common("gemma", "GemmaForCausalLM"),
            json!({"head_dim": 16, "hidden_act": "gelu", "num_key_value_heads": 1}),
            DType::Bf16,
        ),
        (
            "gemma2",
            common("gemma2", "Gemma2ForCausalLM"),
            json!({"head_dim": 16, "hidden_act": null, "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 24, "sliding_window": 5, "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 30.0}),
            DType::Bf16,
        ),
        (
            "gemma3",
            common("gemma3_text", "Gemma3ForCausalLM"),
            json!({"head_dim": 16, "hidden_act": null, "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 24, "sliding_window": 5, "sliding_window_pattern": 3,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
            DType::Bf16,
        ),
        (
            "ministral",
            common("ministral", "MinistralForCausalLM"),
            json!({"head_dim": 16, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention",
            "sliding_attention", "full_attention"]}),
            DType::F16,
        ),
        (
            "ministral3",
            common("ministral3", "Ministral3ForCausalLM"),
            json!({"head_dim": 16, "rope_parameters": scaled}),
            DType::Bf16,
        ),
    ];
    let build = |(seed, (name, config, more, dtype)): (u64, (&'static str, Value, Value, DType))| {
        let mut config = config.as_object().cloned().unwrap_or_default();
        config.extend(more.as_object().cloned().unwrap_or_default());
        (name, RandomCheckpoint { config, dtype, seed })
    };
    (101..).zip(list).map(build).collect()
}

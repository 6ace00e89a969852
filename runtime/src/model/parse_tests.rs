use super::super::testing::scratch;
use super::super::variants::{styled_variants, tiny_variants};
use super::*;
use mixfleet_hal::{ExpertRouting, RotaryPart, Scoring};
use mixfleet_scheduler::cost::LatentAttention;
use mixfleet_scheduler::layers::LayerRope;
use serde_json::json;

fn llama() -> Value {
    json!({"model_type": "llama", "hidden_size": 96, "intermediate_size": 200, "num_hidden_layers": 4,
        "num_attention_heads": 4, "vocab_size": 500})
}

fn qwen2(more: Value) -> Value {
    with(with(llama(), json!({"model_type": "qwen2", "num_key_value_heads": 2})), more)
}

fn with(mut config: Value, more: Value) -> Value {
    let more = more.as_object().cloned().expect("an object");
    config.as_object_mut().expect("an object").extend(more);
    config
}

fn parse(config: Value) -> Result<ModelConfig> {
    ModelConfig::parse(Path::new("config.json"), config.as_object().expect("an object"))
}

fn good(config: Value) -> ModelConfig {
    parse(config).expect("a good config")
}

#[test]
fn absent_fields_are_as_in_transformers() {
    let config = good(llama());
    assert_eq!((config.kv_heads, config.head_dim, config.context_max, config.norm_eps), (4, 24, 2048, 1e-6));
    assert!(!config.tied_embeddings && !config.qkv_bias && config.eos_ids.is_empty());
    assert_eq!(config.windows, [None; 4]);
    assert_eq!((config.rope.inv_freq.len(), config.rope.inv_freq[0], config.rope.scale), (12, 1.0, 1.0));
    let mistral = with(llama(), json!({"model_type": "mistral", "num_attention_heads": 8}));
    let config = good(mistral.clone());
    assert_eq!((config.kv_heads, config.context_max), (8, 131_072));
    assert_eq!(config.windows, [Some(4096); 4]);
    let config = good(with(mistral, json!({"sliding_window": null, "num_key_value_heads": null})));
    assert_eq!(config.windows, [None; 4]);
    let qwen3 = with(llama(), json!({"model_type": "qwen3", "num_key_value_heads": 2}));
    let config = good(qwen3);
    assert_eq!((config.head_dim, config.qk_norm, config.qkv_bias), (128, true, false));
    assert!(good(qwen2(json!({}))).qkv_bias);
    // the second frequency of a head of 24 is theta^(-2/24)
    for (family, theta) in [("mixtral", 1e6f64), ("gpt_oss", 1.5e5)] {
        let own = json!({"model_type": family, "num_key_value_heads": 2, "head_dim": 24});
        let config = good(with(llama(), own));
        let second = f64::from(config.rope.inv_freq[1]) / theta.powf(-1.0 / 12.0);
        assert!(config.norm_eps == 1e-5 && (second - 1.0).abs() < 1e-6, "{family}: {second}");
    }
}

#[test]
fn windows_of_qwen_follow_layer_types_or_the_first_windowed_layer() {
    let sliding = json!({"use_sliding_window": true, "sliding_window": 64, "max_window_layers": 3});
    assert_eq!(good(qwen2(sliding.clone())).windows, [None, None, None, Some(64)]);
    assert_eq!(good(qwen2(json!({"sliding_window": 64, "max_window_layers": 0}))).windows, [None; 4]);
    let (full, slide) = ("full_attention", "sliding_attention");
    let typed = with(sliding, json!({"layer_types": [slide, full, full, slide]}));
    assert_eq!(good(qwen2(typed)).windows, [Some(64), None, None, Some(64)]);
}

#[test]
fn both_spellings_give_the_same_model() {
    let variants = tiny_variants();
    let parsed = |name: &str| {
        let (_, random) = variants.iter().find(|(other, _)| *other == name).expect("a variant");
        ModelConfig::parse(Path::new("config.json"), &random.config).expect(name)
    };
    assert_eq!(parsed("llama3"), parsed("llama3-new-spelling"));
    let rope = json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0});
    let flat = good(qwen2(json!({"rope_parameters": rope})));
    let nested = good(qwen2(json!({"rope_parameters": {"full_attention": rope, "sliding_attention": rope}})));
    assert_eq!(flat, nested);
    assert_eq!(
        flat,
        good(qwen2(json!({"rope_theta": 1000.0, "rope_scaling": {"type": "linear", "factor": 2}})))
    );
    assert_eq!(
        good(with(llama(), json!({"dtype": "bfloat16"}))),
        good(with(llama(), json!({"torch_dtype": "torch.bfloat16"})))
    );
}

/// Inverse frequencies that transformers 5.23 and torch 2.15 computed for these parameters.
#[test]
fn inverse_frequencies_are_those_of_transformers() {
    let check = |rope: Value, head_dim: u32, scale: f32, expected: &[f32]| {
        let more = json!({"head_dim": head_dim, "max_position_embeddings": 512, "rope_parameters": rope});
        let config = good(with(llama(), more));
        assert_eq!(config.rope.scale, scale);
        for (ours, theirs) in config.rope.inv_freq.iter().zip(expected) {
            assert!((ours / theirs - 1.0).abs() < 2e-7, "{ours} {theirs}");
        }
        assert_eq!(config.rope.inv_freq.len(), expected.len());
    };
    let linear = json!({"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0});
    check(linear, 8, 1.0, &[0.25, 0.029_730_178, 0.003_535_534, 0.000_420_448_2]);
    let yarn = json!({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0});
    let expected = [
        1.0,
        0.362_624_14,
        0.121_186_94,
        0.034_375,
        0.005_801_985_5,
        0.002_693_043_6,
        0.00125,
        0.000_580_198_7,
        0.000_269_304_3,
        0.000_125,
        5.801_987e-5,
        2.693_042_7e-5,
    ];
    check(yarn, 24, 1.207_944_2, &expected);
    let yarn = json!({"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64,
        "rope_theta": 1000.0, "beta_fast": 16, "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": false});
    let expected = [
        1.0,
        0.388_342_23,
        0.120_533_99,
        0.022_228_492,
        0.012_499_999,
        0.007_029_267,
        0.003_952_847_3,
        0.002_222_849_5,
        0.001_249_999_9,
        0.000_702_926_66,
        0.000_395_284_76,
        0.000_222_284_89,
    ];
    check(yarn, 24, 1.054_456_5, &expected);
}

#[test]
fn the_rope_table_is_cosines_then_sines() {
    let rope = good(llama()).rope;
    let table = rope.table(&[0, 7]);
    assert_eq!(table.len(), 48);
    assert_eq!((&table[..12], &table[12..24]), (&[1.0; 12][..], &[0.0; 12][..]));
    assert_eq!((table[24], table[36]), (7f32.cos(), 7f32.sin()));
}

#[test]
fn an_answer_also_ends_at_the_eos_token_of_the_tokenizer() {
    let directory = scratch("eos-tokenizer");
    let write =
        |name: &str, value: Value| std::fs::write(directory.join(name), value.to_string()).expect("a file");
    let ends = || ModelConfig::open(&directory).expect("a config").eos_ids;
    write("config.json", with(llama(), json!({"eos_token_id": 2})));
    let added = json!([{"id": 2, "content": "</s>"}, {"id": 5, "content": "<|im_end|>"}]);
    write("tokenizer.json", json!({"added_tokens": added, "model": {"vocab": {"word": 7, "<stop>": 8}}}));
    for (token, expected) in [
        (json!("<|im_end|>"), vec![2, 5]),
        (json!({"content": "<|im_end|>", "lstrip": false}), vec![2, 5]),
        (json!("</s>"), vec![2]),
        (json!("<stop>"), vec![2, 8]),
        (json!("nowhere"), vec![2]),
        (Value::Null, vec![2]),
    ] {
        write("tokenizer_config.json", json!({"eos_token": token}));
        assert_eq!(ends(), expected, "{token}");
    }
    write("special_tokens_map.json", json!({"eos_token": "<|im_end|>"}));
    assert_eq!(ends(), [2, 5], "where tokenizer_config.json names none");
    write(
        "tokenizer_config.json",
        json!({"eos_token": "<late>", "added_tokens_decoder": {"11": {"content": "<late>"}}}),
    );
    write("generation_config.json", json!({"eos_token_id": [3]}));
    assert_eq!(ends(), [3, 11]);
}

#[test]
fn eos_ids_come_from_the_generation_config_first() {
    let directory = scratch("eos");
    let write =
        |name: &str, value: Value| std::fs::write(directory.join(name), value.to_string()).expect("a file");
    write("config.json", with(llama(), json!({"eos_token_id": 2, "bos_token_id": 1})));
    let config = ModelConfig::open(&directory).expect("a config");
    assert_eq!((config.eos_ids, config.bos_id), (vec![2], Some(1)));
    write("generation_config.json", json!({"eos_token_id": [7, 9]}));
    assert_eq!(ModelConfig::open(&directory).expect("a config").eos_ids, [7, 9]);
    write("generation_config.json", json!({"temperature": 0.6}));
    assert_eq!(ModelConfig::open(&directory).expect("a config").eos_ids, [2]);
    write("generation_config.json", json!({"eos_token_id": "</s>"}));
    let error = ModelConfig::open(&directory).unwrap_err().to_string();
    assert!(error.contains("generation_config.json: field 'eos_token_id'"), "{error}");
    std::fs::write(directory.join("config.json"), "[1]").expect("a file");
    assert!(
        ModelConfig::open(&directory).unwrap_err().to_string().contains("config.json: not a JSON object")
    );
}

#[test]
fn what_is_not_supported_is_named_with_what_is() {
    let yarn = |more: Value| json!({"rope_scaling": with(json!({"rope_type": "yarn", "factor": 2.0}), more)});
    let cases = [
        (
            json!({"model_type": "gpt2"}),
            "field 'model_type': 'gpt2' is not supported; supported: llama (LlamaForCausalLM), mistral",
        ),
        (json!({"model_type": null}), "field 'model_type': missing; supported: llama"),
        (json!({"architectures": ["LlamaForSequenceClassification"]}), "field 'architectures'"),
        (json!({"hidden_act": "gelu"}), "field 'hidden_act': 'gelu' is not supported; supported: silu"),
        (json!({"quantization_config": {"bits": 4}}), "field 'quantization_config.quant_method'"),
        (json!({"hidden_size": null}), "field 'hidden_size': missing"),
        (json!({"hidden_size": 0}), "field 'hidden_size': 0, expected a whole number from 1 to"),
        (json!({"hidden_size": 1u64 << 40}), "field 'hidden_size'"),
        (json!({"num_hidden_layers": 2.5}), "field 'num_hidden_layers': 2.5, expected"),
        (json!({"num_key_value_heads": 3}), "field 'num_key_value_heads': 3, expected a divisor of"),
        (
            json!({"num_attention_heads": 5}),
            "field 'head_dim': missing, and hidden_size / num_attention_heads is 96 / 5",
        ),
        (json!({"head_dim": 7}), "field 'head_dim': 7, expected an even number"),
        (json!({"rms_norm_eps": "x"}), "field 'rms_norm_eps'"),
        (json!({"attention_bias": 1}), "field 'attention_bias': 1, expected true or false"),
        (json!({"torch_dtype": "int8"}), "field 'torch_dtype': 'int8' is not supported; supported: float32"),
        (json!({"eos_token_id": -1}), "field 'eos_token_id'"),
        (json!({"partial_rotary_factor": 0.5}), "field 'partial_rotary_factor'"),
        (
            json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
            "field 'rope_scaling.rope_type': 'dynamic' is not supported; supported: default, linear, llama3, yarn",
        ),
        (json!({"rope_parameters": {"rope_type": "linear"}}), "field 'rope_parameters.factor': missing"),
        (
            json!({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}}),
            "field 'rope_scaling.high_freq_factor'",
        ),
        (
            json!({"rope_parameters": {"full_attention": {"rope_theta": 1}, "sliding_attention": {"rope_theta": 2}}}),
            "field 'rope_parameters': differs between layer types",
        ),
        (yarn(json!({"rope_theta": 1.0})), "field 'rope_scaling.rope_theta'"),
        (yarn(json!({"beta_fast": -1})), "field 'rope_scaling.beta_fast'"),
    ];
    for (more, expected) in cases {
        let error = parse(with(llama(), more)).expect_err(expected).to_string();
        assert!(error.starts_with("config.json: ") && error.contains(expected), "{error}\nlacks: {expected}");
    }
    let slide = ["sliding_attention"; 4];
    let cases = [
        (json!({"layer_types": slide}), "without use_sliding_window"),
        (json!({"layer_types": ["full_attention"]}), "1 entries, expected num_hidden_layers (4)"),
        (
            json!({"layer_types": (["mamba2"; 4])}),
            "'mamba2' is not supported; supported: full_attention, sliding_attention",
        ),
        (json!({"max_window_layers": -1, "use_sliding_window": true}), "field 'max_window_layers'"),
        (
            json!({"model_type": "mistral", "layer_types": (["full_attention"; 4])}),
            "only 'sliding_attention' layers",
        ),
    ];
    for (more, expected) in cases {
        let error = parse(qwen2(more)).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}\nlacks: {expected}");
    }
}

fn gpt_oss(more: Value) -> Value {
    let own = json!({"model_type": "gpt_oss", "head_dim": 24, "num_key_value_heads": 2});
    with(with(llama(), own), more)
}

#[test]
fn absent_fields_of_gpt_oss_are_as_in_transformers() {
    let config = good(gpt_oss(json!({})));
    assert_eq!(config.windows, [Some(128), None, Some(128), None]);
    assert!(config.qkv_bias && config.o_bias && !config.mlp_bias && config.sinks.is_some());
    let experts = config.experts.unwrap();
    assert_eq!((experts.routing.experts, experts.routing.active, experts.intermediate), (128, 4, 200));
    assert_eq!(experts.clamped.map(|clamp| clamp.map(|number| number.0)), Some([1.702, 7.0]));
    assert!(experts.routing.normalise && experts.layers == [true; 4]);
    let mxfp4 =
        json!({"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}});
    assert_eq!(good(gpt_oss(mxfp4)).format, Some(mixfleet_hal::WeightFormat::Mxfp4));
}

#[test]
fn what_is_not_supported_of_gpt_oss_is_named() {
    for (more, expected) in [
        (json!({"architectures": ["GptOssForSequenceClassification"]}), "field 'architectures'"),
        (json!({"hidden_act": "gelu"}), "field 'hidden_act'"),
        (json!({"num_experts_per_tok": 200}), "field 'num_experts_per_tok': 200, expected at most"),
        (json!({"swiglu_limit": 0}), "field 'swiglu_limit'"),
        (json!({"swiglu_alpha": "x"}), "field 'swiglu_alpha'"),
        (json!({"layer_types": (["chunked_attention"; 4])}), "field 'layer_types': 'chunked_attention'"),
        (
            json!({"sliding_window": null, "layer_types": (["sliding_attention"; 4])}),
            "field 'layer_types': 'sliding_attention' without",
        ),
        (
            json!({"quantization_config": {"quant_method": "mxfp4", "dequantize": true}}),
            "field 'quantization_config.dequantize': true is not supported; supported: false",
        ),
        (
            json!({"quantization_config": {"quant_method": "mxfp4", "packing": 2}}),
            "field 'quantization_config.packing': this field is not supported",
        ),
    ] {
        let error = parse(gpt_oss(more)).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}\nlacks: {expected}");
    }
}

fn deepseek(more: Value) -> Value {
    let own = json!({"model_type": "deepseek_v3", "kv_lora_rank": 24, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8, "v_head_dim": 14, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2});
    with(with(llama(), own), more)
}

#[test]
fn deepseek_has_latents_and_groups_of_experts() {
    let yarn = json!({"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64});
    let v3 = json!({"q_lora_rank": 20, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5, "rope_scaling": yarn});
    let config = good(deepseek(v3));
    let latent = config.latent.as_ref().unwrap();
    let LatentAttention { q_rank, kv_rank, nope, rope, v, .. } = latent.lengths;
    assert_eq!([q_rank, kv_rank, nope, rope, v], [20, 24, 12, 8, 14]);
    assert_eq!((config.kv_heads, config.head_dim, config.rotated(), config.rope.scale), (1, 32, 8, 1.0));
    // transformers: mscale = 0.1 ln(40) + 1 = 1.36889, squared over the root of nope + rope
    assert!((f64::from(latent.scale.0) - 1.368_888 * 1.368_888 / 20f64.sqrt()).abs() < 1e-6);
    assert_eq!(config.kv_shape(4, DType::Bf16).wire_token_bytes(DType::Bf16), 2 * 32);
    let experts = config.experts.unwrap();
    assert_eq!((experts.layers, experts.shared), (vec![false, true, true, true], 48));
    let routing = experts.routing;
    assert!(experts.correction && routing.normalise && routing.scoring == Scoring::Sigmoid);
    assert_eq!((routing.groups, routing.groups_active, routing.group_best, routing.scale.0), (4, 2, 2, 2.5));

    let v2 = json!({"model_type": "deepseek_v2", "topk_method": "group_limited_greedy"});
    let routing = good(deepseek(v2)).experts.unwrap().routing;
    assert!(!routing.normalise && routing.scoring == Scoring::Softmax);
    assert_eq!((routing.groups, routing.groups_active, routing.group_best), (4, 2, 1));
    let lite = good(deepseek(json!({"model_type": "deepseek_v2", "topk_method": "greedy"})));
    assert_eq!(lite.experts.unwrap().routing, ExpertRouting::softmax(8, 2, false));
    let latent = lite.latent.unwrap();
    assert_eq!((latent.lengths.q_rank, latent.scale.0), (0, (1.0 / 20f64.sqrt()) as f32));
    let kimi = json!({"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]});
    assert!(good(deepseek(kimi)).latent.is_some());
}

#[test]
fn what_is_not_supported_of_deepseek_is_named() {
    for (more, expected) in [
        (json!({"kv_lora_rank": null}), "field 'kv_lora_rank'"),
        (json!({"qk_rope_head_dim": 7}), "field 'qk_rope_head_dim': 7, expected an even number"),
        (json!({"attention_bias": true}), "field 'attention_bias': true is not supported"),
        (json!({"rope_interleave": false}), "field 'rope_interleave': false is not supported"),
        (json!({"scoring_func": "tanh"}), "field 'scoring_func': 'tanh' is not supported"),
        (json!({"topk_method": "best"}), "field 'topk_method': 'best' is not supported"),
        (json!({"n_group": 3}), "field 'n_group': route: 8 experts do not divide into 3 groups"),
        (json!({"topk_group": 5}), "field 'n_group': route: 5 of 4 groups"),
        (json!({"n_shared_experts": 4096, "moe_intermediate_size": 4096}), "field 'n_shared_experts'"),
        (
            json!({"model_type": "deepseek_v2", "topk_method": "greedy", "norm_topk_prob": true, "routed_scaling_factor": 2}),
            "field 'routed_scaling_factor': 2 with norm_topk_prob",
        ),
    ] {
        let error = parse(deepseek(more)).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}\nlacks: {expected}");
    }
}

fn glm(more: Value) -> Value {
    with(with(llama(), json!({"model_type": "glm4_moe", "num_key_value_heads": 2, "head_dim": 24})), more)
}

/// Fields as the configurations of GLM-4.5 have them.
#[test]
fn glm_has_experts_of_deepseek_and_rotates_a_part_of_a_head() {
    let published = json!({"attention_bias": true, "use_qk_norm": true, "partial_rotary_factor": 0.5,
        "rope_theta": 1_000_000, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 40, "n_group": 1, "topk_group": 1, "norm_topk_prob": true,
        "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1});
    let config = good(glm(published));
    assert!(config.qkv_bias && !config.o_bias && !config.mlp_bias && config.qk_norm);
    assert_eq!((config.windows.clone(), config.rotated()), (vec![None; 4], 12));
    assert_eq!(config.rotary(), Some(RotaryPart { first: 0, length: 12, interleaved: false }));
    // transformers: 1 / theta^(2i / dim), of the 12 numbers that are rotated
    for (i, frequency) in config.rope.inv_freq.iter().enumerate() {
        let expected = 1e6f64.powf(-(2.0 * i as f64) / 12.0);
        assert!((f64::from(*frequency) / expected - 1.0).abs() < 1e-6, "{i}: {frequency}");
    }
    let experts = config.experts.unwrap();
    assert_eq!((experts.layers, experts.shared), (vec![false, false, false, true], 40));
    assert!(experts.correction && experts.routing.normalise && experts.routing.scoring == Scoring::Sigmoid);
    assert_eq!((experts.routing.groups, experts.routing.scale.0), (1, 2.5));

    let absent = good(glm(json!({"rms_norm_eps": null})));
    assert!(!absent.qkv_bias && !absent.qk_norm && (absent.norm_eps, absent.rotated()) == (1e-5, 12));
    let experts = absent.experts.unwrap();
    assert_eq!((experts.routing.experts, experts.routing.active, experts.intermediate), (128, 8, 1408));
    assert_eq!((experts.layers, experts.shared), (vec![false, true, true, true], 1408));
    let newer = json!({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}});
    assert_eq!(good(glm(newer)).rotated(), 6);
    let whole = good(glm(json!({"partial_rotary_factor": 1.0})));
    assert_eq!((whole.rotated(), whole.rotary()), (24, None));

    for (more, expected) in [
        (json!({"partial_rotary_factor": 0.3}), "field 'partial_rotary_factor': 0.3 of a head of 24"),
        (json!({"partial_rotary_factor": 1.5}), "field 'partial_rotary_factor': 1.5 of a head"),
        (json!({"partial_rotary_factor": 0.01}), "field 'partial_rotary_factor': 0.01 of a head"),
        (
            json!({"rope_parameters": {"partial_rotary_factor": 0.3}}),
            "field 'rope_parameters.partial_rotary_factor': 0.3",
        ),
        (json!({"use_qk_norm": 1}), "field 'use_qk_norm'"),
        (json!({"n_group": 3}), "field 'n_group'"),
        (json!({"num_experts_per_tok": 200}), "field 'n_group': route"),
        (json!({"model_type": "apertus"}), "'apertus' is not supported"),
    ] {
        let error = parse(glm(more)).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}\nlacks: {expected}");
    }
}

#[test]
fn numbers_that_no_model_has_are_refused_by_name() {
    for (field, wrong) in [
        ("rope_theta", json!([0, 0.0, -1, -10000.0, 1e-300, 1e300, "10000", true])),
        ("rms_norm_eps", json!([0, -1e-5, 1e-300, 1.5, 1e300, "1e-5"])),
        ("hidden_size", json!([0, -96, 96.5, 4e9, 18_446_744_073_709_551_615u64])),
        ("intermediate_size", json!([0, -1, 4e9])),
        ("num_hidden_layers", json!([0, -1, 4097, 4_000_000_000u64])),
        ("num_attention_heads", json!([0, -4, 1 << 20])),
        ("num_key_value_heads", json!([0, -1, 3, 1 << 20])),
        ("head_dim", json!([0, -2, 7, 1 << 20])),
        ("vocab_size", json!([0, -1, 1 << 30])),
        ("max_position_embeddings", json!([0, -1, 1u64 << 40])),
    ] {
        for value in wrong.as_array().expect("a list") {
            let mut config = llama();
            config[field] = value.clone();
            let error = parse(config).expect_err(&format!("{field}: {value}")).to_string();
            assert!(error.contains(&format!("{field}'")), "{error}");
        }
    }
    let both = with(llama(), json!({"rope_theta": -1.0, "rope_parameters": {"rope_theta": 1000.0}}));
    assert!(parse(both).expect_err("one is wrong").to_string().contains("field 'rope_theta'"));
    for (field, value) in
        [("rope_theta", -5.0), ("rope_theta", 0.0), ("rope_theta", 1e-200), ("factor", 1e300)]
    {
        let mut rope = json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0});
        rope[field] = json!(value);
        let error =
            parse(with(llama(), json!({"rope_parameters": rope}))).expect_err("impossible").to_string();
        assert!(error.contains("field 'rope_parameters.rope_theta'"), "{field} {value}: {error}");
    }
}

/// The collection has the `model_type` of most known models; others are not compared.
#[test]
fn known_models_are_served_if_their_family_is() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data/models.json");
    let Ok(text) = std::fs::read_to_string(&path) else {
        eprintln!(
            "SKIPPED: ../shared/data/models.json is absent; families of known models were not compared"
        );
        return;
    };
    let collection: Value = serde_json::from_str(&text).expect("JSON");
    let mut compared = 0;
    for model in mixfleet_scheduler::models::models() {
        let Some(family) = collection[model.name]["model_type"].as_str() else { continue };
        let known = FAMILIES.iter().any(|of| of.model_type == family);
        assert_eq!(model.unserved().is_none(), known, "{}: {family}", model.name);
        compared += 1;
    }
    assert!(compared > 20, "{compared}");
}

fn styled(name: &str) -> Value {
    let (_, random) = styled_variants().into_iter().find(|(other, _)| *other == name).expect("a variant");
    Value::Object(random.config)
}

#[test]
fn a_rope_that_changes_with_length_bounds_the_context() {
    let phi = good(styled("phi3-longrope"));
    assert_eq!((phi.context_max, phi.rotated(), phi.head_dim), (256, 6, 8));
    // sqrt(1 + ln(512 / 256) / ln(256)), and the frequencies by the short factors
    assert!((phi.rope.scale - 1.060_66).abs() < 1e-5, "{}", phi.rope.scale);
    let expected = [1.0, 1e4f32.powf(-1.0 / 3.0) / 1.1, 1e4f32.powf(-2.0 / 3.0) / 1.3];
    let errors =
        phi.rope.inv_freq.iter().zip(expected).map(|(found, expected)| (found / expected - 1.0).abs());
    assert!(errors.fold(0.0, f32::max) < 1e-6);
    assert_eq!(good(styled("ministral3")).context_max, 128);
    let mut few = styled("phi3-longrope");
    few["rope_scaling"]["short_factor"] = json!([1.0, 1.1]);
    assert!(parse(few).unwrap_err().to_string().contains("short_factor"));
}

#[test]
fn layers_are_rotated_as_their_family_says() {
    use LayerRope::{Absent, Main, Second};
    assert_eq!(good(styled("smollm3")).style.ropes, [Main, Absent, Main, Absent]);
    let listed = with(styled("smollm3"), json!({"no_rope_layers": [1, 1, 0, 1]}));
    assert_eq!(good(listed).style.ropes, [Main, Main, Absent, Main]);
    assert_eq!(good(styled("exaone4")).style.ropes, [Main, Main, Main, Absent]);
    assert!(good(with(styled("exaone4"), json!({"sliding_window": null}))).style.ropes.is_empty());
    let gemma = good(styled("gemma3"));
    assert_eq!(gemma.style.ropes, [Second, Second, Main, Second]);
    let second = gemma.second_rope.expect("a second rope");
    // theta is 1e6 of full layers, stretched by 8, and 1e4 of the others; scores carry sqrt(16 / 24)
    assert_eq!([gemma.rope.inv_freq[0], second.inv_freq[0]], [0.125, 1.0]);
    assert!((second.inv_freq[1] - 1e4f32.powf(-0.125)).abs() < 1e-6);
    assert!((gemma.rope.scale - (16f32 / 24.0).sqrt().sqrt()).abs() < 1e-6);
    let same = with(styled("olmo3"), json!({"rope_scaling": null}));
    assert!(good(same).second_rope.is_none());
}

#[test]
fn multipliers_are_those_of_the_residual_stream_as_it_is_kept() {
    let granite = good(styled("granite"));
    let ModelScales { stream_eps, embedding, branch, last_norm, score, .. } = granite.scales;
    assert!((stream_eps / (1e-5 / 0.22 / 0.22) - 1.0).abs() < 1e-6);
    assert!((embedding / (12.0 / 0.22) - 1.0).abs() < 1e-6 && branch == 1.0 && last_norm == 0.125);
    assert!((score - 0.2 * 8f32.sqrt()).abs() < 1e-6);
    let gemma = good(styled("gemma"));
    assert!((gemma.scales.embedding - 48f32.sqrt()).abs() < 1e-6 && gemma.style.gelu);
    let gemma = good(styled("gemma3")).scales;
    assert!((gemma.branch - 1.0 / 48f32.sqrt()).abs() < 1e-6 && gemma.embedding == 1.0);
}

#[test]
fn a_field_that_another_family_reads_is_refused_by_name() {
    for (base, field, value) in [
        (llama(), "embedding_multiplier", json!(2.0)),
        (llama(), "attn_logit_softcapping", json!(50.0)),
        (llama(), "final_logit_softcapping", json!(30.0)),
        (llama(), "no_rope_layers", json!([1, 0])),
        (llama(), "clip_qkv", json!(8.0)),
        (qwen2(json!({})), "use_bidirectional_attention", json!(true)),
        (styled("granite"), "logit_scale", json!(0.5)),
        (styled("gemma3"), "hidden_activation", json!("gelu")),
        (styled("phi3-longrope"), "attention_chunk_size", json!(64)),
        (styled("smollm3"), "use_sliding_window", json!(true)),
        (styled("olmo3"), "partial_rotary_factor", json!(0.5)),
    ] {
        let mut fields = serde_json::Map::new();
        fields.insert(field.to_owned(), value);
        let error = parse(with(base, Value::Object(fields))).unwrap_err().to_string();
        assert!(error.contains(field), "{error}");
    }
    for (field, value) in
        [("residual_multiplier", json!(1)), ("final_logit_softcapping", Value::Null), ("alibi", json!(false))]
    {
        let mut fields = serde_json::Map::new();
        fields.insert(field.to_owned(), value);
        assert_eq!(good(with(llama(), Value::Object(fields))), good(llama()), "{field}");
    }
}

#[test]
fn soft_caps_of_gemma_2_have_defaults_and_may_be_absent() {
    let caps = |config: Value| {
        let scales = good(config).scales;
        (scales.score_cap, scales.logit_cap)
    };
    let mut gemma = styled("gemma2");
    assert_eq!(caps(gemma.clone()), (Some(0.5), Some(30.0)));
    assert_eq!(good(gemma.clone()).windows, [Some(5), None, Some(5), None]);
    gemma["attn_logit_softcapping"] = Value::Null;
    gemma.as_object_mut().expect("an object").remove("final_logit_softcapping");
    assert_eq!(caps(gemma), (None, Some(30.0)));
    let error =
        parse(with(llama(), json!({"final_logit_softcapping": 30.0}))).expect_err("no cap").to_string();
    assert!(error.contains("final_logit_softcapping"), "{error}");
}

#[test]
fn a_granite_4_with_a_state_is_refused() {
    let mut granite = styled("granite4");
    assert_eq!(good(granite.clone()).intermediate, 72);
    granite["layer_types"] = json!(["attention", "mamba", "attention", "attention"]);
    let error = parse(granite).expect_err("a state").to_string();
    assert!(error.contains("layer_types") && error.contains("recurrent state"), "{error}");
}

use super::*;
use serde_json::json;

fn parse(config: &Value) -> Result<Quantisation> {
    let object = json!({"quantization_config": config});
    Quantisation::parse(&Fields::new(Path::new("config.json"), object.as_object().expect("an object")))
}

fn ct(group: &Value) -> Value {
    json!({"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": group}})
}

#[test]
fn groups_are_found_by_expression_then_by_class_and_what_is_ignored_is_plain() {
    let weights = |symmetric: bool| json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": symmetric});
    let config = json!({"quant_method": "compressed-tensors", "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*layers\\.3\\..*"],
        "config_groups": {"all": {"targets": ["Linear"], "weights": weights(true)},
            "mlp": {"targets": ["re:.*mlp.*"], "weights": weights(false)}}});
    let quantisation = parse(&config).unwrap();
    let packed = |symmetric| Scheme::Packed { granularity: Granularity::Block([1, 32]), symmetric };
    assert_eq!(quantisation.scheme("model.layers.0.self_attn.q_proj"), Some(&packed(true)));
    assert_eq!(quantisation.scheme("model.layers.0.mlp.up_proj"), Some(&packed(false)));
    for plain in ["lm_head", "model.layers.3.mlp.up_proj", "model.embed_tokens"] {
        assert_eq!(quantisation.scheme(plain), None, "{plain}");
    }
}

#[test]
fn modules_not_to_convert_are_named_in_several_ways() {
    let config = json!({"quant_method": "fp8", "weight_block_size": [128, 64],
        "modules_to_not_convert": ["lm_head", "model.layers.1", "model.layers.*.self_attn"]});
    let quantisation = parse(&config).unwrap();
    let scheme = Scheme::Float8 { granularity: Granularity::Block([128, 64]), scale: "weight_scale_inv" };
    assert_eq!(quantisation.scheme("model.layers.0.mlp.up_proj"), Some(&scheme));
    assert_eq!(quantisation.scheme("model.layers.11.mlp.up_proj"), Some(&scheme));
    for plain in ["lm_head", "model.layers.1.mlp.up_proj", "model.layers.7.self_attn.q_proj"] {
        assert_eq!(quantisation.scheme(plain), None, "{plain}");
    }
}

#[test]
fn what_is_not_supported_is_refused_by_its_field() {
    let weights = json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32});
    let with = |field: &str, value: Value| {
        let mut weights = weights.clone();
        weights[field] = value;
        ct(&json!({"targets": ["Linear"], "weights": weights}))
    };
    let gptq = |field: &str, value: Value| {
        let mut config = json!({"quant_method": "gptq", "bits": 4, "group_size": 64});
        config[field] = value;
        config
    };
    let cases = [
        (json!({"quant_method": "bitsandbytes"}), "quant_method"),
        (gptq("desc_act", json!(true)), "desc_act"),
        (gptq("bits", json!(3)), "bits"),
        (gptq("checkpoint_format", json!("gptq_v2")), "checkpoint_format"),
        (gptq("rotation", json!("hadamard")), "rotation"),
        (json!({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}), "version"),
        (json!({"quant_method": "awq", "bits": 4}), "group_size"),
        (json!({"quant_method": "fp8", "fmt": "e5m2"}), "fmt"),
        (json!({"quant_method": "fp8", "weight_block_size": [128]}), "weight_block_size"),
        (with("num_bits", json!(3)), "config_groups.group_0.weights.num_bits"),
        (with("actorder", json!("group")), "config_groups.group_0.weights.actorder"),
        (with("strategy", json!("token")), "config_groups.group_0.weights.strategy"),
        (with("group_size", json!(0)), "config_groups.group_0.weights.group_size"),
        (ct(&json!({"targets": ["re:("], "weights": weights})), "config_groups.group_0.targets"),
        (
            ct(&json!({"targets": ["Linear"], "weights": weights, "format": "marlin-24"})),
            "config_groups.group_0.format",
        ),
        (json!({"quant_method": "compressed-tensors"}), "config_groups"),
    ];
    for (config, field) in cases {
        let error = parse(&config).unwrap_err().to_string();
        assert!(error.contains(&format!("field 'quantization_config.{field}'")), "{field}: {error}");
    }
    let rotated =
        json!({"quant_method": "compressed-tensors", "config_groups": {}, "transform_config": {"a": 1}});
    assert!(parse(&rotated).unwrap_err().to_string().contains("transform_config"));
}

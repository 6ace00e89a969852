//! Compares the restated model shapes with the collection they were taken from, where it is available.

use mixfleet_hal::DType;
use mixfleet_scheduler::models::{self, KnownModel};
use serde_json::Value;
use std::path::Path;

fn collection() -> Option<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data/models.json");
    let Ok(text) = std::fs::read_to_string(&path) else {
        eprintln!("SKIPPED: ../shared/data/models.json is absent; models not compared");
        return None;
    };
    Some(serde_json::from_str(&text).expect("JSON"))
}

/// What the collection has under a name that means something else for one model, and what that is.
const EXCEPTIONS: &[(&str, &str, &str)] =
    &[("llama-4-maverick", "intermediate_size", "that of an expert; a plain layer's is restated")];

fn number(row: &Value, keys: &[&str]) -> Option<u64> {
    keys.iter().find_map(|key| row[*key].as_u64())
}

/// Each property of the catalog beside what the collection calls it.
fn properties(model: &KnownModel) -> Vec<(&'static [&'static str], u32)> {
    let mut all: Vec<(&'static [&'static str], u32)> = vec![
        (&["num_hidden_layers"], model.layers),
        (&["hidden_size"], model.hidden),
        (&["num_attention_heads"], model.heads),
        (&["num_key_value_heads"], model.kv_heads),
        (&["vocab_size"], model.vocab),
        (&["max_position_embeddings"], model.context),
    ];
    if model.latent.is_none() {
        all.push((&["head_dim"], model.head_dim));
    }
    if model.experts.is_none_or(|experts| experts.dense_layers > 0 || experts.every > 1) {
        all.push((&["intermediate_size"], model.intermediate));
    }
    if let Some(experts) = model.experts {
        all.push((&["n_routed_experts", "num_local_experts", "num_experts"], experts.count));
        all.push((&["num_experts_per_tok"], experts.active));
        all.push((&["moe_intermediate_size", "intermediate_size"], experts.intermediate));
    }
    if let Some(latent) = model.latent {
        all.push((&["kv_lora_rank"], latent.kv_rank));
        all.push((&["qk_nope_head_dim"], latent.nope));
        all.push((&["qk_rope_head_dim"], latent.rope));
        all.push((&["v_head_dim"], latent.v));
    }
    if let Some(linear) = model.linear {
        all.push((&["linear_num_key_heads"], linear.key_heads));
        all.push((&["linear_num_value_heads"], linear.value_heads));
        all.push((&["linear_key_head_dim"], linear.key_dim));
        all.push((&["linear_value_head_dim"], linear.value_dim));
        all.push((&["linear_conv_kernel_dim"], linear.convolution));
        all.push((&["full_attention_interval"], linear.period));
    }
    all
}

#[test]
fn every_restated_shape_is_the_collections() {
    let Some(collection) = collection() else { return };
    let (mut compared, mut mixtures) = (0, 0);
    for model in models::models() {
        let row = &collection[model.name];
        if row.is_null() {
            continue; // restated from its own published configuration
        }
        for (keys, ours) in properties(model) {
            let excepted = |(name, key, why): &(&str, &str, &str)| {
                *name == model.name && keys == [*key] && !why.is_empty()
            };
            if !EXCEPTIONS.iter().any(excepted) {
                assert_eq!(number(row, keys), Some(u64::from(ours)), "{}: {keys:?}", model.name);
            }
        }
        if let Some(tied) = row["tie_word_embeddings"].as_bool() {
            assert_eq!(model.tied_embeddings, tied, "{}", model.name);
        }
        let queries = row["q_lora_rank"].as_u64().unwrap_or(0);
        assert_eq!(u64::from(model.latent.map_or(0, |latent| latent.q_rank)), queries, "{}", model.name);
        let experts = model.experts;
        if let Some(first) = row["first_k_dense_replace"].as_u64() {
            assert_eq!(experts.map(|experts| u64::from(experts.dense_layers)), Some(first), "{}", model.name);
        }
        if let Some(shared) = row["n_shared_experts"].as_u64() {
            let each = experts.map(|experts| u64::from(experts.shared) / u64::from(experts.intermediate));
            assert_eq!(each, Some(shared), "{}", model.name);
        }
        compared += 1;
        mixtures += usize::from(experts.is_some());
    }
    assert!(compared >= 30 && mixtures >= 17, "{compared} models compared, {mixtures} of them mixtures");
}

/// Values that the collection derived from its configurations, where its formula holds: all matrices, those
/// used per token, and the KV of a token without regard to windows.
#[test]
fn parameters_and_kv_are_what_the_collection_derives() {
    let Some(collection) = collection() else { return };
    let mut compared = 0;
    for model in models::models() {
        let derived = &collection[model.name]["derived"];
        let Some(total) = derived["params_total_b"].as_f64() else { continue };
        let (count, shape) = (model.parameters(), model.shape(DType::Bf16));
        // theirs has two decimals
        let near = |ours: u64, theirs: f64| (ours as f64 / 1e9 - theirs).abs() < 0.005 + 0.002 * theirs;
        assert!(near(count.resident(), total), "{}: {count:?} against {total}", model.name);
        let active = derived["params_active_b"].as_f64().expect("a number");
        assert!(near(count.active(), active), "{}: {count:?} against {active}", model.name);
        assert_eq!(
            Some(shape.kv_bytes_per_token()),
            derived["kv_bytes_per_token_fp16"].as_u64(),
            "{}",
            model.name
        );
        compared += 1;
    }
    assert!(compared >= 30, "{compared} models compared");
}

#[test]
fn what_the_collection_has_and_the_catalog_lacks_is_refused_with_a_reason() {
    let Some(collection) = collection() else { return };
    for name in collection.as_object().expect("an object").keys() {
        if let Err(error) = models::find(name) {
            assert!(error.to_string().contains("the cost of"), "{error}");
        }
    }
}

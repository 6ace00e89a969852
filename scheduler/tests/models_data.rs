//! Compares the restated model shapes with the collection they were taken from, where it is available.

use mixfleet_scheduler::models;
use serde_json::Value;
use std::path::Path;

#[test]
fn every_restated_shape_is_the_collections() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data/models.json");
    let Ok(text) = std::fs::read_to_string(&path) else {
        eprintln!("SKIPPED: ../shared/data/models.json is absent; the models were not compared with it");
        return;
    };
    let collection: Value = serde_json::from_str(&text).expect("JSON");
    let mut compared = 0;
    for model in models::models() {
        let row = &collection[model.name];
        if row.is_null() {
            continue; // restated from its own published configuration
        }
        let number = |key: &str| row[key].as_u64();
        for (key, ours) in [
            ("num_hidden_layers", model.layers),
            ("hidden_size", model.hidden),
            ("intermediate_size", model.intermediate),
            ("num_attention_heads", model.heads),
            ("num_key_value_heads", model.kv_heads),
            ("head_dim", model.head_dim),
            ("vocab_size", model.vocab),
        ] {
            assert_eq!(number(key), Some(u64::from(ours)), "{}: {key}", model.name);
        }
        if let Some(tied) = row["tie_word_embeddings"].as_bool() {
            assert_eq!(model.tied_embeddings, tied, "{}", model.name);
        }
        assert_eq!(Some(model.parameters_b), row["derived"]["params_total_b"].as_f64(), "{}", model.name);
        compared += 1;
    }
    assert!(compared >= 16, "{compared} models compared");
}

#[test]
fn what_the_collection_has_and_the_catalog_lacks_is_refused_with_a_reason() {
    for name in ["mixtral-8x7b", "Qwen3-30B-A3B", "deepseek-v3"] {
        let error = models::find(name).expect_err("not dense").to_string();
        assert!(error.contains("no dense transformer"), "{error}");
    }
}

//! Text models inside multimodal models: their configuration is `text_config`, and their tensors have a
//! prefix. Images are not supported, and tensors that only images use are not read.

use serde_json::{Map, Value, json};
use std::borrow::Cow;

/// Families that contain a text model.
const WRAPPERS: [&str; 2] = ["gemma3", "mistral3"];
/// Fields of the whole model that also apply to the text model, unless overridden there.
const SHARED: [&str; 6] =
    ["dtype", "torch_dtype", "eos_token_id", "bos_token_id", "tie_word_embeddings", "quantization_config"];
/// Prefix of the text model's tensors, and the prefix in a plain text model.
const PREFIXES: [(&str, &str); 3] = [
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
];
/// Prefixes of the image tensors.
const OF_IMAGES: [&str; 4] =
    ["vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector."];

/// Whether a configuration contains a text model.
pub(super) fn is_wrapped(object: &Map<String, Value>) -> bool {
    let family = object.get("model_type").and_then(Value::as_str);
    family.is_some_and(|family| WRAPPERS.contains(&family)) && object.contains_key("text_config")
}

/// The configuration of the text model, which is the whole configuration for most models.
pub(super) fn text_config(object: &Map<String, Value>) -> Cow<'_, Map<String, Value>> {
    let Some(text) = object.get("text_config").and_then(Value::as_object).filter(|_| is_wrapped(object))
    else {
        return Cow::Borrowed(object);
    };
    let mut text = text.clone();
    for field in SHARED {
        if let Some(value) = object.get(field).filter(|_| !text.contains_key(field)) {
            text.insert(field.to_owned(), value.clone());
        }
    }
    if object["model_type"] == "gemma3" {
        // defaults of the configuration class, which files leave out
        let defaults = json!({"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "vocab_size": 262_208, "model_type": "gemma3_text"});
        for (field, value) in defaults.as_object().into_iter().flatten() {
            text.entry(field.clone()).or_insert_with(|| value.clone());
        }
    }
    // the class is the whole model's
    text.remove("architectures");
    Cow::Owned(text)
}

/// The name of a tensor in the text model; none if only images use it.
pub(super) fn text_name(name: &str) -> Option<Cow<'_, str>> {
    if OF_IMAGES.iter().any(|prefix| name.starts_with(prefix)) {
        return None;
    }
    let renamed = |(from, to): &(&str, &str)| Some(format!("{to}{}", name.strip_prefix(from)?));
    Some(PREFIXES.iter().find_map(renamed).map_or(Cow::Borrowed(name), Cow::Owned))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_of_text_are_called_as_in_a_text_model() {
        for (name, expected) in [
            ("language_model.model.layers.3.mlp.up_proj.weight", Some("model.layers.3.mlp.up_proj.weight")),
            ("model.language_model.embed_tokens.weight", Some("model.embed_tokens.weight")),
            ("language_model.lm_head.weight", Some("lm_head.weight")),
            ("lm_head.weight", Some("lm_head.weight")),
            ("vision_tower.blocks.0.attn.q_proj.weight", None),
            ("model.multi_modal_projector.linear_1.weight", None),
        ] {
            assert_eq!(text_name(name).as_deref(), expected, "{name}");
        }
    }

    #[test]
    fn the_text_of_gemma_3_has_the_defaults_of_its_class() {
        let whole = json!({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
            "torch_dtype": "bfloat16", "text_config": {"hidden_size": 2560, "num_hidden_layers": 34}});
        let text = text_config(whole.as_object().expect("an object")).into_owned();
        let of = |field: &str| text[field].clone();
        assert_eq!([of("hidden_size"), of("num_attention_heads"), of("vocab_size")], [2560, 8, 262_208]);
        assert_eq!([of("model_type"), of("torch_dtype")], ["gemma3_text", "bfloat16"]);
        let plain = json!({"model_type": "llama", "text_config": {}});
        assert!(matches!(text_config(plain.as_object().expect("an object")), Cow::Borrowed(_)));
    }
}

//! Default sampling parameters of a checkpoint: `generation_config.json`.

use super::error::Result;
use super::fields::{Fields, read_object_if_present};
use super::gguf::is_gguf;
use mixfleet_hal::cast::{to_f32, to_u32};
use serde_json::Value;
use std::path::Path;

/// Sampling parameters that a checkpoint names. As in vLLM, `do_sample` is not read: clients that want the
/// most likely tokens send temperature 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Temperature.
    pub temperature: Option<f32>,
    /// The smallest set of tokens of this probability is kept.
    pub top_p: Option<f32>,
    /// Number of best tokens that are kept; 0 keeps all.
    pub top_k: Option<u32>,
    /// Tokens at least this likely relative to the best are kept.
    pub min_p: Option<f32>,
    /// Divides the logits of tokens seen.
    pub repetition_penalty: Option<f32>,
    /// Maximum number of tokens of an answer.
    pub max_new_tokens: Option<u32>,
}

/// Fields by which transformers changes the choice of tokens, and that are not applied here.
const UNREAD: [&str; 26] = [
    "bad_words_ids",
    "begin_suppress_tokens",
    "constraints",
    "diversity_penalty",
    "dola_layers",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "force_words_ids",
    "forced_bos_token_id",
    "forced_decoder_ids",
    "forced_eos_token_id",
    "guidance_scale",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "num_beams",
    "penalty_alpha",
    "sequence_bias",
    "stop_strings",
    "suppress_tokens",
    "token_healing",
    "top_h",
    "typical_p",
    "watermarking_config",
];
/// Fields without effect at 1; others have no effect at 0, false and empty lists.
const HARMLESS_ONES: [&str; 4] = ["encoder_repetition_penalty", "guidance_scale", "num_beams", "typical_p"];

/// Whether a field's value has no effect on the choice of tokens.
fn is_harmless(field: &str, value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => {
            // a forced token may have any id
            let harmless = if HARMLESS_ONES.contains(&field) { 1.0 } else { 0.0 };
            number.as_f64() == Some(harmless) && !field.starts_with("forced_")
        }
        Value::Array(list) => list.is_empty(),
        Value::Object(object) => object.is_empty(),
        Value::Bool(true) | Value::String(_) => false,
    }
}

impl GenerationDefaults {
    /// Reads the parameters of a checkpoint directory; none without the file, and none of a GGUF file.
    ///
    /// # Errors
    /// The error names the file and the field.
    pub fn open(directory: &Path) -> Result<Self> {
        if is_gguf(directory) {
            return Ok(GenerationDefaults::default());
        }
        const PENALTY: &str = "repetition_penalty";
        let file = directory.join("generation_config.json");
        let object = read_object_if_present(&file)?.unwrap_or_default();
        let fields = Fields::new(&file, &object);
        let number = |name: &str, most: f64| -> Result<Option<f32>> {
            let Some(value) = fields.get(name).filter(|value| !value.is_null()) else { return Ok(None) };
            let read = value.as_f64().filter(|number| (0.0..=most).contains(number));
            let bound =
                if most < 1e6 { format!("a number from 0 to {most}") } else { "a number from 0 on".into() };
            let wrong = || fields.error(name, format!("{value}, expected {bound}"));
            read.map(|number| Some(to_f32(number))).ok_or_else(wrong)
        };
        let changes = |name: &&&str| fields.object.get(**name).is_some_and(|value| !is_harmless(name, value));
        if let Some(name) = UNREAD.iter().find(changes) {
            let problem = "not applied here, so that answers would differ; remove it to serve without it";
            return Err(fields.error(name, problem));
        }
        let top_k = match fields.get("top_k") {
            None => None,
            Some(value) => {
                // all tokens are kept by 0 in transformers and by -1 in vLLM, and Python may write 50.0
                let whole = value.as_f64().filter(|number| number.fract() == 0.0 && *number >= -1.0);
                let most = whole.filter(|number| *number <= f64::from(u32::MAX));
                let wrong = || fields.error("top_k", "expected a whole number from 0 on, or -1");
                Some(to_u32(most.ok_or_else(wrong)?.max(0.0)))
            }
        };
        let repetition_penalty = number(PENALTY, 100.0)?;
        if repetition_penalty == Some(0.0) {
            return Err(fields.error(PENALTY, "0, expected a number above 0"));
        }
        Ok(GenerationDefaults {
            temperature: number("temperature", f64::from(f32::MAX))?,
            top_p: number("top_p", 1.0)?,
            top_k,
            min_p: number("min_p", 1.0)?,
            repetition_penalty,
            max_new_tokens: fields.count("max_new_tokens", u32::MAX)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::scratch;
    use super::*;

    #[test]
    fn a_checkpoint_says_how_it_is_sampled_from() {
        let directory = scratch("generation");
        assert_eq!(GenerationDefaults::open(&directory).unwrap(), GenerationDefaults::default());
        let open = |text: &str| {
            std::fs::write(directory.join("generation_config.json"), text).unwrap();
            GenerationDefaults::open(&directory)
        };
        let found =
            open(r#"{"do_sample": true, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": null}"#);
        let expected = GenerationDefaults {
            temperature: Some(0.6),
            top_p: Some(0.95),
            top_k: Some(20),
            ..GenerationDefaults::default()
        };
        assert_eq!(found.unwrap(), expected);
        for (text, field) in [
            (r#"{"temperature": -1}"#, "temperature"),
            (r#"{"temperature": NaN}"#, "temperature"),
            (r#"{"top_p": "x"}"#, "top_p"),
            (r#"{"top_k": -2}"#, "top_k"),
            (r#"{"top_k": 2.5}"#, "top_k"),
            (r#"{"max_new_tokens": 0}"#, "max_new_tokens"),
            (r#"{"repetition_penalty": 0}"#, "repetition_penalty"),
        ] {
            let error = open(text).unwrap_err().to_string();
            assert!(error.contains("generation_config.json") && error.contains(field), "{error}");
        }
        for (text, top_k) in [(r#"{"top_k": -1}"#, 0), (r#"{"top_k": 50.0}"#, 50), (r#"{"top_k": 0}"#, 0)] {
            assert_eq!(open(text).unwrap().top_k, Some(top_k), "{text}");
        }
        assert_eq!(open(r#"{"temperature": 3}"#).unwrap().temperature, Some(3.0));
        assert_eq!(open(r#"{"max_new_tokens": 9}"#).unwrap().max_new_tokens, Some(9));
        assert!(open("[").is_err());
    }

    #[test]
    fn a_field_that_would_change_answers_is_refused() {
        let directory = scratch("generation-unread");
        let open = |text: &str| {
            std::fs::write(directory.join("generation_config.json"), text).unwrap();
            GenerationDefaults::open(&directory)
        };
        for (field, value) in [
            ("no_repeat_ngram_size", "3"),
            ("bad_words_ids", "[[7]]"),
            ("suppress_tokens", "[1, 2]"),
            ("begin_suppress_tokens", "[220]"),
            ("forced_bos_token_id", "0"),
            ("num_beams", "4"),
            ("typical_p", "0.9"),
            ("guidance_scale", "1.5"),
            ("stop_strings", "\"END\""),
            ("sequence_bias", "[[[5], -2.0]]"),
            ("forced_decoder_ids", "[[1, 5]]"),
            ("watermarking_config", "{\"bias\": 2.5}"),
        ] {
            let error = open(&format!("{{\"{field}\": {value}}}")).unwrap_err().to_string();
            assert!(error.contains(field) && error.contains("remove it"), "{error}");
        }
        let harmless = r#"{"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": [],
            "bad_words_ids": null, "token_healing": false, "min_length": 0, "max_length": 4096,
            "do_sample": true}"#;
        assert_eq!(open(harmless).unwrap(), GenerationDefaults::default());
    }

    #[test]
    fn numbers_that_python_writes_are_read_around() {
        let directory = scratch("generation-python");
        let text =
            r#"{"max_time": Infinity, "a": -Infinity, "said": "NaN \" Infinity", "top_p": 0.5, "b": [NaN]}"#;
        std::fs::write(directory.join("generation_config.json"), text).unwrap();
        assert_eq!(GenerationDefaults::open(&directory).unwrap().top_p, Some(0.5));
    }
}

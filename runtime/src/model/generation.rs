//! How a checkpoint asks to be sampled from where a request does not say: `generation_config.json`.

use super::error::Result;
use super::fields::{Fields, read_object_if_present};
use super::gguf::is_gguf;
use mixfleet_hal::cast::to_f32;
use std::path::Path;

/// Sampling parameters that a checkpoint names, each within the bounds that requests have. As in vLLM,
/// `do_sample` is not read: who wants the most likely tokens asks for temperature 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GenerationDefaults {
    /// Temperature.
    pub temperature: Option<f32>,
    /// The smallest set of tokens of this probability is kept.
    pub top_p: Option<f32>,
    /// So many best tokens are kept; 0 keeps all.
    pub top_k: Option<u32>,
    /// Tokens at least this likely relative to the best are kept.
    pub min_p: Option<f32>,
    /// Divides the logits of tokens seen.
    pub repetition_penalty: Option<f32>,
}

impl GenerationDefaults {
    /// Those of a checkpoint directory; none without the file, and none of a GGUF file.
    ///
    /// # Errors
    /// The error names the file and the field.
    pub fn open(directory: &Path) -> Result<Self> {
        if is_gguf(directory) {
            return Ok(GenerationDefaults::default());
        }
        let file = directory.join("generation_config.json");
        let object = read_object_if_present(&file)?.unwrap_or_default();
        let fields = Fields::new(&file, &object);
        let number = |name: &str, most: f64| -> Result<Option<f32>> {
            let Some(value) = fields.get(name).filter(|value| !value.is_null()) else { return Ok(None) };
            let read = value.as_f64().filter(|number| (0.0..=most).contains(number));
            let wrong = || fields.error(name, format!("expected a number from 0 to {most}"));
            read.map(|number| Some(to_f32(number))).ok_or_else(wrong)
        };
        let top_k = match fields.get("top_k").filter(|value| !value.is_null()) {
            None => None,
            Some(value) => {
                let read = value.as_u64().and_then(|most| u32::try_from(most).ok());
                Some(read.ok_or_else(|| fields.error("top_k", "expected a whole number from 0 on"))?)
            }
        };
        Ok(GenerationDefaults {
            temperature: number("temperature", 2.0)?,
            top_p: number("top_p", 1.0)?,
            top_k,
            min_p: number("min_p", 1.0)?,
            repetition_penalty: number("repetition_penalty", 100.0)?.filter(|penalty| *penalty > 0.0),
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
            (r#"{"temperature": 3}"#, "temperature"),
            (r#"{"top_p": "x"}"#, "top_p"),
            (r#"{"top_k": -1}"#, "top_k"),
        ] {
            let error = open(text).unwrap_err().to_string();
            assert!(error.contains("generation_config.json") && error.contains(field), "{error}");
        }
        assert!(open("[").is_err());
    }
}

//! Log-probabilities in OpenAI's two shapes.

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use super::answer::TokenLogprobs;
use super::text::TextModel;

/// JSON has no infinity; OpenAI sends this value for impossible tokens.
const IMPOSSIBLE: f32 = -9999.0;

/// `logprobs` of a completion's choice.
#[derive(Debug, Serialize)]
pub(crate) struct TextLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    top_logprobs: Vec<TopMap>,
    text_offset: Vec<usize>,
}

impl TextLogprobs {
    pub(crate) fn new(entries: &[TokenLogprobs], model: &dyn TextModel) -> Self {
        TextLogprobs {
            tokens: entries.iter().map(|entry| text(model, entry.id)).collect(),
            token_logprobs: entries.iter().map(|entry| finite(entry.logprobs.chosen)).collect(),
            top_logprobs: entries.iter().map(|entry| TopMap::new(entry, model)).collect(),
            text_offset: entries.iter().map(|entry| entry.text_offset).collect(),
        }
    }
}

/// The best tokens, and the chosen one if it is not among them, as an object from text to value.
#[derive(Debug)]
struct TopMap(Vec<(String, f32)>);

impl TopMap {
    fn new(entry: &TokenLogprobs, model: &dyn TextModel) -> Self {
        let mut map: Vec<(String, f32)> = Vec::new();
        let chosen = (entry.id, entry.logprobs.chosen);
        for &(id, value) in entry.logprobs.top.iter().chain([&chosen]) {
            let name = text(model, id);
            // Parts of a character decode to the same text; the likeliest one keeps the name.
            if !map.iter().any(|(known, _)| *known == name) {
                map.push((name, finite(value)));
            }
        }
        TopMap(map)
    }
}

impl Serialize for TopMap {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, value) in &self.0 {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

/// `logprobs` of a chat's choice.
#[derive(Debug, Serialize)]
pub(crate) struct ChatLogprobs {
    content: Vec<ChatToken>,
    refusal: Option<()>,
}

#[derive(Debug, Serialize)]
struct ChatToken {
    #[serde(flatten)]
    chosen: Alternative,
    top_logprobs: Vec<Alternative>,
}

#[derive(Debug, Serialize)]
struct Alternative {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl ChatLogprobs {
    pub(crate) fn new(entries: &[TokenLogprobs], model: &dyn TextModel) -> Self {
        let token = |entry: &TokenLogprobs| ChatToken {
            chosen: Alternative::new(entry.id, entry.logprobs.chosen, model),
            top_logprobs: entry
                .logprobs
                .top
                .iter()
                .map(|&(id, value)| Alternative::new(id, value, model))
                .collect(),
        };
        ChatLogprobs { content: entries.iter().map(token).collect(), refusal: None }
    }
}

impl Alternative {
    fn new(id: u32, logprob: f32, model: &dyn TextModel) -> Self {
        let bytes = model.token_bytes(id);
        let token = String::from_utf8_lossy(&bytes).into_owned();
        Alternative { token, logprob: finite(logprob), bytes }
    }
}

fn text(model: &dyn TextModel, id: u32) -> String {
    String::from_utf8_lossy(&model.token_bytes(id)).into_owned()
}

fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { IMPOSSIBLE }
}

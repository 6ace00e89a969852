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
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<TopMap>>,
    text_offset: Vec<usize>,
}

impl TextLogprobs {
    pub(crate) fn new(entries: &[TokenLogprobs], model: &dyn TextModel) -> Self {
        TextLogprobs {
            tokens: entries.iter().map(|entry| text(model, entry.id)).collect(),
            token_logprobs: entries
                .iter()
                .map(|entry| entry.logprobs.as_ref().map(|logprobs| finite(logprobs.chosen)))
                .collect(),
            top_logprobs: entries.iter().map(|entry| TopMap::new(entry, model)).collect(),
            text_offset: entries.iter().map(|entry| entry.text_offset).collect(),
        }
    }
}

/// The best tokens, and the chosen one if it is not among them, as an object from text to value.
#[derive(Debug)]
struct TopMap(Vec<(String, f32)>);

impl TopMap {
    fn new(entry: &TokenLogprobs, model: &dyn TextModel) -> Option<Self> {
        let logprobs = entry.logprobs.as_ref()?;
        let mut map: Vec<(String, f32)> = Vec::new();
        let chosen = (entry.id, logprobs.chosen);
        for &(id, value) in logprobs.top.iter().chain([&chosen]) {
            let name = text(model, id);
            // Parts of a character decode to the same text; the likeliest one keeps the name.
            if !map.iter().any(|(known, _)| *known == name) {
                map.push((name, finite(value)));
            }
        }
        Some(TopMap(map))
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
        let token = |entry: &TokenLogprobs| {
            let logprobs = entry.logprobs.as_ref()?;
            let top = logprobs.top.iter().map(|&(id, value)| Alternative::new(id, value, model));
            let mut chosen = Alternative::new(entry.id, logprobs.chosen, model);
            if entry.is_hidden_end {
                // the bytes of all tokens are the text
                chosen.bytes.clear();
            }
            Some(ChatToken { chosen, top_logprobs: top.collect() })
        };
        ChatLogprobs { content: entries.iter().filter_map(token).collect(), refusal: None }
    }

    /// The entries alone, as responses have them.
    pub(crate) fn into_content(self) -> impl Serialize {
        self.content
    }
}

impl Alternative {
    fn new(id: u32, logprob: f32, model: &dyn TextModel) -> Self {
        let bytes = model.token_bytes(id);
        let token = String::from_utf8_lossy(&bytes).into_owned();
        Alternative { token, logprob: finite(logprob), bytes }
    }
}

/// `prompt_logprobs` in vLLM's shape: for each token but the first, its value and those of the best tokens,
/// by id.
#[derive(Debug, Serialize)]
pub(crate) struct PromptLogprobs(Vec<Option<RankedMap>>);

/// Tokens by id; the prompt's own token is first.
#[derive(Debug)]
struct RankedMap(Vec<(u32, PromptAlternative)>);

#[derive(Debug, Serialize)]
struct PromptAlternative {
    logprob: f32,
    /// From 1 for the likeliest token; unknown beyond the requested alternatives.
    rank: Option<usize>,
    decoded_token: String,
}

impl PromptLogprobs {
    pub(crate) fn new(entries: &[TokenLogprobs], model: &dyn TextModel) -> Self {
        PromptLogprobs(entries.iter().map(|entry| RankedMap::new(entry, model)).collect())
    }
}

impl RankedMap {
    fn new(entry: &TokenLogprobs, model: &dyn TextModel) -> Option<Self> {
        let logprobs = entry.logprobs.as_ref()?;
        let ranked = |id: u32, logprob: f32, rank: Option<usize>| {
            (id, PromptAlternative { logprob: finite(logprob), rank, decoded_token: text(model, id) })
        };
        let rank = logprobs.top.iter().position(|(id, _)| *id == entry.id).map(|at| at + 1);
        let mut map = vec![ranked(entry.id, logprobs.chosen, rank)];
        let others = logprobs.top.iter().enumerate().filter(|(_, (id, _))| *id != entry.id);
        map.extend(others.map(|(at, &(id, logprob))| ranked(id, logprob, Some(at + 1))));
        Some(RankedMap(map))
    }
}

impl Serialize for RankedMap {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(id, token)| (id, token)))
    }
}

fn text(model: &dyn TextModel, id: u32) -> String {
    String::from_utf8_lossy(&model.token_bytes(id)).into_owned()
}

fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { IMPOSSIBLE }
}

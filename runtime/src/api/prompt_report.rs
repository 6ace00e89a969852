//! What an answer says of its prompt: the text (`echo`), and log-probabilities of its tokens, as the package
//! `lm-eval` and others read them.
//!
//! A prompt whose tokens need log-probabilities is submitted as its first token and the others forced behind
//! it ([`GenerateRequest::forced_ids`](crate::request::GenerateRequest::forced_ids)): each is drawn, and told
//! with the log-probabilities of its place.

use std::sync::Arc;

use super::answer::TokenLogprobs;
use super::errors::ApiError;
use super::fields::Fields;
use super::text::{TextDecoder, TextModel};
use crate::request::Logprobs;
use mixfleet_hal::cast::to_u32;

/// Maximum of alternatives per position.
const PROMPT_LOGPROBS_MAX: i64 = 20;

/// What is asked for of the prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PromptWishes {
    /// Whether the text of an answer begins with the prompt.
    pub(crate) echo: bool,
    /// Alternatives per token of the prompt in `prompt_logprobs`.
    pub(crate) logprobs: Option<u32>,
    /// Alternatives per token of the prompt in front of those of the answer.
    pub(crate) echoed_logprobs: Option<u32>,
}

impl PromptWishes {
    /// Reads `echo` where an endpoint has it, and `prompt_logprobs`. `logprobs` are the alternatives that the
    /// answer has.
    pub(crate) fn parse(
        fields: &mut Fields<'_>,
        has_echo: bool,
        logprobs: Option<u32>,
        streams: bool,
    ) -> Result<Self, ApiError> {
        const FIELD: &str = "prompt_logprobs";
        let echo = has_echo && fields.boolean("echo")?.unwrap_or(false);
        let own = fields.integer(FIELD, 0..=PROMPT_LOGPROBS_MAX)?.map(to_u32);
        if own.is_some() && streams {
            return Err(ApiError::value(FIELD, format!("'{FIELD}' are not told in a stream")));
        }
        Ok(PromptWishes { echo, logprobs: own, echoed_logprobs: logprobs.filter(|_| echo) })
    }

    /// Alternatives that are needed per token of the prompt; none if log-probabilities are not.
    pub(crate) fn tops(&self) -> Option<u32> {
        self.logprobs.max(self.echoed_logprobs)
    }

    /// Whether the prompt is told, so that an answer may have no tokens of its own.
    pub(crate) fn tells_prompt(&self) -> bool {
        self.echo || self.logprobs.is_some()
    }
}

/// What the answer says of its prompt.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct ToldPrompt {
    /// The text in front of the answer.
    pub(crate) text: String,
    /// Entries in front of the answer's own.
    pub(crate) echoed: Vec<TokenLogprobs>,
    /// Entries of `prompt_logprobs`, if they are asked for.
    pub(crate) logprobs: Option<Vec<TokenLogprobs>>,
}

/// Reads the tokens of a prompt from the engine's updates.
pub(crate) struct PromptReader {
    wishes: PromptWishes,
    ids: Arc<[u32]>,
    text: String,
    entries: Vec<TokenLogprobs>,
    decoder: Box<dyn TextDecoder>,
    characters: usize,
}

impl PromptReader {
    /// A reader of the prompt `ids`, whose text is `text`, or what the tokens stand for.
    ///
    /// # Errors
    /// The tokenizer's error.
    pub(crate) fn new(
        wishes: PromptWishes,
        ids: Arc<[u32]>,
        text: Option<&str>,
        model: &dyn TextModel,
    ) -> Result<Self, String> {
        let text = match text.filter(|_| wishes.echo) {
            Some(text) => text.to_owned(),
            None if wishes.echo => text_of(&ids, model)?,
            None => String::new(),
        };
        let decoder = model.decoder();
        let mut reader = PromptReader { wishes, ids, text, entries: Vec::new(), decoder, characters: 0 };
        if let (Some(_), Some(&first)) = (wishes.tops(), reader.ids.first()) {
            reader.add(first, None)?;
        }
        Ok(reader)
    }

    /// Number of tokens of the prompt that the engine has still to tell.
    pub(crate) fn left(&self) -> usize {
        self.wishes.tops().map_or(0, |_| self.ids.len() - self.entries.len())
    }

    /// Takes the next token of the prompt.
    ///
    /// # Errors
    /// When it is another one, or has no log-probabilities.
    pub(crate) fn take(&mut self, id: u32, logprobs: Option<Logprobs>) -> Result<(), String> {
        if self.ids.get(self.entries.len()) != Some(&id) || logprobs.is_none() {
            return Err("the engine returned another prompt than was asked for".into());
        }
        self.add(id, logprobs)
    }

    fn add(&mut self, id: u32, logprobs: Option<Logprobs>) -> Result<(), String> {
        self.entries.push(TokenLogprobs { id, text_offset: self.characters, logprobs });
        self.characters += self.decoder.push(id)?.chars().count();
        Ok(())
    }

    /// What the answer says of the prompt, of which nothing is left.
    pub(crate) fn told(self) -> ToldPrompt {
        let cut = |most: u32| {
            let entries = self.entries.iter().cloned();
            entries.map(|entry| entry.with_tops(most)).collect::<Vec<_>>()
        };
        ToldPrompt {
            echoed: self.wishes.echoed_logprobs.map(cut).unwrap_or_default(),
            logprobs: self.wishes.logprobs.map(cut),
            text: self.text,
        }
    }
}

/// The text of a prompt that came as ids.
fn text_of(ids: &[u32], model: &dyn TextModel) -> Result<String, String> {
    let mut decoder = model.decoder();
    let mut text = String::new();
    for &id in ids {
        text.push_str(&decoder.push(id)?);
    }
    text.push_str(&decoder.finish()?);
    Ok(text)
}

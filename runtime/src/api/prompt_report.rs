//! Reports on prompts: the text (`echo`), and log-probabilities of the tokens, in the format that the package
//! `lm-eval` and others read.
//!
//! For log-probabilities only the first token is submitted as the prompt. The other tokens are forced as an
//! answer ([`GenerateRequest::forced_ids`](crate::request::GenerateRequest::forced_ids)), so each is returned
//! with the log-probabilities of its position.

use std::sync::Arc;

use super::answer::TokenLogprobs;
use super::errors::ApiError;
use super::fields::Fields;
use super::text::{TextDecoder, TextModel};
use crate::request::Logprobs;
use mixfleet_hal::cast::to_u32;

/// Maximum number of alternatives per position.
const PROMPT_LOGPROBS_MAX: i64 = 20;

/// The requested report on the prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PromptWishes {
    /// Whether the text of an answer begins with the prompt.
    pub(crate) echo: bool,
    /// Alternatives per token of the prompt in `prompt_logprobs`.
    pub(crate) logprobs: Option<u32>,
    /// Alternatives per token of the prompt in `logprobs`, before those of the answer.
    pub(crate) echoed_logprobs: Option<u32>,
}

impl PromptWishes {
    /// Reads `echo`, if the endpoint has it, and `prompt_logprobs`. `logprobs` is the number of alternatives
    /// in the answer.
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
            return Err(ApiError::value(FIELD, format!("'{FIELD}' is not supported in a stream")));
        }
        Ok(PromptWishes { echo, logprobs: own, echoed_logprobs: logprobs.filter(|_| echo) })
    }

    /// Number of alternatives needed per token of the prompt; none without log-probabilities.
    pub(crate) fn tops(&self) -> Option<u32> {
        self.logprobs.max(self.echoed_logprobs)
    }

    /// Whether the prompt is reported; the answer may then have no generated tokens.
    pub(crate) fn tells_prompt(&self) -> bool {
        self.echo || self.logprobs.is_some()
    }
}

/// The report on a prompt.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct ToldPrompt {
    /// The text before the answer.
    pub(crate) text: String,
    /// Entries before the answer's own.
    pub(crate) echoed: Vec<TokenLogprobs>,
    /// Entries of `prompt_logprobs`, if they are requested.
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
    /// Creates a reader of the prompt `ids`. Its text is `text`, or else the decoded tokens.
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

    /// Number of prompt tokens that the engine has yet to return.
    pub(crate) fn left(&self) -> usize {
        self.wishes.tops().map_or(0, |_| self.ids.len() - self.entries.len())
    }

    /// Takes the next token of the prompt.
    ///
    /// # Errors
    /// When the token differs from the prompt's, or has no log-probabilities.
    pub(crate) fn take(&mut self, id: u32, logprobs: Option<Logprobs>) -> Result<(), String> {
        if self.ids.get(self.entries.len()) != Some(&id) || logprobs.is_none() {
            return Err("the engine returned a prompt other than the requested one".into());
        }
        self.add(id, logprobs)
    }

    fn add(&mut self, id: u32, logprobs: Option<Logprobs>) -> Result<(), String> {
        let text_offset = self.characters;
        self.entries.push(TokenLogprobs { id, text_offset, is_hidden_end: false, logprobs });
        self.characters += self.decoder.push(id)?.chars().count();
        Ok(())
    }

    /// Returns the report on the prompt.
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

/// The text of a prompt that arrived as ids.
fn text_of(ids: &[u32], model: &dyn TextModel) -> Result<String, String> {
    let mut decoder = model.decoder();
    let mut text = String::new();
    for &id in ids {
        text.push_str(&decoder.push(id)?);
    }
    text.push_str(&decoder.finish()?);
    Ok(text)
}

//! What the API needs from a tokenizer and chat template.

use crate::model::ChatMessage;
use serde_json::{Map, Value};
use std::borrow::Cow;

/// Characters that stand for nothing in Unicode, and hence seldom in a text.
const MARKS: std::ops::RangeInclusive<char> = '\u{FDD0}'..='\u{FDEF}';

/// Text to be tokenised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Marked {
    /// The text, with marks.
    pub text: String,
    /// This character is no part of the text: it interrupts what would be a special token and must stay text.
    pub mark: Option<char>,
}

impl Marked {
    /// Text in which special tokens are special.
    pub fn plain(text: String) -> Self {
        Marked { text, mark: None }
    }

    /// The text itself.
    pub fn unmarked(&self) -> Cow<'_, str> {
        match self.mark {
            Some(mark) => Cow::Owned(self.text.replace(mark, "")),
            None => Cow::Borrowed(&self.text),
        }
    }
}

/// Interrupts all that would become special tokens in `strings`, each by itself or beside others. The mark for it, or none
/// where there is nothing to interrupt.
pub(super) fn mark(strings: &mut [&mut String], model: &dyn TextModel) -> Result<Option<char>, String> {
    let places: Vec<Vec<usize>> = strings.iter().map(|text| model.special_places(text)).collect();
    if places.iter().all(Vec::is_empty) {
        return Ok(None);
    }
    let unused = |mark: &char| strings.iter().all(|text| !text.contains(*mark));
    let mark = MARKS.into_iter().find(unused);
    let mark = mark.ok_or("it uses all of U+FDD0 to U+FDEF, which are no characters")?;
    for (text, places) in strings.iter_mut().zip(places) {
        let mut marked = String::with_capacity(text.len() + places.len() * mark.len_utf8());
        let mut done = 0;
        for place in places {
            marked.push_str(&text[done..place]);
            marked.push(mark);
            done = place;
        }
        marked.push_str(&text[done..]);
        **text = marked;
    }
    Ok(Some(mark))
}

/// From text to tokens and back. Errors are messages for the client.
pub trait TextModel: Send + Sync {
    /// The tokens of `prompt`, with the tokenizer's own begin/end tokens if `add_special`.
    ///
    /// # Errors
    /// Why the text cannot be tokenised.
    fn encode(&self, prompt: &Marked, add_special: bool) -> Result<Vec<u32>, String>;

    /// Places in `text`, in order, where a mark keeps it from becoming special tokens, by itself or with what is put
    /// before or behind it.
    fn special_places(&self, text: &str) -> Vec<usize>;

    /// The most bytes of text that one token can stand for, if there is such a bound.
    fn token_bytes_max(&self) -> Option<usize>;

    /// The prompt text of a conversation. `arguments` are extra variables of the template. The text carries its own
    /// special tokens: encode it without `add_special`. Ends early, with any error, once `stopped`.
    ///
    /// # Errors
    /// The model has no template, or the template refuses the conversation.
    fn render_chat(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
        arguments: &Map<String, Value>,
        stopped: &dyn Fn() -> bool,
    ) -> Result<String, String>;

    /// A decoder for one answer. It skips special tokens.
    fn decoder(&self) -> Box<dyn TextDecoder>;

    /// The bytes that one token stands for, for `logprobs` (a special token: its name); empty for an unknown
    /// id.
    fn token_bytes(&self, id: u32) -> Vec<u8>;

    /// Ids below this have a row in the model's embedding; others in a prompt are a 400.
    fn vocabulary_size(&self) -> u32;
}

/// Turns the tokens of one answer into text, bit by bit.
pub trait TextDecoder: Send {
    /// The text that has become complete with this token; empty while a character is unfinished.
    ///
    /// # Errors
    /// The tokenizer's error.
    fn push(&mut self, id: u32) -> Result<String, String>;

    /// What is left at the end; an unfinished character becomes U+FFFD. Called once, last.
    ///
    /// # Errors
    /// The tokenizer's error.
    fn finish(&mut self) -> Result<String, String>;
}

//! The interface to a tokenizer and chat template.

use crate::grammar::{Grammar, GrammarClient, GrammarError};
use crate::model::{ChatMessage, RenderedChat, ToolStyle};
use serde_json::{Map, Value};
use std::borrow::Cow;

/// Unicode noncharacters, which hardly occur in text.
const MARKS: std::ops::RangeInclusive<char> = '\u{FDD0}'..='\u{FDEF}';

/// Text to be tokenised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Marked {
    /// The text, including marks.
    pub text: String,
    /// A character that is not part of the text: it interrupts text that would become a special token and
    /// must stay text.
    pub mark: Option<char>,
    /// Whether only names that stand whole in `text` may become special tokens, even if a tokenizer would
    /// merge other text into one.
    pub is_strict: bool,
}

impl Marked {
    /// Text in which the names of special tokens become special tokens.
    pub fn plain(text: String) -> Self {
        Marked { text, mark: None, is_strict: false }
    }

    /// Text in which the names of special tokens become special tokens unless a mark interrupts them.
    pub fn strict(text: String, mark: Option<char>) -> Self {
        Marked { text, mark, is_strict: true }
    }

    /// Creates the prompt of a rendered chat, in which `mark` interrupts the client's text already.
    ///
    /// # Errors
    /// When no character is left for further interruptions.
    pub fn chat(rendered: RenderedChat, mark: Option<char>) -> Result<Self, String> {
        let RenderedChat { text, places } = rendered;
        if places.is_empty() {
            return Ok(Self::strict(text, mark));
        }
        let mark = match mark {
            Some(mark) => mark,
            None => unused(&[&text])?,
        };
        Ok(Self::strict(with_marks(&text, places, mark), Some(mark)))
    }

    /// The text without marks.
    pub fn unmarked(&self) -> Cow<'_, str> {
        match self.mark {
            Some(mark) => Cow::Owned(self.text.replace(mark, "")),
            None => Cow::Borrowed(&self.text),
        }
    }
}

/// Interrupts everything in `strings` that would become a special token, within one string or together with
/// its neighbours. Returns the mark used, or none if there is nothing to interrupt.
pub(super) fn mark(strings: &mut [&mut String], model: &dyn TextModel) -> Result<Option<char>, String> {
    let places: Vec<Vec<usize>> = strings.iter().map(|text| model.special_places(text)).collect();
    if places.iter().all(Vec::is_empty) {
        return Ok(None);
    }
    let mark = unused(strings)?;
    for (text, places) in strings.iter_mut().zip(places) {
        **text = with_marks(text, places, mark);
    }
    Ok(Some(mark))
}

/// A mark that is in none of `strings`.
fn unused(strings: &[impl AsRef<str>]) -> Result<char, String> {
    let is_unused = |mark: &char| strings.iter().all(|text| !text.as_ref().contains(*mark));
    let mark = MARKS.into_iter().find(is_unused);
    mark.ok_or_else(|| "it uses all of U+FDD0 to U+FDEF, which are noncharacters".into())
}

fn with_marks(text: &str, places: Vec<usize>, mark: char) -> String {
    let mut marked = String::with_capacity(text.len() + places.len() * mark.len_utf8());
    let mut done = 0;
    for place in places {
        marked.push_str(&text[done..place]);
        marked.push(mark);
        done = place;
    }
    marked.push_str(&text[done..]);
    marked
}

/// Converts text to tokens and back. Errors are messages for the client.
pub trait TextModel: Send + Sync {
    /// The tokens of `prompt`, with the tokenizer's own begin/end tokens if `add_special`.
    ///
    /// # Errors
    /// Why the text cannot be tokenised.
    fn encode(&self, prompt: &Marked, add_special: bool) -> Result<Vec<u32>, String>;

    /// Positions in `text`, in order, at which a mark prevents special tokens, in the text alone or together
    /// with text before or after it.
    fn special_places(&self, text: &str) -> Vec<usize>;

    /// The maximum number of bytes of text that one token can stand for, if there is such a limit.
    fn token_bytes_max(&self) -> Option<usize>;

    /// The prompt text of a conversation. `arguments` are extra variables of the template. The text contains
    /// its own special tokens, so it is encoded without `add_special`. If `keeps_text`, only text of the
    /// template may become special tokens, and the text of `messages` and `arguments` was marked for that.
    /// Ends early, with any error, once `stopped`.
    ///
    /// # Errors
    /// The model has no template, or the template rejects the conversation.
    fn render_chat(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
        arguments: &Map<String, Value>,
        keeps_text: bool,
        stopped: &dyn Fn() -> bool,
    ) -> Result<RenderedChat, String>;

    /// The style of the model's tool calls; none if its template has no tools.
    fn tool_style(&self) -> Option<ToolStyle>;

    /// Whether the template reads a variable of this name.
    fn reads_argument(&self, _name: &str) -> bool {
        false
    }

    /// A decoder for one answer. It skips special tokens.
    fn decoder(&self) -> Box<dyn TextDecoder>;

    /// A decoder for one answer that shows special tokens of these names, and skips all others.
    fn decoder_showing(&self, _marks: Vec<&'static str>) -> Box<dyn TextDecoder> {
        self.decoder()
    }

    /// A decoder for one answer that shows all special tokens.
    fn decoder_with_specials(&self) -> Box<dyn TextDecoder> {
        self.decoder()
    }

    /// Compiles a grammar, unless it is compiled already. It blocks meanwhile.
    ///
    /// # Errors
    /// The fault of the grammar, or why it is not compiled now.
    fn check_grammar(&self, grammar: &Grammar, client: GrammarClient<'_>) -> Result<(), GrammarError>;

    /// The bytes that one token stands for, for `logprobs` (a special token's name); empty for an unknown id.
    fn token_bytes(&self, id: u32) -> Vec<u8>;

    /// Number of rows of the model's embedding; token ids of a prompt beyond that get 400.
    fn vocabulary_size(&self) -> u32;
}

/// Turns the tokens of one answer into text incrementally.
pub trait TextDecoder: Send {
    /// The text that is complete with this token; empty while a character is unfinished.
    ///
    /// # Errors
    /// The tokenizer's error.
    fn push(&mut self, id: u32) -> Result<String, String>;

    /// The remaining text at the end; an unfinished character becomes U+FFFD. Called once, last.
    ///
    /// # Errors
    /// The tokenizer's error.
    fn finish(&mut self) -> Result<String, String>;
}

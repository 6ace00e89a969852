//! Finds out which special tokens of a rendered chat the template itself wrote.
//!
//! A template may join, cut, strip and replace the client's text, so that pieces become the name of a special
//! token. Only names that the template wrote count. Two further renders prove who wrote a name:
//!
//! - In the first, the names of special tokens in the template's source are replaced by stand-ins. Where the
//!   text then differs from the original in stand-ins alone, the template wrote those names whole.
//! - Names that remain may be composed by the template (`'<|' + message.role + '|>'`). In another render all
//!   characters of the client's text that special tokens consist of are replaced by stand-ins; where the text
//!   differs from the original in stand-ins alone, names without stand-ins are the template's.
//!
//! If a template branches on the client's text, renders may differ otherwise, and prove nothing. The second
//! render is then repeated with those words of the client left in place that also occur in the template's
//! source, such as `</think>`. A name that remains unproven stays text.

use super::chat::{ChatTemplate, ChatValues, Conversation};
use super::error::{Error, Result};
use super::specials::Specials;
use super::tokenizer::Tokenizer;
use aho_corasick::{AhoCorasick, MatchKind};
use minijinja::Value;
use minijinja::value::{Enumerator, Object, ValueKind};
use serde_json::Value as Json;
use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

/// Stand-ins for characters that the template wrote. These private-use characters have no known use.
const TEMPLATE_BASE: u32 = 0xF_E000;
/// Stand-ins for characters that the client wrote.
const CLIENT_BASE: u32 = 0x10_E000;
/// Number of stand-ins of each kind.
const STAND_INS: u32 = 0x1FFE;

/// The prompt text of a chat.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RenderedChat {
    /// The text.
    pub text: String,
    /// Positions in the text, in order, at which it needs to be interrupted, so that the client's text
    /// becomes no special token.
    pub places: Vec<usize>,
}

/// Renders chats by a template and distinguishes its text from the client's.
#[derive(Debug)]
pub struct ControlText {
    specials: Arc<Specials>,
    letters: Letters,
    /// The template with stand-ins for whole names; none if that is not a valid template.
    whole: Option<ChatTemplate>,
    /// Words of the template's source that it may search for in the client's text.
    words: AhoCorasick,
}

impl ControlText {
    /// Prepares the proofs for a template and the special tokens of a tokenizer.
    ///
    /// # Errors
    /// When the special tokens or the template's words are too many to search for.
    pub fn new(template: &ChatTemplate, tokenizer: &Tokenizer) -> Result<Self> {
        let specials = tokenizer.specials();
        let letters = Letters::of(specials.names());
        let search = |error: aho_corasick::BuildError| Error::Tokenizer(error.to_string());
        let longest = |words: &[String]| {
            AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(words).map_err(search)
        };
        let names = longest(specials.names())?;
        let stand_ins = |text: &str| letters.replace_found(&names, text, TEMPLATE_BASE);
        let whole = template.changed(&stand_ins).ok();
        let words = longest(&words_of(&template.source()))?;
        Ok(ControlText { specials, letters, whole, words })
    }

    /// Renders a conversation. Special tokens of the client's text must have been interrupted before. Ends
    /// early, with any error, once `stopped`.
    ///
    /// # Errors
    /// When the template fails, and when the author of its special tokens cannot be determined.
    pub fn render(
        &self,
        template: &ChatTemplate,
        chat: &Conversation<'_>,
        stopped: &dyn Fn() -> bool,
    ) -> Result<RenderedChat> {
        let text = template.render_chat(chat, stopped)?;
        let names = self.specials.find(&text);
        if names.is_empty() {
            return Ok(RenderedChat { text, places: Vec::new() });
        }
        self.letters.check_unused(chat)?;
        let whole = self.whole.as_ref().and_then(|whole| whole.render_chat(chat, stopped).ok());
        let whole = whole.and_then(|other| self.letters.stand_ins(&text, &other, TEMPLATE_BASE));
        let is_whole = |name: &Range<usize>| {
            whole.as_ref().is_some_and(|written| written[name.clone()].iter().all(|written| *written))
        };
        let (mut proven, open): (Vec<_>, Vec<_>) = names.into_iter().partition(is_whole);
        if open.is_empty() {
            return Ok(RenderedChat { text, places: Vec::new() });
        }
        let said = self.client_text(template, chat, &text, stopped);
        let is_composed =
            |name: &Range<usize>| said.as_ref().is_some_and(|said| said.is_template(&text, name));
        let (composed, unproven): (Vec<_>, Vec<_>) = open.into_iter().partition(is_composed);
        let is_exact = said.is_some_and(|said| said.kept.is_empty());
        if whole.is_none() && !is_exact && !unproven.is_empty() {
            let message = "its template uses this text so that special tokens cannot be distinguished";
            return Err(Error::Template(message.into()));
        }
        proven.extend(composed);
        let places = places(&text, &proven, &unproven);
        Ok(RenderedChat { text, places })
    }

    /// Which bytes of `text` the client wrote; none if that cannot be determined.
    fn client_text(
        &self,
        template: &ChatTemplate,
        chat: &Conversation<'_>,
        text: &str,
        stopped: &dyn Fn() -> bool,
    ) -> Option<ClientBytes> {
        for keeps_words in [false, true] {
            let shift = Shift {
                letters: &self.letters,
                keep: keeps_words.then_some(&self.words),
                kept: RefCell::default(),
            };
            let values = shift.values(template.values(chat));
            let Ok(other) = template.render_values(chat, values, stopped) else { continue };
            if let Some(written) = self.letters.stand_ins(text, &other, CLIENT_BASE) {
                return Some(ClientBytes { written, kept: shift.kept.into_inner() });
            }
        }
        None
    }
}

/// Which bytes of a text the client wrote.
struct ClientBytes {
    written: Vec<bool>,
    /// Words of the client that remain in the text, since the template has them too.
    kept: BTreeSet<String>,
}

impl ClientBytes {
    /// Whether the client contributed nothing to a name. Words that were kept must not share two consecutive
    /// characters with the name.
    fn is_template(&self, text: &str, name: &Range<usize>) -> bool {
        let spelled = text[name.clone()].to_ascii_lowercase();
        let pairs: Vec<&[u8]> = spelled.as_bytes().windows(2).collect();
        let shares =
            |word: &String| word.to_ascii_lowercase().as_bytes().windows(2).any(|pair| pairs.contains(&pair));
        !self.written[name.clone()].iter().any(|client| *client) && !self.kept.iter().any(shares)
    }
}

/// Positions that interrupt each of `unproven`, and none of `proven` where that is possible.
fn places(text: &str, proven: &[Range<usize>], unproven: &[Range<usize>]) -> Vec<usize> {
    let mut places = BTreeSet::new();
    for name in unproven {
        let mut inside = text[name.clone()].char_indices().skip(1).map(|(at, _)| name.start + at).peekable();
        let first = inside.peek().copied();
        let is_free = |at: &usize| !proven.iter().any(|other| other.start < *at && *at < other.end);
        places.extend(inside.find(is_free).or(first));
    }
    places.into_iter().collect()
}

/// The characters of special tokens, each in both cases, with a stand-in for each.
#[derive(Debug)]
struct Letters {
    characters: Vec<char>,
    numbers: HashMap<char, u32>,
}

impl Letters {
    fn of(names: &[String]) -> Self {
        let cases = |letter: char| letter.to_lowercase().chain(letter.to_uppercase()).chain([letter]);
        let characters: BTreeSet<char> = names.iter().flat_map(|name| name.chars()).flat_map(cases).collect();
        let characters: Vec<char> = characters.into_iter().collect();
        let numbers = characters.iter().zip(0..STAND_INS).map(|(letter, number)| (*letter, number)).collect();
        Letters { characters, numbers }
    }

    fn stand_in(&self, letter: char, base: u32) -> char {
        let number = self.numbers.get(&letter);
        number.and_then(|number| char::from_u32(base + number)).unwrap_or(letter)
    }

    fn replace(&self, text: &str, base: u32) -> String {
        text.chars().map(|letter| self.stand_in(letter, base)).collect()
    }

    /// Replaces the matches of `words` in `text`.
    fn replace_found(&self, words: &AhoCorasick, text: &str, base: u32) -> String {
        let (mut replaced, mut done) = (String::with_capacity(text.len()), 0);
        for found in words.find_iter(text) {
            replaced.push_str(&text[done..found.start()]);
            replaced.push_str(&self.replace(&text[found.range()], base));
            done = found.end();
        }
        replaced.push_str(&text[done..]);
        replaced
    }

    /// The bytes of `text` that have stand-ins in `other`; none if the two differ otherwise.
    fn stand_ins(&self, text: &str, other: &str, base: u32) -> Option<Vec<bool>> {
        let mut written = Vec::with_capacity(text.len());
        let mut others = other.chars();
        for letter in text.chars() {
            let other = others.next()?;
            let number = u32::from(other).checked_sub(base).filter(|_| other != letter);
            let stands_for = number.and_then(|number| self.characters.get(number as usize));
            let is_stand_in = stands_for.is_some_and(|stands_for| same_but_case(*stands_for, letter));
            if !is_stand_in && other != letter {
                return None;
            }
            written.extend(std::iter::repeat_n(is_stand_in, letter.len_utf8()));
        }
        others.next().is_none().then_some(written)
    }

    /// Refuses a chat that contains stand-ins, and special tokens that have more distinct characters than
    /// stand-ins.
    fn check_unused(&self, chat: &Conversation<'_>) -> Result<()> {
        if self.characters.len() > STAND_INS as usize {
            let message = format!("its special tokens consist of more than {STAND_INS} characters");
            return Err(Error::Tokenizer(message));
        }
        let bases = [TEMPLATE_BASE, CLIENT_BASE];
        let is_stand_in =
            |letter: char| bases.iter().any(|base| (*base..base + STAND_INS).contains(&u32::from(letter)));
        let said = |message: &super::ChatMessage| {
            message.content.contains(is_stand_in)
                || message.extra.values().any(|value| says(value, &is_stand_in))
        };
        if chat.messages.iter().any(said) || chat.arguments.values().any(|value| says(value, &is_stand_in)) {
            let message = "it uses the private characters from U+FE000 or from U+10E000, which are reserved";
            return Err(Error::Template(message.into()));
        }
        Ok(())
    }
}

/// Whether a string or key in `value` has a character that `is_searched`.
fn says(value: &Json, is_searched: &dyn Fn(char) -> bool) -> bool {
    match value {
        Json::String(text) => text.contains(is_searched),
        Json::Array(items) => items.iter().any(|item| says(item, is_searched)),
        Json::Object(map) => {
            map.iter().any(|(key, item)| key.contains(is_searched) || says(item, is_searched))
        }
        Json::Null | Json::Bool(_) | Json::Number(_) => false,
    }
}

fn same_but_case(a: char, b: char) -> bool {
    a == b || a.to_lowercase().eq(b.to_lowercase()) || a.to_uppercase().eq(b.to_uppercase())
}

/// Replaces the client's text in the values of a chat.
struct Shift<'a> {
    letters: &'a Letters,
    /// Words that are left unchanged.
    keep: Option<&'a AhoCorasick>,
    /// Those words that were found.
    kept: RefCell<BTreeSet<String>>,
}

impl Shift<'_> {
    fn values(&self, values: ChatValues) -> ChatValues {
        let items = |value: &Value| value.try_iter().into_iter().flatten().collect::<Vec<Value>>();
        let messages: Value = items(&values.messages).iter().map(|message| self.message(message)).collect();
        // The names of variables are not printed.
        let item = |key: &Value| values.arguments.get_item(key).unwrap_or_default();
        let arguments = items(&values.arguments);
        let arguments = arguments.iter().map(|name| (name.clone(), self.value(&item(name))));
        ChatValues { messages, arguments: Value::from_pairs(arguments) }
    }

    /// Roles are a few fixed words, which templates compare.
    fn message(&self, message: &Value) -> Value {
        let shifted = self.map(message, &|key, item| match key.as_str() {
            Some("role") => item.clone(),
            _ => self.value(item),
        });
        Value::from_object(shifted)
    }

    fn value(&self, value: &Value) -> Value {
        match value.kind() {
            ValueKind::String => Value::from(self.text(value.as_str().unwrap_or_default())),
            ValueKind::Seq => value.try_iter().into_iter().flatten().map(|item| self.value(&item)).collect(),
            ValueKind::Map => Value::from_object(self.map(value, &|_, item| self.value(item))),
            _ => value.clone(),
        }
    }

    fn map(&self, map: &Value, shift: &dyn Fn(&Value, &Value) -> Value) -> ShiftedMap {
        let mut shifted = ShiftedMap { keys: Vec::new(), values: HashMap::new() };
        for key in map.try_iter().into_iter().flatten() {
            let item = shift(&key, &map.get_item(&key).unwrap_or_default());
            let shown = self.value(&key);
            shifted.keys.push(shown.clone());
            shifted.values.insert(shown, item.clone());
            shifted.values.insert(key, item);
        }
        shifted
    }

    fn text(&self, text: &str) -> String {
        let Some(keep) = self.keep else { return self.letters.replace(text, CLIENT_BASE) };
        let (mut shifted, mut done) = (String::with_capacity(text.len()), 0);
        for found in keep.find_iter(text) {
            shifted.push_str(&self.letters.replace(&text[done..found.start()], CLIENT_BASE));
            shifted.push_str(&text[found.range()]);
            self.kept.borrow_mut().insert(text[found.range()].to_owned());
            done = found.end();
        }
        shifted.push_str(&self.letters.replace(&text[done..], CLIENT_BASE));
        shifted
    }
}

/// A map with stand-ins for keys, in which values are found by either key.
#[derive(Debug)]
struct ShiftedMap {
    keys: Vec<Value>,
    values: HashMap<Value, Value>,
}

impl Object for ShiftedMap {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.values.get(key).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.keys.clone())
    }
}

/// The strings in the tags of a template, of at least two characters.
fn words_of(source: &str) -> Vec<String> {
    let mut words = BTreeSet::new();
    let mut rest = source;
    while let Some(start) = rest.find("{{").into_iter().chain(rest.find("{%")).min() {
        let mut characters = rest[start + 2..].char_indices();
        let mut word: Option<(char, String)> = None;
        let mut end = rest.len();
        while let Some((at, character)) = characters.next() {
            let tail = &rest[start + 2 + at..];
            match &mut word {
                None if tail.starts_with("}}") || tail.starts_with("%}") => {
                    end = start + 2 + at + 2;
                    break;
                }
                None if matches!(character, '\'' | '"') => word = Some((character, String::new())),
                None => {}
                Some((quote, text)) if character == *quote => {
                    words.extend((text.chars().count() > 1).then(|| std::mem::take(text)));
                    word = None;
                }
                Some((_, text)) if character == '\\' => match characters.next() {
                    Some((_, 'n')) => text.push('\n'),
                    Some((_, 't')) => text.push('\t'),
                    Some((_, escaped)) => text.push(escaped),
                    None => {}
                },
                Some((_, text)) => text.push(character),
            }
        }
        rest = &rest[end..];
    }
    words.into_iter().collect()
}

#[cfg(test)]
#[path = "control_tests.rs"]
mod tests;

//! Answers that follow a grammar: the tokens that may come next, by llguidance.

use crate::model::Tokenizer;
use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Maximum length of a grammar's text.
pub const GRAMMAR_BYTES_MAX: usize = 256 << 10;

/// Number of grammars that stay compiled.
const COMPILED_MAX: usize = 64;

/// What a grammar may cost: some 20 ms to compile, 15 ms a token, and 50 MB of states. Errors leave out the
/// parser's state, which would tell the client nothing.
const LIMITS: ParserLimits = ParserLimits {
    max_items_in_row: 2000,
    initial_lexer_fuel: 1_000_000,
    step_lexer_fuel: 200_000,
    step_max_items: 50_000,
    max_lexer_states: 25_000,
    max_grammar_size: 100_000,
    precompute_large_lexemes: false,
    verbose_errors: false,
};

/// What an answer must be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Grammar {
    /// A JSON document that is valid by a JSON schema, which is given as JSON.
    JsonSchema(Arc<str>),
    /// A text that a regular expression matches as a whole.
    Regex(Arc<str>),
    /// A text of a grammar in llguidance's variant of Lark.
    Lark(Arc<str>),
}

impl Grammar {
    /// One of some texts.
    pub fn one_of<'a>(texts: impl IntoIterator<Item = &'a str>) -> Self {
        let escaped: Vec<String> = texts.into_iter().map(escape).collect();
        Grammar::Regex(format!("({})", escaped.join("|")).into())
    }

    /// Its text.
    pub fn text(&self) -> &Arc<str> {
        let (Grammar::JsonSchema(text) | Grammar::Regex(text) | Grammar::Lark(text)) = self;
        text
    }

    fn parsed(&self) -> Result<TopLevelGrammar, String> {
        Ok(match self {
            Grammar::JsonSchema(text) => TopLevelGrammar::from_json_schema(
                serde_json::from_str(text).map_err(|error| format!("the schema is not JSON: {error}"))?,
            ),
            Grammar::Regex(text) => TopLevelGrammar::from_regex(text),
            Grammar::Lark(text) => TopLevelGrammar::from_lark(text.to_string()),
        })
    }
}

/// A text as a regular expression that matches nothing else.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_ascii_punctuation() {
            escaped.push('\\');
        }
        escaped.push(character);
    }
    escaped
}

/// Compiles grammars for the tokens of a model.
pub struct Grammars {
    tokenizer: Tokenizer,
    vocab: u32,
    /// What all grammars share, made when the first one comes.
    factory: OnceLock<Result<ParserFactory, String>>,
    /// Those that were compiled last, the latest first.
    compiled: Mutex<VecDeque<(Grammar, Matcher)>>,
}

impl Grammars {
    /// Grammars over the first `vocab` tokens of a tokenizer.
    pub fn new(tokenizer: Tokenizer, vocab: u32) -> Self {
        Grammars { tokenizer, vocab, factory: OnceLock::new(), compiled: Mutex::default() }
    }

    /// The beginning of an answer that follows a grammar and ends with one of `end_ids`.
    ///
    /// # Errors
    /// What is wrong with the grammar, for the client.
    pub fn begin(&self, grammar: &Grammar, end_ids: Arc<[u32]>) -> Result<GrammarRun, String> {
        if grammar.text().len() > GRAMMAR_BYTES_MAX {
            return Err(format!(
                "it has {} bytes; at most {GRAMMAR_BYTES_MAX} are taken",
                grammar.text().len()
            ));
        }
        let matcher = match self.known(grammar) {
            Some(matcher) => matcher,
            None => self.compile(grammar)?,
        };
        Ok(GrammarRun { matcher, vocab: self.vocab, end_ids, followed: 0 })
    }

    fn known(&self, grammar: &Grammar) -> Option<Matcher> {
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        let at = compiled.iter().position(|(known, _)| known == grammar)?;
        let entry = compiled.remove(at)?;
        // a clone that shares what it learns would be locked by one request while another one computes
        let matcher = entry.1.deep_clone();
        compiled.push_front(entry);
        Some(matcher)
    }

    fn compile(&self, grammar: &Grammar) -> Result<Matcher, String> {
        let factory = self.factory.get_or_init(|| self.factory()).as_ref().map_err(Clone::clone)?;
        let mut matcher = Matcher::new(factory.create_parser(grammar.parsed()?));
        if let Some(error) = matcher.get_error() {
            return Err(first_line(&error));
        }
        // an answer that no token can begin is told now, and not after the prompt was computed
        let mask = matcher.compute_mask_or_eos().map_err(|error| first_line(&error.to_string()))?;
        if mask.is_zero() {
            return Err("no answer can follow it".into());
        }
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        compiled.push_front((grammar.clone(), matcher.deep_clone()));
        compiled.truncate(COMPILED_MAX);
        Ok(matcher)
    }

    fn factory(&self) -> Result<ParserFactory, String> {
        let word = |id: u32| match self.tokenizer.is_special(id) {
            true => [&[TokTrie::SPECIAL_TOKEN_MARKER], &*self.tokenizer.token_bytes(id)].concat(),
            false => self.tokenizer.token_bytes(id),
        };
        let mut words: Vec<Vec<u8>> = (0..self.vocab).map(word).collect();
        // The end of an answer is a token of its own here: which ones end it, a request says.
        words.push([&[TokTrie::SPECIAL_TOKEN_MARKER], &b"<end of the answer>"[..]].concat());
        let trie = TokTrie::from(&TokRxInfo::new(self.vocab + 1, self.vocab), &words);
        let tokens: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory =
            ParserFactory::new_simple(&tokens).map_err(|error| first_line(&error.to_string()))?;
        factory.quiet();
        *factory.limits_mut() = LIMITS;
        Ok(factory)
    }
}

/// Messages of the library end with traces.
fn first_line(error: &str) -> String {
    error.lines().next().unwrap_or_default().chars().take(500).collect()
}

/// Where an answer is in its grammar.
pub struct GrammarRun {
    matcher: Matcher,
    vocab: u32,
    end_ids: Arc<[u32]>,
    /// Number of tokens of the answer that were followed.
    followed: usize,
}

impl GrammarRun {
    /// Follows the tokens of `output`, the whole answer so far, that are new since the last time.
    ///
    /// # Errors
    /// When a token is not of the grammar, or the parser gives up.
    pub fn follow(&mut self, output: &[u32]) -> Result<(), String> {
        let new = output.get(self.followed..).unwrap_or_default();
        self.matcher.consume_tokens(new).map_err(|error| first_line(&error.to_string()))?;
        self.followed = output.len();
        Ok(())
    }

    /// The tokens that must not come next, in order.
    ///
    /// # Errors
    /// When the parser gives up.
    pub fn forbidden(&mut self) -> Result<Vec<u32>, String> {
        let mut mask = self.matcher.compute_mask_or_eos().map_err(|error| first_line(&error.to_string()))?;
        if mask.is_allowed(self.vocab) {
            let known = self.end_ids.iter().filter(|id| **id < self.vocab);
            known.for_each(|id| mask.allow_token(*id));
        }
        Ok((0..self.vocab).filter(|id| !mask.is_allowed(*id)).collect())
    }
}

#[cfg(test)]
#[path = "grammar_tests.rs"]
mod tests;

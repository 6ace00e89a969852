//! The only place that calls llguidance: its limits, its view of a vocabulary, and compiled grammars.

use super::Grammar;
use llguidance::api::{ParserLimits, StopReason, TopLevelGrammar};
use llguidance::panic_utils::catch_unwind;
use llguidance::toktrie::{ApproximateTokEnv, SimpleVob, TokEnv, TokRxInfo, TokTrie};
use llguidance::{ParserFactory, TokenParser};
use serde_json::Value;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

/// Limits on the work of a compiled grammar: at most 7 ms a token. Errors leave out the parser's state, which
/// would tell the client nothing.
const LIMITS: ParserLimits = ParserLimits {
    max_items_in_row: 1000,
    initial_lexer_fuel: 1_000_000,
    step_lexer_fuel: 100_000,
    step_max_items: 50_000,
    max_lexer_states: 10_000,
    max_grammar_size: 100_000,
    precompute_large_lexemes: false,
    verbose_errors: false,
};

/// Compiles grammars over a vocabulary.
pub(super) struct GrammarCompiler {
    factory: ParserFactory,
}

impl GrammarCompiler {
    /// A library over tokens with these bytes, in the order of their ids.
    pub(super) fn new(mut words: Vec<Vec<u8>>) -> Result<Self, String> {
        let vocab = u32::try_from(words.len()).map_err(|error| error.to_string())?;
        // The end of an answer is a special token here: each request says which ids end it.
        words.push(special(b"<end of the answer>"));
        let trie = TokTrie::from(&TokRxInfo::new(vocab + 1, vocab), &words);
        let tokens: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&tokens).map_err(|error| message(&error))?;
        factory.quiet();
        *factory.limits_mut() = LIMITS;
        Ok(GrammarCompiler { factory })
    }

    /// Compiles a grammar, and computes its first mask, which is where much of its work is done.
    ///
    /// # Errors
    /// The fault of the grammar.
    pub(super) fn compile(&self, grammar: &Grammar) -> Result<(Compiled, SimpleVob), String> {
        let parser = self.factory.create_parser(parsed(grammar)?).map_err(|error| message(&error))?;
        let mut compiled = Compiled { parser, failed: None };
        compiled.calling(|parser| {
            parser.start_without_prompt();
            Ok(())
        })?;
        let mask = compiled.mask()?;
        Ok((compiled, mask))
    }
}

/// The bytes of a special token, so that no text is mistaken for it.
pub(super) fn special(bytes: &[u8]) -> Vec<u8> {
    [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat()
}

fn parsed(grammar: &Grammar) -> Result<TopLevelGrammar, String> {
    Ok(match grammar {
        Grammar::JsonSchema(text) => {
            let schema =
                serde_json::from_str(text).map_err(|error| format!("the schema is not JSON: {error}"))?;
            TopLevelGrammar::from_json_schema(without_annotations(schema))
        }
        Grammar::Regex(text) => TopLevelGrammar::from_regex(text),
        Grammar::Lark(text) | Grammar::Begun { lark: text, .. } => {
            TopLevelGrammar::from_lark(text.to_string())
        }
    })
}

/// The formats of texts that the library enforces.
const FORMATS: [&str; 11] =
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"];

/// A schema without the formats that the library does not know: they are annotations, by the specification.
/// `oneOf` is `anyOf` where at most one alternative can hold.
pub(crate) fn without_annotations(schema: Value) -> Value {
    let root = schema.clone();
    rewritten(schema, &root)
}

fn rewritten(schema: Value, root: &Value) -> Value {
    match schema {
        Value::Object(map) => {
            let is_kept = |(key, value): &(String, Value)| {
                key != "format" || value.as_str().is_none_or(|format| FORMATS.contains(&format))
            };
            let is_one_of_any = !map.contains_key("anyOf")
                && map.get("oneOf").and_then(Value::as_array).is_some_and(|ways| are_disjoint(ways, root));
            let inner = |(key, value): (String, Value)| {
                let is_data = matches!(key.as_str(), "enum" | "const" | "default" | "examples");
                let value = if is_data { value } else { rewritten(value, root) };
                let key = if is_one_of_any && key == "oneOf" { "anyOf".into() } else { key };
                (key, value)
            };
            Value::Object(map.into_iter().filter(is_kept).map(inner).collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(|item| rewritten(item, root)).collect()),
        other => other,
    }
}

/// Maximum number of alternatives that are compared with each other.
const ALTERNATIVES_MAX: usize = 64;

/// Whether no value can fit two of these schemas.
fn are_disjoint(ways: &[Value], root: &Value) -> bool {
    let resolved = |way: &'_ Value| {
        let path = way["$ref"].as_str().and_then(|path| path.strip_prefix('#'));
        path.and_then(|path| root.pointer(path)).unwrap_or(way).clone()
    };
    let ways: Vec<Value> = ways.iter().take(ALTERNATIVES_MAX + 1).map(resolved).collect();
    let excludes = |(at, way): (usize, &Value)| ways[..at].iter().all(|other| exclude_each_other(way, other));
    ways.len() <= ALTERNATIVES_MAX && ways.iter().enumerate().all(excludes)
}

/// Whether two schemas differ in their constants, their types, or the constants of a property that both
/// require.
fn exclude_each_other(a: &Value, b: &Value) -> bool {
    let constants = |of: &Value| match (of["enum"].as_array(), of.get("const")) {
        (_, Some(constant)) => Some(vec![constant.clone()]),
        (several, None) => several.cloned(),
    };
    let differ = |a: &Value, b: &Value| match (constants(a), constants(b)) {
        (Some(a), Some(b)) => !a.iter().any(|constant| b.contains(constant)),
        _ => false,
    };
    let kinds = |of: &Value| match &of["type"] {
        Value::String(kind) => vec![kind.clone()],
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        _ => Vec::new(),
    };
    let (of_a, of_b) = (kinds(a), kinds(b));
    let is_number = |kind: &String| matches!(kind.as_str(), "integer" | "number");
    let overlap =
        of_a.iter().any(|kind| of_b.contains(kind) || is_number(kind) && of_b.iter().any(is_number));
    let requires = |of: &Value, name: &str| {
        of["required"].as_array().is_some_and(|names| names.iter().any(|required| required == name))
    };
    let properties = a["properties"].as_object().into_iter().flatten();
    let mut told_apart = properties.filter(|(name, _)| requires(a, name) && requires(b, name));
    let are_objects = |kinds: &[String]| kinds.iter().all(|kind| kind == "object") && !kinds.is_empty();
    differ(a, b)
        || !of_a.is_empty() && !of_b.is_empty() && !overlap
        || are_objects(&of_a)
            && are_objects(&of_b)
            && told_apart.any(|(name, of)| differ(of, &b["properties"][name]))
}

/// Messages of the library end with traces.
fn message(error: &impl std::fmt::Display) -> String {
    error.to_string().lines().next().unwrap_or_default().chars().take(500).collect()
}

/// A compiled grammar and the place of an answer in it. Clones are at places of their own and share the
/// lexer, which is most of the memory.
#[derive(Clone)]
pub(super) struct Compiled {
    parser: TokenParser,
    /// Why it cannot go on; it stays so.
    failed: Option<String>,
}

impl Compiled {
    fn calling<T>(
        &mut self,
        call: impl FnOnce(&mut TokenParser) -> Result<T, Box<dyn std::error::Error + Send + Sync>>,
    ) -> Result<T, String> {
        if let Some(cause) = &self.failed {
            return Err(cause.clone());
        }
        let parser = &mut self.parser;
        let called = catch_unwind(AssertUnwindSafe(|| Ok(call(parser).map_err(|error| message(&error)))));
        let result = called.unwrap_or_else(|error| Err(message(&error)));
        self.failed = result.as_ref().err().cloned();
        result
    }

    /// Goes on by tokens of the answer.
    pub(super) fn follow(&mut self, ids: &[u32]) -> Result<(), String> {
        self.calling(|parser| {
            for id in ids {
                if parser.consume_token(*id)? != 0 {
                    return Err("the grammar goes back over tokens".into());
                }
            }
            parser.check_stop()?;
            Ok(())
        })
    }

    /// The tokens that may come next; only the end where the answer is complete.
    pub(super) fn mask(&mut self) -> Result<SimpleVob, String> {
        self.calling(|parser| match parser.stop_reason() {
            StopReason::NotStopped => Ok(parser.compute_mask()?),
            _ => Ok(parser.token_env.tok_trie().eos_token_set()),
        })
    }

    /// Bytes of the lexer's tables, as the library counts them.
    pub(super) fn lexer_bytes(&self) -> usize {
        self.parser.parser.lexer_stats().num_bytes
    }
}

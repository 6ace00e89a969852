//! Bounds on the text of a grammar, checked before the library sees it.
//!
//! They are cheap and coarse. A text within them may still take too much time or memory: a trial in a child
//! process finds that out (`trial.rs`).

use super::Grammar;
use serde_json::Value;
use std::collections::{HashMap, HashSet};

/// Maximum length of a grammar's text in bytes.
pub const GRAMMAR_BYTES_MAX: usize = 256 << 10;
/// Maximum number of object properties in a JSON schema; OpenAI's.
const PROPERTIES_MAX: usize = 5000;
/// Maximum number of definitions in a JSON schema.
const DEFINITIONS_MAX: usize = 1000;
/// Maximum number of values in the enumerations of a JSON schema.
const ENUM_VALUES_MAX: usize = 10_000;
/// Maximum number of rules and terminals of a Lark grammar.
const RULES_MAX: usize = 2000;
/// Maximum number of items in a terminal of a Lark grammar, or in a regular expression, once references and
/// repetitions are written out.
const EXPANDED_ITEMS_MAX: u64 = 100_000;

/// Maximum length of a repetition, such as `{10,20}`; longer text is read as characters.
const REPEAT_BYTES_MAX: usize = 48;

/// Checks the bounds.
///
/// # Errors
/// Names the bound that is exceeded, for the client.
pub(super) fn check(grammar: &Grammar) -> Result<(), String> {
    let bytes = grammar.text().len();
    if bytes > GRAMMAR_BYTES_MAX {
        return Err(format!("it has {bytes} bytes; at most {GRAMMAR_BYTES_MAX} are taken"));
    }
    match grammar {
        Grammar::JsonSchema(text) => check_schema(text),
        Grammar::Regex(text) => check_expanded("the regular expression", expanded_items(text, &|_| 1)),
        Grammar::Lark(text) | Grammar::Begun { lark: text, .. } => check_lark(text),
    }
}

fn within(what: &str, count: usize, most: usize) -> Result<(), String> {
    match count > most {
        true => Err(format!("it has {count} {what}; at most {most} are taken")),
        false => Ok(()),
    }
}

fn check_expanded(what: &str, items: u64) -> Result<(), String> {
    match items > EXPANDED_ITEMS_MAX {
        true => Err(format!(
            "{what} has more than {EXPANDED_ITEMS_MAX} items once its repetitions are written out"
        )),
        false => Ok(()),
    }
}

/// Counts that determine the size of a JSON schema.
#[derive(Default)]
struct SchemaCounts {
    properties: usize,
    definitions: usize,
    enum_values: usize,
}

impl SchemaCounts {
    /// Adds what `value` holds. serde_json bounds its depth.
    fn add(&mut self, value: &Value) {
        match value {
            Value::Array(items) => items.iter().for_each(|item| self.add(item)),
            Value::Object(map) => {
                for (key, item) in map {
                    let members = item.as_object().map_or(0, serde_json::Map::len);
                    match key.as_str() {
                        "properties" | "patternProperties" => self.properties += members,
                        "$defs" | "definitions" => self.definitions += members,
                        "enum" => self.enum_values += item.as_array().map_or(0, Vec::len),
                        _ => {}
                    }
                    self.add(item);
                }
            }
            _ => {}
        }
    }
}

fn check_schema(text: &str) -> Result<(), String> {
    let schema: Value =
        serde_json::from_str(text).map_err(|error| format!("the schema is not JSON: {error}"))?;
    let mut counts = SchemaCounts::default();
    counts.add(&schema);
    within("properties", counts.properties, PROPERTIES_MAX)?;
    within("definitions", counts.definitions, DEFINITIONS_MAX)?;
    within("enum values", counts.enum_values, ENUM_VALUES_MAX)
}

fn check_lark(text: &str) -> Result<(), String> {
    let mut bodies: HashMap<&str, &str> = HashMap::new();
    let mut rules = 0;
    let mut line_at = 0;
    let lines = text.split_inclusive('\n').filter_map(|line| {
        line_at += line.len();
        RuleStart::of(line, line_at - line.len())
    });
    let mut starts = lines.peekable();
    while let Some(RuleStart { name, body_at, .. }) = starts.next() {
        let end = starts.peek().map_or(text.len(), |next| next.line_at);
        rules += 1;
        bodies.insert(name, &text[body_at..end]);
    }
    within("rules and terminals", rules, RULES_MAX)?;
    let mut sizes = TerminalSizes { bodies: &bodies, opened: HashSet::new(), known: HashMap::new() };
    let mut names: Vec<&str> = bodies.keys().copied().filter(|name| is_terminal(name)).collect();
    names.sort_unstable();
    names.into_iter().try_for_each(|name| check_expanded(&format!("the terminal {name}"), sizes.of(name)))
}

/// Where a rule or terminal begins in a text.
struct RuleStart<'a> {
    name: &'a str,
    /// The beginning of its line.
    line_at: usize,
    /// The text after the colon.
    body_at: usize,
}

impl<'a> RuleStart<'a> {
    /// The rule or terminal that begins in the line at `line_at`, if one does.
    fn of(line: &'a str, line_at: usize) -> Option<Self> {
        let begins = line.trim_start_matches([' ', '\t']);
        let begins = begins.strip_prefix(['?', '!']).unwrap_or(begins);
        let name = &begins[..name_bytes(begins)];
        let colon = begins[name.len()..].find(':').filter(|_| !name.is_empty())?;
        let body = &begins[name.len() + colon + 1..];
        Some(RuleStart { name, line_at, body_at: line_at + line.len() - body.len() })
    }
}

/// The length of the name that a text begins with; 0 if it begins with none.
fn name_bytes(text: &str) -> usize {
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    match text.bytes().next() {
        Some(first) if is_name(first) && !first.is_ascii_digit() => {
            text.bytes().position(|byte| !is_name(byte)).unwrap_or(text.len())
        }
        _ => 0,
    }
}

/// Terminals have names in capitals. Only they are written out; rules refer to each other.
fn is_terminal(name: &str) -> bool {
    name.trim_start_matches('_').starts_with(|first: char| first.is_ascii_uppercase())
}

/// The number of items of each terminal once written out.
struct TerminalSizes<'a> {
    bodies: &'a HashMap<&'a str, &'a str>,
    opened: HashSet<&'a str>,
    known: HashMap<&'a str, u64>,
}

impl<'a> TerminalSizes<'a> {
    /// Returns the size of a terminal. It keeps an explicit stack, since a chain of references may be long,
    /// and reads each body twice. A terminal that refers to itself, which the library refuses, counts as one
    /// item there.
    fn of(&mut self, name: &'a str) -> u64 {
        let mut stack = vec![(name, false)];
        while let Some((top, inner_known)) = stack.pop() {
            let body = self.bodies.get(top).copied().unwrap_or_default();
            if inner_known {
                let size = expanded_items(body, &|inner| self.known.get(inner).copied().unwrap_or(1));
                self.known.insert(top, size);
            } else if self.opened.insert(top) {
                stack.push((top, true));
                let unopened = |inner: &&str| self.bodies.contains_key(inner) && !self.opened.contains(inner);
                stack.extend(names_in(body).filter(unopened).map(|inner| (inner, false)));
            }
        }
        self.known.get(name).copied().unwrap_or(1)
    }
}

/// The names of terminals in a body, outside of its strings and regular expressions.
fn names_in(body: &str) -> impl Iterator<Item = &str> + use<'_> {
    Items { rest: body }.filter_map(|item| match item {
        Item::Name(name) if is_terminal(name) => Some(name),
        _ => None,
    })
}

/// A piece of a terminal's body or of a regular expression.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Item<'a> {
    Open,
    Close,
    Name(&'a str),
    /// A string, a regular expression or a character.
    Text(&'a str),
    /// The factor of `{m,n}`.
    Repeat(u64),
}

/// Splits a body into items. It need not be well formed.
struct Items<'a> {
    rest: &'a str,
}

impl<'a> Items<'a> {
    fn take(&mut self, bytes: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(bytes);
        self.rest = rest;
        taken
    }

    /// Takes all up to the next unescaped `end`, which is taken too.
    fn take_quoted(&mut self, end: char) -> &'a str {
        let mut escaped = false;
        let inner = self.rest.char_indices().skip(1).find(|&(_, character)| {
            let ends = character == end && !escaped;
            escaped = character == '\\' && !escaped;
            ends
        });
        let bytes = inner.map_or(self.rest.len(), |(at, _)| at + end.len_utf8());
        self.take(bytes)
    }
}

impl<'a> Iterator for Items<'a> {
    type Item = Item<'a>;

    fn next(&mut self) -> Option<Item<'a>> {
        let first = self.rest.chars().next()?;
        let name = name_bytes(self.rest);
        if name > 0 {
            return Some(Item::Name(self.take(name)));
        }
        Some(match first {
            '(' | '[' => {
                self.take(1);
                Item::Open
            }
            ')' | ']' => {
                self.take(1);
                Item::Close
            }
            '"' | '/' => Item::Text(self.take_quoted(first)),
            '\\' => {
                let escaped = self.rest.chars().nth(1).map_or(0, char::len_utf8);
                Item::Text(self.take(1 + escaped))
            }
            '{' => match self.rest.bytes().take(REPEAT_BYTES_MAX).position(|byte| byte == b'}') {
                Some(end) => {
                    let numbers = self.take(end + 1);
                    let numbers = numbers[1..end].split([',', '.']).filter_map(|n| n.trim().parse().ok());
                    Item::Repeat(numbers.max().unwrap_or(1))
                }
                None => Item::Text(self.take(1)),
            },
            _ => Item::Text(self.take(first.len_utf8())),
        })
    }
}

/// The number of items of a body with its repetitions written out, where a name stands for `size_of` items.
/// A regular expression within it counts as its own items.
fn expanded_items(body: &str, size_of: &dyn Fn(&str) -> u64) -> u64 {
    // sums of the groups that are open, and the size of the last item, which a repetition multiplies
    let (mut sums, mut last) = (vec![0u64], 0u64);
    for item in (Items { rest: body }) {
        let size = match item {
            Item::Open => {
                sums.push(0);
                last = 0;
                continue;
            }
            Item::Close if sums.len() > 1 => sums.pop().unwrap_or(0),
            Item::Close => 1,
            Item::Repeat(factor) => {
                // the item itself is in the sum already
                let more = last.saturating_mul(factor.saturating_sub(1));
                if let Some(sum) = sums.last_mut() {
                    *sum = sum.saturating_add(more);
                }
                last = last.saturating_mul(factor);
                continue;
            }
            Item::Name(name) if is_terminal(name) => size_of(name),
            Item::Name(_) => 1,
            Item::Text(text) if text.len() > 1 && text.starts_with('/') => {
                expanded_items(text.trim_matches('/'), &|_| 1)
            }
            Item::Text(_) => 1,
        };
        if let Some(sum) = sums.last_mut() {
            *sum = sum.saturating_add(size);
        }
        last = size;
    }
    sums.into_iter().fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn refused(grammar: &Grammar, what: &str) {
        let said = check(grammar).unwrap_err();
        assert!(said.contains(what), "{said}");
    }

    #[test]
    fn items_are_counted_with_their_repetitions() {
        let count = |text: &str| expanded_items(text, &|_| 1);
        assert_eq!(count("(ab){3}"), 3);
        assert_eq!(count("(x{5}y){10}"), 60);
        assert_eq!(count("[a-c]{2,7}"), 21);
        assert_eq!(count(r"\(\)"), 2);
        assert_eq!(count("((.{10}){10}){10}"), 1000);
        let doubled = |name: &str| if name == "A" { 50 } else { 1 };
        assert_eq!(expanded_items("A A | \"x\"", &doubled) / 10, 10);
    }

    #[test]
    fn what_is_too_large_is_refused_by_its_bound() {
        let flat: serde_json::Map<_, _> = (0..6751).map(|at| (format!("p{at}"), json!({}))).collect();
        let schema = json!({"type": "object", "properties": flat});
        refused(&Grammar::JsonSchema(schema.to_string().into()), "6751 properties");
        let definitions: serde_json::Map<_, _> = (0..1001).map(|at| (format!("d{at}"), json!({}))).collect();
        refused(&Grammar::JsonSchema(json!({"$defs": definitions}).to_string().into()), "1001 definitions");
        let values: Vec<usize> = (0..10_001).collect();
        refused(&Grammar::JsonSchema(json!({"enum": values}).to_string().into()), "10001 enum values");
        let rules: String = (0..2001).map(|at| format!("r{at}: \"a\"\n")).collect();
        refused(&Grammar::Lark(rules.into()), "2001 rules");
        refused(&Grammar::Regex("((a{100}){100}){100}".into()), "repetitions");
        refused(&Grammar::Regex("x".repeat(GRAMMAR_BYTES_MAX + 1).into()), "bytes");
    }

    #[test]
    fn doublings_of_terminals_are_refused_and_chains_are_not() {
        let mut doubled = String::from("start: T0\n");
        (0..30).for_each(|at| doubled.push_str(&format!("T{at}: T{} T{}\n", at + 1, at + 1)));
        refused(&Grammar::Lark(format!("{doubled}T30: /[a-z]+/\n").into()), "terminal T");
        let mut chain = String::from("start: T0\n");
        (0..1500).for_each(|at| chain.push_str(&format!("T{at}: \"a\" T{}\n", at + 1)));
        assert_eq!(check(&Grammar::Lark(format!("{chain}T1500: \"b\"\n").into())), Ok(()));
        // a cycle, which the library refuses, ends here too
        assert_eq!(check(&Grammar::Lark("start: A\nA: B \"x\"\nB: A \"y\"\n".into())), Ok(()));
        let braces = "{".repeat(GRAMMAR_BYTES_MAX);
        assert!(check(&Grammar::Regex(braces.into())).is_err(), "as many characters");
        for text in ["T: {", "T: \"", "T: /", "T: ((((", "T: ]]]]", "T: \\", "é: \"ü\"", "T: x{,}{9}{}"] {
            assert_eq!(check(&Grammar::Lark(text.into())), Ok(()), "{text}");
        }
    }
}

//! Refuses templates that recurse or allocate without bound in ways that steps do not count.

use super::error::{Error, Result};
use minijinja::ErrorKind;
use std::collections::HashSet;

/// Maximum digits of a width or precision in a format.
const WIDTH_DIGITS_MAX: usize = 4;

/// A word, string or symbol in a tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token<'a> {
    Word(&'a str),
    Text,
    Symbol(char),
}

/// Refuses a template that stores a namespace in a variable or an attribute. Stored in an attribute, it could
/// contain itself, and printing or comparing it would overflow the stack. Passing one to a macro is common.
pub(super) fn check_namespaces(source: &str) -> Result<()> {
    let tags: Vec<Vec<Token<'_>>> = tags(source);
    let sets: Vec<SetTag<'_>> = tags.iter().filter_map(|tag| SetTag::of(tag)).collect();
    let names: HashSet<&str> = sets.iter().filter_map(SetTag::new_namespace).collect();
    match sets.iter().find_map(|set| set.stored(&names)) {
        None => Ok(()),
        Some(word) => {
            let message =
                format!("'{word}' is stored as a value; a namespace may be used by its attributes only");
            Err(Error::Template(message))
        }
    }
}

/// A tag that sets a variable or an attribute.
struct SetTag<'a> {
    /// The text before the equals sign.
    target: &'a [Token<'a>],
    value: &'a [Token<'a>],
}

impl<'a> SetTag<'a> {
    fn of(tag: &'a [Token<'a>]) -> Option<Self> {
        let (Token::Word("set"), rest) = tag.split_first()? else { return None };
        let at = rest.iter().position(|token| *token == Token::Symbol('='))?;
        Some(SetTag { target: &rest[..at], value: &rest[at + 1..] })
    }

    /// The variable that becomes a new namespace.
    fn new_namespace(&self) -> Option<&'a str> {
        match (self.target, self.value) {
            ([Token::Word(name)], [Token::Word("namespace"), Token::Symbol('('), ..]) => Some(name),
            _ => None,
        }
    }

    /// A namespace that is stored: one of `names`, the one whose attribute is set, or a new one that does not
    /// become a variable.
    fn stored(&self, names: &HashSet<&str>) -> Option<&'a str> {
        let own = match self.target {
            [Token::Word(name), Token::Symbol('.' | '['), ..] => Some(*name),
            _ => None,
        };
        let skipped = usize::from(self.new_namespace().is_some());
        self.value.iter().enumerate().skip(skipped).find_map(|(at, token)| {
            let Token::Word(word) = *token else { return None };
            let before = at.checked_sub(1).map(|before| self.value[before]);
            let (after, behind) = (self.value.get(at + 1).copied(), self.value.get(at + 2).copied());
            let is_attribute = before == Some(Token::Symbol('.'));
            let is_named = after == Some(Token::Symbol('=')) && behind != Some(Token::Symbol('='));
            let is_looked_into = matches!(after, Some(Token::Symbol('.' | '[') | Token::Word("is")));
            let is_whole = (names.contains(word) || own == Some(word)) && !is_looked_into;
            let is_stored = (word == "namespace" || is_whole) && !is_attribute && !is_named;
            is_stored.then_some(word)
        })
    }
}

/// The tokens of each tag.
fn tags(source: &str) -> Vec<Vec<Token<'_>>> {
    let (mut found, mut rest) = (Vec::new(), source);
    while let Some(start) = ["{{", "{%", "{#"].iter().filter_map(|open| rest.find(open)).min() {
        let tag = &rest[start + 2..];
        if rest[start..].starts_with("{#") {
            rest = tag.find("#}").map_or("", |end| &tag[end + 2..]);
            continue;
        }
        let (tokens, length) = tokens(tag);
        found.push(tokens);
        rest = &tag[length..];
    }
    found
}

/// The tokens up to the end of a tag, and the number of bytes before it.
fn tokens(tag: &str) -> (Vec<Token<'_>>, usize) {
    let (mut found, mut at) = (Vec::new(), 0);
    while let Some(letter) = tag[at..].chars().next() {
        let rest = &tag[at..];
        if rest.starts_with("}}") || rest.starts_with("%}") {
            return (found, at);
        }
        let is_word = |letter: char| letter.is_alphanumeric() || letter == '_';
        let length = match letter {
            '\'' | '"' => {
                found.push(Token::Text);
                text_length(rest, letter)
            }
            _ if is_word(letter) => {
                let length = rest.find(|letter| !is_word(letter)).unwrap_or(rest.len());
                found.push(Token::Word(&rest[..length]));
                length
            }
            // The sign that trims white space belongs to the tag.
            '-' | '+' if at == 0 => 1,
            _ => {
                found.extend((!letter.is_whitespace()).then_some(Token::Symbol(letter)));
                letter.len_utf8()
            }
        };
        at += length;
    }
    (found, tag.len())
}

fn text_length(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, letter) in text.char_indices().skip(1) {
        if letter == quote && !escaped {
            return at + 1;
        }
        escaped = letter == '\\' && !escaped;
    }
    text.len()
}

/// Refuses a format with a width or precision that takes much memory, or that is computed from a value.
pub(super) fn check_widths(text: &str) -> std::result::Result<(), minijinja::Error> {
    let digits = text.split(|letter: char| !letter.is_ascii_digit()).map(str::len).max().unwrap_or(0);
    let is_taken = text.contains('*') && text.contains('%') || text.contains(":{");
    match digits > WIDTH_DIGITS_MAX || is_taken {
        true => {
            let message = "format: widths have at most 4 digits and are part of the format";
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        }
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ChatMessage, ChatTemplate};
    use super::*;

    #[test]
    fn a_namespace_that_could_contain_itself_is_refused() {
        for source in [
            "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
            "{%- set ns = namespace(a=1) -%}{% set x = [ns] %}",
            "{% set a = namespace() %}{% set b = namespace() %}{% set a.x = b %}",
            "{% macro m(s) %}{% set s.a = [s] %}{% endmacro %}",
            "{% set a = [namespace()] %}{% set a[0].x = a %}",
            "{% set a = namespace(b=namespace()) %}",
            "{% set a.b = namespace() %}",
            "{% set make = namespace %}{% set a = make() %}{% set b = make() %}{% set a.x = b %}",
        ] {
            let error = check_namespaces(source).expect_err(source).to_string();
            assert!(error.contains("by its attributes only"), "{error}");
        }
        for source in [
            "{%- set ns = namespace(last=messages|length - 1, ns=1) -%}{% set ns.last = ns.last + 1 %}{{ ns['last'] }}",
            "{% set ns = namespace() %}{% if ns is defined and x.ns == 'ns' %}{{ f(ns=1) }}{# ns #} ns {% endif %}",
            "{{ tool.namespace }}{{ 'namespace(' }}",
            // as in published templates
            "{% set ns = namespace(n=0) %}{% macro m(s) %}{% set s.n = s.n + 1 %}{% endmacro %}{{ m(ns) }}{{ m(s=ns) }}",
            "{% macro m(functions, namespace='f') %}{{ 'namespace ' + namespace }}{% endmacro %}",
        ] {
            check_namespaces(source).expect(source);
        }
    }

    #[test]
    fn formats_and_methods_take_no_memory_without_bound() {
        let render = |source: &str| {
            let template = ChatTemplate::new(source, None, None).expect(source);
            let messages = [ChatMessage::new("user", "x")];
            template.render(&messages, true, &serde_json::Map::new(), 0)
        };
        for (source, told) in [
            ("{{ '%9999999999s' | format('x') }}", "format: widths"),
            ("{{ '%*d' | format(99999999, 1) }}", "format: widths"),
            ("{{ '{:99999999}'.format('x') }}", "format: widths"),
            ("{{ ('x' * 8000000).replace('x', 'long' * 9) }}", "replace: its result"),
            ("{{ ('x' * 30000000).join([1, 2, 3]) }}", "join: its result"),
        ] {
            let error = render(source).expect_err(source).to_string();
            assert!(error.contains(told), "{source}: {error}");
        }
        assert_eq!(
            render("{{ '%5s|%s' | format('x', 1) }}{{ 'a-b'.replace('-', '+') }}").unwrap(),
            "    x|1a+b"
        );
    }
}

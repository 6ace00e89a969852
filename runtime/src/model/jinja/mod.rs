//! Jinja2 as transformers configures it, on minijinja.
//!
//! Constructs that the two render differently are rewritten before minijinja reads a template
//! ([`mod@translate`]), or replaced here: operators, filters, tests, methods, and the formatting of values.

mod arguments;
mod cycles;
mod filters;
mod json;
mod lexer;
mod methods;
mod operators;
mod predicates;
mod text;
mod translate;

use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value};
use std::cell::Cell;

pub(in crate::model) use translate::translate;

/// Maximum number of bytes of one text that a template creates.
const TEXT_BYTES_MAX: usize = 32 << 20;
/// Units of work that one rendering may take in operators, filters and methods, each of which counts as one
/// step: an item of a list that is copied, or 16 bytes of a text. All units take a second, and a gigabyte if
/// every copy is kept.
const WORK_MAX: u64 = 64_000_000;
/// Maximum number of items of one list, or of characters that a text is divided into.
const ITEMS_MAX: usize = 1 << 22;
/// Maximum nesting of values that are written as text.
const NESTING_MAX: usize = 100;

thread_local! {
    static WORK_LEFT: Cell<u64> = const { Cell::new(WORK_MAX) };
}

/// An environment without templates.
///
/// # Errors
/// Never: the syntax is Jinja's own.
pub(super) fn environment() -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_unknown_method_callback(methods::call);
    environment.set_formatter(|out, state: &mut State, value| {
        if *state.auto_escape() != AutoEscape::None && !value.is_safe() {
            let escaped = text::with_text(value, operators::escaped)?;
            return out.write_str(&escaped).map_err(|_| Error::from(ErrorKind::WriteFailure));
        }
        text::with_text(value, |text| out.write_str(text).map_err(|_| Error::from(ErrorKind::WriteFailure)))
    });
    operators::add(&mut environment);
    filters::add(&mut environment);
    predicates::add(&mut environment);
    cycles::add(&mut environment);
    Ok(environment)
}

/// Part of every error about a text or list beyond its limit.
pub(super) const BEYOND: &str = "its result could exceed";

/// Begins a rendering on this thread.
pub(super) fn begin() {
    WORK_LEFT.set(WORK_MAX);
}

/// Counts work on `items`.
fn work(items: usize) -> Result<(), Error> {
    match WORK_LEFT.get().checked_sub(items as u64) {
        Some(left) => {
            WORK_LEFT.set(left);
            Ok(())
        }
        None => Err(Error::new(ErrorKind::OutOfFuel, "its filters and methods take too long")),
    }
}

/// Counts the work of a text, and refuses one that is too long.
fn long_text(what: &str, bytes: usize) -> Result<(), Error> {
    if bytes > TEXT_BYTES_MAX {
        return Err(wrong(format!("{what}: {BEYOND} {TEXT_BYTES_MAX} bytes")));
    }
    work(bytes / 16)
}

/// Counts the work of a list, and refuses one that is too long.
fn long_list(what: &str, items: usize) -> Result<(), Error> {
    if items > ITEMS_MAX {
        return Err(wrong(format!("{what}: {BEYOND} {ITEMS_MAX} items")));
    }
    work(items)
}

fn wrong(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// The values of something that can be iterated over: characters, keys, items.
fn items(value: &Value) -> Result<Vec<Value>, Error> {
    if let Some(text) = value.as_str() {
        long_list("a text's characters", text.len())?;
        return Ok(text.chars().map(Value::from).collect());
    }
    if value.is_none() {
        return Err(wrong("None cannot be iterated over"));
    }
    let mut found = Vec::new();
    for item in value.try_iter()?.checked() {
        if found.len() % 1024 == 0 {
            long_list("a list", 1024.min(value.len().unwrap_or(1024)))?;
            if found.len() > ITEMS_MAX {
                long_list("a list", found.len())?;
            }
        }
        found.push(item?);
    }
    Ok(found)
}

/// The pairs of a map; none if it is none.
fn pairs(value: &Value) -> Option<Vec<(Value, Value)>> {
    if value.kind() != minijinja::value::ValueKind::Map {
        return None;
    }
    Some(value.as_object()?.try_iter_pairs()?.collect())
}

//! Tests that differ from jinja2's in minijinja.

use super::arguments::Given;
use super::text::text;
use super::{operators, pairs};
use minijinja::value::ValueKind;
use minijinja::{Environment, Error, Value};

/// The signs of comparisons, and the names of their tests.
const ORDERS: [(&str, &[&str]); 4] = [
    ("<", &["<", "lt", "lessthan"]),
    (">", &[">", "gt", "greaterthan"]),
    ("<=", &["<=", "le"]),
    (">=", &[">=", "ge"]),
];

pub(super) fn add(environment: &mut Environment<'_>) {
    environment.add_test("sequence", is_sequence);
    environment
        .add_test("iterable", |value: &Value| is_sequence(value) || value.kind() == ValueKind::Iterable);
    environment.add_test("mapping", |value: &Value| is_mapping(value));
    environment.add_test("callable", is_callable);
    environment
        .add_test("number", |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool));
    environment.add_test("integer", |value: &Value| value.kind() == ValueKind::Number && value.is_integer());
    environment.add_test("float", |value: &Value| value.kind() == ValueKind::Number && !value.is_integer());
    environment.add_test("lower", |value: &Value| is_case(value, char::is_uppercase));
    environment.add_test("upper", |value: &Value| is_case(value, char::is_lowercase));
    environment.add_test("sameas", is_same);
    for (sign, names) in ORDERS {
        for name in names {
            environment.add_test(*name, move |a: &Value, b: &Value| operators::holds(sign, a, b));
        }
    }
}

fn is_sequence(value: &Value) -> bool {
    match value.kind() {
        ValueKind::Undefined | ValueKind::String | ValueKind::Seq | ValueKind::Iterable => true,
        ValueKind::Map => is_mapping(value),
        _ => false,
    }
}

/// Whether a value is a map; namespaces and macros, which resemble maps, are not.
fn is_mapping(value: &Value) -> bool {
    pairs(value).is_some() && !is_macro(value) && !operators::is_namespace(value)
}

fn is_macro(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Macro"))
}

fn is_callable(value: &Value) -> bool {
    value.is_undefined() || value.kind() == ValueKind::Plain || is_macro(value)
}

fn is_case(value: &Value, is_other: fn(char) -> bool) -> Result<bool, Error> {
    let text = text(value)?;
    let is_cased = |letter: char| letter.is_lowercase() || letter.is_uppercase();
    Ok(text.chars().any(is_cased) && !text.chars().any(is_other))
}

/// Python's `is`, as far as it can be determined: constants, and equal values of one kind.
fn is_same(value: &Value, given: Given) -> bool {
    let other = given.into_values().into_iter().next().unwrap_or_default();
    value.kind() == other.kind() && value.is_integer() == other.is_integer() && *value == other
}

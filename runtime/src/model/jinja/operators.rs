//! Operators that differ from Python's in minijinja, as functions of [`translate`](mod@super::translate).

use super::arguments::{Given, integer};
use super::text::{text, with_text};
use super::{items, long_list, long_text, pairs, wrong};
use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Object, Tuple, ValueKind};
use minijinja::{Environment, Error, State, Value};
use std::cmp::Ordering;
use std::sync::Arc;

pub(super) fn add(environment: &mut Environment<'_>) {
    environment.add_function("__add__", |a: &Value, b: &Value| sum(a, b));
    environment.add_function("__mul__", |a: &Value, b: &Value| product(a, b));
    environment.add_function("__mod__", |a: &Value, b: &Value| remainder(a, b));
    environment.add_function("__pos__", positive);
    environment.add_function("__iterable__", |value: &Value| match value.is_none() {
        true => Err(wrong("None cannot be iterated over")),
        false => Ok(value.clone()),
    });
    environment.add_function("__compare__", |parts: Given| compared(&parts.into_values()));
    environment.add_function("__join__", |parts: Given| joined(&parts.into_values()));
    environment.add_function("__slice__", slice);
    environment.add_function("__attr__", attribute);
}

/// A Python number: bool is an int.
enum JinjaNumber {
    Integer(i128),
    Float(f64),
}

impl JinjaNumber {
    fn of(value: &Value) -> Option<Self> {
        match value.kind() {
            ValueKind::Bool => Some(JinjaNumber::Integer(i128::from(value.is_true()))),
            ValueKind::Number if value.is_integer() => {
                i128::try_from(value.clone()).ok().map(JinjaNumber::Integer)
            }
            ValueKind::Number => f64::try_from(value.clone()).ok().map(JinjaNumber::Float),
            _ => None,
        }
    }

    fn float(&self) -> f64 {
        match self {
            JinjaNumber::Integer(integer) => *integer as f64,
            JinjaNumber::Float(float) => *float,
        }
    }
}

/// The order of two values. As in Python, values of different kinds have none.
pub(super) fn order(a: &Value, b: &Value) -> Result<Option<Ordering>, Error> {
    if JinjaNumber::of(a).is_some() && JinjaNumber::of(b).is_some() {
        let number = |value: &Value| {
            if value.kind() == ValueKind::Bool { i64::from(value.is_true()).into() } else { value.clone() }
        };
        return Ok(number(a).partial_cmp(&number(b)));
    }
    if let (Some(a), Some(b)) = (a.as_str(), b.as_str()) {
        return Ok(Some(a.cmp(b)));
    }
    if !(is_list(a) && is_list(b) && a.is_tuple() == b.is_tuple()) {
        return Err(unsupported("<", a, b));
    }
    let (a, b) = (items(a)?, items(b)?);
    match a.iter().zip(&b).find(|(a, b)| a != b) {
        Some((a, b)) => order(a, b),
        None => Ok(Some(a.len().cmp(&b.len()))),
    }
}

/// A chain of comparisons: values, with the signs between them as texts.
fn compared(parts: &[Value]) -> Result<bool, Error> {
    for triple in parts.windows(3).step_by(2) {
        let [a, sign, b] = triple else { continue };
        let sign = sign.as_str().unwrap_or_default();
        if !holds(sign, a, b)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether a comparison holds.
pub(super) fn holds(sign: &str, a: &Value, b: &Value) -> Result<bool, Error> {
    Ok(match sign {
        "==" => a == b,
        "!=" => a != b,
        "<" => order(a, b)?.is_some_and(Ordering::is_lt),
        "<=" => order(a, b)?.is_some_and(Ordering::is_le),
        ">" => order(a, b)?.is_some_and(Ordering::is_gt),
        _ => order(a, b)?.is_some_and(Ordering::is_ge),
    })
}

/// An integer as a value.
pub(super) fn integer_value(integer: i128) -> Value {
    i64::try_from(integer).map_or_else(|_| Value::from(integer), Value::from)
}

fn calculate(
    sign: &str,
    a: &Value,
    b: &Value,
    integers: fn(i128, i128) -> Option<i128>,
    floats: fn(f64, f64) -> f64,
) -> Result<Value, Error> {
    match (JinjaNumber::of(a), JinjaNumber::of(b)) {
        (Some(JinjaNumber::Integer(a)), Some(JinjaNumber::Integer(b))) => integers(a, b)
            .map(integer_value)
            .ok_or_else(|| wrong(format!("'{sign}' cannot be computed for these numbers"))),
        (Some(a), Some(b)) => Ok(Value::from(floats(a.float(), b.float()))),
        _ => Err(unsupported(sign, a, b)),
    }
}

fn unsupported(sign: &str, a: &Value, b: &Value) -> Error {
    wrong(format!("'{sign}' is not defined for values of the kinds {} and {}", a.kind(), b.kind()))
}

fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

pub(super) fn sum(a: &Value, b: &Value) -> Result<Value, Error> {
    if let (Some(left), Some(right)) = (a.as_str(), b.as_str()) {
        long_text("+", left.len() + right.len())?;
        // If one text is marked as safe, the other one is escaped.
        return match (a.is_safe(), b.is_safe()) {
            (false, false) => Ok(Value::from([left, right].concat())),
            (true, true) => Ok(Value::from_safe_string([left, right].concat())),
            (true, false) => Ok(Value::from_safe_string([left, &escaped(right)?].concat())),
            (false, true) => Ok(Value::from_safe_string([&escaped(left)?, right].concat())),
        };
    }
    if is_list(a) && is_list(b) && a.is_tuple() == b.is_tuple() {
        long_list("+", a.len().unwrap_or(0).saturating_add(b.len().unwrap_or(0)))?;
        let mut all = items(a)?;
        all.append(&mut items(b)?);
        return Ok(if a.is_tuple() { Value::from(Tuple::new(all)) } else { Value::from(all) });
    }
    calculate("+", a, b, i128::checked_add, |a, b| a + b)
}

/// A text with HTML's special characters replaced.
pub(super) fn escaped(of: &str) -> Result<String, Error> {
    long_text("escape", of.len().saturating_mul(5))?;
    let mut all = String::with_capacity(of.len());
    for letter in of.chars() {
        match letter {
            '&' => all.push_str("&amp;"),
            '<' => all.push_str("&lt;"),
            '>' => all.push_str("&gt;"),
            '\'' => all.push_str("&#39;"),
            '"' => all.push_str("&#34;"),
            _ => all.push(letter),
        }
    }
    Ok(all)
}

fn product(a: &Value, b: &Value) -> Result<Value, Error> {
    let is_count = |value: &Value| matches!(JinjaNumber::of(value), Some(JinjaNumber::Integer(_)));
    let repeated = match (is_count(a), is_count(b)) {
        (false, true) => Some((a, b)),
        (true, false) => Some((b, a)),
        _ => None,
    };
    let Some((of, count)) = repeated.filter(|(of, _)| of.as_str().is_some() || is_list(of)) else {
        return calculate("*", a, b, i128::checked_mul, |a, b| a * b);
    };
    let count = i128::try_from(count.clone()).unwrap_or(i128::from(count.is_true())).max(0);
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    if let Some(text) = of.as_str() {
        long_text("*", text.len().saturating_mul(count))?;
        return Ok(Value::from(text.repeat(count)));
    }
    let list = items(of)?;
    long_list("*", list.len().saturating_mul(count))?;
    let all: Vec<Value> = list.iter().cycle().take(list.len() * count).cloned().collect();
    Ok(if of.is_tuple() { Value::from(Tuple::new(all)) } else { Value::from(all) })
}

/// The remainder, or a text's `%` formatting.
fn remainder(a: &Value, b: &Value) -> Result<Value, Error> {
    if let Some(form) = a.as_str() {
        let values = if b.is_tuple() { items(b)? } else { vec![b.clone()] };
        return formatted(form, &values);
    }
    calculate("%", a, b, remainder_of, |a, b| {
        let remainder = a % b;
        if remainder != 0.0 && (remainder < 0.0) != (b < 0.0) { remainder + b } else { remainder }
    })
    .and_then(|value| match f64::try_from(value.clone()) {
        Ok(number) if number.is_nan() => Err(wrong("'%': division by zero")),
        _ => Ok(value),
    })
}

/// The remainder has the sign of the divisor.
fn remainder_of(a: i128, b: i128) -> Option<i128> {
    let remainder = a.checked_rem(b)?;
    Some(if remainder != 0 && (remainder < 0) != (b < 0) { remainder + b } else { remainder })
}

/// `%` formatting with values; containers are formatted as Python does.
pub(super) fn formatted(form: &str, values: &[Value]) -> Result<Value, Error> {
    super::super::template_limits::check_widths(form)?;
    let mut written = Vec::with_capacity(values.len());
    let is_by_name = form.contains("%(");
    for value in values {
        let is_container =
            is_list(value) || value.kind() == ValueKind::Map && !value.is_kwargs() && !is_by_name;
        written.push(if is_container { Value::from(text(value)?) } else { value.clone() });
    }
    let formatted = format(FormatStyle::Printf, form, &written)?;
    long_text("%", formatted.len())?;
    Ok(Value::from(formatted))
}

fn positive(value: &Value) -> Result<Value, Error> {
    match JinjaNumber::of(value) {
        Some(JinjaNumber::Integer(integer)) => Ok(integer_value(integer)),
        Some(JinjaNumber::Float(float)) => Ok(Value::from(float)),
        None => Err(wrong(format!("'+' is not defined for a value of the kind {}", value.kind()))),
    }
}

fn joined(parts: &[Value]) -> Result<Value, Error> {
    let mut all = String::new();
    for part in parts {
        with_text(part, |text| {
            long_text("~", all.len() + text.len())?;
            all.push_str(text);
            Ok(())
        })?;
    }
    Ok(Value::from(all))
}

/// A slice by Python's rules.
fn slice(of: &Value, start: &Value, stop: &Value, step: &Value) -> Result<Value, Error> {
    let bound = |value: &Value| integer("a slice", &Some(value.clone()));
    let (start, stop, step) = (bound(start)?, bound(stop)?, bound(step)?.unwrap_or(1));
    let list = match of.kind() {
        ValueKind::String | ValueKind::Seq | ValueKind::Iterable => items(of)?,
        ValueKind::Undefined => return Err(Error::from(minijinja::ErrorKind::UndefinedError)),
        kind => return Err(wrong(format!("a value of the kind {kind} has no slices"))),
    };
    if step == 0 {
        return Err(wrong("the step of a slice is not zero"));
    }
    let length = i64::try_from(list.len()).unwrap_or(i64::MAX);
    let (lowest, highest) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let place = |bound: Option<i64>, default: i64| match bound {
        None => default,
        Some(at) if at < 0 => at.saturating_add(length).max(lowest),
        Some(at) => at.min(highest),
    };
    let (first, last) = match step > 0 {
        true => (place(start, 0), place(stop, length)),
        false => (place(start, length - 1), place(stop, -1)),
    };
    let mut taken = Vec::new();
    let mut at = first;
    while if step > 0 { at < last } else { at > last } {
        taken.extend(usize::try_from(at).ok().and_then(|at| list.get(at)).cloned());
        at = at.saturating_add(step);
    }
    Ok(match of.kind() {
        ValueKind::String => Value::from(taken.iter().filter_map(Value::as_str).collect::<String>()),
        _ if of.is_tuple() => Value::from(Tuple::new(taken)),
        _ => Value::from(taken),
    })
}

/// An attribute with the name of a dictionary method, which takes precedence over a key of this name.
fn attribute(of: &Value, name: &str) -> Result<Value, Error> {
    if pairs(of).is_some() && of.downcast_object_ref::<Method>().is_none() && !is_namespace(of) {
        return Ok(Value::from_object(Method { of: of.clone(), name: name.into() }));
    }
    of.get_attr(name)
}

/// Whether a value is a namespace, whose attributes are its own.
pub(super) fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

/// A method that has not been called.
#[derive(Debug)]
struct Method {
    of: Value,
    name: String,
}

impl Object for Method {
    fn repr(self: &Arc<Self>) -> minijinja::value::ObjectRepr {
        minijinja::value::ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, state: &mut State<'_, '_>, given: &[Value]) -> Result<Value, Error> {
        self.of.call_method(state, &self.name, given)
    }
}

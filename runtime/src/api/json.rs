//! Scans JSON without building it: values that are not requested are skipped.

use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::fmt;
use std::ops::ControlFlow;

/// The type of a value, from its first byte.
pub(crate) fn kind(raw: &RawValue) -> &'static str {
    match raw.get().as_bytes().first() {
        Some(b'n') => "null",
        Some(b't' | b'f') => "a boolean",
        Some(b'"') => "a string",
        Some(b'[') => "an array",
        Some(b'{') => "an object",
        _ => "a number",
    }
}

/// Whether a value is null, which means absent.
pub(crate) fn is_null(raw: &RawValue) -> bool {
    raw.get() == "null"
}

/// Calls `each` with every element of an array until it breaks.
///
/// # Errors
/// When the text is not an array.
pub(crate) fn elements<'a>(
    text: &'a str,
    each: impl FnMut(&'a RawValue) -> ControlFlow<()>,
) -> serde_json::Result<()> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    deserializer.deserialize_seq(Elements(each))?;
    deserializer.end()
}

/// Calls `each` with every field of an object until it breaks.
///
/// # Errors
/// When the text is not an object.
pub(crate) fn entries<'a>(
    text: &'a str,
    each: impl FnMut(Cow<'a, str>, &'a RawValue) -> ControlFlow<()>,
) -> serde_json::Result<()> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    deserializer.deserialize_map(Entries(each))?;
    deserializer.end()
}

struct Elements<F>(F);

impl<'a, F: FnMut(&'a RawValue) -> ControlFlow<()>> Visitor<'a> for Elements<F> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an array")
    }

    fn visit_seq<A: SeqAccess<'a>>(mut self, mut sequence: A) -> Result<(), A::Error> {
        while let Some(element) = sequence.next_element::<&RawValue>()? {
            if (self.0)(element).is_break() {
                while sequence.next_element::<serde::de::IgnoredAny>()?.is_some() {}
                break;
            }
        }
        Ok(())
    }
}

struct Entries<F>(F);

/// A key, borrowed where possible.
#[derive(serde::Deserialize)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

impl<'a, F: FnMut(Cow<'a, str>, &'a RawValue) -> ControlFlow<()>> Visitor<'a> for Entries<F> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'a>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(Key(name)) = map.next_key()? {
            let value = map.next_value::<&RawValue>()?;
            if (self.0)(name, value).is_break() {
                while map.next_entry::<serde::de::IgnoredAny, serde::de::IgnoredAny>()?.is_some() {}
                break;
            }
        }
        Ok(())
    }
}

/// A body as text.
///
/// # Errors
/// When it is not UTF-8, which JSON must be.
pub(crate) fn text(body: &[u8]) -> serde_json::Result<&str> {
    std::str::from_utf8(body).map_err(serde_json::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_passed_over_is_checked_all_the_same() {
        let mut seen = Vec::new();
        let text = r#" {"a": {"b": [1]}, "\u0063": "x", "a": null} "#;
        entries(text, |name, value| {
            seen.push((name.into_owned(), value.get(), kind(value)));
            ControlFlow::Continue(())
        })
        .unwrap();
        let expected =
            [("a", r#"{"b": [1]}"#, "an object"), ("c", r#""x""#, "a string"), ("a", "null", "null")];
        assert_eq!(seen, expected.map(|(name, raw, kind)| (name.to_string(), raw, kind)));
        for broken in ["", "{", "[1,]", "[1] 2", "{}", "[tru]", "[1 2]"] {
            assert!(elements(broken, |_| ControlFlow::Break(())).is_err(), "{broken}");
        }
        // Nesting costs no stack where values are skipped.
        let deep = format!("[{}{}]", "[".repeat(100_000), "]".repeat(100_000));
        let mut count = 0;
        elements(&deep, |_| {
            count += 1;
            ControlFlow::Continue(())
        })
        .unwrap();
        assert_eq!(count, 1);
    }
}

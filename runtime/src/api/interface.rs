//! The OpenAPI description of the HTTP interface, and warnings about fields that it lacks.

use super::fields::Fields;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use mixfleet_hal::catalog::closest_names;
use serde_json::Value;
use std::collections::BTreeSet;
use std::sync::LazyLock;

const INTERFACE: &str = include_str!("openapi.json");
/// Maximum number of unknown fields in a warning, and the maximum length of their names.
const TOLD_MAX: usize = 4;
const NAME_BYTES_MAX: usize = 64;

/// Names of all fields of requests that generate.
static KNOWN: LazyLock<BTreeSet<String>> = LazyLock::new(|| {
    let document: Value = serde_json::from_str(INTERFACE).unwrap_or_default();
    let schemas = ["ChatRequest", "CompletionRequest"].map(|name| &document["components"]["schemas"][name]);
    let named = schemas.into_iter().filter_map(|schema| schema["properties"].as_object());
    named.flat_map(|properties| properties.keys().cloned()).collect()
});

/// Answers with the description, which contains nothing specific to this server.
pub(super) async fn interface() -> Response {
    let text = INTERFACE.replacen("VERSION", env!("CARGO_PKG_VERSION"), 1);
    ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], text).into_response()
}

/// The value of a `warning` header for unknown fields that resemble a known one; none without such fields.
pub(super) fn unknown_fields(fields: &Fields<'_>) -> Option<HeaderValue> {
    let is_plain = |name: &&str| {
        name.len() <= NAME_BYTES_MAX && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
    };
    let unknown = fields.unread().filter(is_plain).filter(|name| !KNOWN.contains(*name)).take(TOLD_MAX);
    let told: Vec<String> = unknown
        .filter_map(|name| {
            let near = closest_names(name, KNOWN.iter().map(String::as_str).filter(|known| known.len() > 3));
            Some(format!("'{name}' has no effect; did you mean '{}'?", near.first()?))
        })
        .collect();
    let text = format!("299 mixfleet \"{}\"", told.join(" "));
    (!told.is_empty()).then(|| HeaderValue::from_str(&text).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_that_is_like_a_known_one_is_told() {
        let told = |body: &str| {
            let fields = Fields::parse(body.as_bytes()).unwrap();
            unknown_fields(&fields).map(|value| value.to_str().unwrap().to_owned())
        };
        let expected = "299 mixfleet \"'max_token' has no effect; did you mean 'max_tokens'?\"";
        assert_eq!(told(r#"{"max_token": 3, "user": "u", "zzqqxx": 1}"#).as_deref(), Some(expected));
        assert_eq!(told(r#"{"metadata": {}, "a\r\nb: c": 1}"#), None);
        let many: String = (0..500).map(|i| format!("\"temperatur{i}\":1,")).collect();
        let text = told(&format!("{{{}\"x\":1}}", many)).unwrap();
        assert_eq!(text.matches("no effect").count(), TOLD_MAX, "{text}");
    }
}

//! What of a client's body must differ at an engine.

use crate::object::RawObject;
use serde_json::value::RawValue;

/// A body for an engine, and the facts needed to read its answer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PreparedBody {
    pub(crate) body: Vec<u8>,
    /// The model's name in the client's request.
    pub(crate) client_model: String,
    /// The model's name on the engine.
    pub(crate) engine_model: String,
    /// Whether the client wants the lengths at the end of a stream.
    pub(crate) usage_asked: bool,
}

/// Rewrites the fields of `object` that must differ: the model's name, and the stream options. `original` is
/// the body if nothing in it was replaced yet.
///
/// # Errors
/// The fault of the body.
pub(crate) fn prepare(
    mut object: RawObject<'_>,
    original: Option<&[u8]>,
    stream: bool,
    own_model: Option<&str>,
) -> Result<PreparedBody, String> {
    let client_model: String = object.read("model").ok_or("'model' is not a string")?;
    let engine_model = own_model.unwrap_or(&client_model).to_owned();
    let mut changed = original.is_none();
    if engine_model != client_model {
        object.set("model", &engine_model);
        changed = true;
    }
    let mut usage_asked = false;
    if stream {
        let given = object.given("stream_options").map(str::to_owned);
        let mut options = match &given {
            Some(text) => {
                RawObject::parse(text.as_bytes()).map_err(|_| "'stream_options' is not an object")?
            }
            None => RawObject::default(),
        };
        usage_asked = options.read("include_usage").unwrap_or(false);
        if !usage_asked {
            options.set("include_usage", &true);
            let text = String::from_utf8(options.write()).map_err(|_| "'stream_options' is not text")?;
            let raw = RawValue::from_string(text).map_err(|_| "'stream_options' is not JSON")?;
            object.set("stream_options", &raw);
            changed = true;
        }
    }
    let body = match original.filter(|_| !changed) {
        Some(original) => original.to_vec(),
        None => object.write(),
    };
    Ok(PreparedBody { body, client_model, engine_model, usage_asked })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prepared(body: &str, stream: bool, own: Option<&str>) -> (String, bool) {
        let object = RawObject::parse(body.as_bytes()).unwrap();
        let prepared = prepare(object, Some(body.as_bytes()), stream, own).unwrap();
        (String::from_utf8(prepared.body).unwrap(), prepared.usage_asked)
    }

    #[test]
    fn a_body_is_changed_only_where_it_must_be() {
        let body = r#"{ "model": "m", "tools": [ {"x": 1.0} ], "odd_field":{"deep":[1,2]}, "top_k":3 }"#;
        assert_eq!(prepared(body, false, None), (body.into(), false));
        let streamed = prepared(body, true, Some("file.gguf")).0;
        let expected = r#"{"model":"file.gguf","tools":[ {"x": 1.0} ],"odd_field":{"deep":[1,2]},"top_k":3,"stream_options":{"include_usage":true}}"#;
        assert_eq!(streamed, expected);
    }

    #[test]
    fn a_client_that_asks_for_lengths_itself_is_known() {
        let body = r#"{"model":"m","stream":true,"stream_options":{"include_usage":true,"more":7}}"#;
        assert_eq!(prepared(body, true, None), (body.into(), true));
        let body = r#"{"model":"m","stream":true,"stream_options":{"include_usage":false,"more":7}}"#;
        let expected = r#"{"model":"m","stream":true,"stream_options":{"include_usage":true,"more":7}}"#;
        assert_eq!(prepared(body, true, None), (expected.into(), false));
        let object = RawObject::parse(br#"{"model":"m","stream_options":7}"#).unwrap();
        assert!(prepare(object, None, true, None).unwrap_err().contains("stream_options"));
        assert!(prepare(RawObject::parse(b"{}").unwrap(), None, false, None).is_err());
    }
}

//! Constraints on the answer: `response_format`, and vLLM's fields for structured outputs.

use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::errors::ApiError;
use super::fields::{Fields, each, text, wrong_type};
use super::refused::asks_for_nothing;
use super::{ServedModel, fields};
use crate::grammar::{Grammar, GrammarClient, GrammarError};

/// Maximum number of choices in a grammar.
const CHOICES_MAX: usize = 4096;

/// vLLM's older names of the fields in `structured_outputs`, and the newer names.
const GUIDED: [(&str, &str); 5] = [
    ("guided_json", "json"),
    ("guided_json_object", "json_object"),
    ("guided_regex", "regex"),
    ("guided_choice", "choice"),
    ("guided_grammar", "grammar"),
];

/// A grammar, and the field that requested it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AnswerForm {
    field: String,
    pub(crate) grammar: Grammar,
}

impl AnswerForm {
    /// A constraint from a field.
    pub(crate) fn new(field: &str, grammar: Grammar) -> Self {
        AnswerForm { field: field.into(), grammar }
    }

    /// Reads the fields that constrain an answer; none if the answer is free.
    pub(crate) fn parse(fields: &mut Fields<'_>) -> Result<Option<Self>, ApiError> {
        let mut found: Vec<AnswerForm> = Vec::new();
        found.extend(response_format(fields)?);
        if let Some(mut inner) = fields.fields("structured_outputs")? {
            for (_, name) in GUIDED {
                let field = format!("structured_outputs.{name}");
                found
                    .extend(inner.take(name).map(|raw| constraint(&field, name, raw)).transpose()?.flatten());
            }
            refuse_effects("structured_outputs", inner)?;
        }
        for (field, name) in GUIDED {
            found.extend(fields.take(field).map(|raw| constraint(field, name, raw)).transpose()?.flatten());
        }
        if let [first, second, ..] = &found[..] {
            let message = format!("an answer follows '{}' or '{}', not both", first.field, second.field);
            return Err(ApiError::value(second.field.clone(), message));
        }
        Ok(found.pop())
    }

    /// Whether the constraint may be dropped.
    pub(crate) fn is_optional(&self) -> bool {
        self.grammar.is_optional()
    }

    /// Refuses a constraint if answers never end; `ends` says whether a token ends them.
    pub(crate) fn check_end(&self, ends: bool) -> Result<(), ApiError> {
        if ends {
            return Ok(());
        }
        let message = format!("'{}' needs an end token: send it without 'ignore_eos'", self.field);
        Err(ApiError::value(self.field.clone(), message))
    }

    /// Refuses a grammar that no answer of this model can follow. It blocks while the grammar is compiled.
    pub(crate) fn check_grammar(
        &self,
        model: &ServedModel,
        client: GrammarClient<'_>,
    ) -> Result<(), ApiError> {
        let field = &self.field;
        model.text.check_grammar(&self.grammar, client).map_err(|error| match error {
            GrammarError::Refused(cause) => ApiError::value(field.clone(), format!("'{field}': {cause}")),
            GrammarError::Busy(cause) => ApiError::overloaded(format!("'{field}': {cause}"), 1),
        })
    }
}

fn response_format(fields: &mut Fields<'_>) -> Result<Option<AnswerForm>, ApiError> {
    const FIELD: &str = "response_format";
    let Some(mut inner) = fields.fields(FIELD)? else { return Ok(None) };
    let grammar = match inner.string("type")?.as_deref() {
        Some("text") => return refuse_effects(FIELD, inner).map(|()| None),
        Some("json_object") => match inner.take("schema") {
            Some(schema) => Grammar::JsonSchema(schema.get().into()),
            None => any_object(),
        },
        Some("json_schema") => {
            let mut nested = inner.fields("json_schema")?.unwrap_or_default();
            let schema = nested.take("schema").or_else(|| inner.take("schema"));
            for known in ["name", "description", "strict"] {
                nested.take(known);
                inner.take(known);
            }
            refuse_effects("response_format.json_schema", nested)?;
            let Some(schema) = schema else {
                let message = "'response_format.json_schema.schema' is missing";
                return Err(ApiError::field(
                    "response_format.json_schema.schema",
                    "missing_parameter",
                    message,
                ));
            };
            Grammar::JsonSchema(schema.get().into())
        }
        Some(other) => {
            let other: String = other.chars().take(32).collect();
            let message =
                format!("'response_format.type' is one of text, json_object, json_schema, not {other:?}");
            return Err(ApiError::value("response_format.type", message));
        }
        None => {
            let message = "'response_format.type' is missing";
            return Err(ApiError::field("response_format.type", "missing_parameter", message));
        }
    };
    refuse_effects(FIELD, inner)?;
    Ok(Some(AnswerForm::new(FIELD, grammar)))
}

/// Refuses unread fields of an object that would change the answer.
fn refuse_effects(within: &str, mut inner: Fields<'_>) -> Result<(), ApiError> {
    let names: Vec<String> = inner.unread().map(str::to_owned).collect();
    for name in names {
        let raw = inner.take(&name);
        let has_effect = |raw: &RawValue| fields::value(&name, raw).map(|value| !asks_for_nothing(&value));
        if raw.map(has_effect).transpose()?.unwrap_or(false) {
            let name: String = name.chars().take(64).collect();
            return Err(ApiError::unsupported(&format!("{within}.{name}"), "it is not implemented"));
        }
    }
    Ok(())
}

fn any_object() -> Grammar {
    Grammar::JsonSchema(json!({"type": "object"}).to_string().into())
}

/// One of vLLM's constraints; none if it constrains nothing.
fn constraint(field: &str, kind: &str, raw: &RawValue) -> Result<Option<AnswerForm>, ApiError> {
    let string = |wanted| text(field, raw)?.ok_or_else(|| wrong_type(field, wanted, raw));
    let grammar = match kind {
        "json" => match text(field, raw)? {
            Some(schema) if schema.is_empty() => return Ok(None),
            Some(schema) => Grammar::JsonSchema(schema.into()),
            None => Grammar::JsonSchema(raw.get().into()),
        },
        "json_object" => match fields::value(field, raw)? {
            Value::Bool(true) => any_object(),
            Value::Bool(false) => return Ok(None),
            _ => return Err(wrong_type(field, "true or false", raw)),
        },
        "choice" => {
            let mut texts: Vec<String> = Vec::new();
            let take = |item| {
                if texts.len() == CHOICES_MAX {
                    let message = format!("'{field}' holds more than {CHOICES_MAX} texts");
                    return Err(ApiError::value(field, message));
                }
                texts.push(text(field, item)?.ok_or_else(|| wrong_type(field, "an array of strings", item))?);
                Ok(())
            };
            each(raw, take).ok_or_else(|| wrong_type(field, "an array of strings", raw))??;
            if texts.is_empty() {
                return Err(ApiError::value(field, format!("'{field}' holds no text to choose")));
            }
            Grammar::one_of(texts.iter().map(String::as_str))
        }
        "regex" => Grammar::Regex(string("a string")?.into()),
        _ => Grammar::Lark(string("a string")?.into()),
    };
    let constrains = !grammar.text().is_empty();
    Ok(constrains.then(|| AnswerForm::new(field, grammar)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(body: &Value) -> Result<Option<AnswerForm>, ApiError> {
        let body = body.to_string();
        AnswerForm::parse(&mut Fields::parse(body.as_bytes()).unwrap())
    }

    #[test]
    fn every_way_to_ask_for_a_form_gives_its_grammar() {
        let schema = json!({"type": "object", "properties": {"z": {}, "a": {}}});
        let of_schema = Grammar::JsonSchema(schema.to_string().into());
        let object = Grammar::JsonSchema(r#"{"type":"object"}"#.into());
        let cases = [
            (json!({"response_format": {"type": "json_object"}}), object.clone()),
            (json!({"guided_json_object": true}), object),
            (json!({"response_format": {"type": "json_object", "schema": schema}}), of_schema.clone()),
            (json!({"response_format": {"type": "json_schema", "schema": schema}}), of_schema.clone()),
            (
                json!({"response_format": {"type": "json_schema", "json_schema":
                    {"name": "x", "strict": true, "schema": schema}}}),
                of_schema.clone(),
            ),
            (json!({"structured_outputs": {"json": schema}}), of_schema.clone()),
            (json!({"structured_outputs": {"json": schema.to_string(), "regex": null}}), of_schema.clone()),
            (json!({"guided_json": schema}), of_schema),
            (json!({"guided_regex": "a+"}), Grammar::Regex("a+".into())),
            (json!({"structured_outputs": {"choice": ["a.b", "c"]}}), Grammar::Regex(r"(a\.b|c)".into())),
            (json!({"guided_grammar": "start: \"a\""}), Grammar::Lark("start: \"a\"".into())),
        ];
        for (body, grammar) in cases {
            assert_eq!(parse(&body).unwrap().map(|format| format.grammar), Some(grammar), "{body}");
        }
        for body in [
            json!({"response_format": {"type": "text"}}),
            json!({"response_format": null, "guided_choice": null, "guided_regex": ""}),
            json!({"structured_outputs": {"json_object": false, "disable_any_whitespace": false}}),
        ] {
            assert_eq!(parse(&body).unwrap(), None, "{body}");
        }
    }

    #[test]
    fn what_is_no_form_is_refused_by_the_name_of_the_field() {
        let refused = |body: &Value| parse(body).unwrap_err().to_json();
        let cases = [
            (json!({"response_format": {"type": "xml"}}), "response_format.type"),
            (json!({"response_format": {}}), "response_format.type"),
            (json!({"response_format": 1}), "response_format"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema.schema"),
            (json!({"guided_choice": [1]}), "guided_choice"),
            (json!({"structured_outputs": {"choice": []}}), "structured_outputs.choice"),
            (json!({"response_format": {"type": "json_object", "pattern": "a+"}}), "response_format.pattern"),
            (json!({"response_format": {"type": "text", "schema": {"enum": [1]}}}), "response_format.schema"),
            (json!({"guided_regex": 1}), "guided_regex"),
            (
                json!({"structured_outputs": {"whitespace_pattern": "x"}}),
                "structured_outputs.whitespace_pattern",
            ),
            (json!({"guided_regex": "a", "structured_outputs": {"regex": "b"}}), "guided_regex"),
        ];
        for (body, field) in cases {
            let error: Value = serde_json::from_str(&refused(&body)).unwrap();
            assert_eq!(error["error"]["param"], field, "{body}: {error}");
        }
    }
}

//! `kv_transfer_params`, by which routers have one engine compute a prompt and another one answer.

use serde_json::{Map, Value};

use super::ServedModel;
use super::errors::ApiError;
use super::fields::Fields;
use super::generate::Plan;

pub(crate) const FIELD: &str = "kv_transfer_params";

/// Whether the KV of the prompt is for another engine. KV from another engine needs no field: it is found in
/// the cache. Without [`ServedModel::exchange`] the field stays unread, and is refused.
pub(crate) fn parse(fields: &mut Fields<'_>, model: &ServedModel) -> Result<bool, ApiError> {
    if model.exchange.is_none() {
        return Ok(false);
    }
    let given = fields.object(FIELD)?.unwrap_or_default();
    let (decode, prefill) = (flag(&given, "do_remote_decode")?, flag(&given, "do_remote_prefill")?);
    if decode && prefill {
        let message = format!("'{FIELD}': the KV of a prompt is received or sent, not both");
        return Err(ApiError::value(FIELD, message));
    }
    Ok(decode)
}

fn flag(given: &Map<String, Value>, name: &str) -> Result<bool, ApiError> {
    match given.get(name) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(_) => Err(ApiError::value(FIELD, format!("'{FIELD}.{name}' must be true or false"))),
    }
}

impl Plan {
    /// Location of the prompt's KV, if it is for another engine.
    ///
    /// # Errors
    /// When there is no single prompt and answer.
    pub(crate) fn hand_over(&self, model: &ServedModel) -> Result<Option<Value>, ApiError> {
        let Some(exchange) = model.exchange.as_ref().filter(|_| self.keeps_kv) else { return Ok(None) };
        let parameters = &self.parameters;
        let [prompt] = &self.prompts[..] else { return Err(undivided("several prompts")) };
        if parameters.choices != 1 {
            return Err(undivided("several choices"));
        }
        if self.prompt_wishes.tops().is_some() {
            return Err(undivided("log-probabilities of the prompt"));
        }
        if parameters.stream.is_some() {
            return Err(undivided("'stream'"));
        }
        Ok(Some(exchange.hand_over(prompt.len(), parameters.cache_salt.as_deref())))
    }
}

fn undivided(what: &str) -> ApiError {
    ApiError::value(FIELD, format!("'{FIELD}' with 'do_remote_decode' is not supported beside {what}"))
}

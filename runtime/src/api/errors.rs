//! Errors in OpenAI's shape.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use crate::request::{Failure, FailureKind, Rejection};

/// Error code of a request that ended engines. Gateways know it (`runtime/engines/src/ask.rs`).
const QUARANTINED_CODE: &str = "request_quarantined";

/// An error for the client: `{"error":{"message","type","param","code"}}` with a status.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    kind: &'static str,
    message: String,
    param: Option<String>,
    code: &'static str,
    retry_after_s: Option<u64>,
}

#[derive(Serialize)]
struct Envelope<'a> {
    error: Body<'a>,
}

#[derive(Serialize)]
struct Body<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    kind: &'a str,
    param: Option<&'a str>,
    code: &'a str,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, code: &'static str, message: impl Into<String>) -> Self {
        let message = message.into();
        ApiError { status, kind, message, param: None, code, retry_after_s: None }
    }

    /// Status 400 without a particular field: the body itself is invalid.
    pub(crate) fn body(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", "invalid_body", message)
    }

    /// Status 400: the URL cannot be parsed.
    pub(crate) fn address(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", "invalid_address", message)
    }

    /// Status 400 for a field.
    pub(crate) fn field(param: impl Into<String>, code: &'static str, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", code, message);
        ApiError { param: Some(param.into()), ..error }
    }

    /// Status 400: the field has the right type and an invalid value.
    pub(crate) fn value(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::field(param, "invalid_value", message)
    }

    /// Status 400: the field would change the output in a way that this server does not support.
    pub(crate) fn unsupported(param: &str, hint: &str) -> Self {
        Self::field(param, "unsupported_parameter", format!("'{param}' is not supported: {hint}"))
    }

    /// Renames the field to one within `place`.
    pub(crate) fn within(self, place: &str) -> Self {
        ApiError { param: self.param.map(|param| format!("{place}.{param}")), ..self }
    }

    /// Replaces names of fields by those that the client knows.
    pub(crate) fn renamed(mut self, names: &[(&str, &str)]) -> Self {
        let Some(param) = &mut self.param else { return self };
        if let Some((from, to)) = names.iter().find(|(from, _)| param.starts_with(from)) {
            *param = param.replacen(from, to, 1);
            self.message = self.message.replace(from, to);
        }
        self
    }

    /// Status 400: prompt and output do not fit the model's context.
    pub(crate) fn context_length(param: &'static str, message: impl Into<String>) -> Self {
        Self::field(param, "context_length_exceeded", message)
    }

    /// Status 401: no valid API key.
    pub(crate) fn unauthorized() -> Self {
        let message = "missing or wrong API key: send it as 'Authorization: Bearer KEY'";
        Self::new(StatusCode::UNAUTHORIZED, "invalid_request_error", "invalid_api_key", message)
    }

    /// Status 403: the `Host` header is not a name of this server.
    pub(crate) fn foreign_host(host: &str) -> Self {
        let message =
            format!("host name '{host}' is not allowed: the server's operator can allow it by --allow-host");
        Self::new(StatusCode::FORBIDDEN, "invalid_request_error", "host_not_allowed", message)
    }

    /// Status 403: the request comes from a web page of an origin that is not allowed.
    pub(crate) fn foreign_origin() -> Self {
        let message =
            "pages of this origin are not allowed: the server's operator can allow it by --allow-origin";
        Self::new(StatusCode::FORBIDDEN, "invalid_request_error", "origin_not_allowed", message)
    }

    /// Status 404: another model than the one served.
    pub(crate) fn unknown_model(wanted: &str, served: &str) -> Self {
        let message = format!("the model '{wanted}' does not exist here; this server has '{served}'");
        let error = Self::new(StatusCode::NOT_FOUND, "invalid_request_error", "model_not_found", message);
        ApiError { param: Some("model".into()), ..error }
    }

    /// Status 404: there is nothing at this URL.
    pub(crate) fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", "not_found", message)
    }

    /// Status 405: the method is not allowed here.
    pub(crate) fn method() -> Self {
        let message = "this method is not allowed at this address";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", "method_not_allowed", message)
    }

    /// Status 408: the body took too long.
    pub(crate) fn slow_body() -> Self {
        let message = "the request body did not arrive in time";
        Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", "body_timeout", message)
    }

    /// Status 413: the body is too large.
    pub(crate) fn body_too_large(limit_bytes: usize) -> Self {
        let message = format!("the request body is larger than {limit_bytes} bytes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", "body_too_large", message)
    }

    /// Status 415: the body is not JSON.
    pub(crate) fn media_type(message: &str) -> Self {
        let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        Self::new(status, "invalid_request_error", "unsupported_media_type", message)
    }

    /// Status 429: try again later.
    pub(crate) fn overloaded(message: impl Into<String>, retry_after_s: u64) -> Self {
        let status = StatusCode::TOO_MANY_REQUESTS;
        let error = Self::new(status, "rate_limit_error", "rate_limit_exceeded", message);
        ApiError { retry_after_s: Some(retry_after_s.max(1)), ..error }
    }

    /// Status 500: the server failed.
    pub(crate) fn server(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", "internal_error", message)
    }

    /// Status 429 for rejected requests, else 500.
    pub(crate) fn failure(failure: Failure) -> Self {
        match failure.kind {
            FailureKind::TurnedAway => ApiError::overloaded(failure.message, 1),
            FailureKind::Request | FailureKind::Exhausted | FailureKind::Engine => {
                ApiError::server(failure.message)
            }
        }
    }

    /// Status 502: no engine answered.
    pub(crate) fn engine(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_GATEWAY, "server_error", "engine_failed", message)
    }

    /// Status 500: engines ended with this request, and it is not tried again.
    pub(crate) fn quarantined(message: impl Into<String>) -> Self {
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        Self::new(status, "server_error", QUARANTINED_CODE, message)
    }

    /// Status 503: the service is unavailable for now.
    pub(crate) fn unavailable(code: &'static str, message: impl Into<String>, retry_after_s: u64) -> Self {
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable", code, message);
        ApiError { retry_after_s: Some(retry_after_s), ..error }
    }

    /// The message of the error.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// The error's code, which programs may check.
    pub(crate) fn code(&self) -> &'static str {
        self.code
    }

    /// Seconds after which a retry makes sense, if it does.
    pub(crate) fn retry_after_s(&self) -> Option<u64> {
        self.retry_after_s
    }

    /// The error as a JSON document.
    pub(crate) fn to_json(&self) -> String {
        let ApiError { message, kind, param, code, .. } = self;
        let body = Body { message, kind, param: param.as_deref(), code };
        serde_json::to_string(&Envelope { error: body }).expect("strings serialise")
    }
}

impl From<Rejection> for ApiError {
    fn from(rejection: Rejection) -> Self {
        match rejection {
            Rejection::Overloaded { reason, retry_after_s } => Self::overloaded(reason, retry_after_s),
            Rejection::TooLarge(message) => {
                Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", "request_too_large", message)
            }
            Rejection::Unavailable(message) => Self::unavailable("unavailable", message, 1),
            Rejection::Quarantined(message) => Self::quarantined(message),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, self.to_json()).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = self.retry_after_s {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.code == QUARANTINED_CODE {
            // OpenAI's clients retry every status from 500 on, unless a header forbids it
            headers.insert("x-should-retry", HeaderValue::from_static("false"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

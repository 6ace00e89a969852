//! Parses the proxy's messages, and builds the picker's responses.

use envoy_types::pb::envoy::config::core::v3::header_value_option::HeaderAppendAction;
use envoy_types::pb::envoy::config::core::v3::{HeaderValue, HeaderValueOption, Metadata};
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    BodyMutation, BodyResponse, CommonResponse, HeaderMutation, HeadersResponse, HttpBody, HttpHeaders,
    ImmediateResponse, ProcessingResponse, ProtocolConfiguration, StreamedBodyResponse, TrailersResponse,
};
use envoy_types::pb::envoy::r#type::v3::HttpStatus;
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Struct, Value};
use mixfleet_runtime::picker::PickRefusal;

/// Namespace of load balancing in a proxy's metadata.
const BALANCER: &str = "envoy.lb";
/// Header and metadata key of the destinations.
pub(crate) const DESTINATION: &str = "x-gateway-destination-endpoint";

/// Headers of a message by name.
pub(crate) struct MessageHeaders<'a>(pub(crate) &'a HttpHeaders);

impl MessageHeaders<'_> {
    /// A header's value, if it is text.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        let headers = &self.0.headers.as_ref()?.headers;
        let header = headers.iter().find(|header| header.key.eq_ignore_ascii_case(name))?;
        match header.raw_value.is_empty() {
            true => Some(&header.value),
            false => std::str::from_utf8(&header.raw_value).ok(),
        }
    }

    /// The first of these headers that is present.
    pub(crate) fn first(&self, names: &[&str]) -> Option<&str> {
        names.iter().find_map(|name| self.get(name))
    }
}

fn field<'a>(metadata: Option<&'a Metadata>, namespace: &str, key: &str) -> Option<&'a Kind> {
    metadata?.filter_metadata.get(namespace)?.fields.get(key)?.kind.as_ref()
}

/// The endpoints that a proxy allows; none if it allows all.
pub(crate) fn subset(metadata: Option<&Metadata>) -> Option<Vec<String>> {
    let list =
        |text: &str| text.split(',').map(|one| one.trim().to_owned()).filter(|one| !one.is_empty()).collect();
    match field(metadata, "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset")? {
        Kind::ListValue(values) => {
            let texts = values.values.iter().filter_map(|value| match &value.kind {
                Some(Kind::StringValue(text)) => Some(text.clone()),
                _ => None,
            });
            Some(texts.collect())
        }
        Kind::StringValue(text) => Some(list(text)),
        // a hint that is not a list names no endpoints
        _ => Some(Vec::new()),
    }
}

/// The endpoint that served a request, as the proxy reports it.
pub(crate) fn served(metadata: Option<&Metadata>) -> Option<&str> {
    match field(metadata, BALANCER, "x-gateway-destination-endpoint-served")? {
        Kind::StringValue(text) => Some(text),
        _ => None,
    }
}

/// Checks that the body mode is the supported one, or that bodies are not sent.
///
/// # Errors
/// The required configuration.
pub(crate) fn check_modes(protocol: Option<&ProtocolConfiguration>) -> Result<BodiesSent, String> {
    let Some(modes) = protocol else { return Ok(BodiesSent { request: true, response: true }) };
    let is_sent = |name: &str, mode: i32| match BodySendMode::try_from(mode) {
        Ok(BodySendMode::FullDuplexStreamed) => Ok(true),
        Ok(BodySendMode::None) => Ok(false),
        _ => Err(format!("{name} of the ext_proc filter must be FULL_DUPLEX_STREAMED or NONE")),
    };
    Ok(BodiesSent {
        request: is_sent("request_body_mode", modes.request_body_mode)?,
        response: is_sent("response_body_mode", modes.response_body_mode)?,
    })
}

/// Whether a proxy sends bodies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BodiesSent {
    pub(crate) request: bool,
    pub(crate) response: bool,
}

fn of(response: Response) -> ProcessingResponse {
    ProcessingResponse { response: Some(response), ..ProcessingResponse::default() }
}

fn set(name: &str, value: &str) -> HeaderValueOption {
    HeaderValueOption {
        header: Some(HeaderValue { key: name.into(), raw_value: value.into(), ..HeaderValue::default() }),
        append_action: HeaderAppendAction::OverwriteIfExistsOrAdd.into(),
        ..HeaderValueOption::default()
    }
}

/// Header with the endpoint that computes the prompt, for llm-d's sidecar of the destination.
const PREFILLER: &str = "x-prefiller-host-port";

fn mutation(headers: &[(&str, String)]) -> Option<HeaderMutation> {
    let set_headers: Vec<_> = headers.iter().map(|(name, value)| set(name, value)).collect();
    (!set_headers.is_empty()).then_some(HeaderMutation { set_headers, ..HeaderMutation::default() })
}

/// Builds the response that sends a request to these destinations, and has its prompt computed by
/// `prefiller`, if there is one.
pub(crate) fn destined(destinations: &str, prefiller: Option<&str>) -> ProcessingResponse {
    let text = Value { kind: Some(Kind::StringValue(destinations.into())) };
    let inner = Struct { fields: [(DESTINATION.to_owned(), text)].into() };
    let outer = Value { kind: Some(Kind::StructValue(inner)) };
    let mut headers =
        HeaderMutation { set_headers: vec![set(DESTINATION, destinations)], ..HeaderMutation::default() };
    match prefiller {
        Some(prefiller) => headers.set_headers.push(set(PREFILLER, prefiller)),
        // a client must not name one
        None => headers.remove_headers.push(PREFILLER.into()),
    }
    let common = CommonResponse {
        header_mutation: Some(headers),
        clear_route_cache: true,
        ..CommonResponse::default()
    };
    ProcessingResponse {
        dynamic_metadata: Some(Struct { fields: [(BALANCER.to_owned(), outer)].into() }),
        ..of(Response::RequestHeaders(HeadersResponse { response: Some(common) }))
    }
}

/// Builds the response that passes the headers of an answer on, with additional ones.
pub(crate) fn passed_headers(more: &[(&str, String)]) -> ProcessingResponse {
    let common = CommonResponse { header_mutation: mutation(more), ..CommonResponse::default() };
    of(Response::ResponseHeaders(HeadersResponse { response: Some(common) }))
}

/// Builds the response that passes a piece of a body on.
pub(crate) fn passed_body(body: HttpBody, is_request: bool) -> ProcessingResponse {
    let HttpBody { body, end_of_stream, end_of_stream_without_message, grpc_message_compressed, .. } = body;
    let streamed = StreamedBodyResponse {
        body,
        end_of_stream,
        end_of_stream_without_message,
        grpc_message_compressed,
        ..StreamedBodyResponse::default()
    };
    let mutation = BodyMutation { mutation: Some(Mutation::StreamedResponse(streamed)) };
    let common = CommonResponse { body_mutation: Some(mutation), ..CommonResponse::default() };
    let response = BodyResponse { response: Some(common) };
    of(if is_request { Response::RequestBody(response) } else { Response::ResponseBody(response) })
}

/// Builds the response that passes trailers on.
pub(crate) fn passed_trailers(is_request: bool) -> ProcessingResponse {
    let response = TrailersResponse::default();
    of(if is_request { Response::RequestTrailers(response) } else { Response::ResponseTrailers(response) })
}

/// Builds the response in place of an endpoint.
pub(crate) fn refused(refusal: PickRefusal) -> ProcessingResponse {
    let PickRefusal { status, retry_after_s, code, body } = refusal;
    let mut headers = vec![("content-type", "application/json".to_owned())];
    headers.extend(retry_after_s.map(|after_s| ("retry-after", after_s.to_string())));
    of(Response::ImmediateResponse(ImmediateResponse {
        status: Some(HttpStatus { code: status.into() }),
        headers: mutation(&headers),
        body: body.into(),
        details: format!("mixfleet: {code}"),
        ..ImmediateResponse::default()
    }))
}

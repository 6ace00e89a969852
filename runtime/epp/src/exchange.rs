//! One request and its answer in the picker.

use crate::message::{self, BodiesSent, MessageHeaders};
use crate::state::{PickerState, PoolInForce};
use envoy_types::pb::envoy::config::core::v3::Metadata;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    HttpBody, HttpHeaders, ProcessingRequest, ProcessingResponse,
};
use mixfleet_engines::AnswerReader;
use mixfleet_hal::outside::{EngineFault, EngineFaultKind};
use mixfleet_runtime::picker::{PickQuery, PickRefusal, Picked};
use std::sync::Arc;
use std::time::Duration;
use tonic::Status;

/// Maximum size of a request's body.
const BODY_BYTES_MAX: usize = 32 << 20;
/// Maximum length of a client's request id; a longer one is replaced.
const ID_BYTES_MAX: usize = 128;
const OBJECTIVE: [&str; 2] = ["x-llm-d-inference-objective", "x-gateway-inference-objective"];
const FAIRNESS: [&str; 2] = ["x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"];
/// Request header that turns on response headers about the placement.
const EXPLAIN: &str = "x-mixfleet-explain";

/// A request in the picker. Dropping it before its end cancels the placement.
pub(crate) struct Exchange {
    shared: Arc<PickerState>,
    sent: BodiesSent,
    has_begun: bool,
    query: PickQuery,
    /// Name of the request's objective, if it has one.
    objective: Option<String>,
    /// The only endpoints that the proxy allows, if it names any.
    subset: Option<Vec<String>>,
    explains: bool,
    /// Pieces of the body that wait for a destination.
    waiting: Vec<HttpBody>,
    held_bytes: usize,
    /// Whether the request has a destination, or was refused.
    is_decided: bool,
    picked: Option<Picked>,
    pool: Option<Arc<PoolInForce>>,
    answer: AnswerPhase,
}

/// State of the answer.
enum AnswerPhase {
    None,
    /// The pieces are read.
    Read(AnswerReader),
    /// The pieces pass unread.
    Unread,
    Over,
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.shared.release(self.held_bytes);
    }
}

impl Exchange {
    pub(crate) fn new(shared: Arc<PickerState>) -> Self {
        Exchange {
            shared,
            sent: BodiesSent { request: true, response: true },
            has_begun: false,
            query: PickQuery::default(),
            objective: None,
            subset: None,
            explains: false,
            waiting: Vec::new(),
            held_bytes: 0,
            is_decided: false,
            picked: None,
            pool: None,
            answer: AnswerPhase::None,
        }
    }

    /// Answers a message of the proxy. Returns nothing while more of the request is needed.
    ///
    /// # Errors
    /// The reason why the message cannot be answered.
    pub(crate) async fn step(
        &mut self,
        message: ProcessingRequest,
    ) -> Result<Vec<ProcessingResponse>, Status> {
        if !std::mem::replace(&mut self.has_begun, true) {
            let sent = message::check_modes(message.protocol_config.as_ref());
            self.sent = sent.map_err(Status::failed_precondition)?;
        }
        let metadata = message.metadata_context;
        match message.request {
            Some(Request::RequestHeaders(headers)) => self.request_headers(&headers, metadata.as_ref()).await,
            Some(Request::RequestBody(body)) => Ok(self.request_body(body).await),
            Some(Request::RequestTrailers(_)) => {
                let mut answers = if !self.is_decided { self.place().await } else { Vec::new() };
                if self.picked.is_some() {
                    answers.push(message::passed_trailers(true));
                }
                Ok(answers)
            }
            Some(Request::ResponseHeaders(headers)) => Ok(self.response_headers(&headers, metadata.as_ref())),
            Some(Request::ResponseBody(body)) => {
                self.read(&body);
                Ok(vec![message::passed_body(body, false)])
            }
            Some(Request::ResponseTrailers(_)) => {
                self.ended();
                Ok(vec![message::passed_trailers(false)])
            }
            None => Err(Status::invalid_argument("a message without a request")),
        }
    }

    /// Time after which the prompt of an unstreamed answer is assumed to be computed; none for streams, and
    /// once the answer has begun.
    pub(crate) fn prompt_due(&self) -> Option<Duration> {
        let picked = self.picked.as_ref().filter(|picked| !picked.stream())?;
        matches!(self.answer, AnswerPhase::None).then(|| picked.prompt_due())
    }

    /// Records that the prompt is assumed to be computed.
    pub(crate) fn guess_first_token(&mut self) {
        if let Some(picked) = &mut self.picked {
            picked.guess_first_token();
        }
    }

    async fn request_headers(
        &mut self,
        headers: &HttpHeaders,
        metadata: Option<&Metadata>,
    ) -> Result<Vec<ProcessingResponse>, Status> {
        let read = MessageHeaders(headers);
        let is_sane = |id: &&str| {
            (1..=ID_BYTES_MAX).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_graphic())
        };
        let id = read.get("x-request-id").filter(is_sane).map(str::to_owned);
        let path = read.get(":path").unwrap_or_default();
        self.query = PickQuery {
            id: id.unwrap_or_else(|| self.shared.random_id()),
            path: path.split('?').next().unwrap_or_default().to_owned(),
            fairness_id: read.first(&FAIRNESS).map(str::to_owned),
            ..PickQuery::default()
        };
        self.objective = read.first(&OBJECTIVE).map(str::to_owned);
        self.explains = read.get(EXPLAIN).is_some_and(|value| matches!(value, "1" | "true"));
        self.subset = message::subset(metadata);
        match headers.end_of_stream || !self.sent.request {
            true => Ok(self.place().await),
            false => Ok(Vec::new()),
        }
    }

    async fn request_body(&mut self, body: HttpBody) -> Vec<ProcessingResponse> {
        if self.is_decided {
            return match self.picked.is_some() {
                true => vec![message::passed_body(body, true)],
                // it was refused: further pieces are discarded
                false => Vec::new(),
            };
        }
        let bytes = self.held_bytes + body.body.len();
        if bytes > BODY_BYTES_MAX {
            return self.refuse(PickRefusal::too_large(BODY_BYTES_MAX));
        }
        if let Err(refusal) = self.shared.hold(body.body.len()) {
            return self.refuse(refusal);
        }
        self.held_bytes = bytes;
        let is_last = body.end_of_stream || body.end_of_stream_without_message;
        self.waiting.push(body);
        if is_last { self.place().await } else { Vec::new() }
    }

    /// Answers the request with a refusal, in place of an endpoint.
    fn refuse(&mut self, refusal: PickRefusal) -> Vec<ProcessingResponse> {
        self.is_decided = true;
        self.waiting = Vec::new();
        self.shared.release(std::mem::take(&mut self.held_bytes));
        vec![message::refused(refusal)]
    }

    /// Places the request, whose body is complete, and sends it on.
    async fn place(&mut self) -> Vec<ProcessingResponse> {
        let Some(pool) = self.shared.pool() else {
            return self.refuse(PickRefusal::unavailable("no endpoint of the pool has answered yet"));
        };
        if pool.is_empty() {
            return self.refuse(PickRefusal::unavailable("no endpoint of the pool is ready"));
        }
        let left_out = pool.left_out(self.subset.as_deref());
        if left_out.len() == pool.addresses.len() {
            let why = "none of the endpoints that the proxy offers is in the pool";
            return self.refuse(PickRefusal::unavailable(why));
        }
        let pieces: Vec<&[u8]> = self.waiting.iter().map(|piece| piece.body.as_slice()).collect();
        let priority = self.objective.as_ref().and_then(|name| pool.objectives.get(name));
        let query = PickQuery {
            body: Arc::new(pieces.concat()),
            priority: priority.copied().unwrap_or(0),
            left_out,
            ..self.query.clone()
        };
        let picked = match pool.picker.pick(query).await {
            Ok(picked) => picked,
            Err(refusal) => return self.refuse(refusal),
        };
        self.is_decided = true;
        self.shared.release(std::mem::take(&mut self.held_bytes));
        let destinations = picked.destinations();
        let named = destinations.iter().take(self.shared.settings.fallbacks + 1);
        let named: Vec<&str> = named.map(|&at| pool.addresses[at].as_str()).collect();
        let prefiller = picked.prompt_at().map(|at| pool.addresses[at].as_str());
        let mut answers = vec![message::destined(&named.join(","), prefiller)];
        let waiting = std::mem::take(&mut self.waiting);
        answers.extend(waiting.into_iter().map(|piece| message::passed_body(piece, true)));
        (self.picked, self.pool) = (Some(picked), Some(pool));
        answers
    }

    fn response_headers(
        &mut self,
        headers: &HttpHeaders,
        metadata: Option<&Metadata>,
    ) -> Vec<ProcessingResponse> {
        let read = MessageHeaders(headers);
        let status = read.get(":status").and_then(|status| status.parse().ok()).unwrap_or(0);
        let mut more = Vec::new();
        if let (Some(picked), Some(pool)) = (&mut self.picked, &self.pool) {
            let served = message::served(metadata).and_then(|address| pool.positions.get(address).copied());
            // a failure without a serving endpoint is the proxy's own answer
            if served.is_some() || status < 500 {
                picked.served_by(served);
            }
            if self.explains {
                more.push(("x-mixfleet-placement", self.query.id.clone()));
                more.push(("x-mixfleet-predicted-ttft-ms", format!("{:.1}", picked.ttft().0 * 1e3)));
            }
            let is_plain = read.get("content-encoding").is_none_or(|encoding| encoding == "identity");
            let is_stream =
                read.get("content-type").is_some_and(|kind| kind.starts_with("text/event-stream"));
            self.answer = match status {
                200 if is_plain && self.sent.response && picked.is_read() => {
                    AnswerPhase::Read(AnswerReader::new(is_stream))
                }
                200..=299 => AnswerPhase::Unread,
                _ => {
                    picked.answered_with(status);
                    AnswerPhase::Over
                }
            };
        }
        if headers.end_of_stream || !self.sent.response {
            self.ended();
        }
        vec![message::passed_headers(&more)]
    }

    /// Reads a piece of the answer.
    fn read(&mut self, body: &HttpBody) {
        if let (AnswerPhase::Read(reader), Some(picked)) = (&mut self.answer, &mut self.picked) {
            match reader.push(&body.body) {
                Ok(chunks) => chunks.iter().for_each(|chunk| picked.chunk(chunk)),
                Err(fault) => {
                    picked.failed(&unfinished(fault));
                    self.answer = AnswerPhase::Over;
                }
            }
        }
        if body.end_of_stream || body.end_of_stream_without_message {
            self.ended();
        }
    }

    /// Handles the end of the answer.
    fn ended(&mut self) {
        let answer = std::mem::replace(&mut self.answer, AnswerPhase::Over);
        let Some(mut picked) = self.picked.take() else { return };
        match answer {
            AnswerPhase::Read(reader) if reader.is_stream() && reader.is_complete() => picked.done(None),
            AnswerPhase::Read(reader) if reader.is_stream() => {
                let detail = "its stream ended before it was complete";
                picked.failed(&EngineFault::new(EngineFaultKind::Failed, detail));
            }
            AnswerPhase::Read(mut reader) => match reader.usage() {
                Ok(usage) => picked.done(usage),
                Err(fault) => picked.failed(&unfinished(fault)),
            },
            AnswerPhase::Unread => picked.passed(),
            AnswerPhase::None | AnswerPhase::Over => {}
        }
    }
}

/// Converts a fault in a relayed answer. A cut answer does not show that the engine has ended: only a probe
/// does.
fn unfinished(fault: EngineFault) -> EngineFault {
    let kind = if fault.kind == EngineFaultKind::Cut { EngineFaultKind::Failed } else { fault.kind };
    EngineFault { kind, ..fault }
}

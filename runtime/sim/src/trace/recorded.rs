//! Runs that were recorded request by request, to compare predictions with.

use super::lines::Lines;
use super::{Format, Request, TraceError, request_log};
use mixfleet_hal::units::{Ordered, Seconds};
use serde::Deserialize;
use std::path::Path;

/// A recorded run: the requests of a log (`request-log`) whose lines have times too.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordedRun {
    /// In order of arrival.
    pub requests: Vec<RecordedRequest>,
}

/// A request of a recorded run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecordedRequest {
    /// Arrival time from the first arrival.
    pub at: Seconds,
    /// Prompt length.
    pub prompt_tokens: u32,
    /// Answer length.
    pub output_tokens: u32,
    /// Time from when the engine had it to its first token.
    pub ttft_s: f64,
    /// Mean time per token after the first; none for an answer of one token.
    pub tpot_s: Option<f64>,
    /// Time from when the engine had it to its last token.
    pub e2e_s: f64,
}

#[derive(Deserialize)]
struct RecordedTimes {
    /// When the engine had the request, on the clock of the two below; without it, that is its arrival.
    queued_ts: Option<f64>,
    arrival_time: Option<f64>,
    first_token_ts: Option<f64>,
    last_token_ts: Option<f64>,
}

impl RecordedRun {
    /// Reads the log at `path`, which may be compressed.
    ///
    /// # Errors
    /// Those of a trace, and a line without times.
    pub fn read(path: &Path) -> Result<Self, TraceError> {
        let name = path.display().to_string();
        let file = mixfleet_hal::files::open(path);
        let file = file.map_err(|cause| TraceError::Read { name: name.clone(), line: 0, cause })?;
        let mut lines = Lines::new(name.clone(), file, None)?;
        let mut requests = Vec::new();
        while let Some(line) = lines.next()? {
            let read = recorded(line);
            requests.push(read.map_err(|cause| lines.error(Format::RequestLog, cause))?);
        }
        requests.sort_by_key(|request: &RecordedRequest| Ordered(request.at.0));
        let Some(first) = requests.first().map(|request| request.at) else {
            return Err(TraceError::Empty { name });
        };
        requests.iter_mut().for_each(|request| request.at = request.at - first);
        Ok(RecordedRun { requests })
    }

    /// The same requests as a trace; a request's id is its index here.
    pub fn trace(&self) -> impl Iterator<Item = Result<Request, TraceError>> + '_ {
        (0..).zip(&self.requests).map(|(id, recorded)| {
            let RecordedRequest { at, prompt_tokens, output_tokens, .. } = *recorded;
            Ok(Request {
                id,
                at,
                prompt_tokens,
                output_tokens,
                chain: Vec::new(),
                session: None,
                class: None,
            })
        })
    }
}

fn recorded(line: &[u8]) -> Result<RecordedRequest, String> {
    let draft = request_log::parse(line)?;
    let times: RecordedTimes = serde_json::from_slice(line).map_err(|cause| cause.to_string())?;
    let need = |time: Option<f64>, key: &str| {
        time.filter(|time| time.is_finite()).ok_or_else(|| {
            format!("no {key}; a recorded run has the time of each request's first and last token")
        })
    };
    let first = need(times.first_token_ts, "first_token_ts")?;
    let last = need(times.last_token_ts, "last_token_ts")?;
    let queued = need(times.queued_ts.or(times.arrival_time), "queued_ts")?;
    let (prompt_tokens, output_tokens) = (draft.lengths.prompt, draft.lengths.output.max(1));
    let (ttft_s, e2e_s) = (first - queued, last - queued);
    if !(ttft_s > 0.0 && e2e_s >= ttft_s) {
        return Err(format!("its first token comes {ttft_s} s and its last {e2e_s} s after it was queued"));
    }
    let tpot_s = (output_tokens > 1).then(|| (e2e_s - ttft_s) / f64::from(output_tokens - 1));
    Ok(RecordedRequest { at: draft.at, prompt_tokens, output_tokens, ttft_s, tpot_s, e2e_s })
}

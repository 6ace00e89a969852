//! The per-request logs of vLLM's and LLMServingSim's benchmarks.

use super::DATE_S_MAX;
use super::read::{Draft, Lengths};
use mixfleet_hal::units::Seconds;
use serde::Deserialize;

#[derive(Deserialize)]
struct LoggedRequest {
    input_toks: u64,
    output_toks: u64,
    /// Arrival time on any clock: the reader counts from the first arrival.
    arrival_time: Option<f64>,
    arrival_time_ns: Option<f64>,
}

/// The request of a line, or the fault.
pub(super) fn parse(line: &[u8]) -> Result<Draft, String> {
    let line: LoggedRequest = serde_json::from_slice(line).map_err(|cause| cause.to_string())?;
    let at = match (line.arrival_time, line.arrival_time_ns) {
        (Some(seconds), _) => seconds,
        (None, Some(nanoseconds)) => nanoseconds / 1e9,
        (None, None) => return Err("neither arrival_time nor arrival_time_ns".into()),
    };
    if !(at.is_finite() && at >= 0.0) {
        return Err(format!("arrival at {at} is not a time"));
    }
    if at > DATE_S_MAX {
        return Err(format!("arrival at {at} s is no date; is it in milliseconds or less?"));
    }
    let lengths = Lengths::new(line.input_toks, line.output_toks)?;
    Ok(Draft { at: Seconds(at), lengths, chain: Vec::new(), class: None })
}

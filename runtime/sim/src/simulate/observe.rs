//! Observing a run.

use mixfleet_scheduler::fleet::{Action, Event};

/// Callbacks of a run. Values for methods that are not implemented are not computed. `()` observes nothing.
pub trait Observer {
    /// A request arrives, the `requests`th.
    fn arrived(&mut self, _now_s: f64, _requests: u64) {}

    /// The fleet machine answers an arrival.
    fn decided(&mut self, _now_s: f64, _action: &Action) {}

    /// The fleet machine receives an event.
    fn told(&mut self, _now_s: f64, _event: &Event) {}

    /// An answer is complete.
    fn finished(&mut self, _now_s: f64, _answer: &AnswerTimes) {}

    /// Whether the run can end here, `missed` requests having been rejected, dropped or not answered as
    /// promised. The results then cover what happened until here.
    fn is_decided(&self, missed: u64) -> bool {
        let _ = missed;
        false
    }

    /// Interval of [`Observer::sampled`]; none by default.
    fn interval_s(&self) -> Option<f64> {
        None
    }

    /// The load of a pool, each pool in turn, at the end of every interval and of the run. For a time without
    /// requests only the first and the last sample are taken.
    fn sampled(&mut self, _sample: &Sample) {}
}

impl Observer for () {}

/// The times of an answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AnswerTimes {
    /// The request's id.
    pub request: u64,
    /// Prompt length.
    pub prompt_tokens: u32,
    /// Answer length.
    pub output_tokens: u32,
    /// Time of arrival in the run.
    pub arrived_s: f64,
    /// Time from arrival to the first token.
    pub ttft_s: f64,
    /// Mean time per token after the first; none for an answer of one token.
    pub tpot_s: Option<f64>,
    /// TBT by the SLO's metric; none for an answer of one token.
    pub tbt_s: Option<f64>,
    /// Time from arrival to the last token.
    pub e2e_s: f64,
}

/// The state of a pool, and what happened in the interval before it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// Time of the sample.
    pub time_s: f64,
    /// Length of the interval.
    pub interval_s: f64,
    /// Index of the pool in [`Setup::pools`](super::Setup::pools).
    pub pool: u32,
    /// Number of waiting prompts.
    pub queued: u64,
    /// Number of prompts being computed.
    pub prefilling: u64,
    /// Number of sequences that wait for KV from elsewhere, or for room for it.
    pub receiving: u64,
    /// Number of sequences that decode.
    pub decoding: u64,
    /// KV memory, in tokens, of all sequences; a shared prefix counts once.
    pub used_tokens: u64,
    /// KV memory, in tokens, of unused cached prefixes.
    pub cached_tokens: u64,
    /// Share of the instances' time in the interval spent on prompts.
    pub prefill_utilisation: f64,
    /// Share of the instances' time in the interval spent on decoding.
    pub decode_utilisation: f64,
    /// Mean over the instances of the predicted time of their prompts divided by the TTFT objective:
    /// Mooncake's load (v3, section 7). At 1 a new prompt without length would just meet it.
    pub prefill_load: f64,
    /// Mean over the instances of the decode step's time divided by the TBT objective; 0 where nothing
    /// decodes.
    pub decode_load: f64,
    /// Requests that arrived in the interval, in the whole fleet.
    pub fleet_arrived: u64,
    /// Requests that were rejected in the interval, by the whole fleet.
    pub fleet_rejected: u64,
    /// Requests that were dropped in the interval since their decode instance in this pool was too busy.
    pub dropped: u64,
    /// Answers that this pool completed in the interval.
    pub completed: u64,
}

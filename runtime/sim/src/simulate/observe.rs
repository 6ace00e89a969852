//! Watching a run while it goes on.

use mixfleet_scheduler::fleet::{Action, Event};

/// Is told of a run what it wants to know; whatever it leaves out is not looked at. `()` wants nothing.
pub trait Observer {
    /// One request more arrives: the `requests`th.
    fn arrived(&mut self, now_s: f64, requests: u64) {
        let _ = (now_s, requests);
    }

    /// What the fleet's machine answers to an arrival.
    fn decided(&mut self, now_s: f64, action: &Action) {
        let _ = (now_s, action);
    }

    /// What the fleet's machine is told.
    fn told(&mut self, now_s: f64, event: &Event) {
        let _ = (now_s, event);
    }

    /// An answer is complete.
    fn finished(&mut self, now_s: f64, answer: &AnswerTimes) {
        let _ = (now_s, answer);
    }

    /// How often [`Observer::sampled`] is wanted; not at all by default.
    fn interval_s(&self) -> Option<f64> {
        None
    }

    /// The load of a pool, each pool in turn, at the end of every interval and of the run. Of a time without
    /// any request only the first and the last sample come.
    fn sampled(&mut self, sample: &Sample) {
        let _ = sample;
    }
}

impl Observer for () {}

/// How a request fared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AnswerTimes {
    /// Arrival to first token.
    pub ttft_s: f64,
    /// The gap between its tokens by the SLO's metric; none of an answer of one token.
    pub tbt_s: Option<f64>,
    /// Arrival to last token.
    pub e2e_s: f64,
}

/// A pool at a moment, and what happened in the interval that ends then.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// The moment.
    pub time_s: f64,
    /// The interval.
    pub interval_s: f64,
    /// Which pool, as in [`Setup::pools`](super::Setup::pools).
    pub pool: u32,
    /// Prompts that wait.
    pub queued: u64,
    /// Prompts in computation.
    pub prefilling: u64,
    /// Sequences that wait for KV from elsewhere, or for room for it.
    pub receiving: u64,
    /// Sequences that decode.
    pub decoding: u64,
    /// KV memory, in tokens, of all that run; a shared prefix counts once.
    pub used_tokens: u64,
    /// KV memory, in tokens, of prefixes that nobody uses now.
    pub cached_tokens: u64,
    /// Share of the instances' time in the interval that prompts took,
    pub prefill_utilisation: f64,
    /// and decoding.
    pub decode_utilisation: f64,
    /// Predicted time of the prompts that wait or run over the objective for TTFT, mean of the instances:
    /// Mooncake's load (v3, section 7). 1: a new prompt without length would just meet it.
    pub prefill_load: f64,
    /// Time of the decode step over the objective for TBT, mean of the instances; 0 where nothing decodes.
    pub decode_load: f64,
    /// Requests that arrived in the interval, in the whole fleet.
    pub fleet_arrived: u64,
    /// Requests that were turned away in the interval, by the whole fleet.
    pub fleet_rejected: u64,
    /// Requests that were given up in the interval since their decode instance in this pool was too busy.
    pub dropped: u64,
    /// Answers that this pool completed in the interval.
    pub completed: u64,
}

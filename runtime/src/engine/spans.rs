//! What a worker does for a request, as spans of the request's trace: its prompt, its hand-off, its answer.

use super::worker::{Active, Worker};
use crate::trace::{SpanFact, SpanFacts};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::batch::RequestId;

/// What an instance does for a request, and since when.
#[derive(Clone, Copy, Debug)]
pub(super) enum WorkPhase {
    /// Its prompt waits or is computed here, or elsewhere for an answer here.
    Prompt(Seconds),
    /// Another instance decodes it, and gets its KV from here.
    HandOff,
    /// It decodes here.
    Decode(Seconds),
}

impl Worker {
    /// A prompt got its blocks.
    pub(super) fn prompt_begins(&mut self, request: RequestId) {
        let now = self.env.now();
        if let Some(active) = self.active.get_mut(&request) {
            active.phase = WorkPhase::Prompt(now);
        }
    }

    /// A token was drawn here, behind a prompt if it is the first.
    pub(super) fn prompt_done(&mut self, request: RequestId) {
        let (now, is_sent) = (self.env.now(), self.sender.hands_off(request));
        let Some(active) = self.active.get_mut(&request) else { return };
        let WorkPhase::Prompt(since) = active.phase else { return };
        active.phase = if is_sent { WorkPhase::HandOff } else { WorkPhase::Decode(now) };
        let active = &self.active[&request];
        self.tell("prefill", active, (since, now));
    }

    /// All KV of a request that decodes here has come.
    pub(super) fn decode_begins(&mut self, request: RequestId) {
        let now = self.env.now();
        if let Some(active) = self.active.get_mut(&request) {
            active.phase = WorkPhase::Decode(now);
        }
    }

    /// All KV of a request was sent, since `started`.
    pub(super) fn tell_handed_off(&self, request: RequestId, started: Seconds) {
        let active = self.active.get(&request);
        if let Some(active) = active.filter(|active| matches!(active.phase, WorkPhase::HandOff)) {
            self.tell("hand-off", active, (started, self.env.now()));
        }
    }

    /// A request is not here any more.
    pub(super) fn tell_decoded(&self, active: &Active) {
        if let WorkPhase::Decode(since) = active.phase {
            self.tell("decode", active, (since, self.env.now()));
        }
    }

    fn tell(&self, name: &'static str, active: &Active, times: (Seconds, Seconds)) {
        let trace = active.wanted.hints.trace;
        let facts = || -> SpanFacts {
            vec![
                ("mixfleet.instance", SpanFact::Text(self.steps.device.info().id.clone())),
                ("mixfleet.attempt", SpanFact::Count(active.attempt.into())),
            ]
        };
        self.metrics.traces.phase(&*self.env, trace, name, times, facts);
    }
}

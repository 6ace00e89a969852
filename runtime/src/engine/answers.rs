//! The coordinator's part for drawn tokens, which reach the client in their order.
//!
//! An instance's reports come in their order. After a placement the first token may come from another
//! instance than the others, though, over a slower connection: tokens that come before it wait.

use super::coordinator::Coordinator;
use super::transfers::Transferred;
use crate::request::{Failure, FinishReason, Logprobs, Update};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{Error, ErrorKind};
use mixfleet_scheduler::batch::RequestId;
use mixfleet_scheduler::fleet::{Action, Event, RejectReason};
use mixfleet_scheduler::transfer::Reporter;

/// A token that an instance drew.
pub(super) struct Drawn {
    pub(super) token: u32,
    pub(super) logprobs: Option<Logprobs>,
    pub(super) finish: Option<FinishReason>,
}

impl Coordinator {
    /// Handles token `index` of the answer to a request, which the transfer machine puts in its place.
    pub(super) fn drawn(&mut self, by: Reporter, index: u32, drawn: Drawn) {
        let Some(tracked) = self.requests.get(&by.request) else { return };
        if !self.transfers.is_current(by) {
            return;
        }
        if drawn.token >= self.vocabulary {
            let wrong = format!("it drew token {}, which the model does not have", drawn.token);
            return self.distrust(by, &wrong);
        }
        if index >= tracked.wanted.max_tokens {
            let wrong = format!("it drew token {index} of an answer of {}", tracked.wanted.max_tokens);
            return self.distrust(by, &wrong);
        }
        self.transfer(Transferred::Drawn { by, index, token: drawn, at: self.env.now() });
    }

    /// Gives up an instance that reports what cannot be.
    pub(super) fn distrust(&mut self, by: Reporter, wrong: &str) {
        let detail = format!("request {}: {wrong}", by.request);
        self.failed(by.instance, &Error::new(ErrorKind::Corrupt, detail));
    }

    /// Appends the next token to the answer to a request, and ends it with its last one.
    pub(super) fn append(&mut self, by: Reporter, drawn: Drawn) {
        let Reporter { instance, request, .. } = by;
        let Drawn { token, logprobs, finish } = drawn;
        // An answer may end with a token that came before this one.
        let Some(tracked) = self.requests.get_mut(&request) else { return };
        let Some(decode) = self.transfers.place(request).map(|place| place.decode) else { return };
        let first = tracked.generated.is_empty();
        tracked.generated.push(token);
        self.note_token(request);
        let event = if first || instance != decode {
            Event::PrefillDone { request, instance }
        } else {
            Event::DecodeStep { instance, requests: vec![request], tokens: 1 }
        };
        let dropped = self.fleet_step(event).into_iter().find_map(|action| match action {
            Action::Drop { reason, .. } => Some(reason),
            _ => None,
        });
        let tracked = &self.requests[&request];
        let is_whole = tracked.generated.len() >= tracked.wanted.max_tokens as usize;
        let finish_of_all = finish.or(is_whole.then_some(FinishReason::Length));
        if let (Some(reason), None) = (dropped, finish_of_all) {
            return self.drop_late(request, &reason);
        }
        tracked.tell(Update::Token { id: token, logprobs });
        // A worker that would continue is stopped.
        let Some(reason) = finish_of_all else { return };
        let tracked = self.requests.remove(&request).expect("still there");
        // before the client can ask for it
        let now = self.env.now();
        if let Some(usd) = self.metrics.usd(request, now) {
            self.placements.cost(&tracked.wanted.id, usd);
        }
        if let Some(phases) = self.metrics.phases(request, now) {
            let tokens = to_u32(tracked.generated.len());
            self.placements.phases(&tracked.wanted.id, phases, Some(tokens));
        }
        self.note_over(request, &tracked.wanted, true);
        tracked.tell(Update::Finished { reason });
        self.offer(request, decode, &tracked);
        self.fleet_step(Event::Finished { request });
        self.transfer(Transferred::Finished { request, instance, knows: finish.is_some() });
    }

    /// Gives up a request whose prompt is computed. Its client gets no token, so that it gets the status of
    /// a request that was turned away.
    fn drop_late(&mut self, request: RequestId, reason: &RejectReason) {
        let prefilled_s = self.requests[&request].started_at.map_or(0.0, |at| (self.env.now() - at).0);
        self.metrics.requests_dropped.inc();
        self.metrics.prefill_dropped_s.inc_by(prefilled_s);
        let message = format!("its prompt is done, and its decode instance is too busy by now: {reason}");
        self.fail(request, Failure::turned_away(message));
    }
}

//! The coordinator's part for drawn tokens, which reach the client in their order.
//!
//! An instance's reports come in their order. After a placement the first token may come from another
//! instance than the others, though, over a slower connection: tokens that come before it wait.

use super::coordinator::{Coordinator, Stage};
use super::messages::Order;
use crate::request::{Failure, FinishReason, Logprobs, Update};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{Error, ErrorKind};
use mixfleet_scheduler::batch::RequestId;
use mixfleet_scheduler::fleet::{Action, Event, InstanceId, RejectReason};

/// A token that an instance drew.
pub(super) struct Drawn {
    pub(super) token: u32,
    pub(super) logprobs: Option<Logprobs>,
    pub(super) finish: Option<FinishReason>,
}

impl Coordinator {
    /// Handles token `index` of the answer to a request, from one of its current instances.
    pub(super) fn drawn(&mut self, instance: InstanceId, request: RequestId, index: u32, drawn: Drawn) {
        let tracked = self.requests.get_mut(&request).expect("checked by the caller");
        let (token, next) = (drawn.token, to_u32(tracked.generated.len()));
        let wrong = if token >= self.vocabulary {
            format!("it drew token {token}, which the model does not have")
        } else if index == next {
            self.append(instance, request, drawn);
            return self.append_early(request);
        } else if index > next
            && index < tracked.wanted.max_tokens
            && instance == tracked.decode
            && instance != tracked.prefill
        {
            tracked.early.insert(index, drawn);
            return;
        } else {
            format!("it drew token {index} of its answer, of which {next} are there")
        };
        self.failed(instance, &Error::new(ErrorKind::Corrupt, format!("request {request}: {wrong}")));
    }

    /// Appends the tokens that waited for the one before them.
    fn append_early(&mut self, request: RequestId) {
        while let Some(tracked) = self.requests.get_mut(&request)
            && let Some(drawn) = tracked.early.remove(&to_u32(tracked.generated.len()))
        {
            let decode = tracked.decode;
            self.append(decode, request, drawn);
        }
    }

    /// Appends the next token to the answer to a request, and ends it with its last one.
    fn append(&mut self, instance: InstanceId, request: RequestId, drawn: Drawn) {
        let Drawn { token, logprobs, finish } = drawn;
        let tracked = self.requests.get_mut(&request).expect("checked by the caller");
        let first = tracked.generated.is_empty();
        tracked.generated.push(token);
        match tracked.stage {
            _ if instance == tracked.decode => {}
            // The two reports came over different connections.
            Stage::Joined => self.metrics.kv_exposed_s.observe(0.0),
            _ => tracked.stage = Stage::Computed { at: self.env.now() },
        }
        self.note_token(request);
        let event = if first || instance != self.requests[&request].decode {
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
        if let Some(usd) = self.metrics.usd(request, self.env.now()) {
            self.placements.cost(&tracked.wanted.id, usd);
        }
        self.note_over(request, &tracked.wanted, true);
        tracked.tell(Update::Finished { reason });
        self.offer(request, &tracked);
        self.fleet_step(Event::Finished { request });
        if instance != tracked.decode || finish.is_none() {
            self.send(tracked.decode, Order::Cancel { request });
        }
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

//! Prefixes on their way from instances that hold them: for prompts, and ahead of demand for those to come.

use super::World;
use super::agenda::Next;
use super::engine::{Job, Message};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::batch::{After, Urgency};
use mixfleet_scheduler::fleet::Event;
use mixfleet_scheduler::kv::BlockHash;
use mixfleet_scheduler::table::IdMap;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Tells the numbers of copies from those of requests.
const COPY: u64 = 1 << 63;

/// What was copied ahead of demand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Replicated {
    /// Prefixes that were sent.
    pub copies: u64,
    /// Prefixes that were to be copied, and found no room, or nothing left to be sent.
    pub dropped: u64,
    /// Bytes that were sent; `kv_bytes_moved` has them too.
    pub bytes: f64,
}

/// A copy that was asked for.
pub(super) struct Copy {
    pub(super) from: u32,
    pub(super) to: u32,
    /// The whole prefix.
    pub(super) chain: Arc<[BlockHash]>,
    /// Tokens of it that are there.
    pub(super) held_tokens: u32,
}

#[derive(Default)]
pub(super) struct Copies {
    under_way: IdMap<Copy>,
    asked: u64,
    sent: Replicated,
}

impl Copies {
    pub(super) fn sent(&self) -> Replicated {
        self.sent
    }

    /// A copy lost its room; false if it is none.
    pub(super) fn revoked(&mut self, request: u64) -> bool {
        let copy = self.under_way.remove(request).is_some();
        self.sent.dropped += u64::from(copy);
        copy
    }
}

impl World<'_> {
    /// An instance has room for KV from elsewhere, of which it holds some.
    pub(super) fn has_room(&mut self, instance: u32, request: u64, held_tokens: u32) {
        if let Some(flight) = self.flights.get_mut(request)
            && flight.decode == instance
            && flight.prefill != instance
        {
            flight.held_tokens = held_tokens;
            let attempt = flight.attempt;
            self.schedule(self.now_s, Next::Reserved { request, attempt });
        } else {
            let attempt = self.attempt(request);
            self.schedule(self.now_s, Next::Pull { request, attempt, held_tokens });
        }
    }

    /// Has a prefix sent to an instance that has room for it.
    pub(super) fn pull(&mut self, request: u64, held_tokens: u32) {
        let (from, tokens, chain) = match (self.flights.get(request), self.copies.under_way.get(request)) {
            (Some(flight), _) => {
                let Some((from, until)) = flight.pull else { return };
                let tokens = self.pulled_tokens(until, flight.prompt_tokens);
                (from, tokens, flight.chain.clone())
            }
            (None, Some(copy)) => {
                let all = copy.chain.len() as u32 * self.setup.block_tokens;
                (copy.from, all, copy.chain.clone())
            }
            (None, None) => return,
        };
        if let Some(flight) = self.flights.get_mut(request) {
            flight.pull_held_tokens = held_tokens;
        } else if let Some(copy) = self.copies.under_way.get_mut(request) {
            copy.held_tokens = held_tokens;
        }
        self.send(from, Message::Lend { request, tokens, chain });
    }

    /// An instance lends the first `tokens` tokens of a prefix: they leave from `ready_s` on.
    pub(super) fn lent(&mut self, from: u32, request: u64, tokens: u32, ready_s: f64) {
        let copy = self.copies.under_way.get(request).map(|copy| (copy.to, copy.held_tokens));
        let flight = self.flights.get(request).filter(|flight| flight.pull.is_some());
        let Some((to, held_tokens)) = flight.map(|flight| (flight.prefill, flight.pull_held_tokens)).or(copy)
        else {
            return self.schedule(self.now_s, Next::Pulled { request, attempt: u32::MAX, from, tokens });
        };
        let sent = tokens.saturating_sub(held_tokens);
        let mut arrives_s = self.now_s;
        if sent > 0 {
            let bytes = f64::from(sent) * self.setup.fleet.kv_bytes_per_token as f64;
            arrives_s = self.network.send(self.now_s, ready_s, from, to, bytes);
            if copy.is_some() {
                self.copies.sent.copies += 1;
                self.copies.sent.bytes += bytes;
            }
        } else if copy.is_some() {
            self.copies.sent.dropped += 1;
        }
        let (tokens, attempt) = (tokens.max(held_tokens), self.attempt(request));
        self.schedule(arrives_s, Next::Pulled { request, attempt, from, tokens });
    }

    /// The first `tokens` tokens of a prefix are where they are wanted; none: nobody waits for them there any
    /// more.
    pub(super) fn pulled(&mut self, request: u64, from: u32, tokens: Option<u32>) {
        self.send(from, Message::Unlend { request });
        let Some(tokens) = tokens else { return };
        let to = match self.flights.get_mut(request) {
            Some(flight) => {
                flight.pull = None;
                flight.prefill
            }
            None => {
                let Some(copy) = self.copies.under_way.remove(request) else { return };
                copy.to
            }
        };
        self.send(to, Message::Landed { request, tokens_valid: tokens, since_s: None });
    }

    /// Begins to copy a prefix ahead of demand: it waits for its room among the requests.
    pub(super) fn send_copy(&mut self, copy: Copy) {
        self.copies.asked += 1;
        let request = COPY | self.copies.asked;
        let tokens = copy.chain.len() as u32 * self.setup.block_tokens;
        let job = Job {
            request,
            prompt_tokens: tokens,
            output_tokens: 0,
            chain: copy.chain.clone(),
            urgency: Urgency { gives_way: true, ..Urgency::due_at(Seconds(self.now_s)) },
        };
        let to = copy.to;
        self.copies.under_way.insert(request, copy);
        self.send(to, Message::Add { job, pulls: tokens, after: After::Keep });
    }

    /// A request has lost its place: it gets another one.
    pub(super) fn replay(&mut self, request: u64) {
        if self.copies.revoked(request) {
            return;
        }
        let Some(flight) = self.flights.get_mut(request) else { return };
        flight.attempt += 1;
        let (prefill, decode, due) = (flight.prefill, flight.decode, flight.urgency.due);
        self.tell(Event::Cancelled { request });
        self.give_up(request, [prefill, decode]);
        self.ask_fleet(request, Some(due));
    }
}

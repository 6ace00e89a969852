//! Pulls of prefixes for prompts, and copies of prefixes ahead of demand.

use super::agenda::Next;
use super::engine::{Job, Message, with_answer};
use super::flight::Flight;
use super::{KV, World};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::{Bytes, Seconds};
use mixfleet_scheduler::batch::{After, Urgency};
use mixfleet_scheduler::cost::KvCopy;
use mixfleet_scheduler::fleet::{Action, Event, InstanceId, PromptChain};
use mixfleet_scheduler::kv::BlockHash;
use mixfleet_scheduler::table::IdMap;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Distinguishes the ids of copies from those of requests.
const COPY: u64 = 1 << 63;

/// Totals of copies ahead of demand, and of what KV nodes took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Replicated {
    /// Number of prefixes that were sent.
    pub copies: u64,
    /// Number of copies that found no room, or nothing left to be sent.
    pub dropped: u64,
    /// Bytes that were sent, which `kv_bytes_moved` includes.
    pub bytes: f64,
}

/// A requested copy.
pub(super) struct Copy {
    pub(super) from: u32,
    pub(super) to: u32,
    /// The whole prefix.
    pub(super) chain: Arc<[BlockHash]>,
    /// Number of its tokens that the receiver holds.
    pub(super) held_tokens: u32,
}

impl Copy {
    pub(super) fn new(from: InstanceId, to: InstanceId, hashes: Vec<BlockHash>) -> Self {
        Copy { from: from.0, to: to.0, chain: hashes.into(), held_tokens: 0 }
    }
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

    /// Drops a copy whose reservation was revoked; false if `request` is none.
    pub(super) fn revoked(&mut self, request: u64) -> bool {
        let copy = self.under_way.remove(request).is_some();
        self.sent.dropped += u64::from(copy);
        copy
    }
}

impl World<'_> {
    /// Handles an instance's room for KV from elsewhere, of which it holds `held_tokens`.
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

    /// Asks the holder of a prefix to send it to an instance that has room.
    pub(super) fn pull(&mut self, request: u64, held_tokens: u32) {
        let (from, tokens, chain) = match (self.flights.get(request), self.copies.under_way.get(request)) {
            (Some(flight), _) => {
                let Some((from, until)) = flight.pull else { return };
                let tokens = self.pulled_tokens(until, flight.prompt_tokens);
                (from, tokens, flight.chain.clone())
            }
            (None, Some(copy)) => {
                let all = to_u32(copy.chain.len()) * self.setup.block_tokens;
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

    /// Sends the first `tokens` tokens of a lent prefix, of which `on_device` are on the devices, and which
    /// are ready at `ready_s`.
    pub(super) fn lent(&mut self, from: u32, request: u64, (tokens, on_device): (u32, u32), ready_s: f64) {
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
            self.leaves(from, to, sent.into(), on_device.saturating_sub(held_tokens).into());
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

    /// Lets KV of as much as `tokens` tokens go from one instance to another, of which `gathered` are on the
    /// devices there.
    pub(super) fn leaves(&mut self, from: u32, to: u32, tokens: f64, gathered: f64) {
        let bytes = |tokens: f64| Bytes(tokens * self.setup.fleet.kv_bytes_per_token as f64);
        let takes = self.setup.instances[from as usize].spec.kv_copies;
        let takes = takes.leaves(bytes(gathered), self.setup.fleet.layers);
        let over = Seconds(bytes(tokens).0 * self.network.link(from, to).seconds_per_byte);
        self.copy(from, KvCopy { takes, over });
        self.comes(from, to, tokens, 0.0);
    }

    /// Lets KV of as much as `tokens` tokens come from another instance, in no less than `least_s`.
    pub(super) fn comes(&mut self, from: u32, to: u32, tokens: f64, least_s: f64) {
        let bytes = Bytes(tokens * self.setup.fleet.kv_bytes_per_token as f64);
        let takes = self.setup.instances[to as usize].spec.kv_copies.lands(bytes, self.setup.fleet.layers);
        let over = Seconds((bytes.0 * self.network.link(from, to).seconds_per_byte).max(least_s));
        self.copy(to, KvCopy { takes, over });
    }

    fn copy(&mut self, instance: u32, copy: KvCopy) {
        if copy.takes.0 > 0.0 {
            self.send(instance, Message::Copy(copy));
        }
    }

    /// Handles the arrival of the first `tokens` tokens of a prefix; none if they are no longer waited for.
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

    /// Offers the KV of a complete answer to KV nodes, and starts the copy that one of them takes.
    pub(super) fn offer(&mut self, request: u64, flight: &Flight) {
        if !self.routers.first().has_kv_node() {
            return;
        }
        let (block_tokens, prompt) = (self.setup.block_tokens, (flight.prompt_tokens, &flight.chain[..]));
        // the last token's KV was never computed
        let tokens = flight.prompt_tokens + flight.output_tokens.saturating_sub(1);
        let hashes = with_answer(request, prompt, tokens, block_tokens);
        let chain = PromptChain { block_tokens, kv_dtype: KV, hashes };
        let (instance, chains) = (InstanceId(flight.decode), vec![chain]);
        self.tell(Event::Offered { request, instance, chains });
        let mut copies = Vec::new();
        for action in self.actions.drain(..) {
            self.observer.decided(self.now_s, &action);
            if let Action::Replicate { from, to, hashes, .. } = action {
                copies.push(Copy::new(from, to, hashes));
            }
        }
        copies.into_iter().for_each(|copy| self.send_copy(copy));
    }

    /// Starts a copy ahead of demand, which waits for room among the requests.
    pub(super) fn send_copy(&mut self, copy: Copy) {
        self.copies.asked += 1;
        let request = COPY | self.copies.asked;
        let tokens = to_u32(copy.chain.len()) * self.setup.block_tokens;
        let job = Job {
            request,
            prompt_tokens: tokens,
            output_tokens: 0,
            chain: copy.chain.clone(),
            urgency: Urgency { gives_way: true, ..Urgency::due_at(Seconds(self.now_s)) },
        };
        let to = copy.to;
        self.copies.under_way.insert(request, copy);
        self.send(to, Message::Add { job, pulls: tokens, after: After::Keep, decoder: None });
    }

    /// Places a request again that has lost its place.
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

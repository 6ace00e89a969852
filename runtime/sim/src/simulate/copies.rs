//! Pulls of prefixes for prompts, and copies of prefixes ahead of demand.

use super::agenda::{LentPrefix, Next};
use super::engine::{Message, with_answer};
use super::flight::Flight;
use super::transfers::SimulatedTransfer;
use super::{KV, World};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::{Bytes, Seconds};
use mixfleet_scheduler::cost::KvCopy;
use mixfleet_scheduler::fleet::{Action, Event, InstanceId, PromptChain};
use mixfleet_scheduler::kv::BlockHash;
use mixfleet_scheduler::table::IdMap;
use mixfleet_scheduler::transfer::{PrefixSource, Reporter};
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

/// Copies in progress, with their prefixes.
#[derive(Default)]
pub(super) struct Copies {
    pub(super) chains: IdMap<Arc<[BlockHash]>>,
    asked: u64,
    pub(super) sent: Replicated,
}

impl World<'_> {
    /// Sends a lent prefix, which is ready at `ready_s`, unless it is no longer awaited.
    pub(super) fn lent(&mut self, from: u32, prefix: LentPrefix, ready_s: f64) {
        let LentPrefix { request, attempt, to, sent, gathered, .. } = prefix;
        let mut arrives_s = self.now_s;
        if self.transfers.awaits_prefix(Reporter { instance: InstanceId(to), request, attempt }) {
            let is_copy = self.copies.chains.contains(request);
            if sent > 0 {
                let bytes = f64::from(sent) * self.setup.fleet.kv_bytes_per_token as f64;
                arrives_s = self.network.send(self.now_s, ready_s, from, to, bytes);
                self.leaves(from, to, sent.into(), gathered.into());
                if is_copy {
                    self.copies.sent.copies += 1;
                    self.copies.sent.bytes += bytes;
                }
            } else if is_copy {
                self.copies.sent.dropped += 1;
            }
        }
        self.schedule(arrives_s, Next::Pulled { from, prefix });
    }

    /// Sends KV of `tokens` tokens from one instance to another, `gathered` of which are on the sender's
    /// devices.
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

    /// Handles the arrival of a prefix.
    pub(super) fn pulled(&mut self, from: u32, prefix: LentPrefix) {
        let LentPrefix { request, attempt, to, tokens, .. } = prefix;
        self.send(from, Message::Unlend { request });
        if self.transfers.awaits_prefix(Reporter { instance: InstanceId(to), request, attempt }) {
            self.send(to, Message::Landed { request, tokens_valid: tokens, since_s: None });
        }
    }

    /// Offers the KV of a complete answer on `instance` to KV nodes, and starts the copy that one of them
    /// accepts.
    pub(super) fn offer(&mut self, request: u64, instance: InstanceId, flight: &Flight) {
        if !self.routers.first().has_kv_node() {
            return;
        }
        let (block_tokens, prompt) = (self.setup.block_tokens, (flight.prompt_tokens, &flight.chain[..]));
        // the last token's KV was never computed
        let tokens = flight.prompt_tokens + flight.output_tokens.saturating_sub(1);
        let hashes = with_answer(request, prompt, tokens, block_tokens);
        let chains = vec![PromptChain { block_tokens, kv_dtype: KV, hashes }];
        self.tell(Event::Offered { request, instance, chains });
        let mut copies = Vec::new();
        for action in self.actions.drain(..) {
            self.observer.decided(self.now_s, &action);
            copies.push(action);
        }
        copies.into_iter().for_each(|action| self.begin_copy(action));
    }

    /// Starts a copy requested by the fleet machine: it waits for room among the requests.
    pub(super) fn begin_copy(&mut self, action: Action) {
        let Action::Replicate { from, to, hashes, .. } = action else { return };
        self.copies.asked += 1;
        let request = COPY | self.copies.asked;
        let source = PrefixSource { holder: from, until: to_u32(hashes.len()) * self.setup.block_tokens };
        self.copies.chains.insert(request, hashes.into());
        self.transfer(SimulatedTransfer::CopyWanted { request, source, to });
    }
}

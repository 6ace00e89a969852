//! Prefixes on their way to where requests to come will want them.

use super::{Next, World};
use mixfleet_scheduler::kv::BlockHash;
use mixfleet_scheduler::table::IdMap;
use serde::{Deserialize, Serialize};

/// What was copied ahead of demand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Replicated {
    /// Prefixes that were sent.
    pub copies: u64,
    /// Of them, those that found no room, or not the beginning any more that they were to follow.
    pub dropped: u64,
    /// Bytes that were sent; `kv_bytes_moved` has them too.
    pub bytes: f64,
}

/// A copy that was asked for.
pub(super) struct Copy {
    pub(super) from: u32,
    pub(super) to: u32,
    /// The whole prefix.
    pub(super) chain: Vec<BlockHash>,
    /// At its end.
    pub(super) tokens: u32,
}

#[derive(Default)]
pub(super) struct Copies {
    on_their_way: IdMap<Copy>,
    sent: Replicated,
}

impl Copies {
    pub(super) fn sent(&self) -> Replicated {
        self.sent
    }
}

impl World<'_> {
    /// Puts a copy on the wire, behind what is there.
    pub(super) fn send_copy(&mut self, copy: Copy) {
        let bytes = f64::from(copy.tokens) * self.setup.fleet.kv_bytes_per_token as f64;
        let arrives_s = self.network.send(self.now_s, self.now_s, copy.from, copy.to, bytes);
        let sent = &mut self.copies.sent;
        sent.copies += 1;
        sent.bytes += bytes;
        let number = sent.copies;
        self.copies.on_their_way.insert(number, copy);
        self.schedule(arrives_s, Next::Copied { number });
    }

    /// A copy is there: the instance holds it from now on, if it can.
    pub(super) fn copied(&mut self, number: u64) {
        let Some(copy) = self.copies.on_their_way.remove(number) else { return };
        let blocks = copy.tokens.div_ceil(self.setup.block_tokens.max(1)) as usize;
        let engine = &mut self.engines[copy.to as usize];
        if !engine.take_copy(&copy.chain, blocks, &mut self.outcomes) {
            self.copies.sent.dropped += 1;
        }
        self.settle(copy.to);
    }
}

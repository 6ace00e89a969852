//! Blocks that come from another instance for requests to come.

use super::{Engine, Outcome};
use mixfleet_scheduler::kv::{BlockHash, Tier};

impl Engine {
    /// The last `copied` blocks of `chain` have arrived. They are held if what comes before them still is and if they fit beside what is in use;
    /// whether they are.
    pub(in crate::simulate) fn take_copy(
        &mut self,
        chain: &[BlockHash],
        copied: usize,
        outcomes: &mut Vec<Outcome>,
    ) -> bool {
        let known = self.cache.pin(chain);
        let fits = (chain.len() - known) as u64 <= self.available();
        let joins = known + copied >= chain.len();
        if joins && fits {
            self.fit();
            self.cache.insert(chain, &mut self.evicted);
        }
        self.cache.unpin(&chain[..known]);
        self.tell_evicted(outcomes);
        if joins && fits && known < chain.len() {
            outcomes.push(Outcome::Stored(Tier::Device, chain[known..].to_vec()));
        }
        joins && fits
    }
}

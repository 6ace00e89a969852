//! What of a prompt's prefix must come from a lower tier or from another instance before its computing can begin.

use super::{Engine, Outcome, Sequence};
use mixfleet_scheduler::kv::Tier;

impl Engine {
    /// Begins to load what lower tiers hold of a sequence's chain beyond the devices' part, and notes that `pulled` blocks
    /// follow. When the load ends, if there is one.
    pub(super) fn stage(&mut self, now_s: f64, sequence: &mut Sequence, pulled: usize) -> Option<f64> {
        if pulled == 0 && self.lower.is_empty() {
            return None;
        }
        let chain = &sequence.job.chain[..sequence.job.chain.len().min(self.reusable(sequence))];
        let held = self.cache.longest_prefix(chain);
        let before = sequence.staged.clone();
        if !before.is_empty() && before.start <= held {
            return None;
        }
        // what the devices held in front of staged blocks may have sunk meanwhile
        let gap_end = if before.is_empty() { chain.len() } else { before.start.min(chain.len()) };
        let gap = &chain[held..gap_end];
        let lower = self.lower.prefix(gap);
        let come = held + lower.iter().sum::<usize>();
        let closed = !before.is_empty() && come == before.start;
        sequence.staged = held..if closed { before.end } else { come + pulled };
        sequence.loaded = [0, 1, 2].map(|tier| sequence.loaded[tier] + lower[tier]);
        if come == held {
            return None;
        }
        let ready_s = self.lower.load(now_s, &gap[..come - held], lower);
        sequence.job.ready_at_s = sequence.job.ready_at_s.max(ready_s);
        Some(ready_s)
    }

    /// Leading blocks of a sequence that need not be computed, where the devices hold `hits`.
    pub(super) fn known(&self, sequence: &Sequence, hits: usize) -> usize {
        let staged = &sequence.staged;
        let joined = if staged.start <= hits { staged.end.max(hits) } else { hits };
        joined.min(self.reusable(sequence))
    }

    /// Says what was given up since the last time, and where it went.
    pub(super) fn tell_evicted(&mut self, outcomes: &mut Vec<Outcome>) {
        if !self.evicted.is_empty() {
            let evicted = std::mem::take(&mut self.evicted);
            self.lower.take_in(&evicted, outcomes);
            outcomes.push(Outcome::Evicted(Tier::Device, evicted));
        }
    }
}

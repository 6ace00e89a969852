//! Loads of KV from lower tiers, while steps of other sequences run.

use super::{Engine, Outcome};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::{Bytes, Seconds};
use mixfleet_scheduler::cost::KvCopy;
use mixfleet_scheduler::kv::BlockHash;

impl Engine {
    /// Starts loading the leading blocks of `chain` that lower tiers hold, unless computing them is better.
    /// `first` is the index of the first block in the sequence.
    pub(super) fn load(
        &mut self,
        now_s: f64,
        request: u64,
        first: u32,
        chain: &[BlockHash],
        outcomes: &mut Vec<Outcome>,
    ) {
        self.has_news = true;
        let by_tier = self.lower.prefix(chain);
        let blocks = by_tier.iter().sum::<usize>();
        let tokens = to_u32(blocks) * self.block_tokens;
        let bytes = Bytes(f64::from(tokens) * self.kv.token_bytes);
        let (context, time) = (first * self.block_tokens, Seconds(self.lower.time_s(by_tier)));
        if blocks == 0 || !self.machine.loads_rather(&self.cost, context, tokens, time) {
            return self.without_load.push(request);
        }
        let takes = self.kv.cost.loads(bytes, self.kv.layers);
        let until_s = self.lower.load(now_s, &chain[..blocks], by_tier);
        let Some(active) = self.active(request) else { return };
        active.loaded = [0, 1, 2].map(|tier| active.loaded[tier] + by_tier[tier]);
        let attempt = active.attempt;
        self.copying.add(now_s, KvCopy { takes, over: Seconds(until_s - now_s) });
        let until_s = until_s + takes.0;
        outcomes.push(Outcome::Loads { request, attempt, blocks: to_u32(blocks), until_s });
    }
}

//! What instances hold of a prompt, and what loading it takes.

use super::super::{Arrival, Fleet};
use mixfleet_hal::units::Seconds;

impl Fleet {
    /// Leading prompt tokens that instances hold and can reuse, and the time to load them from lower tiers,
    /// if any; by position. The last token is always computed: its logits give the first token.
    pub(super) fn reusable(&mut self, arrival: &Arrival) -> (Vec<u32>, Vec<Seconds>) {
        let mut cached = std::mem::take(&mut self.cached);
        cached.clear();
        cached.resize(self.loads.len(), 0);
        let mut loading = Vec::new();
        for chain in &arrival.chains {
            let block = chain.block_tokens.max(1);
            let most = arrival.prompt_tokens.saturating_sub(1) / block * block;
            self.index.lookup(&chain.hashes, &mut self.prefixes);
            for prefix in self.prefixes.as_slice() {
                let Some(at) = self.position(prefix.instance) else { continue };
                let is_excluded = arrival.exclude.contains(&prefix.instance);
                if self.loads.kv_block_tokens(at) == chain.block_tokens && !is_excluded {
                    cached[at] = prefix.total().saturating_mul(block).min(most);
                    if prefix.blocks[0] < prefix.total() {
                        let on_device = prefix.blocks[0].saturating_mul(block).min(most);
                        let loads = self.load_time(at, prefix.blocks.map(|blocks| blocks * block));
                        loading.resize(self.loads.len(), Seconds::ZERO);
                        let load = &self.loads[at];
                        let waiting = (load.everyone().sequences as usize + load.prompts() + 1) as f64;
                        let computed = load.prefill_s(on_device, cached[at] - on_device);
                        // the instance decides by about the same: see `batch::Instance::loads_rather`
                        let computes = load.spec.role.computes() && loads > computed * waiting;
                        loading[at] = if computes { computed } else { loads };
                    }
                }
            }
        }
        (cached, loading)
    }

    /// Time to load `tokens` of each tier onto the devices of instance `at`, from all tiers at once.
    fn load_time(&self, at: usize, tokens: [u32; 3]) -> Seconds {
        let times = tokens.iter().zip(&self.loads[at].tiers).skip(1).filter(|(tokens, _)| **tokens > 0);
        let times = times.map(|(&tokens, tier)| tier.time(self.kv_bytes(tokens)));
        times.fold(Seconds::ZERO, Seconds::max)
    }
}

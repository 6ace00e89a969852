//! What KV nodes take: the prefix of every complete answer, if fetching it back would be quicker than
//! computing it again.
//!
//! ```text
//! missing = what the node lacks of prompt and answer
//! take it if  pull(missing) < prefill(missing) on the quickest instance,
//!             the links out and in are free within PATIENCE,
//!             and, where there are prices, w * (prefill - pull) > price of the traffic both ways
//! ```
//!
//! A device evicts blocks long after it computed them, so a node takes a copy early, while the block is still
//! on the device: a later eviction then loses nothing. The node that holds at least half of the prefix takes
//! the rest; new prefixes are spread over all nodes by their keys. Nothing is taken while a copy that begins
//! with the same missing block is in flight. The cost of evictions on the node is not counted.

use super::explain::ScoreUnit;
use super::load::Load;
use super::place::ways_free;
use super::{Action, Fleet, InstanceId, PromptChain, Role};
use crate::kv::{BlockHash, Prefixes};
use mixfleet_hal::cast::{to_u32, to_usize};
use mixfleet_hal::units::Seconds;

/// Time for which a copy may wait for its links. Its blocks stay in use until then.
const PATIENCE: Seconds = Seconds(1.0);
/// A copy is given up after this many times the predicted time, plus a second.
const LATE: f64 = 2.0;

/// Copies to KV nodes in flight: the node, the first block of each, and when it is given up.
#[derive(Clone, Debug, Default)]
pub(super) struct Offers(Vec<(InstanceId, BlockHash, Seconds)>);

impl Offers {
    /// Whether a copy to `node` that begins with this block is in flight.
    fn has(&mut self, now: Seconds, node: InstanceId, first: BlockHash) -> bool {
        self.0.retain(|&(.., until)| until >= now);
        self.0.iter().any(|&(to, block, _)| (to, block) == (node, first))
    }
}

impl Fleet {
    /// Whether a KV node is up.
    pub fn has_kv_node(&self) -> bool {
        self.able(Role::keeps).next().is_some()
    }

    /// Has a KV node take what it lacks of a prefix that an instance holds.
    pub(super) fn offered(
        &mut self,
        now: Seconds,
        instance: InstanceId,
        chains: &[PromptChain],
        actions: &mut Vec<Action>,
    ) {
        let Some(from) = self.position(instance) else { return };
        let Some((to, chain, held)) = self.taker(from, chains) else { return };
        let Some(&first) = chain.hashes.get(held) else { return };
        let block = |blocks: usize| to_u32(blocks).saturating_mul(chain.block_tokens);
        let (held, tokens) = (block(held), block(chain.hashes.len() - held));
        if !self.is_worth_taking(now, (from, to), held, tokens) {
            return;
        }
        let node = self.loads[to].spec.id;
        if self.offers.has(now, node, first) {
            return;
        }
        let until = now + self.pull_time(now, from, to, tokens) * LATE + Seconds(1.0);
        self.offers.0.push((node, first, until));
        self.occupy(now, from, to, self.kv_bytes(tokens));
        let hashes = chain.hashes.clone();
        actions.push(Action::Replicate { from: instance, to: node, hashes, tokens });
    }

    /// The KV node that takes a prefix, the keys of its blocks, and the number of them that it holds.
    fn taker<'a>(&self, from: usize, chains: &'a [PromptChain]) -> Option<(usize, &'a PromptChain, usize)> {
        let holder = &self.loads[from];
        let chain_of = |node: &Load| {
            let own = chains.iter().find(|chain| node.spec.has_blocks_of(chain))?;
            let tokens = own.hashes.len() as u64 * u64::from(own.block_tokens);
            let fits = tokens > 0 && node.spec.kv_capacity_tokens >= tokens;
            let is_same = node.spec.kv_dtype == holder.spec.kv_dtype;
            (fits && is_same && self.link(holder, node).is_some()).then_some(own)
        };
        let held_by = |at: usize, chain: &PromptChain| {
            let (id, mut held) = (self.loads[at].spec.id, Prefixes::default());
            self.index.lookup(&chain.hashes, &mut held);
            let prefix = held.as_slice().iter().find(|prefix| prefix.instance == id);
            prefix.map_or(0, |prefix| prefix.total() as usize)
        };
        let nodes = self.able(Role::keeps).filter_map(|(at, node)| {
            let chain = chain_of(node)?;
            Some((at, chain, held_by(at, chain)))
        });
        let nodes: Vec<_> = nodes.collect();
        let (_, first, _) = nodes.first()?;
        let next = nodes[to_usize(first.hashes.last()?.0 % nodes.len() as u64)];
        // the first of equals
        let most = nodes.into_iter().rev().max_by_key(|(.., held)| *held);
        most.filter(|(_, chain, held)| 2 * held >= chain.hashes.len()).or(Some(next))
    }

    /// Whether a node should take `tokens` tokens that follow the `held` ones there.
    fn is_worth_taking(&self, now: Seconds, (from, to): (usize, usize), held: u32, tokens: u32) -> bool {
        let (holder, node) = (&self.loads[from], &self.loads[to]);
        let (Some(there), Some(back)) = (self.link(holder, node), self.link(node, holder)) else {
            return false;
        };
        let bytes = self.kv_bytes(tokens);
        let kinds = self.loads.kinds().iter().filter(|kind| kind.role.prefills());
        let computed = kinds.map(|kind| kind.prefill_s(held, tokens));
        let Some(gain) = computed.reduce(Seconds::min).map(|computed| computed - back.time(bytes)) else {
            return false;
        };
        let (unit, weight) = self.weights();
        let traffic = if unit == ScoreUnit::Usd { there.price(bytes).0 + back.price(bytes).0 } else { 0.0 };
        gain > Seconds::ZERO && gain.0 * weight > traffic && ways_free(now, holder, node) <= PATIENCE
    }
}

#[cfg(test)]
mod tests;

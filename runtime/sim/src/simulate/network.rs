//! The network: each instance has one link out and one in, each of which carries one transfer at a time.

use super::Setup;
use mixfleet_scheduler::cost::LinkCost;
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, Default)]
struct Card {
    out_free_s: f64,
    in_free_s: f64,
    /// Time that its transfers out, and in, have taken or are going to.
    taken_s: (f64, f64),
}

pub(super) struct Network {
    cards: Vec<Card>,
    pools: Vec<u32>,
    nics: Vec<Option<LinkCost>>,
    between: BTreeMap<(u32, u32), LinkCost>,
    /// Bytes and dollars by pair of pools.
    moved: BTreeMap<(u32, u32), (f64, f64)>,
}

impl Network {
    pub(super) fn new(setup: &Setup) -> Self {
        Network {
            cards: vec![Card::default(); setup.instances.len()],
            pools: setup.instances.iter().map(|instance| instance.spec.pool).collect(),
            nics: setup.instances.iter().map(|instance| instance.spec.nic).collect(),
            between: setup.pool_links.iter().map(|&(from, to, cost)| ((from, to), cost)).collect(),
            moved: BTreeMap::new(),
        }
    }

    /// The path from one instance to another.
    pub(super) fn link(&self, from: u32, to: u32) -> LinkCost {
        let pools = self.between.get(&(self.pools[from as usize], self.pools[to as usize])).copied();
        LinkCost::between(self.nics[from as usize], self.nics[to as usize], pools).unwrap_or_default()
    }

    /// Sends `bytes` that are ready at `ready_s`, requested at `now_s`; returns when the last of them
    /// arrives.
    pub(super) fn send(&mut self, now_s: f64, ready_s: f64, from: u32, to: u32, bytes: f64) -> f64 {
        let link = self.link(from, to);
        let takes_s = bytes * link.seconds_per_byte;
        // Each end serves its own transfers in turn. A transfer that waits for the other end lets later ones
        // pass, since network interfaces share their bandwidth among many streams.
        let out = &mut self.cards[from as usize].out_free_s;
        *out = out.max(ready_s) + takes_s;
        let out_s = *out;
        let into = &mut self.cards[to as usize].in_free_s;
        *into = into.max(ready_s) + takes_s;
        let ends_s = out_s.max(*into);
        self.cards[from as usize].taken_s.0 += takes_s;
        self.cards[to as usize].taken_s.1 += takes_s;
        let pools = (self.pools[from as usize], self.pools[to as usize]);
        let moved = self.moved.entry(pools).or_default();
        moved.0 += bytes;
        moved.1 += bytes * link.usd_per_byte;
        ends_s.max(now_s) + link.latency.0
    }

    /// Sends KV whose layers are sent as they are computed, from `began_s` to `now_s`.
    pub(super) fn hand_off(
        &mut self,
        began_s: f64,
        now_s: f64,
        (from, to): (u32, u32),
        bytes: f64,
        layers: u32,
    ) -> f64 {
        let layers = f64::from(layers.max(1));
        let first_layer_s = began_s + (now_s - began_s) / layers;
        let last_layer_s = bytes / layers * self.link(from, to).seconds_per_byte;
        self.send(now_s, first_layer_s, from, to, bytes)
            .max(now_s + last_layer_s + self.link(from, to).latency.0)
    }

    /// Time for which an instance's network is taken by all transfers so far, out and in.
    pub(super) fn taken_s(&self, instance: usize) -> (f64, f64) {
        self.cards[instance].taken_s
    }

    /// Bytes and dollars by pair of pools.
    pub(super) fn moved(&self) -> &BTreeMap<(u32, u32), (f64, f64)> {
        &self.moved
    }
}

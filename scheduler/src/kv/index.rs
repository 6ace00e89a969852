//! Which instance holds which prefix, and in which tier.
//!
//! A block has one entry: its key and the set of its holders. Sets are shared between blocks, so that a
//! lookup does work only where the set changes along the chain, and a block that all instances hold costs as
//! little as one that a single instance holds. An instance that is cleared gets a new number, in O(1);
//! entries of the old number are removed piece by piece during later changes.

use super::BlockHash;
use super::blocks::Blocks;
use super::sets::{EMPTY, Edit, Member, Sets};
use crate::ids::InstanceId;
use mixfleet_hal::cast::to_u32;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The tier in which an instance holds a block, fastest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tier {
    /// The memory of the device that computes.
    #[default]
    Device,
    /// The host's memory.
    Dram,
    /// The host's disk.
    Ssd,
}

impl Tier {
    /// All tiers, in the order of [`Prefix::blocks`].
    pub const ALL: [Tier; 3] = [Tier::Device, Tier::Dram, Tier::Ssd];

    pub(super) fn bit(self) -> u32 {
        1 << self as u32
    }
}

/// A change of its cache that an instance reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change<'a> {
    /// It now holds these blocks in this tier.
    Store(Tier, &'a [BlockHash]),
    /// It no longer holds these blocks in this tier.
    Evict(Tier, &'a [BlockHash]),
    /// It holds nothing any more.
    Clear,
}

/// The result of applying a numbered change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applied {
    /// The index is up to date with the instance.
    Done,
    /// The change was known already; nothing changed.
    Late,
    /// Earlier changes are missing, so it was not applied. The instance counts as holding nothing until the
    /// changes from `expected` on were applied in order, or a snapshot was.
    Gap {
        /// The number of the first missing change.
        expected: u64,
    },
}

/// The leading blocks of a chain that an instance holds without a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    /// The instance.
    pub instance: InstanceId,
    /// Number of blocks of the prefix by the fastest tier that holds them, in the order of [`Tier::ALL`].
    pub blocks: [u32; 3],
}

impl Prefix {
    /// Number of leading blocks without a gap, in any tier.
    pub fn total(&self) -> u32 {
        self.blocks.iter().sum()
    }
}

/// The result of a lookup, and its working memory, for reuse.
#[derive(Clone, Debug, Default)]
pub struct Prefixes {
    found: Vec<Prefix>,
    alive: Vec<Alive>,
}

/// A holder of all blocks so far, with the tiers of the last one.
#[derive(Clone, Copy, Debug)]
struct Alive {
    member: Member,
    /// Its index in `found`.
    place: u32,
    /// The first of its blocks in its current fastest tier that are not counted yet.
    since: u32,
}

impl Alive {
    fn count(&self, found: &mut [Prefix], blocks: u32) {
        found[self.place as usize].blocks[self.member.fastest()] += blocks - self.since;
    }
}

impl Prefixes {
    /// Each instance that holds the first block, in an arbitrary order that depends only on the history.
    pub fn as_slice(&self) -> &[Prefix] {
        &self.found
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holder {
    Counts(InstanceId),
    /// Changes of this instance are missing.
    Unsure(InstanceId),
    /// The number was cleared; blocks may still refer to it.
    Gone,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    holder: u32,
    /// The number of the next change.
    next: u64,
    /// One more than the largest number received.
    seen: u64,
}

/// Which instances hold which blocks, from their reports. Storing twice has the effect of storing once;
/// evicting a block that is not held does nothing.
///
/// Changes over a reliable channel go through [`store`](Self::store), [`evict`](Self::evict) and
/// [`clear`](Self::clear); numbered ones, counted from 0 by each instance, through [`apply`](Self::apply) and
/// [`resync`](Self::resync). An instance uses one of the two.
#[derive(Clone, Default)]
pub struct PrefixIndex {
    blocks: Blocks,
    sets: Sets,
    holders: Vec<Holder>,
    holders_free: Vec<u32>,
    instances: BTreeMap<InstanceId, Known>,
    sweep: Sweep,
}

/// One pass over all blocks at a time, for the numbers that were cleared when it began.
#[derive(Clone, Default)]
struct Sweep {
    piece: usize,
    now: Vec<u32>,
    later: Vec<u32>,
}

impl std::fmt::Debug for PrefixIndex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PrefixIndex({} blocks, {} instances)", self.blocks(), self.instances.len())
    }
}

impl PrefixIndex {
    /// Records that `instance` now holds these blocks in `tier`.
    pub fn store(&mut self, instance: InstanceId, tier: Tier, hashes: &[BlockHash]) {
        let holder = self.known(instance).holder;
        self.edit(hashes, Edit::Add(holder, tier));
        self.sweep_some();
    }

    /// Records that `instance` no longer holds these blocks in `tier`.
    pub fn evict(&mut self, instance: InstanceId, tier: Tier, hashes: &[BlockHash]) {
        if let Some(&Known { holder, .. }) = self.instances.get(&instance) {
            self.edit(hashes, Edit::Remove(holder, tier));
            self.sweep_some();
        }
    }

    /// Records that `instance` holds nothing any more, in O(1); the memory is freed during later changes.
    pub fn clear(&mut self, instance: InstanceId) {
        if let Some(&Known { holder, .. }) = self.instances.get(&instance) {
            self.known(instance).holder = self.new_holder(self.holders[holder as usize]);
            self.retire(holder);
            self.sweep_some();
        }
    }

    /// Removes `instance`, its blocks and the number of its last change, because it left or starts again from
    /// 0.
    pub fn remove(&mut self, instance: InstanceId) {
        if let Some(known) = self.instances.remove(&instance) {
            self.retire(known.holder);
            self.sweep_some();
        }
    }

    /// Applies the change that `instance` numbered `sequence`. After a clear, earlier missing changes no
    /// longer matter.
    pub fn apply(&mut self, instance: InstanceId, sequence: u64, change: Change) -> Applied {
        let known = self.known(instance);
        if sequence < known.next {
            return Applied::Late;
        }
        if change == Change::Clear {
            return self.resync(instance, sequence, &[]);
        }
        known.seen = known.seen.max(sequence.saturating_add(1));
        let (holder, expected) = (known.holder, known.next);
        if sequence > expected {
            self.holders[holder as usize] = Holder::Unsure(instance);
            return Applied::Gap { expected };
        }
        known.next = sequence.saturating_add(1);
        match change {
            Change::Store(tier, hashes) => self.edit(hashes, Edit::Add(holder, tier)),
            Change::Evict(tier, hashes) => self.edit(hashes, Edit::Remove(holder, tier)),
            Change::Clear => {}
        }
        self.sweep_some();
        self.count_again(instance);
        Applied::Done
    }

    /// Replaces the blocks of `instance` by `snapshot`, which it held after its change `sequence`. A snapshot
    /// older than the last applied change is [`Applied::Late`]; one that is older than a change that was left
    /// out closes only a part of the gap.
    pub fn resync(
        &mut self,
        instance: InstanceId,
        sequence: u64,
        snapshot: &[(Tier, &[BlockHash])],
    ) -> Applied {
        let next = sequence.saturating_add(1);
        let known = self.known(instance);
        if next < known.next {
            return Applied::Late;
        }
        known.next = next;
        known.seen = known.seen.max(next);
        self.clear(instance);
        for &(tier, hashes) in snapshot {
            self.store(instance, tier, hashes);
        }
        self.count_again(instance);
        match self.missing(instance) {
            None => Applied::Done,
            Some(expected) => Applied::Gap { expected },
        }
    }

    /// The number of the first missing change of `instance`, which counts as holding nothing until it
    /// arrives.
    pub fn missing(&self, instance: InstanceId) -> Option<u64> {
        let known = self.instances.get(&instance)?;
        (known.next < known.seen).then_some(known.next)
    }

    /// Finds the holders of leading blocks of `chain` without a gap. Costs O(1) per block, and O(1) per
    /// holder where the holders of adjacent blocks differ.
    pub fn lookup(&self, chain: &[BlockHash], answer: &mut Prefixes) {
        let Prefixes { found, alive } = answer;
        found.clear();
        alive.clear();
        // `first` is the set of the first block, until another one comes: most of its members end there
        let (mut first, mut set, mut blocks) = (EMPTY, EMPTY, 0);
        self.blocks.walk(chain, |next, count| {
            if set == EMPTY {
                first = next;
            } else if next != set && first != EMPTY {
                self.first_holders(first, self.sets.members(next), blocks, found, alive);
                first = EMPTY;
            } else if next != set {
                intersect(alive, self.sets.members(next), found, blocks);
            }
            set = next;
            blocks += count;
            first != EMPTY || !alive.is_empty()
        });
        if first != EMPTY {
            self.first_holders(first, &[], blocks, found, alive);
        }
        alive.iter().for_each(|alive| alive.count(found, blocks));
    }

    /// Everything that `instance` holds, tier by tier, in order. Scans all blocks, so it is for checks.
    pub fn held_by(&self, instance: InstanceId) -> Vec<(Tier, BlockHash)> {
        let mut held = Vec::new();
        let Some(&Known { holder, .. }) = self.instances.get(&instance) else { return held };
        self.blocks.each(|hash, set| {
            let member = self.sets.members(set).iter().find(|member| member.holder() == holder);
            let tiers = Tier::ALL.into_iter().filter(|&tier| member.is_some_and(|member| member.is_in(tier)));
            held.extend(tiers.map(|tier| (tier, hash)));
        });
        held.sort_unstable();
        held
    }

    /// Number of distinct blocks, including those of cleared instances that are not removed yet.
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Removes everything that cleared instances left, at once.
    pub fn sweep(&mut self) {
        while !self.sweep.now.is_empty() {
            self.sweep_some();
        }
    }

    fn known(&mut self, instance: InstanceId) -> &mut Known {
        if !self.instances.contains_key(&instance) {
            let holder = self.new_holder(Holder::Counts(instance));
            self.instances.insert(instance, Known { holder, next: 0, seen: 0 });
        }
        self.instances.get_mut(&instance).expect("it was there or was inserted")
    }

    fn new_holder(&mut self, holder: Holder) -> u32 {
        if let Some(number) = self.holders_free.pop() {
            self.holders[number as usize] = holder;
            return number;
        }
        assert!(self.holders.len() < Member::HOLDERS_MAX, "half a billion instances at most");
        self.holders.push(holder);
        to_u32(self.holders.len()) - 1
    }

    fn retire(&mut self, holder: u32) {
        self.holders[holder as usize] = Holder::Gone;
        let sweep = &mut self.sweep;
        if sweep.now.is_empty() { sweep.now.push(holder) } else { sweep.later.push(holder) }
    }

    fn count_again(&mut self, instance: InstanceId) {
        if self.missing(instance).is_none() {
            let holder = self.known(instance).holder;
            self.holders[holder as usize] = Holder::Counts(instance);
        }
    }

    fn edit(&mut self, hashes: &[BlockHash], edit: Edit) {
        self.sets.start_edit();
        let removes = matches!(edit, Edit::Remove(..));
        self.blocks.update(hashes, removes, |set| self.sets.move_block(set, edit));
    }

    /// Removes cleared instances from the blocks of one piece, if there are any.
    fn sweep_some(&mut self) {
        if self.sweep.now.is_empty() {
            return;
        }
        if self.sweep.piece < self.blocks.pieces() {
            let holders = &self.holders;
            let gone = |holder: u32| holders[holder as usize] == Holder::Gone;
            let sets = &mut self.sets;
            sets.start_edit();
            self.blocks.update_piece(self.sweep.piece, |set| sets.move_block(set, Edit::Purge(&gone)));
            self.sweep.piece += 1;
        } else {
            self.sweep.piece = 0;
            self.holders_free.append(&mut self.sweep.now);
            std::mem::swap(&mut self.sweep.now, &mut self.sweep.later);
        }
    }

    /// The holders of the first `blocks` blocks, whose set is `first`. Holders that are among `next` stay
    /// alive.
    fn first_holders(
        &self,
        first: u32,
        next: &[Member],
        blocks: u32,
        found: &mut Vec<Prefix>,
        alive: &mut Vec<Alive>,
    ) {
        let members = self.sets.members(first);
        found.reserve(members.len());
        for member in members {
            if let Holder::Counts(instance) = self.holders[member.holder() as usize] {
                let fastest = member.fastest();
                // in one piece: reading a value as a whole after writing it in parts stalls
                let blocks = [0, 1, 2].map(|tier| if tier == fastest { blocks } else { 0 });
                found.push(Prefix { instance, blocks });
            }
        }
        let mut rest = members;
        for &same in next {
            rest = from_holder(rest, same.holder());
            let Some(member) = rest.first() else { return };
            let Holder::Counts(instance) = self.holders[same.holder() as usize] else { continue };
            if member.holder() == same.holder() {
                // if all members count, the member and result sets have the same layout
                let at = members.len() - rest.len();
                let is_it = |prefix: &Prefix| prefix.instance == instance;
                let place =
                    if found.get(at).is_some_and(is_it) { Some(at) } else { found.iter().position(is_it) };
                alive.extend(place.map(|place| Alive { member: same, place: to_u32(place), since: blocks }));
            }
        }
    }
}

/// Keeps those in `alive` that are among `members`, with their tiers there, after `blocks` blocks. Both are
/// ordered by holder.
fn intersect(alive: &mut Vec<Alive>, mut members: &[Member], found: &mut [Prefix], blocks: u32) {
    alive.retain_mut(|alive| {
        let holder = alive.member.holder();
        members = from_holder(members, holder);
        match members.split_first() {
            Some((&same, rest)) if same.holder() == holder => {
                if same.fastest() != alive.member.fastest() {
                    alive.count(found, blocks);
                    alive.since = blocks;
                }
                alive.member = same;
                members = rest;
                true
            }
            _ => {
                alive.count(found, blocks);
                false
            }
        }
    });
}

/// The `members` from `holder` on: usually the first; far away if few are searched among many, so the steps
/// double.
fn from_holder(members: &[Member], holder: u32) -> &[Member] {
    let mut step = 1;
    if members.first().is_none_or(|first| first.holder() >= holder) {
        return members;
    }
    while step < members.len() && members[step].holder() < holder {
        step *= 2;
    }
    let near = &members[..members.len().min(step + 1)];
    &members[near.partition_point(|other| other.holder() < holder)..]
}

#[cfg(test)]
mod tests;

//! Sets of holders, each stored once: blocks that were stored together have the same holders.

use super::table::{Table, spread};
use super::{BlockHash, Tier};
use mixfleet_hal::cast::{to_u8, to_u32};

/// Number of edits of sets that are memoised while a change is applied.
const EDITED: usize = 64;

/// The set without members, which has no block count.
pub(super) const EMPTY: u32 = 0;

/// A holder (by number) and its tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Member(u32);

impl Member {
    /// Upper limit of holders' numbers.
    pub(super) const HOLDERS_MAX: usize = 1 << 29;

    fn new(holder: u32, tiers: u32) -> Self {
        Member(holder << 3 | tiers)
    }
    pub(super) fn holder(self) -> u32 {
        self.0 >> 3
    }
    fn tiers(self) -> u32 {
        self.0 & 7
    }
    pub(super) fn is_in(self, tier: Tier) -> bool {
        self.tiers() & tier.bit() != 0
    }
    /// The index of the fastest tier in which it holds a copy.
    pub(super) fn fastest(self) -> usize {
        self.tiers().trailing_zeros() as usize
    }
}

/// The members of a set. Up to five need no heap memory; the enum has 24 bytes either way.
#[derive(Clone, Debug)]
enum Members {
    Few { len: u8, members: [Member; 5] },
    Many(Box<[Member]>),
}

#[derive(Clone, Debug)]
struct Set {
    /// Number of blocks with this set. A free entry has none, and refers to the next free one by its only
    /// member.
    blocks: u32,
    members: Members,
}

/// A change of a set.
#[derive(Clone, Copy)]
pub(super) enum Edit<'a> {
    /// The holder also holds the block in this tier.
    Add(u32, Tier),
    /// The holder no longer holds the block in this tier.
    Remove(u32, Tier),
    /// The holders (by number) that satisfy this are removed.
    Purge(&'a dyn Fn(u32) -> bool),
}

/// All sets that some block has.
#[derive(Clone)]
pub(super) struct Sets {
    sets: Vec<Set>,
    free: u32,
    /// Sets by the hash of their members.
    known: Table,
    /// (set, set after the edit) at an index derived from the set's number, since adjacent blocks of a chain
    /// mostly change alike. A pair is valid as long as the latter set has blocks.
    edited: [(u32, u32); EDITED],
    scratch: Vec<Member>,
}

impl Default for Sets {
    fn default() -> Self {
        let empty = Set { blocks: 0, members: Members::new(&[]) };
        Sets {
            sets: vec![empty],
            free: EMPTY,
            known: Table::new(0),
            edited: [(EMPTY, EMPTY); EDITED],
            scratch: Vec::new(),
        }
    }
}

impl Members {
    fn new(from: &[Member]) -> Self {
        let mut members = [Member::default(); 5];
        match members.get_mut(..from.len()) {
            Some(few) => {
                few.copy_from_slice(from);
                Members::Few { len: to_u8(from.len()), members }
            }
            None => Members::Many(from.into()),
        }
    }

    fn as_slice(&self) -> &[Member] {
        match self {
            Members::Few { len, members } => &members[..usize::from(*len)],
            Members::Many(members) => members,
        }
    }
}

impl Edit<'_> {
    fn apply(self, members: &mut Vec<Member>) {
        match self {
            Edit::Add(holder, tier) => match members.binary_search_by_key(&holder, |m| m.holder()) {
                Ok(at) => members[at].0 |= tier.bit(),
                Err(at) => members.insert(at, Member::new(holder, tier.bit())),
            },
            Edit::Remove(holder, tier) => {
                if let Ok(at) = members.binary_search_by_key(&holder, |m| m.holder()) {
                    members[at].0 &= !tier.bit();
                    if members[at].tiers() == 0 {
                        members.remove(at);
                    }
                }
            }
            Edit::Purge(gone) => members.retain(|member| !gone(member.holder())),
        }
    }
}

impl Sets {
    /// The members in the order of their numbers.
    pub(super) fn members(&self, set: u32) -> &[Member] {
        self.sets[set as usize].members.as_slice()
    }

    /// Must be called before the first block of another edit.
    pub(super) fn start_edit(&mut self) {
        self.edited.fill((EMPTY, EMPTY));
    }

    /// Moves a block from `set` to the result of `edit` on it.
    pub(super) fn move_block(&mut self, set: u32, edit: Edit) -> u32 {
        let at = set as usize % EDITED;
        let (before, mut after) = self.edited[at];
        if before != set || self.sets[after as usize].blocks == 0 {
            let mut members = std::mem::take(&mut self.scratch);
            members.clear();
            members.extend_from_slice(self.members(set));
            edit.apply(&mut members);
            after = if members == self.members(set) { set } else { self.find_or_create(&members) };
            self.scratch = members;
            self.edited[at] = (set, after);
        }
        if after != set {
            if after != EMPTY {
                self.sets[after as usize].blocks += 1;
            }
            self.give_up(set);
        }
        after
    }

    /// Number of sets that some block has.
    #[cfg(test)]
    pub(super) fn live(&self) -> usize {
        self.sets.iter().filter(|set| set.blocks > 0).count()
    }

    /// Number of entries for sets, in use or free.
    #[cfg(test)]
    pub(super) fn places(&self) -> usize {
        self.sets.len()
    }

    fn find_or_create(&mut self, members: &[Member]) -> u32 {
        if members.is_empty() {
            return EMPTY;
        }
        let hash = hash(members);
        if let Some(set) = self.known.get(hash, |set| self.members(set) == members) {
            return set;
        }
        let new = Set { blocks: 0, members: Members::new(members) };
        let set = if self.free == EMPTY {
            if self.sets.len() == self.sets.capacity() {
                self.sets.reserve_exact(8 + self.sets.len() / 8);
            }
            self.sets.push(new);
            to_u32(self.sets.len()) - 1
        } else {
            let set = self.free;
            self.free = self.members(set)[0].0;
            self.sets[set as usize] = new;
            // The number refers to another set now.
            self.start_edit();
            set
        };
        self.known.insert(hash, set);
        set
    }

    /// Removes one block from `set`.
    fn give_up(&mut self, set: u32) {
        if set == EMPTY {
            return;
        }
        self.sets[set as usize].blocks -= 1;
        if self.sets[set as usize].blocks == 0 {
            self.known.remove(hash(self.members(set)), set);
            self.sets[set as usize].members = Members::new(&[Member(self.free)]);
            self.free = set;
        }
    }
}

fn hash(members: &[Member]) -> u64 {
    members.iter().fold(0, |hash, member| spread(BlockHash(hash ^ u64::from(member.0))))
}

//! Sets of holders, each stored once: blocks that were stored together are held by the same instances.

use super::table::{Table, spread};
use super::{BlockHash, Tier};

/// Edits of sets that are remembered while a change is carried out.
const EDITED: usize = 64;

/// The set without members. It is never counted.
pub(super) const EMPTY: u32 = 0;

/// A holder (by number) and its tiers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Member(u32);

impl Member {
    /// Holders have smaller numbers than this.
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
    /// The fastest tier in which it holds a copy, as an index.
    pub(super) fn fastest(self) -> usize {
        self.tiers().trailing_zeros() as usize
    }
}

/// Up to five members need no memory of their own; the enum has 24 bytes either way.
#[derive(Clone, Debug)]
enum Members {
    Few { len: u8, members: [Member; 5] },
    Many(Box<[Member]>),
}

#[derive(Clone, Debug)]
struct Set {
    /// Blocks that have it. A free place has none, and names the next free one as its only member.
    blocks: u32,
    members: Members,
}

/// How a set is changed.
#[derive(Clone, Copy)]
pub(super) enum Edit<'a> {
    /// This holder has it in this tier too.
    Add(u32, Tier),
    /// This holder has it no longer in this tier.
    Remove(u32, Tier),
    /// These holders (by number) are gone.
    Purge(&'a dyn Fn(u32) -> bool),
}

/// All sets that some block has.
#[derive(Clone)]
pub(super) struct Sets {
    sets: Vec<Set>,
    free: u32,
    /// Sets by the hash of their members.
    known: Table,
    /// (set, set after the edit) at the set's number: neighbours in a chain mostly change alike. A pair holds until
    /// the latter has no blocks any more.
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
                Members::Few { len: from.len() as u8, members }
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
    /// Members in the order of their numbers.
    pub(super) fn members(&self, set: u32) -> &[Member] {
        self.sets[set as usize].members.as_slice()
    }

    /// To be called before the first block of another edit.
    pub(super) fn start_edit(&mut self) {
        self.edited.fill((EMPTY, EMPTY));
    }

    /// Takes a block from `set` to what `edit` makes of it.
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

    /// Sets that some block has.
    #[cfg(test)]
    pub(super) fn live(&self) -> usize {
        self.sets.iter().filter(|set| set.blocks > 0).count()
    }

    /// Places for sets, in use or free.
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
            self.sets.len() as u32 - 1
        } else {
            let set = self.free;
            self.free = self.members(set)[0].0;
            self.sets[set as usize] = new;
            // The number has another meaning now.
            self.start_edit();
            set
        };
        self.known.insert(hash, set);
        set
    }

    /// One block less has `set`.
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

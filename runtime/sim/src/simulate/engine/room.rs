//! Blocks for those who decode, and who gives way when there are too few.

use super::Engine;
use super::sequence::Sequence;
use mixfleet_hal::random::bits;
use mixfleet_scheduler::batch::Place;
use mixfleet_scheduler::kv::BlockHash;

/// Keeps the keys of a sequence's own blocks apart from a trace's.
const OWN: u64 = 0x5EED_0F0E_17B1_0C45;

impl Engine {
    /// Those that give way to `place`. Someone who reads along would see his answer stand still: he keeps what he has.
    fn later(&self, place: Place) -> impl Iterator<Item = &Sequence> {
        self.preemptable().filter(move |s| s.job.gives_way && s.place() > place)
    }

    /// What goes elsewhere is being read, or soon will be.
    fn preemptable(&self) -> impl Iterator<Item = &Sequence> {
        self.prefilling.iter().filter(|s| s.job.stays).chain(&self.decoding)
    }

    /// Beside others, or instead of one. Looked at before prefixes are.
    pub(super) fn has_place_for(&self, place: Place) -> bool {
        self.holding() < self.sequences_max || self.later(place).next().is_some()
    }

    /// The fewest of those that can give way, the last first, who leave a place and `wanted` blocks. None if all of them do not.
    pub(super) fn who_gives_way(&self, place: Place, wanted: u64) -> Option<Vec<Place>> {
        let (mut holding, mut available) = (self.holding(), self.available());
        let fits = |holding, available| holding < self.sequences_max && wanted <= available;
        let mut losers = Vec::new();
        if fits(holding, available) {
            return Some(losers);
        }
        let mut later: Vec<&Sequence> = self.later(place).collect();
        later.sort_unstable_by_key(|s| s.place());
        while let Some(last) = later.pop() {
            losers.push(last.place());
            holding -= 1;
            available += last.private + self.cache.pinned_once(&last.job.chain[..last.pinned]) as u64;
            if fits(holding, available) {
                return Some(losers);
            }
        }
        None
    }

    /// Takes the blocks of who has this place.
    pub(super) fn give_way(&mut self, place: Place) {
        if let Some(at) = self.prefilling.iter().position(|s| s.place() == place) {
            // what of it is computed is in the cache already
            let mut sequence = self.prefilling.remove(at);
            self.give_back(&mut sequence);
            self.waits_again(sequence);
        } else if let Some(at) = self.decoding.iter().position(|s| s.place() == place) {
            let sequence = self.decoding.remove(at);
            self.kv_tokens -= u64::from(sequence.context);
            self.preempt(sequence);
        }
    }

    /// Blocks for `steps` more tokens of everyone who decodes; who is due last gives way. False if nobody is left.
    pub(super) fn make_room(&mut self, steps: u32) -> bool {
        loop {
            let needs = |s: &Sequence| {
                let blocks = u64::from((s.context + steps).div_ceil(self.block_tokens));
                blocks.saturating_sub(s.pinned as u64 + s.private)
            };
            let needed: u64 = self.decoding.iter().map(needs).sum();
            if self.decoding.is_empty() {
                return false;
            }
            if needed <= self.available() {
                break;
            }
            let Some(last) = self.preemptable().map(Sequence::place).max() else { return false };
            self.give_way(last);
        }
        for sequence in &mut self.decoding {
            let blocks = u64::from((sequence.context + steps).div_ceil(self.block_tokens));
            let more = blocks.saturating_sub(sequence.pinned as u64 + sequence.private);
            sequence.private += more;
            self.private += more;
        }
        true
    }

    /// A run that was cut short has blocks for steps that it did not get to.
    pub(super) fn give_back_unused(&mut self) {
        for sequence in &mut self.decoding {
            let used = u64::from(sequence.context.div_ceil(self.block_tokens));
            let own = sequence.private.min(used.saturating_sub(sequence.pinned as u64));
            self.private -= sequence.private - own;
            sequence.private = own;
        }
    }

    /// Takes a sequence's blocks. What they hold stays until somebody needs them: when it comes back it finds what is left.
    fn preempt(&mut self, mut sequence: Sequence) {
        self.give_back(&mut sequence);
        let full = (sequence.context / self.block_tokens) as usize;
        sequence.job.chain.truncate(full);
        for at in sequence.job.chain.len()..full {
            sequence.job.chain.push(BlockHash(bits(sequence.job.request ^ OWN, at as u64)));
        }
        self.fit();
        self.cache.insert(&sequence.job.chain, &mut self.evicted);
        sequence.wanted = sequence.job.prompt_tokens + sequence.generated;
        self.waits_again(sequence);
    }

    fn waits_again(&mut self, mut sequence: Sequence) {
        (sequence.context, sequence.staged) = (0, 0..0);
        self.wait(sequence);
    }

    pub(super) fn give_back(&mut self, sequence: &mut Sequence) {
        self.private -= sequence.private;
        self.cache.unpin(&sequence.job.chain[..sequence.pinned]);
        (sequence.private, sequence.pinned) = (0, 0);
    }

    pub(super) fn release(&mut self, mut sequence: Sequence) {
        self.give_back(&mut sequence);
    }
}

//! Blocks for those who decode, and who gives way when there are too few.

use super::Engine;
use super::sequence::Sequence;
use mixfleet_hal::random::bits;
use mixfleet_scheduler::kv::BlockHash;

/// Keeps the keys of a sequence's own blocks apart from a trace's.
const OWN: u64 = 0x5EED_0F0E_17B1_0C45;

impl Engine {
    /// Blocks for `steps` more tokens of everyone who decodes; who came last gives way. False if nobody is left.
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
            let Some(last) = self.decoding.pop() else { return false };
            self.kv_tokens -= u64::from(last.context);
            self.preempt(last);
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
        (sequence.context, sequence.staged) = (0, 0..0);
        self.queue.push_front(sequence);
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

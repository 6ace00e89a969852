//! Several rows of a sequence in a step: those whose tokens are known before they count as drawn.

use super::{After, BatchLimits, Evicted, Instance, Phase, StepSequence, Text};
use mixfleet_hal::cast::to_u32;

impl<T: Text> Instance<T> {
    /// Adds rows of decoding sequences of the step, as far as their tokens are known and as there are blocks
    /// without preempting others. Each row is a part of its own, behind the others, and is drawn from: with
    /// those of other sequences there are at most [`BatchLimits::sequences_max`], for whose logits there is
    /// memory.
    pub(super) fn run_ahead(&mut self, parts: &mut Vec<StepSequence>, evicted: &mut Vec<Evicted<T::Block>>) {
        let BatchLimits { block_tokens, step_tokens_max, sequences_max, spare_blocks, .. } = self.limits;
        let count = self.limits.page_parts.count();
        let rows_max = sequences_max.min(step_tokens_max as usize);
        let mut left = to_u32(rows_max.saturating_sub(self.places.of(Phase::Running).len()));
        for at in 0..parts.len() {
            let first = parts[at];
            let sequence = self.sequences.get_mut(first.request).expect("a running request is known");
            let wanted = match sequence.after {
                Some(After::Decode) => sequence.text.known_ahead().min(left),
                _ => 0,
            };
            let covered = |pages: usize| to_u32(pages) / count * block_tokens;
            while covered(sequence.pages.len()) < sequence.length + wanted
                && self.blocks.available() > spare_blocks * count as usize
                && self.blocks.extend(&mut sequence.pages, evicted)
            {}
            let rows = wanted.min(covered(sequence.pages.len()) - sequence.length);
            parts.extend((1..=rows).map(|row| StepSequence { start: first.start + row, ..first }));
            left -= rows;
        }
    }
}

//! Skipping runs of equal steps, for a simulator that has a clock instead of a device.

use super::{Action, Instance, Phase, StepSequence, Text, publish};

impl<T: Text> Instance<T> {
    /// The number of steps, at most `most`, that would follow the running one with the same sequences, one
    /// token each, without events and while no sequence ends. Blocks may be allocated between them. Exact as
    /// long as no waiting request has a prefix that is only now being generated.
    pub fn steady_steps(&self, most: u32) -> u32 {
        let all_decode = self.in_step.iter().all(|part| part.sample && part.tokens == 1);
        if self.news || !all_decode || self.in_step.len() != self.places.of(Phase::Running).len() {
            return 0;
        }
        let sequences = || self.in_step.iter().map(|part| self.sequence(part.request));
        if sequences().any(|s| s.cancelled || !s.preemptable()) {
            return 0;
        }
        let available = self.blocks.available();
        // Each has blocks for the token of this step.
        if self.in_step.len() * self.blocks.blocks_for(most) <= available {
            return most;
        }
        let suffice = |steps: u32| {
            let wanted = |length: u32, pages: usize| self.blocks.blocks_for(length + steps) - pages;
            sequences().map(|s| wanted(s.length, s.pages.len())).sum::<usize>() <= available
        };
        if suffice(most) {
            return most;
        }
        let (mut enough, mut too_many) = (0, most);
        while enough + 1 < too_many {
            let middle = enough + (too_many - enough) / 2;
            if suffice(middle) { enough = middle } else { too_many = middle }
        }
        enough
    }

    /// Completes the running step and those that follow, up to the last of `steps` more, which then runs: the
    /// same as `Event::StepDone` and `Event::Idle`, `steps` times, if every sequence draws a token and none
    /// ends. `steps` is at most [`Instance::steady_steps`].
    pub fn advance(&mut self, steps: u32, actions: &mut Vec<Action<T::Block>>) {
        if steps == 0 {
            return;
        }
        let block_tokens = self.limits.block_tokens;
        let mut in_step = std::mem::take(&mut self.in_step);
        let mut evicted = Vec::new();
        let mut left = steps;
        while left > 0 {
            // This advances up to the next step in which a sequence fills a block.
            let to_edge = |part: &StepSequence| block_tokens - part.start % block_tokens;
            let now = in_step.iter().map(to_edge).min().unwrap_or(left).min(left);
            left -= now;
            let mut short = Vec::new();
            for part in &mut in_step {
                let sequence = self.sequences.get_mut(part.request).expect("what runs is known");
                sequence.computed += now;
                sequence.length += now;
                part.start += now;
                publish(&mut self.blocks, sequence, actions);
                if !sequence.has_blocks(block_tokens) {
                    short.push(part.request);
                }
            }
            for request in short {
                let grown = self.grow(request, &mut evicted, actions);
                assert!(grown, "more steps than there are blocks for");
            }
            if !evicted.is_empty() {
                actions.push(Action::Evicted(std::mem::take(&mut evicted)));
            }
        }
        self.in_step = in_step;
    }
}

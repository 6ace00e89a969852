//! Skipping runs of equal steps, for a simulator that has a clock instead of a device.

use super::give_back::let_go;
use super::{Action, Instance, Phase, StepSequence, Text, publish};

impl<T: Text> Instance<T> {
    /// The number of steps, at most `most`, that would follow the running one with the same sequences, one
    /// token each, without events and while no sequence ends. Blocks may be allocated between them. Exact as
    /// long as no waiting request has a prefix that is only now being generated.
    pub fn steady_steps(&self, most: u32) -> u32 {
        let all_decode = self.in_step.iter().all(|part| part.sample && part.tokens == 1);
        if self.news
            || self.parties.contend()
            || !all_decode
            || self.in_step.len() != self.places.of(Phase::Running).len()
        {
            return 0;
        }
        let sequences = || self.in_step.iter().map(|part| self.sequence(part.request));
        if sequences().any(|s| s.cancelled || !s.preemptable()) {
            return 0;
        }
        // waiting sequences may find room in the pages that layers with a window give back
        let waits = !self.places.of(Phase::Queued).is_empty() || !self.places.of(Phase::Asking).is_empty();
        let until_given = |part: &StepSequence| self.steps_until_given(part.start);
        let first = self.in_step.iter().filter_map(until_given).min().filter(|_| waits);
        let most = first.map_or(most, |first| most.min(first - 1));
        let parts = self.limits.page_parts.count() as usize;
        // pages that layers with a window give back during these steps are not counted on
        let available = self.blocks.available() / parts;
        // Each has blocks for the token of this step.
        if self.in_step.len() * self.blocks.blocks_for(most) <= available {
            return most;
        }
        let suffice = |steps: u32| {
            let wanted = |length: u32, pages: usize| self.blocks.blocks_for(length + steps) - pages;
            sequences().map(|s| wanted(s.length, s.pages.len() / parts)).sum::<usize>() <= available
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

    /// The number of steps of one token, from the first one at `start`, after which a block is given back;
    /// none if none ever is.
    fn steps_until_given(&self, start: u32) -> Option<u32> {
        let block_tokens = self.limits.block_tokens;
        let until = |&window: &u32| {
            let first = block_tokens + window - 1;
            match start.checked_sub(first) {
                None => first - start,
                Some(past) => block_tokens - past % block_tokens,
            }
        };
        self.limits.page_parts.windows().iter().flatten().map(until).min()
    }

    /// Completes the running step and those that follow, up to the last of `steps` more, which then runs. It
    /// is the same as `Event::StepDone` and `Event::Idle`, `steps` times, if every sequence draws a token and
    /// none ends. `steps` is at most [`Instance::steady_steps`].
    pub fn advance(&mut self, steps: u32, actions: &mut Vec<Action<T::Block>>) {
        if steps == 0 {
            return;
        }
        let block_tokens = self.limits.block_tokens;
        let mut in_step = std::mem::take(&mut self.in_step);
        let mut evicted = Vec::new();
        let mut left = steps;
        while left > 0 {
            // This advances up to the next step in which a sequence fills a block or gives one back.
            let to_edge = |part: &StepSequence| {
                let filled = block_tokens - part.start % block_tokens;
                self.steps_until_given(part.start).map_or(filled, |given| given.min(filled))
            };
            let now = in_step.iter().map(to_edge).min().unwrap_or(left).min(left);
            left -= now;
            let mut short = Vec::new();
            for part in &mut in_step {
                let sequence = self.sequences.get_mut(part.request).expect("a running request is known");
                sequence.computed += now;
                sequence.length += now;
                part.start += now;
                publish(&mut self.blocks, sequence, actions);
                let_go(&mut self.blocks, sequence);
                if !sequence.has_blocks(&self.limits) {
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

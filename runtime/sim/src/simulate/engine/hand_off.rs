//! Requests whose prompts other instances compute.

use super::{Engine, Job, Outcome, Sequence};

impl Engine {
    /// A prompt shall be computed elsewhere as soon as there is room for its KV here.
    pub(in crate::simulate) fn reserve(&mut self, job: Job) {
        self.reserving.push_back(Sequence::new(job));
    }

    /// A request whose prompt was computed elsewhere, and whose first token is out since `since_s`.
    pub(in crate::simulate) fn join(
        &mut self,
        request: u64,
        prompt_tokens: u32,
        output_tokens: u32,
        since_s: f64,
    ) {
        let reserved = self.receiving.iter().position(|s| s.job.request == request);
        let mut sequence = match reserved {
            Some(at) => self.receiving.remove(at),
            None => Sequence::new(Job {
                request,
                prompt_tokens,
                output_tokens,
                chain: Vec::new(),
                pulled_tokens: 0,
                ready_at_s: 0.0,
                stays: true,
                due_s: 0.0,
            }),
        };
        (sequence.context, sequence.wanted) = (prompt_tokens, prompt_tokens + 1);
        (sequence.generated, sequence.last_token_s, sequence.started) = (1, since_s, true);
        self.landed.push_back(sequence);
    }

    /// Gives room to those who wait for it, first come, first served.
    pub(super) fn take_reservations(&mut self, outcomes: &mut Vec<Outcome>) {
        while self.holding() < self.sequences_max
            && let Some(mut next) = self.reserving.pop_front()
        {
            let Some(hits) = self.claim(&mut next) else {
                self.reserving.push_front(next);
                return;
            };
            self.tell_evicted(outcomes);
            let held_tokens = hits as u32 * self.block_tokens;
            outcomes.push(Outcome::Reserved { request: next.job.request, held_tokens });
            self.receiving.push(next);
        }
    }

    /// Those whose KV has come decode from now on, as far as there is room.
    pub(super) fn take_landed(&mut self, outcomes: &mut Vec<Outcome>) {
        while let Some(mut next) = self.landed.pop_front() {
            let reserved = next.private + next.pinned as u64 > 0;
            let blocks = self.blocks_for(next.wanted);
            if !reserved && (self.holding() >= self.sequences_max || blocks > self.available()) {
                self.landed.push_front(next);
                return;
            }
            if reserved {
                let full = (next.context / self.block_tokens) as usize;
                self.publish(&mut next, full, outcomes);
                outcomes.push(Outcome::Joined { request: next.job.request });
            } else {
                next.private = blocks;
                self.private += blocks;
            }
            self.kv_tokens += u64::from(next.context);
            self.decoding.push(next);
        }
    }
}

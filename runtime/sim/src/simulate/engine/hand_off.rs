//! Requests whose prompts other instances compute.

use super::{Engine, Job, Outcome, Sequence};
use mixfleet_scheduler::batch::Place;

impl Engine {
    /// A prompt shall be computed elsewhere as soon as there is room for its KV here.
    pub(in crate::simulate) fn reserve(&mut self, job: Job) {
        let sequence = Sequence::new(job);
        let at = self.reserving.partition_point(|s| s.place() < sequence.place());
        self.reserving.insert(at, sequence);
    }

    /// A request whose prompt was computed elsewhere, and whose first token is out since `since_s`.
    pub(in crate::simulate) fn join(&mut self, job: Job, since_s: f64) {
        let reserved = self.receiving.iter().position(|s| s.job.request == job.request);
        let mut sequence = match reserved {
            Some(at) => self.receiving.remove(at),
            None => Sequence::new(job),
        };
        let tokens = sequence.job.prompt_tokens;
        (sequence.context, sequence.wanted) = (tokens, tokens + 1);
        (sequence.generated, sequence.last_token_s, sequence.started) = (1, since_s, true);
        let behind = |s: &&Sequence| s.job.gives_way && s.place() > sequence.place();
        let at = self.landed.len() - self.landed.iter().rev().take_while(behind).count();
        self.landed.insert(at, sequence);
    }

    /// It can take in what comes: no step runs.
    pub(in crate::simulate) fn is_idle(&self) -> bool {
        self.at.is_none()
    }

    /// A request's KV is taken in elsewhere.
    pub(in crate::simulate) fn let_go(&mut self, request: u64) {
        if let Some(at) = self.sending.iter().position(|s| s.job.request == request) {
            let sequence = self.sending.remove(at);
            self.release(sequence);
        }
    }

    /// The first prompt in the queue has all that it needs from elsewhere.
    pub(super) fn next_is_ready(&self, now_s: f64) -> bool {
        self.queue.front().is_some_and(|next| next.job.ready_at_s <= now_s)
    }

    /// Tokens of the next step beside those that decode.
    pub(super) fn step_tokens(&self) -> u32 {
        self.step_tokens_max.saturating_sub(self.decoding.len() as u32)
    }

    /// Whether prompts that come before `place` leave something of the next step; each one's single last token goes before all.
    fn has_step_for(&self, place: Place) -> bool {
        let before = self.prefilling.iter().filter(|s| s.pending() == 1 || s.place() < place);
        before.map(|s| u64::from(s.pending())).sum::<u64>() < u64::from(self.step_tokens())
    }

    /// Gives room to those who wait for it in the order in which they are due, until one finds none; prompts only while those
    /// before them leave something of the next step.
    pub(super) fn let_in(&mut self, now_s: f64, outcomes: &mut Vec<Outcome>) {
        loop {
            let ready = self.queue.front().filter(|_| self.next_is_ready(now_s)).map(Sequence::place);
            let prompt = ready.filter(|&place| self.has_step_for(place));
            let reserves = match (self.reserving.front().map(Sequence::place), prompt) {
                (Some(elsewhere), Some(here)) => elsewhere < here,
                (elsewhere, _) => elsewhere.is_some(),
            };
            let found = if reserves {
                self.take_reservation(outcomes)
            } else {
                prompt.is_some() && self.admit(now_s, outcomes)
            };
            if !found {
                return;
            }
        }
    }

    /// Gives room to the first who wants some for KV from elsewhere. False if there is none.
    fn take_reservation(&mut self, outcomes: &mut Vec<Outcome>) -> bool {
        let Some(mut next) = self.reserving.pop_front() else { return false };
        let Some(hits) = self.claim(&mut next) else {
            self.reserving.push_front(next);
            return false;
        };
        self.tell_evicted(outcomes);
        let held_tokens = hits as u32 * self.block_tokens;
        outcomes.push(Outcome::Reserved { request: next.job.request, held_tokens });
        self.receiving.push(next);
        true
    }

    /// Those whose KV has come decode from now on, as far as there is room.
    pub(super) fn take_landed(&mut self, outcomes: &mut Vec<Outcome>) {
        while let Some(mut next) = self.landed.pop_front() {
            let reserved = next.private + next.pinned as u64 > 0;
            let blocks = self.blocks_for(next.wanted);
            if !reserved {
                let Some(losers) = self.who_gives_way(next.place(), blocks) else {
                    self.landed.push_front(next);
                    return;
                };
                losers.into_iter().for_each(|place| self.give_way(place));
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

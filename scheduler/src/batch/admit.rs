//! Assigning blocks to waiting sequences, and preempting flex requests for them.

use super::rows::{Decodes, StepRoom};
use super::{Action, After, Evicted, Instance, Phase, Place, RequestId, Sequence, Text, order};
use mixfleet_hal::cast::to_u32;

/// The blocks that a waiting sequence needs.
pub(super) struct Need {
    /// Cached pages of its prefix.
    pub(super) hits: Vec<u32>,
    /// Number of other blocks.
    pub(super) fresh: usize,
    /// Number of leading blocks that could be cached: at least one token is computed, to draw the next one.
    reusable: u32,
}

impl<T: Text> Instance<T> {
    /// The rows of the next step left for prompts, after the decodes.
    fn room(&self) -> StepRoom {
        let (mut decodes, mut prompts) = (Decodes::default(), Vec::new());
        for &place in self.places.of(Phase::Running).iter().rev() {
            let sequence = self.sequence(place.request);
            match sequence.pending() {
                1 => decodes.add(sequence),
                pending => prompts.push((place, (sequence.computed, pending))),
            }
        }
        StepRoom::new(self.prompt_rows(decodes, None), prompts)
    }

    /// Gives blocks to waiting sequences, in their order, until one does not fit even if later flex requests
    /// are preempted. A prompt without room in the next step keeps waiting: at its turn it can reuse prefixes
    /// computed in the meantime. A sequence whose next block is already being loaded waits for that load, and
    /// later ones are admitted first. Returns true if a load began, after which more may be admitted.
    pub(super) fn admit(
        &mut self,
        evicted: &mut Vec<Evicted<T::Block>>,
        actions: &mut Vec<Action<T::Block>>,
    ) -> bool {
        if self.places.of(Phase::Queued).is_empty() && self.places.of(Phase::Asking).is_empty() {
            return false;
        }
        if self.parties.contend() {
            return self.admit_in_turn(evicted, actions);
        }
        let mut room = self.room();
        let mut seen = None;
        loop {
            let next_of = |phase| order::next(self.places.of(phase), seen);
            // If one prompt finds no room, no later one does.
            let prompt = next_of(Phase::Queued).filter(|&place| room.is_left_for(place));
            let next = [prompt, next_of(Phase::Asking)].into_iter().flatten().min();
            let Some(place) = next.filter(|&place| self.has_place_for(place)) else { return false };
            seen = Some(place);
            let need = self.need(place.request);
            if self.is_being_loaded(place.request, &need) {
                continue;
            }
            let sequence = self.sequence(place.request);
            let cached = to_u32(need.hits.len()) / self.limits.page_parts.count() * self.limits.block_tokens;
            if sequence.phase == Phase::Queued && !room.admits(cached, sequence.length - cached) {
                continue;
            }
            let Some(losers) = self.who_gives_way(place, &need) else { return false };
            for &loser in &losers {
                self.preempt(loser, actions);
            }
            if self.take_blocks(place, need, evicted, actions) {
                return true;
            }
            if !losers.is_empty() {
                room = self.room();
            } else if self.sequence(place.request).phase == Phase::Running {
                let sequence = self.sequence(place.request);
                room.take(sequence.computed, sequence.pending());
            }
        }
    }

    pub(super) fn holding(&self) -> usize {
        let waiting = self.places.of(Phase::Queued).len() + self.places.of(Phase::Asking).len();
        self.sequences.len() - waiting
    }

    /// Requests that `place` may preempt, the last first. Only flex requests are preempted, since other
    /// answers are streamed to a reader.
    fn later(&self, place: Place) -> impl Iterator<Item = &Sequence<T>> {
        let later = self.places.of(Phase::Running).iter().rev().take_while(move |&&other| other > place);
        later.map(|other| self.sequence(other.request)).filter(|s| s.urgency.gives_way && s.preemptable())
    }

    /// Whether it can join the others or replace one; checked before prefixes are.
    fn has_place_for(&self, place: Place) -> bool {
        self.holding() < self.limits.sequences_max || self.later(place).next().is_some()
    }

    pub(super) fn need(&mut self, request: RequestId) -> Need {
        let sequence = self.sequences.get_mut(request).expect("a waiting sequence is known");
        let reusable = (sequence.length - 1) / self.limits.block_tokens;
        let hits = match sequence.after {
            // all layers' KV is sent
            Some(After::HandOff) => self.blocks.whole_prefix(&mut sequence.text, reusable),
            _ => self.blocks.longest_prefix(&mut sequence.text, reusable),
        };
        let parts = self.limits.page_parts.count() as usize;
        let fresh = self.blocks.blocks_for(sequence.length) - hits.len() / parts;
        Need { hits, fresh, reusable }
    }

    /// The fewest requests to preempt, the last first, so that a waiting sequence fits. None if it would not
    /// fit even then.
    fn who_gives_way(&self, place: Place, need: &Need) -> Option<Vec<RequestId>> {
        let mut holding = self.holding();
        let mut available = self.blocks.available();
        let parts = self.limits.page_parts.count() as usize;
        let wanted = need.fresh * parts + self.blocks.idle_among(&need.hits);
        let fits = |holding: usize, available: usize| {
            let spare = if holding == 0 { 0 } else { self.limits.spare_blocks * parts };
            holding < self.limits.sequences_max && wanted + spare <= available
        };
        let mut losers = Vec::new();
        if fits(holding, available) {
            return Some(losers);
        }
        for last in self.later(place) {
            losers.push(last.place.request);
            holding -= 1;
            let own = |page: &&u32| self.blocks.has_one_user(**page) && !need.hits.contains(page);
            available += last.pages.iter().filter(own).count();
            if fits(holding, available) {
                return Some(losers);
            }
        }
        None
    }

    /// Whether another sequence loads the block that this one would load first.
    fn is_being_loaded(&mut self, request: RequestId, need: &Need) -> bool {
        let loading: Vec<RequestId> =
            self.places.of(Phase::Loading).iter().map(|place| place.request).collect();
        let block = to_u32(need.hits.len()) / self.limits.page_parts.count();
        if loading.is_empty() || block >= need.reusable {
            return false;
        }
        let wanted = self.sequence_mut(request).text.hash(block);
        loading.into_iter().any(|other| {
            let sequence = self.sequence_mut(other);
            sequence.published == block && sequence.length / self.limits.block_tokens > block && {
                self.sequence_mut(other).text.hash(block) == wanted
            }
        })
    }

    /// Gives a sequence its blocks. True if some are to be loaded first.
    pub(super) fn take_blocks(
        &mut self,
        place: Place,
        need: Need,
        evicted: &mut Vec<Evicted<T::Block>>,
        actions: &mut Vec<Action<T::Block>>,
    ) -> bool {
        let request = place.request;
        let Need { hits: mut pages, fresh, reusable } = need;
        let cached = to_u32(pages.len()) / self.limits.page_parts.count();
        pages.iter().for_each(|&page| self.blocks.acquire(page));
        for _ in 0..fresh {
            assert!(self.blocks.extend(&mut pages, evicted), "counted before");
        }
        let sequence = self.sequences.get_mut(request).expect("a waiting sequence is known");
        sequence.computed = cached * self.limits.block_tokens;
        sequence.published = cached;
        sequence.pages = pages;
        if !self.limits.lower_tiers || cached == reusable {
            self.begin(request, actions);
            return false;
        }
        let chain = (cached..reusable).map(|block| sequence.text.hash(block)).collect();
        self.enter(request, Phase::Loading);
        actions.push(Action::Load { request, blocks: cached..reusable, chain });
        true
    }

    /// Starts a sequence that has its blocks, including its cached prefix.
    fn begin(&mut self, request: RequestId, actions: &mut Vec<Action<T::Block>>) {
        let sequence = self.sequence_mut(request);
        let tokens_cached = sequence.computed;
        if sequence.after.is_some() && sequence.pulls <= tokens_cached {
            sequence.pulls = 0;
            self.enter(request, Phase::Running);
            actions.push(Action::Admitted { request, tokens_cached });
        } else {
            self.enter(request, Phase::Receiving);
            actions.push(Action::Reserved { request, tokens_cached });
        }
    }

    pub(super) fn loaded(&mut self, request: RequestId, blocks: u32, actions: &mut Vec<Action<T::Block>>) {
        let Some(sequence) = self.sequences.get_mut(request) else { return };
        if sequence.phase != Phase::Loading {
            return;
        }
        sequence.computed += blocks * self.limits.block_tokens;
        assert!(sequence.computed < sequence.length, "more blocks came than were requested");
        self.begin(request, actions);
        self.publish(request, actions);
    }
}

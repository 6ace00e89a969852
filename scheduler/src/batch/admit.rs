//! Who gets blocks, and who gives way for it.

use super::{Action, Evicted, Instance, Phase, Place, RequestId, Sequence, order};

/// What the next step has left for prompts, as one goes through them in their order.
struct Room {
    tokens: u32,
    /// Prompts that run with what is left of them, not gone past yet, the last first.
    prompts: Vec<(Place, u32)>,
}

impl Room {
    /// Tokens that those before `place` leave. Places are asked for in their order.
    fn left_for(&mut self, place: Place) -> u32 {
        while let Some((_, pending)) = self.prompts.pop_if(|(earlier, _)| *earlier < place) {
            self.take(pending);
        }
        self.tokens
    }

    fn take(&mut self, tokens: u32) {
        self.tokens = self.tokens.saturating_sub(tokens);
    }
}

/// What a waiting sequence needs.
struct Need {
    /// Cached blocks that it begins with.
    hits: Vec<u32>,
    /// Others.
    fresh: usize,
    /// Leading blocks that could be cached: one token at least is computed, to draw the next one.
    reusable: usize,
}

impl Instance {
    /// A step decodes first; what that leaves goes to the prompts in their order.
    fn room(&self) -> Room {
        let running = self.sequences.values().filter(|s| s.phase == Phase::Running);
        let (decodes, prompts): (Vec<_>, Vec<_>) =
            running.map(|s| (s.place, s.pending())).partition(|(_, pending)| *pending == 1);
        let mut prompts = prompts;
        prompts.sort_unstable_by_key(|(place, _)| std::cmp::Reverse(*place));
        let beside = if decodes.is_empty() { u32::MAX } else { self.limits.prefill_tokens_beside_decode_max };
        let tokens = self.limits.step_tokens_max.saturating_sub(decodes.len() as u32).min(beside);
        Room { tokens, prompts }
    }

    /// Gives blocks to those who wait, in their order, until one does not fit even if flexible ones due later give way. A prompt that
    /// the next step has no room for waits on: when its turn comes, it finds the prefixes that were computed meanwhile.
    /// True: blocks are to be loaded first.
    pub(super) fn admit(&mut self, evicted: &mut Vec<Evicted>, actions: &mut Vec<Action>) -> bool {
        let mut room = self.room();
        let mut seen = None;
        while let Some(place) = order::next(&self.waiting, seen) {
            seen = Some(place);
            let sequence = &self.sequences[&place.request];
            let computes = sequence.after.is_some() && sequence.pulls == 0;
            if computes && room.left_for(place) == 0 {
                continue;
            }
            if !self.has_place_for(place) {
                return false;
            }
            let need = self.need(place.request);
            let Some(losers) = self.who_gives_way(place, &need) else { return false };
            for &loser in &losers {
                self.preempt(loser, actions);
            }
            if self.take_blocks(place, need, evicted, actions) {
                return true;
            }
            if !losers.is_empty() {
                room = self.room();
            } else if self.sequences[&place.request].phase == Phase::Running {
                room.take(self.sequences[&place.request].pending());
            }
        }
        false
    }

    fn holding(&self) -> usize {
        self.sequences.len() - self.waiting.len()
    }

    /// Those that give way to `place`. Someone who reads along would see his answer stand still: he keeps what he has.
    fn later(&self, place: Place) -> impl Iterator<Item = &Sequence> {
        self.sequences.values().filter(move |s| s.gives_way && s.preemptable() && s.place > place)
    }

    /// Beside others, or instead of one. Looked at before prefixes are.
    fn has_place_for(&self, place: Place) -> bool {
        self.holding() < self.limits.sequences_max || self.later(place).next().is_some()
    }

    fn need(&mut self, request: RequestId) -> Need {
        let sequence = self.sequences.get_mut(&request).expect("a waiting sequence is known");
        let length = sequence.tokens.len() as u32;
        let reusable = ((length - 1) / self.limits.block_tokens) as usize;
        sequence.hash_blocks(reusable);
        let hits = self.blocks.longest_prefix(&sequence.chain.hashes()[..reusable], &sequence.tokens);
        let fresh = self.blocks.blocks_for(length) - hits.len();
        Need { hits, fresh, reusable }
    }

    /// The fewest of those that can give way, the last first, whose places and blocks make room for a waiting sequence. None if all of
    /// them do not.
    fn who_gives_way(&self, place: Place, need: &Need) -> Option<Vec<RequestId>> {
        let mut holding = self.holding();
        let mut available = self.blocks.available();
        let wanted = need.fresh + self.blocks.idle_among(&need.hits);
        let fits = |holding: usize, available: usize| {
            let spare = if holding == 0 { 0 } else { self.limits.spare_blocks };
            holding < self.limits.sequences_max && wanted + spare <= available
        };
        let mut losers = Vec::new();
        if fits(holding, available) {
            return Some(losers);
        }
        let mut later: Vec<&Sequence> = self.later(place).collect();
        later.sort_unstable_by_key(|s| s.place);
        while let Some(last) = later.pop() {
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

    /// True: some of them are to be loaded first.
    fn take_blocks(
        &mut self,
        place: Place,
        need: Need,
        evicted: &mut Vec<Evicted>,
        actions: &mut Vec<Action>,
    ) -> bool {
        let request = place.request;
        self.waiting.remove(&place);
        let Need { hits: mut pages, fresh, reusable } = need;
        let cached = pages.len();
        pages.iter().for_each(|&page| self.blocks.acquire(page));
        let fresh = (0..fresh).map(|_| self.blocks.allocate(evicted).expect("counted before"));
        pages.extend(fresh);
        let sequence = self.sequences.get_mut(&request).expect("a waiting sequence is known");
        sequence.computed = cached as u32 * self.limits.block_tokens;
        sequence.published = cached;
        sequence.pages = pages;
        if !self.limits.lower_tiers || cached == reusable {
            self.begin(request, actions);
            return false;
        }
        sequence.phase = Phase::Loading;
        let block_tokens = self.limits.block_tokens as usize;
        actions.push(Action::Load {
            request,
            blocks_cached: cached as u32,
            chain: sequence.chain.hashes()[cached..reusable].to_vec(),
            tokens: sequence.tokens[cached * block_tokens..reusable * block_tokens].to_vec(),
            pages: sequence.pages[cached..reusable].to_vec(),
        });
        true
    }

    /// A sequence has its blocks, and in them what was to be found of its prefix.
    fn begin(&mut self, request: RequestId, actions: &mut Vec<Action>) {
        let sequence = self.sequences.get_mut(&request).expect("known");
        let (tokens_cached, pages) = (sequence.computed, sequence.pages.clone());
        if sequence.after.is_some() && sequence.pulls <= tokens_cached {
            sequence.phase = Phase::Running;
            sequence.pulls = 0;
            actions.push(Action::Admitted { request, tokens_cached, pages });
        } else {
            sequence.phase = Phase::Receiving;
            actions.push(Action::Reserved { request, tokens_cached, pages });
        }
    }

    pub(super) fn loaded(&mut self, request: RequestId, blocks: u32, actions: &mut Vec<Action>) {
        let Some(sequence) = self.sequences.get_mut(&request) else { return };
        assert_eq!(sequence.phase, Phase::Loading, "request {request} was not loading");
        sequence.computed += blocks * self.limits.block_tokens;
        assert!(sequence.computed < sequence.tokens.len() as u32, "more blocks came than were asked for");
        self.begin(request, actions);
        self.publish(request, actions);
    }
}

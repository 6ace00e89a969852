//! Shares of an instance among the parties that use it at the same time: tenants, or addresses of clients.
//!
//! While one party is here it has everything, and nothing in this file applies. As soon as several are:
//!
//! - **Turns.** Each party's tokens are counted, prompt tokens once and generated tokens twice. The waiting
//!   request of the party with the least is next, and so are its prompt tokens in a step. A party that comes
//!   begins at the least count of those that are here (Virtual Token Counter; Sheng et al., OSDI 2024). Among
//!   the requests of one party the order stays that of [`Place`].
//! - **Slots and KV memory.** A request with which its party stays within an equal share of both goes before
//!   one with which it does not, and may preempt those of parties beyond their shares, the last of theirs
//!   first.
//! - **Time.** A step takes at most as many times as long as there are parties as a step with the sequences
//!   of the one with the least work would: each gets at least its share of the instance's speed (processor
//!   sharing).
//!
//! **No deadlock.** The first running sequence of a party is never preempted for a share. So the first
//! request of the fleet keeps its blocks, once it has them, as it does without shares. It gets them: those
//! of its own party do not overtake it, its party's running sequences end, and then it is within its share,
//! at any size, while the counts of the other parties rise until it is next. Requests that took
//! blocks for their share leave their party within it, so that they cannot be taken back for another's
//! share.

use super::rows::{Decodes, StepShare};
use super::{Action, Evicted, Instance, Need, PartyId, Phase, Place, RequestId};
use super::{Sequence, StepSequence, TILE, Text};
use crate::cost::{CostModel, Prefill, SizedCorrections};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::Seconds;
use std::collections::BTreeMap;

/// What a generated token counts; a prompt token counts 1.
const GENERATED_COUNTS: u64 = 2;

/// A party that is here.
#[derive(Clone, Copy, Debug, Default)]
struct PartyTokens {
    /// Number of its sequences, waiting ones included.
    sequences: usize,
    /// Count of its tokens.
    tokens: u64,
}

/// The parties that are here; work without a party is not counted.
#[derive(Debug, Default)]
pub(super) struct Parties(BTreeMap<PartyId, PartyTokens>);

impl Parties {
    /// Adds a sequence.
    pub(super) fn enter(&mut self, party: PartyId) {
        if party != PartyId::NONE {
            let least = self.0.values().map(|served| served.tokens).min().unwrap_or(0);
            self.0.entry(party).or_insert(PartyTokens { sequences: 0, tokens: least }).sequences += 1;
        }
    }

    /// Removes a sequence, with its party if it was the only one.
    pub(super) fn leave(&mut self, party: PartyId) {
        let Some(served) = self.0.get_mut(&party) else { return };
        served.sequences -= 1;
        if served.sequences == 0 {
            self.0.remove(&party);
        }
    }

    /// Whether several are here.
    pub(super) fn contend(&self) -> bool {
        self.0.len() > 1
    }

    /// Counts the tokens of a sequence in a step.
    pub(super) fn count(&mut self, party: PartyId, tokens: u32, decodes: bool) {
        if let Some(served) = self.0.get_mut(&party) {
            served.tokens += u64::from(tokens) * if decodes { GENERATED_COUNTS } else { 1 };
        }
    }

    /// Tokens of a party; work without a party comes last.
    fn tokens(&self, party: PartyId) -> u64 {
        self.0.get(&party).map_or(u64::MAX, |served| served.tokens)
    }

    /// An equal share of `of`.
    fn share(&self, of: usize) -> usize {
        of / self.0.len().max(1)
    }
}

/// What the sequences of a party hold.
#[derive(Clone, Copy, Debug, Default)]
struct Holding {
    slots: usize,
    pages: usize,
    /// Its prompt tokens that are not computed.
    prompt_tokens: u64,
    /// The first of its running sequences, which is never preempted for a share.
    first: Option<RequestId>,
}

/// What all parties hold, and an equal share.
struct Holdings {
    of: BTreeMap<PartyId, Holding>,
    slots: usize,
    pages: usize,
    prompt_tokens: u64,
}

/// What a waiting sequence lacks.
#[derive(Clone, Copy)]
struct Lack {
    slot: bool,
    pages: bool,
}

impl Holdings {
    fn holding(&self, party: PartyId) -> Holding {
        self.of.get(&party).copied().unwrap_or_default()
    }

    /// Whether a party is beyond its share of the scarce resource.
    fn is_beyond(&self, party: PartyId, lack: Lack) -> bool {
        let Holding { slots, pages, .. } = self.holding(party);
        (lack.slot && slots > self.slots) || (lack.pages && pages > self.pages)
    }

    /// Whether `party` stays within its share with a sequence of `pages` more. A party that holds nothing
    /// does, for any number of pages.
    fn stays_within(&self, party: PartyId, pages: usize) -> bool {
        let holding = self.holding(party);
        let fits = holding.slots < self.slots && holding.pages + pages <= self.pages;
        party != PartyId::NONE && (holding.slots == 0 || fits)
    }
}

impl<T: Text> Instance<T> {
    fn party(&self, request: RequestId) -> PartyId {
        self.sequence(request).urgency.party
    }

    fn holdings(&self) -> Holdings {
        let parties = &self.parties;
        let mut of: BTreeMap<PartyId, Holding> = BTreeMap::new();
        for phase in [Phase::Running, Phase::Loading, Phase::Receiving, Phase::HandedOff] {
            for place in self.places.of(phase) {
                let sequence = self.sequence(place.request);
                let holding = of.entry(sequence.urgency.party).or_default();
                holding.slots += 1;
                holding.pages += sequence.pages.len();
                if phase == Phase::Running {
                    holding.first.get_or_insert(place.request);
                    holding.prompt_tokens += u64::from(sequence.pending().saturating_sub(1));
                }
            }
        }
        Holdings {
            of,
            slots: parties.share(self.limits.sequences_max).max(1),
            pages: parties.share(self.blocks.available() + self.blocks.pages_used()),
            prompt_tokens: parties.share(self.limits.step_tokens_max as usize) as u64,
        }
    }

    /// The same as [`Instance::admit`] where several parties are here.
    pub(super) fn admit_in_turn(
        &mut self,
        evicted: &mut Vec<Evicted<T::Block>>,
        actions: &mut Vec<Action<T::Block>>,
    ) -> bool {
        loop {
            let held = self.holdings();
            let Some(place) = self.next_in_turn(&held) else { return false };
            let need = self.need(place.request);
            let Some(losers) = self.who_yields(place, &need, held) else { return false };
            for &loser in &losers {
                self.preempt(loser, actions);
            }
            if self.take_blocks(place, need, evicted, actions) {
                return true;
            }
        }
    }

    /// The next waiting sequence: of the first sequence of each party, one that keeps its party within its
    /// share, of the party that was served least. A prompt waits while others of its party fill its share of
    /// a step, so that it can reuse the prefixes that they compute.
    fn next_in_turn(&self, held: &Holdings) -> Option<Place> {
        let mut firsts: BTreeMap<PartyId, Place> = BTreeMap::new();
        for phase in [Phase::Queued, Phase::Asking] {
            for &place in self.places.of(phase) {
                let party = self.party(place.request);
                let is_full = || held.holding(party).prompt_tokens >= held.prompt_tokens;
                if phase == Phase::Queued && is_full() {
                    continue;
                }
                let first = firsts.entry(party).or_insert(place);
                *first = place.min(*first);
            }
        }
        let parts = self.limits.page_parts.count() as usize;
        let turn = |party: PartyId, place: Place| {
            let pages = self.blocks.blocks_for(self.sequence(place.request).length) * parts;
            let beyond = !held.stays_within(party, pages);
            (beyond, self.parties.tokens(party), held.holding(party).slots, place)
        };
        firsts.into_iter().map(|(party, place)| turn(party, place)).min().map(|(.., place)| place)
    }

    /// The fewest sequences to preempt so that a waiting one fits, the last first: later flex requests of its
    /// own party or of none, and, for its share, sequences of parties beyond theirs. None if it would not
    /// fit.
    fn who_yields(&self, place: Place, need: &Need, mut held: Holdings) -> Option<Vec<RequestId>> {
        let party = self.party(place.request);
        let parts = self.limits.page_parts.count() as usize;
        let wanted = need.fresh * parts + self.blocks.idle_among(&need.hits);
        let within = held.stays_within(party, need.fresh * parts + need.hits.len());
        let (mut holding, mut available) = (self.holding(), self.blocks.available());
        let mut last_first = self.places.of(Phase::Running).iter().rev();
        let mut losers = Vec::new();
        loop {
            let spare = if holding == 0 { 0 } else { self.limits.spare_blocks * parts };
            let lack = Lack { slot: holding >= self.limits.sequences_max, pages: wanted + spare > available };
            if !lack.slot && !lack.pages {
                return Some(losers);
            }
            let yields = |other: &&Place| {
                let sequence = self.sequence(other.request);
                let theirs = sequence.urgency.party;
                let flex = sequence.urgency.gives_way && **other > place;
                let is_first = held.holding(theirs).first == Some(other.request);
                let for_share = within && theirs != party && !is_first && held.is_beyond(theirs, lack);
                sequence.preemptable() && ((flex && [party, PartyId::NONE].contains(&theirs)) || for_share)
            };
            let loser = last_first.find(yields)?;
            let sequence = self.sequence(loser.request);
            losers.push(loser.request);
            holding -= 1;
            let own = |page: &&u32| self.blocks.has_one_user(**page) && !need.hits.contains(page);
            available += sequence.pages.iter().filter(own).count();
            if let Some(theirs) = held.of.get_mut(&sequence.urgency.party) {
                theirs.slots -= 1;
                theirs.pages -= sequence.pages.len();
            }
        }
    }

    /// The last sequence of the party that is furthest beyond its share of KV memory, except its first.
    pub(super) fn last_beyond_share(&self) -> Option<RequestId> {
        let held = self.holdings();
        let beyond = held.of.iter().filter(|(_, holding)| holding.pages > held.pages);
        let furthest = beyond.max_by_key(|(_, holding)| holding.pages).map(|(&party, _)| party)?;
        let first = held.holding(furthest).first;
        let mut last_first = self.places.of(Phase::Running).iter().rev().map(|place| place.request);
        last_first.find(|&request| {
            let sequence = self.sequence(request);
            sequence.urgency.party == furthest && sequence.preemptable() && Some(request) != first
        })
    }

    /// Limits the next step to what each party's share allows: of `decodes` some remain, in turns of the
    /// parties, and `prompts` get the order of turns. None if the step is one party's.
    pub(super) fn share_step(
        &self,
        decodes: &mut Vec<StepSequence>,
        prompts: &mut [RequestId],
    ) -> Option<StepShare> {
        let step_tokens_max = self.limits.step_tokens_max;
        let mut works: BTreeMap<PartyId, PartyWork> = BTreeMap::new();
        for part in &*decodes {
            let sequence = self.sequence(part.request);
            works.entry(sequence.urgency.party).or_default().decodes.add(sequence);
        }
        for &request in &*prompts {
            let sequence = self.sequence(request);
            works.entry(sequence.urgency.party).or_default().prompt(sequence, step_tokens_max);
        }
        let place = |request| self.sequence(request).place;
        prompts.sort_by_key(|&request| (self.parties.tokens(self.party(request)), place(request)));
        let cost = self.cost.as_ref().filter(|_| works.len() > 1)?;
        let corrections = self.learner.corrections();
        let alone = works.values().map(|work| (work, work.alone(cost, corrections)));
        let (least, time) = alone.reduce(|a, b| if b.1 < a.1 { b } else { a })?;
        let decoding = works.values().filter(|work| work.decodes.sequences > 0).count();
        self.keep_in_turns(decodes, time * decoding as f64, decoding);
        let prompt_only = works.values().filter(|work| work.decodes.sequences == 0);
        let rows = prompt_only.filter_map(|work| work.prompt).map(|prompt| prompt.tokens).min();
        let rows_min = match (least.decodes.sequences, least.prompt) {
            (0, Some(prompt)) => prompt.tokens,
            _ => rows.unwrap_or(1).min(TILE),
        };
        Some(StepShare { within: time * works.len() as f64, rows_min })
    }

    /// Keeps as many of `decodes` as a step of `within` has, at least one of each of the `parties`, in turns.
    fn keep_in_turns(&self, decodes: &mut Vec<StepSequence>, within: Seconds, parties: usize) {
        let (Some(cost), true) = (&self.cost, parties > 0) else { return };
        let mut rounds: BTreeMap<PartyId, usize> = BTreeMap::new();
        let mut in_turns: Vec<(usize, u64, StepSequence)> = Vec::with_capacity(decodes.len());
        for part in decodes.drain(..) {
            let round = rounds.entry(self.party(part.request)).or_default();
            in_turns.push((*round, self.parties.tokens(self.party(part.request)), part));
            *round += 1;
        }
        in_turns.sort_by_key(|&(round, tokens, _)| (round, tokens));
        let mut kv_tokens = 0;
        let contexts: Vec<u64> = in_turns
            .iter()
            .map(|(.., part)| {
                kv_tokens += u64::from(self.sequence(part.request).length);
                kv_tokens
            })
            .collect();
        let fits = |count: usize| {
            let step = cost.decode_step_s(to_u32(count), contexts[count - 1]);
            step * self.learner.step_factor(to_u32(count)) <= within
        };
        let counts: Vec<usize> = (parties + 1..=in_turns.len()).collect();
        let kept = parties + counts.partition_point(|&count| fits(count));
        decodes.extend(in_turns.into_iter().take(kept).map(|(.., part)| part));
    }
}

/// What a party has to do in the next step.
#[derive(Clone, Copy, Default)]
struct PartyWork {
    decodes: Decodes,
    /// The first of its prompts, as far as a step has room for it.
    prompt: Option<Prefill>,
}

impl PartyWork {
    fn prompt<T>(&mut self, sequence: &Sequence<T>, step_tokens_max: u32) {
        let tokens = sequence.pending().min(step_tokens_max);
        let last = tokens == sequence.pending();
        self.prompt.get_or_insert(Prefill { context: sequence.computed, tokens, last });
    }

    /// The time of a step with its decodes, or its prompt if it has none.
    fn alone(&self, cost: &CostModel, corrections: SizedCorrections) -> Seconds {
        let Decodes { sequences, kv_tokens, .. } = self.decodes;
        match self.prompt {
            Some(prompt) if sequences == 0 => corrections.step_s(cost, &[prompt], (0, 0)),
            _ => cost.decode_step_s(sequences, kv_tokens) * corrections.step_of(sequences),
        }
    }
}

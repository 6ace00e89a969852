//! The instance's machine: which sequences run in the next step, which blocks they get, who waits, who is
//! preempted.
//!
//! The instance's worker feeds it events and carries out its actions; `Event::Idle` asks for the next step. A
//! sequence is a number of tokens of which `computed` have their KV in blocks (what the tokens are only its
//! [`Text`] knows); whatever is missing is computed next, so a prompt, a chunk of it, a single decode token,
//! a recomputed sequence after preemption and a transfer that came incomplete are all the same case.
//!
//! **No deadlock.** Every request has one place in the order, the same on all instances: by when it is due,
//! equal ones by age. Who comes earlier in it wins: the queue is sorted by it, a step's tokens go to the
//! earliest prompts, a decode that finds no block and a request that finds no place beside flexible ones due
//! later preempt the last of them (which keeps its place and recomputes later), and a waiting request may
//! revoke the reservation of a later one when nothing else can run. The first request of the fleet therefore
//! always gets its blocks, provided that each alone fits, which the fleet checks on arrival. Due times are
//! fixed there, and nobody is due long before it comes: a request is overtaken only by those who come before
//! it is due itself, or within a head start that is bounded, so everyone becomes the first. What others pull
//! from here changes none of this: lent blocks are in use until they are read, which waits for nothing here,
//! and nobody who could run waits for them. A sequence that waits for what it pulls is a reservation that may
//! be revoked.

mod admit;
mod blocks;
mod event;
mod order;
mod refusal;
mod rows;
mod steady;
mod text;
mod travel;

pub use blocks::{BlockCounts, BlockPool, Evicted};
pub use event::{Action, After, Event, Sampled, Step, StepSequence};
pub use order::Place;
pub use refusal::Refusal;
pub use rows::Urgency;
pub(crate) use rows::rows_beside;
pub use text::{Text, TokenIds};

pub use crate::ids::RequestId;

use crate::cost::CostModel;
use crate::kv::{BlockHash, CachePolicy};
use crate::table::IdMap;
use order::Places;
use rows::{Decodes, PromptRows};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Bounds of one instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLimits {
    /// KV blocks.
    pub blocks_total: u32,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// New tokens in one step, all sequences together.
    pub step_tokens_max: u32,
    /// Prompt tokens in a step that also decodes. None: as many as the tightest TBT objective of those who
    /// decode allows by the instance's own prediction, and [`BatchLimits::PREFILL_TOKENS_BESIDE_DECODE_MAX`]
    /// where none of them has an objective.
    pub prefill_tokens_beside_decode_max: Option<u32>,
    /// Sequences that hold blocks at a time.
    pub sequences_max: usize,
    /// Blocks that admission leaves available for those who already decode.
    pub spare_blocks: usize,
    /// What blocks hold that are given up is kept elsewhere: whoever gets blocks asks there for more of his
    /// prefix.
    pub lower_tiers: bool,
    /// Which cached block is given up first.
    pub cache_policy: CachePolicy,
}

/// What holds where nobody says otherwise, in `serve` as in a simulation.
impl BatchLimits {
    /// Tokens in a block of KV, where a device asks for no other number.
    pub const BLOCK_TOKENS: u32 = 16;
    /// New tokens in one step.
    pub const STEP_TOKENS_MAX: u32 = 512;
    /// Prompt tokens in a step that also decodes where nobody has a TBT objective: at a few hundred tokens
    /// per second of prefill, about a quarter of a second between two tokens of the others.
    pub const PREFILL_TOKENS_BESIDE_DECODE_MAX: u32 = 64;
    /// Sequences that hold blocks at a time.
    pub const SEQUENCES_MAX: u32 = 64;

    /// Room for each of `sequences_max` sequences to begin a block, up to a hundredth of the memory.
    pub fn spare_blocks(blocks_total: u32, sequences_max: usize) -> usize {
        (blocks_total as usize / 100).min(sequences_max)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// In the queue, without blocks, to be computed here.
    Queued,
    /// In the queue, without blocks, for KV from elsewhere.
    Asking,
    /// Being computed: prompt or decode.
    Running,
    /// Its blocks are being filled from the lower tiers.
    Loading,
    /// Blocks are reserved, KV is on its way.
    Receiving,
    /// Computed, blocks are being read by a transfer.
    HandedOff,
}

#[derive(Debug)]
struct Sequence<T> {
    place: Place,
    urgency: Urgency,
    text: T,
    /// Tokens of prompt and answer so far.
    length: u32,
    computed: u32,
    pages: Vec<u32>,
    /// Leading blocks that are in the prefix index, or were found to be there already.
    published: u32,
    phase: Phase,
    /// None: its KV comes from elsewhere.
    after: Option<After>,
    /// Leading tokens whose KV is waited for before the rest is computed.
    pulls: u32,
    cancelled: bool,
}

impl<T> Sequence<T> {
    fn pending(&self) -> u32 {
        self.length - self.computed
    }

    /// It can lose its blocks and be computed again here. What goes elsewhere is being read, or soon will be.
    fn preemptable(&self) -> bool {
        self.phase == Phase::Running && self.after == Some(After::Decode)
    }

    /// It has blocks for all its tokens.
    fn has_blocks(&self, block_tokens: u32) -> bool {
        self.pages.len() as u64 * u64::from(block_tokens) >= u64::from(self.length)
    }

    /// Its part in a step.
    fn part(&self, tokens: u32) -> StepSequence {
        let (request, start) = (self.place.request, self.computed);
        StepSequence { request, start, tokens, sample: start + tokens == self.length }
    }

    /// Where it waits for blocks.
    fn in_queue(&self) -> Phase {
        if self.after.is_some() && self.pulls == 0 { Phase::Queued } else { Phase::Asking }
    }
}

/// Publishes the full blocks of `sequence` that were computed since the last time.
fn publish<T: Text>(
    blocks: &mut BlockPool<T::Block>,
    sequence: &mut Sequence<T>,
    actions: &mut Vec<Action<T::Block>>,
) {
    let is_full = |block: u32| {
        u64::from(sequence.computed) >= (u64::from(block) + 1) * u64::from(blocks.block_tokens())
    };
    if !is_full(sequence.published) {
        return;
    }
    let full = sequence.computed / blocks.block_tokens();
    let mut stored = Vec::with_capacity((full - sequence.published) as usize);
    for block in sequence.published..full {
        let (hash, text) = (sequence.text.hash(block), &sequence.text);
        if blocks.publish(sequence.pages[block as usize], hash, block, || text.block(block)) {
            stored.push(hash);
        }
    }
    sequence.published = full;
    if !stored.is_empty() {
        actions.push(Action::Stored(stored));
    }
}

/// What the router and the metrics see of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchLoad {
    /// Requests without blocks yet.
    pub waiting: usize,
    /// Requests with blocks.
    pub running: usize,
    /// The blocks.
    pub blocks: BlockCounts,
}

/// How many sequences are at what.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Phases {
    /// Prompts that wait to be computed here.
    pub queued: usize,
    /// Sequences that wait for room for KV from elsewhere.
    pub asking: usize,
    /// Sequences that have that room, and wait for the KV.
    pub receiving: usize,
    /// Prompts in computation.
    pub prefilling: usize,
    /// Sequences that decode.
    pub decoding: usize,
    /// Tokens of those that decode.
    pub decoding_tokens: u64,
    /// Computed prompts whose KV is read by others.
    pub handed_off: usize,
}

/// The machine.
#[derive(Debug)]
pub struct Instance<T: Text> {
    limits: BatchLimits,
    /// Predicts its steps; without it none is sized by an objective.
    cost: Option<Arc<CostModel>>,
    blocks: BlockPool<T::Block>,
    sequences: IdMap<Sequence<T>>,
    /// All of them, by phase.
    places: Places,
    /// Blocks that others read, by the request for which they do.
    lent: IdMap<Vec<u32>>,
    /// The step that the device runs.
    in_step: Vec<StepSequence>,
    /// Something came, or blocks came back, after those who wait were looked at last.
    news: bool,
}

impl<T: Text> Instance<T> {
    /// An empty instance.
    pub fn new(limits: BatchLimits) -> Self {
        assert!(limits.step_tokens_max > 0 && limits.sequences_max > 0, "an instance that can do nothing");
        Instance {
            limits,
            cost: None,
            blocks: BlockPool::new(limits.blocks_total, limits.block_tokens, limits.cache_policy),
            sequences: IdMap::default(),
            places: Places::default(),
            lent: IdMap::default(),
            in_step: Vec::new(),
            news: false,
        }
    }

    /// With a prediction of its steps, by which prompts are kept to what the TBT objectives of others allow.
    #[must_use]
    pub fn predicted_by(mut self, cost: Arc<CostModel>) -> Self {
        self.cost = Some(cost);
        self
    }

    /// What the router and the metrics see.
    pub fn load(&self) -> BatchLoad {
        let (waiting, running) = (self.sequences.len() - self.holding(), self.holding());
        BatchLoad { waiting, running, blocks: self.blocks.counts() }
    }

    /// How many sequences are at what.
    pub fn phases(&self) -> Phases {
        let count = |phase| self.places.of(phase).len();
        let running = || self.places.of(Phase::Running).iter().map(|place| self.sequence(place.request));
        let decoding = || running().filter(|sequence| sequence.pending() == 1);
        Phases {
            queued: count(Phase::Queued),
            asking: count(Phase::Asking),
            receiving: count(Phase::Receiving),
            prefilling: count(Phase::Running) - decoding().count(),
            decoding: decoding().count(),
            decoding_tokens: decoding().map(|sequence| u64::from(sequence.length)).sum(),
            handed_off: count(Phase::HandedOff),
        }
    }

    /// The prefixes that its blocks hold, in order.
    pub fn stored(&self) -> Vec<BlockHash> {
        self.blocks.hashes()
    }

    /// The tokens of a sequence that is here.
    pub fn text(&self, request: RequestId) -> Option<&T> {
        self.sequences.get(request).map(|sequence| &sequence.text)
    }

    /// The same, to append what is drawn.
    pub fn text_mut(&mut self, request: RequestId) -> Option<&mut T> {
        self.sequences.get_mut(request).map(|sequence| &mut sequence.text)
    }

    /// The block table of a sequence; empty where it has none.
    pub fn pages(&self, request: RequestId) -> &[u32] {
        self.sequences.get(request).map_or(&[], |sequence| &sequence.pages)
    }

    /// Takes in an event and says what to do.
    pub fn step(&mut self, event: Event<T>, actions: &mut Vec<Action<T::Block>>) {
        self.news = true;
        match event {
            Event::Add { request, urgency, text, pulls, after } => {
                self.take_in(request, urgency, text, (pulls, Some(after)), actions);
            }
            Event::Reserve { request, urgency, text } => {
                self.take_in(request, urgency, text, (0, None), actions);
            }
            Event::Landed { request, tokens_valid, next } => {
                self.landed(request, tokens_valid, next, actions);
            }
            Event::Loaded { request, blocks } => self.loaded(request, blocks, actions),
            Event::StepDone { sampled } => self.step_done(&sampled, actions),
            Event::Lend { request, text } => self.lend(request, text, actions),
            Event::Unlend { request } => self.unlend(request),
            Event::Release { request } => self.drop_request(request),
            Event::Cancel { request } => {
                self.unlend(request);
                self.drop_request(request);
            }
            Event::Idle => self.idle(actions),
        }
    }

    fn sequence(&self, request: RequestId) -> &Sequence<T> {
        self.sequences.get(request).expect("whoever has a place is known")
    }

    fn sequence_mut(&mut self, request: RequestId) -> &mut Sequence<T> {
        self.sequences.get_mut(request).expect("whoever has a place is known")
    }

    fn enter(&mut self, request: RequestId, phase: Phase) {
        let sequence = self.sequences.get_mut(request).expect("whoever has a place is known");
        self.places.of_mut(sequence.phase).remove(&sequence.place);
        self.places.of_mut(phase).insert(sequence.place);
        sequence.phase = phase;
    }

    fn step_done(&mut self, sampled: &[Sampled], actions: &mut Vec<Action<T::Block>>) {
        let mut sampled = sampled.iter().peekable();
        let mut in_step = std::mem::take(&mut self.in_step);
        for StepSequence { request, tokens, .. } in in_step.drain(..) {
            let drawn = sampled.next_if(|s| s.request == request);
            let sequence = self.sequences.get_mut(request).expect("what runs is known");
            sequence.computed += tokens;
            if sequence.cancelled {
                self.drop_request(request);
                continue;
            }
            publish(&mut self.blocks, sequence, actions);
            if sequence.pending() > 0 {
                continue;
            }
            let drawn = drawn.unwrap_or_else(|| panic!("request {request} drew no token"));
            if sequence.after == Some(After::HandOff) {
                self.enter(request, Phase::HandedOff);
            } else if drawn.finished {
                self.drop_request(request);
            } else {
                sequence.length += 1;
            }
        }
        self.in_step = in_step;
    }

    fn publish(&mut self, request: RequestId, actions: &mut Vec<Action<T::Block>>) {
        let sequence = self.sequences.get_mut(request).expect("known");
        publish(&mut self.blocks, sequence, actions);
    }

    fn drop_request(&mut self, request: RequestId) {
        let Some(sequence) = self.sequences.get_mut(request) else { return };
        if self.in_step.iter().any(|part| part.request == request) {
            sequence.cancelled = true;
            return;
        }
        self.release_pages(request);
        if let Some(Sequence { phase, place, .. }) = self.sequences.remove(request) {
            self.places.of_mut(phase).remove(&place);
        }
    }

    /// Deepest blocks first: a prefix is worth more than what follows it.
    fn release_pages(&mut self, request: RequestId) {
        for page in std::mem::take(&mut self.sequence_mut(request).pages).into_iter().rev() {
            self.blocks.release(page);
        }
    }

    fn idle(&mut self, actions: &mut Vec<Action<T::Block>>) {
        assert!(self.in_step.is_empty(), "idle while a step runs");
        self.news = false;
        let mut evicted = Vec::new();
        let step = loop {
            if self.admit(&mut evicted, actions) {
                break Step::default();
            }
            let step = self.form_step(&mut evicted, actions);
            if !step.sequences.is_empty() || !self.revoke(actions) {
                break step;
            }
        };
        if !evicted.is_empty() {
            // Before `Run`: the blocks get new content in that step.
            actions.push(Action::Evicted(evicted));
        }
        if !step.sequences.is_empty() {
            self.in_step.extend_from_slice(&step.sequences);
            actions.push(Action::Run(step));
        }
    }

    fn form_step(
        &mut self,
        evicted: &mut Vec<Evicted<T::Block>>,
        actions: &mut Vec<Action<T::Block>>,
    ) -> Step {
        let sequences = Vec::with_capacity(self.places.of(Phase::Running).len());
        let (mut step, mut prompts) = (Step { sequences }, Vec::new());
        // of those who decode, who needs a block first, in their order
        let mut short = Vec::new();
        for place in self.places.of(Phase::Running) {
            let sequence = self.sequence(place.request);
            match sequence.pending() {
                0 => {}
                1 => {
                    step.sequences.push(sequence.part(1));
                    if !sequence.has_blocks(self.limits.block_tokens) {
                        short.push(place.request);
                    }
                }
                _ => prompts.push(place.request),
            }
        }
        let mut budget = self.limits.step_tokens_max;
        if !short.is_empty() || step.sequences.len() > budget as usize {
            // Earlier ones may preempt later ones.
            let mut short = short.into_iter().peekable();
            step.sequences.retain(|part| {
                let is_short = short.next_if_eq(&part.request).is_some();
                let runs = budget > 0
                    && self.decodes(part.request)
                    && (!is_short || self.grow(part.request, evicted, actions));
                budget -= u32::from(runs);
                runs
            });
        }
        if prompts.is_empty() {
            return step;
        }
        let mut decodes = Decodes::default();
        step.sequences.iter().for_each(|part| decodes.add(self.sequence(part.request)));
        let mut rows = PromptRows::new(&self.limits, self.cost.as_ref(), decodes);
        for request in prompts {
            let sequence = self.sequence(request);
            let pending = sequence.pending();
            // one that was preempted above has lost its blocks
            if !rows.are_left() || sequence.phase != Phase::Running {
                continue;
            }
            // A sequence that landed incomplete may have one token beyond its blocks: it decodes next.
            let covered = sequence.pages.len() as u32 * self.limits.block_tokens - sequence.computed;
            let wanted = pending.min(covered);
            let new_tokens = rows.take(sequence.computed, wanted, wanted == pending);
            if new_tokens > 0 {
                step.sequences.push(sequence.part(new_tokens));
            }
        }
        step
    }

    /// Still running (an earlier one may have preempted it) with one token to go.
    fn decodes(&self, request: RequestId) -> bool {
        let sequence = self.sequence(request);
        sequence.phase == Phase::Running && sequence.pending() == 1
    }

    /// Makes sure that there is a block for the sequence's next token. If none is to be had, later
    /// sequences are preempted, the last first; if there are none, it waits or is preempted itself.
    fn grow(
        &mut self,
        request: RequestId,
        evicted: &mut Vec<Evicted<T::Block>>,
        actions: &mut Vec<Action<T::Block>>,
    ) -> bool {
        if self.sequence(request).has_blocks(self.limits.block_tokens) {
            return true;
        }
        loop {
            if let Some(page) = self.blocks.allocate(evicted) {
                self.sequence_mut(request).pages.push(page);
                return true;
            }
            let mut last_first = self.places.of(Phase::Running).iter().rev().map(|place| place.request);
            let last = last_first.find(|&request| self.sequence(request).preemptable());
            let last = last.expect("the sequence itself is preemptable");
            if last == request && self.others_will_release(request) {
                return false;
            }
            self.preempt(last, actions);
            if last == request {
                return false;
            }
        }
    }

    /// Blocks will come back without this sequence's doing.
    fn others_will_release(&self, request: RequestId) -> bool {
        let holding = [Phase::Running, Phase::Loading, Phase::Receiving, Phase::HandedOff];
        let mut others = holding.into_iter().flat_map(|phase| self.places.of(phase));
        others.any(|place| {
            place.request != request && self.sequence(place.request).after == Some(After::HandOff)
        })
    }

    fn preempt(&mut self, request: RequestId, actions: &mut Vec<Action<T::Block>>) {
        self.news = true;
        self.release_pages(request);
        let sequence = self.sequence_mut(request);
        sequence.computed = 0;
        let queue = sequence.in_queue();
        self.enter(request, queue);
        actions.push(Action::Preempted { request });
    }

    /// Nothing can run here: if the first that wants to comes before a reservation, it takes its
    /// blocks. True if there was one.
    fn revoke(&mut self, actions: &mut Vec<Action<T::Block>>) -> bool {
        let first_of = |phase: Phase| self.places.of(phase).first().copied();
        let first = [Phase::Queued, Phase::Asking, Phase::Running].into_iter().filter_map(first_of).min();
        let last = self.places.of(Phase::Receiving).last().copied();
        let (Some(first), Some(last)) = (first, last) else { return false };
        if last < first || !self.places.of(Phase::HandedOff).is_empty() {
            return false;
        }
        self.drop_request(last.request);
        actions.push(Action::Revoked { request: last.request });
        true
    }
}

#[cfg(test)]
mod refusal_tests;
#[cfg(test)]
mod rows_tests;
#[cfg(test)]
mod steady_tests;
#[cfg(test)]
mod tests;

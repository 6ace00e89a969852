//! The instance machine: which sequences run in the next step, which blocks they get, and which ones wait or
//! are preempted.
//!
//! The instance's worker feeds it events and carries out its actions; `Event::Idle` asks for the next step. A
//! sequence is a number of tokens of which `computed` have their KV in blocks (only its [`Text`] knows the
//! tokens); whatever is missing is computed next, so a prompt, a chunk of it, a single decode token, a
//! recomputed sequence after preemption and an incomplete transfer are all the same case.
//!
//! **No deadlock.** Every request has one place in the order, the same on all instances: by due time, then by
//! age. Earlier requests win: the queue is sorted by this order, a step's tokens go to the earliest prompts,
//! a decode that finds no block and a request that finds no place beside later flex requests preempt the last
//! of them (which keeps its place and is recomputed later), and a waiting request may revoke the reservation
//! of a later one when nothing else can run. The first request of the fleet therefore always gets its blocks,
//! provided that each fits alone, which the fleet machine checks on arrival. Due times are fixed there, at
//! most a bounded time before the arrival: a request is overtaken only by those that arrive before it is due,
//! or within that time after, so every request becomes the first. Pulls from this instance do not change
//! this: lent blocks are in use until they are read, which waits for nothing here, and no sequence that could
//! run waits for them. A sequence that waits for a pull is a reservation that may be revoked.
//!
//! Where requests of several parties meet, `shares.rs` decides between the parties, and says why that keeps
//! this true.

mod admit;
mod ahead;
mod blocks;
mod event;
mod give_back;
mod order;
mod refusal;
mod rows;
mod shares;
mod steady;
mod text;
mod travel;

pub use crate::kv::parts::{LayerPages, NO_PAGE, PageParts};
pub use blocks::{BlockCounts, BlockPool, Evicted, PageDevices};
pub use event::{Action, After, Event, Sampled, Step, StepSequence};
pub use order::Place;
pub use refusal::Refusal;
pub use rows::Urgency;
pub(crate) use rows::rows_beside;
pub use text::{Text, TokenIds};

pub use crate::ids::{PartyId, RequestId};

use crate::cost::{CostModel, Learner, MeasuredSteps};
use crate::kv::{BlockHash, CachePolicy};
use crate::table::IdMap;
use admit::Need;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::units::Seconds;
use order::Places;
use rows::{Decodes, PromptRows, StepShare, TILE};
use serde::{Deserialize, Serialize};
use shares::Parties;
use std::sync::Arc;

/// Limits of one instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchLimits {
    /// Number of KV blocks.
    pub blocks_total: u32,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Maximum new tokens per step, over all sequences.
    pub step_tokens_max: u32,
    /// Maximum prompt tokens in a step that also decodes. If none: as many as the tightest TBT objective of
    /// the decoding requests allows by the instance's own prediction; if none of them has one, as many as at
    /// most double the step's time, and [`BatchLimits::PREFILL_TOKENS_BESIDE_DECODE_MAX`] in any case.
    pub prefill_tokens_beside_decode_max: Option<u32>,
    /// Maximum number of sequences that hold blocks.
    pub sequences_max: usize,
    /// Blocks that admission leaves for sequences that already decode.
    pub spare_blocks: usize,
    /// Whether evicted blocks are kept in lower tiers, from which more of a prefix can be loaded.
    pub lower_tiers: bool,
    /// The order in which cached blocks are evicted.
    pub cache_policy: CachePolicy,
    /// The devices that the blocks are divided among.
    pub page_devices: PageDevices,
    /// The parts of the layers that a block has a page of. Only pages of all layers go to lower tiers or are
    /// divided among devices.
    pub page_parts: PageParts,
}

/// Defaults of `serve` and the simulator.
impl BatchLimits {
    /// Tokens per KV block, unless a device prefers another number.
    pub const BLOCK_TOKENS: u32 = 16;
    /// Maximum new tokens per step.
    pub const STEP_TOKENS_MAX: u32 = 512;
    /// Prompt tokens that a step may have beside decodes without a TBT objective, however long they take. It
    /// is, at a few hundred tokens per second of prefill, about a quarter of a second between two tokens of
    /// the others.
    pub const PREFILL_TOKENS_BESIDE_DECODE_MAX: u32 = 64;
    /// Maximum number of sequences that hold blocks.
    pub const SEQUENCES_MAX: u32 = 64;

    /// One spare block for each of `sequences_max` sequences, up to a hundredth of the memory.
    pub fn spare_blocks(blocks_total: u32, sequences_max: usize) -> usize {
        (blocks_total as usize / 100).min(sequences_max)
    }

    /// Tokens that the KV blocks hold.
    pub fn kv_tokens(&self) -> u64 {
        u64::from(self.blocks_total) * u64::from(self.block_tokens)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// It is in the queue, without blocks, to be computed here.
    Queued,
    /// It is in the queue, without blocks, for KV from elsewhere.
    Asking,
    /// Its prompt or answer is being computed.
    Running,
    /// Its blocks are being loaded from the lower tiers.
    Loading,
    /// Its blocks are reserved, and its KV is in transit.
    Receiving,
    /// It is computed, and its blocks are being read by a transfer.
    HandedOff,
}

#[derive(Debug)]
struct Sequence<T> {
    place: Place,
    urgency: Urgency,
    text: T,
    /// Length of prompt and answer so far.
    length: u32,
    computed: u32,
    /// The pages of its blocks, the parts of a block next to each other.
    pages: Vec<u32>,
    /// Number of leading blocks that are in the prefix index or were found there.
    published: u32,
    phase: Phase,
    /// What happens after the prompt; none if its KV comes from elsewhere.
    after: Option<After>,
    /// Number of leading tokens whose KV is waited for before the rest is computed.
    pulls: u32,
    cancelled: bool,
}

impl<T> Sequence<T> {
    fn pending(&self) -> u32 {
        self.length - self.computed
    }

    /// Whether it can lose its blocks and be recomputed here. Blocks of a hand-off are being read, or soon
    /// will be.
    fn preemptable(&self) -> bool {
        self.phase == Phase::Running && self.after == Some(After::Decode)
    }

    /// Whether it has blocks for all its tokens.
    fn has_blocks(&self, limits: &BatchLimits) -> bool {
        let blocks = self.pages.len() as u64 / u64::from(limits.page_parts.count());
        blocks * u64::from(limits.block_tokens) >= u64::from(self.length)
    }

    /// Its part of a step.
    fn part(&self, tokens: u32) -> StepSequence {
        let (request, start) = (self.place.request, self.computed);
        StepSequence { request, start, tokens, sample: start + tokens == self.length }
    }

    /// Its phase while it waits for blocks.
    fn in_queue(&self) -> Phase {
        if self.after.is_some() && self.pulls == 0 { Phase::Queued } else { Phase::Asking }
    }
}

/// Publishes the full blocks of `sequence` that were computed since the last call.
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
    let parts = blocks.parts().count() as usize;
    for block in sequence.published..full {
        let (hash, text) = (sequence.text.hash(block), &sequence.text);
        let pages = &sequence.pages[block as usize * parts..][..parts];
        if blocks.publish_block(pages, hash, block, || text.block(block)) {
            stored.push(hash);
        }
    }
    sequence.published = full;
    if !stored.is_empty() {
        actions.push(Action::Stored(stored));
    }
}

/// The load of an instance, for the router and the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchLoad {
    /// Number of requests without blocks.
    pub waiting: usize,
    /// Number of requests with blocks.
    pub running: usize,
    /// Blocks by state.
    pub blocks: BlockCounts,
    /// Whether its steps take much more or less than its declared part would take.
    #[serde(default)]
    pub is_degraded: bool,
}

/// Number of sequences by phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Phases {
    /// Prompts that wait to be computed here.
    pub queued: usize,
    /// Sequences that wait for room for KV from elsewhere.
    pub asking: usize,
    /// Sequences that have that room, and wait for the KV.
    pub receiving: usize,
    /// Prompts being computed.
    pub prefilling: usize,
    /// Sequences that decode.
    pub decoding: usize,
    /// Total tokens of the decoding sequences.
    pub decoding_tokens: u64,
    /// Computed prompts whose KV is read by others.
    pub handed_off: usize,
}

/// The instance machine.
#[derive(Debug)]
pub struct Instance<T: Text> {
    limits: BatchLimits,
    /// Predicts its steps; without it no step is sized by an objective.
    cost: Option<Arc<CostModel>>,
    /// Corrects these predictions.
    learner: Learner,
    blocks: BlockPool<T::Block>,
    sequences: IdMap<Sequence<T>>,
    /// All sequences in order, by phase.
    places: Places,
    /// The parties of these sequences.
    parties: Parties,
    /// Blocks that other instances read, by request.
    lent: IdMap<Vec<u32>>,
    /// The step that the device runs.
    in_step: Vec<StepSequence>,
    /// Whether an event or freed blocks came since the queue was last checked.
    news: bool,
}

impl<T: Text> Instance<T> {
    /// Creates an empty instance.
    pub fn new(limits: BatchLimits) -> Self {
        assert!(limits.step_tokens_max > 0 && limits.sequences_max > 0, "an instance that can do nothing");
        assert!(!limits.lower_tiers || limits.page_parts == PageParts::ONE, "tiers keep pages of all layers");
        let BatchLimits { blocks_total, block_tokens, cache_policy, .. } = limits;
        let pages = (blocks_total, limits.page_parts.clone());
        Instance {
            cost: None,
            learner: Learner::default(),
            blocks: BlockPool::divided(pages, block_tokens, cache_policy, &limits.page_devices),
            limits,
            sequences: IdMap::default(),
            places: Places::default(),
            parties: Parties::default(),
            lent: IdMap::default(),
            in_step: Vec::new(),
            news: false,
        }
    }

    /// Adds a cost model, by which prompts are limited to the TBT objectives of other requests.
    #[must_use]
    pub fn predicted_by(mut self, cost: Arc<CostModel>) -> Self {
        self.cost = Some(cost);
        self
    }

    /// Learns what steps take, by which later ones are sized.
    pub fn learn(&mut self, steps: &MeasuredSteps) {
        if let Some(cost) = &self.cost {
            // no correction fades here: an instance that is sized for runs, and is measured
            self.learner.observe_steps(Seconds::ZERO, cost, steps);
        }
    }

    /// Whether to load the KV of `tokens` prompt tokens after `context` tokens, which takes `load` while
    /// other sequences keep running, instead of computing it, which delays every sequence here.
    pub fn loads_rather(&self, cost: &CostModel, context: u32, tokens: u32, load: Seconds) -> bool {
        let piece = tokens.min(self.limits.step_tokens_max);
        let computed = cost.prefill_s(context, tokens) * self.learner.prefill_factor(piece);
        load <= computed * self.sequences.len().max(1) as f64
    }

    /// The load, for the router and the metrics.
    pub fn load(&self) -> BatchLoad {
        let (waiting, running) = (self.sequences.len() - self.holding(), self.holding());
        let is_degraded = !self.learner.is_as_declared();
        BatchLoad { waiting, running, blocks: self.blocks.counts(), is_degraded }
    }

    /// Number of sequences by phase.
    pub fn phases(&self) -> Phases {
        let count = |phase| self.places.of(phase).len();
        let running = || self.places.of(Phase::Running).iter().map(|place| self.sequence(place.request));
        let decoding = || running().filter(|sequence| sequence.pending() == 1);
        Phases {
            queued: count(Phase::Queued) + count(Phase::Loading),
            asking: count(Phase::Asking),
            receiving: count(Phase::Receiving),
            prefilling: count(Phase::Running) - decoding().count(),
            decoding: decoding().count(),
            decoding_tokens: decoding().map(|sequence| u64::from(sequence.length)).sum(),
            handed_off: count(Phase::HandedOff),
        }
    }

    /// The prefixes in its blocks, in order.
    pub fn stored(&self) -> Vec<BlockHash> {
        self.blocks.hashes()
    }

    /// The tokens of a sequence.
    pub fn text(&self, request: RequestId) -> Option<&T> {
        self.sequences.get(request).map(|sequence| &sequence.text)
    }

    /// The tokens of a sequence, for appending drawn tokens.
    pub fn text_mut(&mut self, request: RequestId) -> Option<&mut T> {
        self.sequences.get_mut(request).map(|sequence| &mut sequence.text)
    }

    /// The block table of a sequence, with the pages of all parts of a block next to each other and
    /// [`NO_PAGE`] for pages no longer read; empty if it has none.
    pub fn pages(&self, request: RequestId) -> &[u32] {
        self.sequences.get(request).map_or(&[], |sequence| &sequence.pages)
    }

    /// Handles an event and appends the actions.
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

    /// Prompt rows that `decodes` leave in a step.
    fn prompt_rows(&self, decodes: Decodes, share: Option<StepShare>) -> PromptRows {
        let cost = self.cost.as_ref().map(|cost| (cost, self.learner.corrections()));
        let prompts = [Phase::Running, Phase::Queued].map(|phase| self.places.of(phase));
        let mut prompts = prompts.into_iter().flatten().map(|place| self.sequence(place.request));
        let handed_off =
            if decodes.sequences == 0 && prompts.all(|prompt| prompt.after == Some(After::HandOff)) {
                self.places.of(Phase::Running).len() + self.places.of(Phase::Queued).len()
            } else {
                0
            };
        PromptRows::new(&self.limits, cost, decodes, to_u32(handed_off), share)
    }

    fn sequence(&self, request: RequestId) -> &Sequence<T> {
        self.sequences.get(request).expect("a placed request is known")
    }

    fn sequence_mut(&mut self, request: RequestId) -> &mut Sequence<T> {
        self.sequences.get_mut(request).expect("a placed request is known")
    }

    fn enter(&mut self, request: RequestId, phase: Phase) {
        let sequence = self.sequences.get_mut(request).expect("a placed request is known");
        self.places.of_mut(sequence.phase).remove(&sequence.place);
        self.places.of_mut(phase).insert(sequence.place);
        sequence.phase = phase;
    }

    fn step_done(&mut self, sampled: &[Sampled], actions: &mut Vec<Action<T::Block>>) {
        let mut sampled = sampled.iter().peekable();
        let mut in_step = std::mem::take(&mut self.in_step);
        for StepSequence { request, tokens, start, .. } in in_step.drain(..) {
            let drawn = sampled.next_if(|s| s.request == request);
            // gone with an earlier row of this step
            let Some(sequence) = self.sequences.get_mut(request) else { continue };
            sequence.computed += tokens;
            let decodes = tokens == 1 && start + 1 == sequence.length;
            self.parties.count(sequence.urgency.party, tokens, decodes);
            if sequence.cancelled {
                self.drop_request(request);
                continue;
            }
            publish(&mut self.blocks, sequence, actions);
            if sequence.pending() > 0 {
                self.give_back(request);
                continue;
            }
            let drawn = drawn.unwrap_or_else(|| panic!("request {request} drew no token"));
            if sequence.after == Some(After::HandOff) {
                self.enter(request, Phase::HandedOff);
            } else if drawn.finished {
                self.drop_request(request);
            } else {
                sequence.length += 1;
                self.give_back(request);
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
        if let Some(Sequence { phase, place, urgency, .. }) = self.sequences.remove(request) {
            self.places.of_mut(phase).remove(&place);
            self.parties.leave(urgency.party);
        }
    }

    /// Releases deepest blocks first, since a prefix is worth more than its continuation.
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
            // This precedes `Run`, since the blocks get new content in that step.
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
        // decoding requests that need a block first, in their order
        let (mut short, mut ahead) = (Vec::new(), false);
        for place in self.places.of(Phase::Running) {
            let sequence = self.sequence(place.request);
            match sequence.pending() {
                0 => {}
                1 => {
                    step.sequences.push(sequence.part(1));
                    ahead |= sequence.text.known_ahead() > 0;
                    if !sequence.has_blocks(&self.limits) {
                        short.push(place.request);
                    }
                }
                _ => prompts.push(place.request),
            }
        }
        let contend = self.parties.contend();
        let share = if contend { self.share_step(&mut step.sequences, &mut prompts) } else { None };
        if contend {
            let is_short = |part: &&StepSequence| !self.sequence(part.request).has_blocks(&self.limits);
            short = step.sequences.iter().filter(is_short).map(|part| part.request).collect();
        }
        let mut budget = self.limits.step_tokens_max;
        if !short.is_empty() || step.sequences.len() > budget as usize {
            // Earlier requests may preempt later ones.
            let mut short = short.into_iter().peekable();
            step.sequences.retain(|part| {
                let is_short = short.next_if_eq(&part.request).is_some();
                let runs = budget > 0
                    && self.decodes(part.request)
                    && (!is_short || self.grow(part.request, evicted, actions));
                budget -= u32::from(runs);
                runs
            });
            if contend {
                // those beyond their share are preempted for others, though they are earlier
                step.sequences.retain(|part| self.decodes(part.request));
            }
        }
        if ahead {
            self.run_ahead(&mut step.sequences, evicted);
        }
        if !prompts.is_empty() {
            self.add_prompts(&mut step, prompts, share);
        }
        step
    }

    /// Adds pieces of `prompts` beside a step's decodes.
    fn add_prompts(&self, step: &mut Step, prompts: Vec<RequestId>, share: Option<StepShare>) {
        let mut decodes = Decodes::default();
        step.sequences.iter().for_each(|part| decodes.add(self.sequence(part.request)));
        let mut rows = self.prompt_rows(decodes, share);
        for request in prompts {
            let sequence = self.sequence(request);
            let pending = sequence.pending();
            // a sequence preempted above has lost its blocks
            if !rows.are_left() || sequence.phase != Phase::Running {
                continue;
            }
            // A sequence that landed incomplete may have one token beyond its blocks, which it decodes next.
            let blocks = to_u32(sequence.pages.len()) / self.limits.page_parts.count();
            let covered = blocks * self.limits.block_tokens - sequence.computed;
            let wanted = pending.min(covered);
            let new_tokens = rows.take(sequence.computed, wanted, wanted == pending);
            if new_tokens > 0 {
                step.sequences.push(sequence.part(new_tokens));
            }
        }
    }

    /// Whether it still runs (an earlier request may have preempted it) and decodes.
    fn decodes(&self, request: RequestId) -> bool {
        let sequence = self.sequence(request);
        sequence.phase == Phase::Running && sequence.pending() == 1
    }

    /// Makes sure that there is a block for the sequence's next token. If none is available, later sequences
    /// are preempted, the last first; if there are none, it waits or is preempted itself.
    fn grow(
        &mut self,
        request: RequestId,
        evicted: &mut Vec<Evicted<T::Block>>,
        actions: &mut Vec<Action<T::Block>>,
    ) -> bool {
        if self.sequence(request).has_blocks(&self.limits) {
            return true;
        }
        loop {
            let sequence = self.sequences.get_mut(request).expect("a placed request is known");
            if self.blocks.extend(&mut sequence.pages, evicted) {
                return true;
            }
            let last = self.last_to_run();
            if last == request && self.others_will_release(request) {
                return false;
            }
            self.preempt(last, actions);
            if last == request {
                return false;
            }
        }
    }

    /// The sequence that is preempted first for one that runs.
    fn last_to_run(&self) -> RequestId {
        if self.parties.contend()
            && let Some(last) = self.last_beyond_share()
        {
            return last;
        }
        let mut last_first = self.places.of(Phase::Running).iter().rev().map(|place| place.request);
        let last = last_first.find(|&request| self.sequence(request).preemptable());
        last.expect("the sequence itself is preemptable")
    }

    /// Whether other sequences will release blocks by themselves.
    fn others_will_release(&self, request: RequestId) -> bool {
        let holding = [Phase::Running, Phase::Loading, Phase::Receiving, Phase::HandedOff];
        let mut others = holding.into_iter().flat_map(|phase| self.places.of(phase));
        others.any(|place| {
            let other = self.sequence(place.request);
            // a loading sequence will run, and can then be preempted
            let releases = other.after == Some(After::HandOff) || other.phase == Phase::Loading;
            place.request != request && releases
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

    /// Revokes the last reservation if nothing can run here and the first waiting request precedes it. True
    /// if there was one.
    fn revoke(&mut self, actions: &mut Vec<Action<T::Block>>) -> bool {
        let first_of = |phase: Phase| self.places.of(phase).first().copied();
        let first = [Phase::Queued, Phase::Asking, Phase::Running].into_iter().filter_map(first_of).min();
        let last = self.places.of(Phase::Receiving).last().copied();
        let (Some(first), Some(last)) = (first, last) else { return false };
        // hand-offs and loads complete on their own
        let ends =
            [Phase::HandedOff, Phase::Loading].into_iter().any(|phase| !self.places.of(phase).is_empty());
        if last < first || ends {
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
mod shares_tests;
#[cfg(test)]
mod steady_tests;
#[cfg(test)]
mod tests;

//! The instance's machine: which sequences run in the next step, which blocks they get, who waits,
//! who is preempted.
//!
//! The instance's worker feeds it events and carries out its actions; `Event::Idle` asks for the next
//! step. A sequence is a list of tokens of which `computed` have their KV in blocks; whatever is
//! missing is computed next, so a prompt, a chunk of it, a single decode token, a recomputed sequence
//! after preemption and a transfer that came incomplete are all the same case.
//!
//! **No deadlock.** Every request has one place in the order, the same on all instances: by when it is due, equal ones by age.
//! Who comes earlier in it wins: the queue is sorted by it, a step's tokens go to the earliest prompts, a decode that finds no block and
//! a request that finds no place beside flexible ones due later preempt the last of them (which keeps its place and recomputes later), and a
//! waiting request may revoke the reservation of a later one when nothing else can run. The first request of the fleet therefore always gets its blocks, provided that each alone fits, which the fleet checks
//! on arrival. Due times are fixed there, and nobody is due before it comes: a request is overtaken only by those who come
//! before it is due itself, so everyone becomes the first.
//! What others pull from here changes none of this: lent blocks are in use until they are read, which waits for nothing here, and nobody
//! who could run waits for them. A sequence that waits for what it pulls is a reservation that may be revoked.

mod admit;
mod blocks;
mod order;
mod refusal;
mod travel;

pub use blocks::{BlockCounts, BlockPool, Evicted};
pub use order::Place;
pub use refusal::Refusal;

use crate::kv::hash::{BlockHash, Chain, PrefixHasher};
use mixfleet_hal::units::Seconds;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Identifies a request; smaller is older.
pub type RequestId = u64;

/// Bounds of one instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchLimits {
    /// KV blocks.
    pub blocks_total: u32,
    /// Tokens in a block.
    pub block_tokens: u32,
    /// New tokens in one step, all sequences together.
    pub step_tokens_max: u32,
    /// Prompt tokens in a step that also decodes: bounds the TBT of those who decode.
    pub prefill_tokens_beside_decode_max: u32,
    /// Sequences that hold blocks at a time.
    pub sequences_max: usize,
    /// Blocks that admission leaves available for those who already decode.
    pub spare_blocks: usize,
    /// What blocks hold that are given up is kept elsewhere: whoever gets blocks asks there for more of his prefix.
    pub lower_tiers: bool,
}

/// What happens to a sequence once its prompt is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// It decodes here.
    Decode,
    /// Its KV goes to another instance; the blocks are kept until `Event::Release`.
    HandOff,
}

/// What the worker tells the machine.
#[derive(Debug)]
pub enum Event {
    /// Compute this sequence.
    Add {
        /// Its id.
        request: RequestId,
        /// Its place in the order, on the fleet's clock.
        due: Seconds,
        /// Nobody reads along: those due earlier may take its place and its blocks.
        gives_way: bool,
        /// Prompt, and what was generated before if it continues.
        tokens: Vec<u32>,
        /// Hashes its blocks, in its tenant's namespace.
        hasher: PrefixHasher,
        /// Leading tokens whose KV another instance can send: what is not here of them is waited for once.
        pulls: u32,
        /// What then.
        after: After,
    },
    /// Make room for a sequence whose KV comes from elsewhere.
    Reserve {
        /// Its id.
        request: RequestId,
        /// Its place in the order, on the fleet's clock.
        due: Seconds,
        /// Nobody reads along: those due earlier may take its place and its blocks.
        gives_way: bool,
        /// Prompt, and what was generated before if it continues.
        tokens: Vec<u32>,
        /// Hashes its blocks, in its tenant's namespace.
        hasher: PrefixHasher,
    },
    /// The KV of the first `tokens_valid` tokens of a sequence that waits for it is in its blocks. Missing ones are
    /// recomputed here.
    Landed {
        /// Its id.
        request: RequestId,
        /// Leading tokens whose KV arrived and was verified.
        tokens_valid: u32,
        /// The token that the other instance drew after the last one, if all went well there.
        next: Option<u32>,
    },
    /// Another instance wants the KV of these tokens, as far as it is here. The blocks are kept until `Event::Unlend`.
    Lend {
        /// For whom: there may be a sequence of the same request here, of which this is independent.
        request: RequestId,
        /// Leading tokens of its prompt.
        tokens: Vec<u32>,
        /// Hashes its blocks, in its tenant's namespace.
        hasher: PrefixHasher,
    },
    /// Lent blocks are no longer read.
    Unlend {
        /// For whom they were.
        request: RequestId,
    },
    /// What came of an `Action::Load`.
    Loaded {
        /// Its id.
        request: RequestId,
        /// Leading blocks of those asked for whose KV is in its pages now. The rest is computed.
        blocks: u32,
    },
    /// The step is done.
    StepDone {
        /// For each sequence whose step had `sample` set.
        sampled: Vec<Sampled>,
    },
    /// A handed-off sequence's blocks are no longer read.
    Release {
        /// Its id.
        request: RequestId,
    },
    /// The client left, or the request goes on elsewhere. Unknown ids are fine.
    Cancel {
        /// Its id.
        request: RequestId,
    },
    /// The device has nothing to do.
    Idle,
}

/// A drawn token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampled {
    /// Whose.
    pub request: RequestId,
    /// Its id.
    pub token: u32,
    /// The answer ends with it.
    pub finished: bool,
}

/// What the worker must do. What `Evicted` names can be read before anything else is done.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Run this; then `Event::StepDone`.
    Run(Step),
    /// Bring these blocks from the lower tiers, as far as they are there; then `Event::Loaded`. Nothing runs beside it: what
    /// comes takes part in the next step, and the next in the queue finds it in the cache.
    Load {
        /// For whom.
        request: RequestId,
        /// Blocks of its prefix before these.
        blocks_cached: u32,
        /// The keys of what follows,
        chain: Vec<BlockHash>,
        /// the tokens,
        tokens: Vec<u32>,
        /// and where they go.
        pages: Vec<u32>,
    },
    /// An added sequence got its blocks.
    Admitted {
        /// Its id.
        request: RequestId,
        /// Leading tokens whose KV was here already.
        tokens_cached: u32,
        /// Its block table.
        pages: Vec<u32>,
    },
    /// A sequence whose KV comes from elsewhere got its blocks: send it from `tokens_cached` on.
    Reserved {
        /// Its id.
        request: RequestId,
        /// Leading tokens whose KV is here already.
        tokens_cached: u32,
        /// Its block table.
        pages: Vec<u32>,
    },
    /// The leading blocks that `Event::Lend` asked for and that are here.
    Lent {
        /// For whom.
        request: RequestId,
        /// Where they lie.
        pages: Vec<u32>,
    },
    /// A reservation was taken back before its KV was complete: the request starts anew.
    Revoked {
        /// Its id.
        request: RequestId,
    },
    /// What was asked for cannot be: nothing of it is here. One that has the same id goes on.
    Refused {
        /// Its id.
        request: RequestId,
        /// Why.
        reason: Refusal,
    },
    /// A sequence lost its blocks and will be recomputed here. For the metrics.
    Preempted {
        /// Its id.
        request: RequestId,
    },
    /// These prefixes are in the cache now.
    Stored(Vec<BlockHash>),
    /// These are not any more.
    Evicted(Vec<Evicted>),
}

/// One forward pass over several sequences.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Those with one new token first, then those with several.
    pub sequences: Vec<StepSequence>,
}

/// A sequence's part in a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepSequence {
    /// Whose.
    pub request: RequestId,
    /// Tokens before the new ones; their KV is in `pages`.
    pub start: u32,
    /// New tokens.
    pub tokens: Vec<u32>,
    /// Block table that covers `start` + `tokens`.
    pub pages: Vec<u32>,
    /// The last new token is the sequence's last: draw the next.
    pub sample: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// In the queue, without blocks.
    Waiting,
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
struct Sequence {
    place: Place,
    gives_way: bool,
    tokens: Vec<u32>,
    computed: u32,
    pages: Vec<u32>,
    /// Keys of the full blocks of `tokens`, as far as needed so far.
    chain: Chain,
    /// Leading blocks that are in the prefix index, or were found to be there already.
    published: usize,
    phase: Phase,
    /// None: its KV comes from elsewhere.
    after: Option<After>,
    /// Leading tokens whose KV is waited for before the rest is computed.
    pulls: u32,
    cancelled: bool,
}

impl Sequence {
    fn pending(&self) -> u32 {
        self.tokens.len() as u32 - self.computed
    }

    /// It can lose its blocks and be computed again here. What goes elsewhere is being read, or soon will be.
    fn preemptable(&self) -> bool {
        self.phase == Phase::Running && self.after == Some(After::Decode)
    }

    /// Extends the chain over the first `blocks` blocks.
    fn hash_blocks(&mut self, blocks: usize) {
        let block_tokens = self.chain.block_tokens() as usize;
        let hashed = self.chain.hashes().len();
        if hashed < blocks {
            self.chain.extend(&self.tokens[hashed * block_tokens..blocks * block_tokens]);
        }
    }
}

/// What the router and the metrics see of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// Requests without blocks yet.
    pub waiting: usize,
    /// Requests with blocks.
    pub running: usize,
    /// The blocks.
    pub blocks: BlockCounts,
}

/// The machine.
#[derive(Debug)]
pub struct Instance {
    limits: BatchLimits,
    blocks: BlockPool,
    sequences: BTreeMap<RequestId, Sequence>,
    waiting: BTreeSet<Place>,
    /// Blocks that others read, by the request for which they do.
    lent: BTreeMap<RequestId, Vec<u32>>,
    /// Sequences of the step that the device runs, with their new tokens.
    in_step: Vec<(RequestId, u32)>,
}

impl Instance {
    /// An empty instance.
    pub fn new(limits: BatchLimits) -> Self {
        assert!(limits.step_tokens_max > 0 && limits.sequences_max > 0, "an instance that can do nothing");
        Instance {
            limits,
            blocks: BlockPool::new(limits.blocks_total, limits.block_tokens),
            sequences: BTreeMap::new(),
            waiting: BTreeSet::new(),
            lent: BTreeMap::new(),
            in_step: Vec::new(),
        }
    }

    /// What the router and the metrics see.
    pub fn load(&self) -> Load {
        let waiting = self.waiting.len();
        Load { waiting, running: self.sequences.len() - waiting, blocks: self.blocks.counts() }
    }

    /// The prefixes that its blocks hold, in order.
    pub fn stored(&self) -> Vec<BlockHash> {
        self.blocks.hashes()
    }

    /// Takes in an event and says what to do.
    pub fn step(&mut self, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Add { request, due, gives_way, tokens, hasher, pulls, after } => {
                let place = Place { due, request };
                self.take_in(place, gives_way, tokens, hasher, (pulls, Some(after)), actions);
            }
            Event::Reserve { request, due, gives_way, tokens, hasher } => {
                self.take_in(Place { due, request }, gives_way, tokens, hasher, (0, None), actions);
            }
            Event::Landed { request, tokens_valid, next } => {
                self.landed(request, tokens_valid, next, actions);
            }
            Event::Loaded { request, blocks } => self.loaded(request, blocks, actions),
            Event::StepDone { sampled } => self.step_done(&sampled, actions),
            Event::Lend { request, tokens, hasher } => self.lend(request, &tokens, hasher, actions),
            Event::Unlend { request } => self.unlend(request),
            Event::Release { request } => self.drop_request(request),
            Event::Cancel { request } => {
                self.unlend(request);
                self.drop_request(request);
            }
            Event::Idle => self.idle(actions),
        }
    }

    fn step_done(&mut self, sampled: &[Sampled], actions: &mut Vec<Action>) {
        for (request, new_tokens) in std::mem::take(&mut self.in_step) {
            let sequence =
                self.sequences.get_mut(&request).expect("a sequence in a step stays until its end");
            sequence.computed += new_tokens;
            if sequence.cancelled {
                self.drop_request(request);
                continue;
            }
            self.publish(request, actions);
            let sequence = self.sequences.get_mut(&request).expect("still there");
            if sequence.pending() > 0 {
                continue;
            }
            let drawn = sampled.iter().find(|s| s.request == request);
            let drawn = drawn.unwrap_or_else(|| panic!("request {request} drew no token"));
            if sequence.after == Some(After::HandOff) {
                sequence.phase = Phase::HandedOff;
            } else if drawn.finished {
                self.drop_request(request);
            } else {
                sequence.tokens.push(drawn.token);
            }
        }
    }

    /// Publishes the full blocks that were computed since the last time.
    fn publish(&mut self, request: RequestId, actions: &mut Vec<Action>) {
        let sequence = self.sequences.get_mut(&request).expect("known");
        let block_tokens = self.limits.block_tokens;
        let full = (sequence.computed / block_tokens) as usize;
        sequence.hash_blocks(full);
        let mut stored = Vec::new();
        let blocks = sequence.tokens.chunks_exact(block_tokens as usize);
        for (at, block) in blocks.enumerate().take(full).skip(sequence.published) {
            let hash = sequence.chain.hashes()[at];
            if self.blocks.publish(sequence.pages[at], hash, block) {
                stored.push(hash);
            }
        }
        sequence.published = full;
        if !stored.is_empty() {
            actions.push(Action::Stored(stored));
        }
    }

    fn drop_request(&mut self, request: RequestId) {
        if let Some(sequence) = self.sequences.get_mut(&request) {
            if self.in_step.iter().any(|(id, _)| *id == request) {
                sequence.cancelled = true;
                return;
            }
            let place = sequence.place;
            self.release_pages(request);
            self.waiting.remove(&place);
            self.sequences.remove(&request);
        }
    }

    /// Deepest blocks first: a prefix is worth more than what follows it.
    fn release_pages(&mut self, request: RequestId) {
        let sequence = self.sequences.get_mut(&request).expect("known");
        for page in std::mem::take(&mut sequence.pages).into_iter().rev() {
            self.blocks.release(page);
        }
    }

    fn idle(&mut self, actions: &mut Vec<Action>) {
        assert!(self.in_step.is_empty(), "idle while a step runs");
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
            self.in_step = step.sequences.iter().map(|s| (s.request, s.tokens.len() as u32)).collect();
            actions.push(Action::Run(step));
        }
    }

    /// Those that run, in their order.
    fn running(&self) -> Vec<RequestId> {
        let running = self.sequences.values().filter(|s| s.phase == Phase::Running);
        let mut places: Vec<Place> = running.map(|s| s.place).collect();
        places.sort_unstable();
        places.into_iter().map(|place| place.request).collect()
    }

    fn form_step(&mut self, evicted: &mut Vec<Evicted>, actions: &mut Vec<Action>) -> Step {
        let mut step = Step::default();
        let mut budget = self.limits.step_tokens_max;
        for request in self.running() {
            if budget == 0 || !self.decodes(request) || !self.grow(request, evicted, actions) {
                continue;
            }
            budget -= 1;
            step.sequences.push(self.part(request, 1));
        }
        if !step.sequences.is_empty() {
            budget = budget.min(self.limits.prefill_tokens_beside_decode_max);
        }
        for request in self.running() {
            let pending = self.sequences[&request].pending();
            if budget == 0 || pending <= 1 {
                continue;
            }
            // A sequence that landed incomplete may have one token beyond its blocks: it decodes next.
            let sequence = &self.sequences[&request];
            let covered = sequence.pages.len() as u32 * self.limits.block_tokens - sequence.computed;
            let new_tokens = pending.min(budget).min(covered);
            budget -= new_tokens;
            step.sequences.push(self.part(request, new_tokens));
        }
        step
    }

    /// Still running (an earlier one may have preempted it) with one token to go.
    fn decodes(&self, request: RequestId) -> bool {
        let sequence = &self.sequences[&request];
        sequence.phase == Phase::Running && sequence.pending() == 1
    }

    /// Makes sure that there is a block for the sequence's next token. If none is to be had, later
    /// sequences are preempted, the last first; if there are none, it waits or is preempted itself.
    fn grow(&mut self, request: RequestId, evicted: &mut Vec<Evicted>, actions: &mut Vec<Action>) -> bool {
        let sequence = &self.sequences[&request];
        if sequence.pages.len() * self.limits.block_tokens as usize >= sequence.tokens.len() {
            return true;
        }
        loop {
            if let Some(page) = self.blocks.allocate(evicted) {
                self.sequences.get_mut(&request).expect("known").pages.push(page);
                return true;
            }
            let places = self.sequences.values().filter(|s| s.preemptable()).map(|s| s.place);
            let last = places.max().expect("the sequence itself is preemptable").request;
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
        let mut others = self.sequences.iter().filter(|(id, _)| **id != request);
        others.any(|(_, s)| s.after == Some(After::HandOff) && s.phase != Phase::Waiting)
    }

    fn preempt(&mut self, request: RequestId, actions: &mut Vec<Action>) {
        self.release_pages(request);
        let sequence = self.sequences.get_mut(&request).expect("known");
        sequence.phase = Phase::Waiting;
        sequence.computed = 0;
        self.waiting.insert(sequence.place);
        actions.push(Action::Preempted { request });
    }

    fn part(&self, request: RequestId, new_tokens: u32) -> StepSequence {
        let sequence = &self.sequences[&request];
        let end = sequence.computed + new_tokens;
        StepSequence {
            request,
            start: sequence.computed,
            tokens: sequence.tokens[sequence.computed as usize..end as usize].to_vec(),
            pages: sequence.pages[..self.blocks.blocks_for(end)].to_vec(),
            sample: end == sequence.tokens.len() as u32,
        }
    }

    /// Nothing can run here: if the first that wants to comes before a reservation, it takes its
    /// blocks. True if there was one.
    fn revoke(&mut self, actions: &mut Vec<Action>) -> bool {
        let sequences = || self.sequences.values();
        let wants = |s: &&Sequence| matches!(s.phase, Phase::Waiting | Phase::Running);
        let Some(first) = sequences().filter(wants).map(|s| s.place).min() else { return false };
        let handing_off = sequences().any(|s| s.phase == Phase::HandedOff);
        let last = sequences().filter(|s| s.phase == Phase::Receiving).map(|s| s.place).max();
        if let Some(last) = last
            && last > first
            && !handing_off
        {
            self.drop_request(last.request);
            actions.push(Action::Revoked { request: last.request });
            return true;
        }
        false
    }
}

#[cfg(test)]
mod refusal_tests;
#[cfg(test)]
mod tests;

//! What one instance does with the requests that it was given: continuous batching with chunked prefill in the order that the
//! scheduler gives, as serving engines do it. It makes no choice of placement.
//!
//! A *plan* is what the instance is at: one step with prompt tokens in it, or a run of decode steps that nothing disturbs. A run
//! is one event, however long; who comes meanwhile cuts it short after the step in progress.

mod alone;
mod hand_off;
mod replica;
mod room;
mod sequence;
mod stage;

use super::results::Reused;
use super::tiers::Tiers;
use super::timeline::Occupation;
use super::{InstanceSetup, Setup};
use mixfleet_scheduler::cost::{CostModel, Prefill};
use mixfleet_scheduler::fleet::{HandOff, Role};
use mixfleet_scheduler::kv::{BlockCache, BlockHash, Tier};
use sequence::Sequence;
use std::collections::VecDeque;
use std::sync::Arc;

/// A prompt to be computed.
#[derive(Clone)]
pub(super) struct Job {
    pub(super) request: u64,
    pub(super) prompt_tokens: u32,
    pub(super) output_tokens: u32,
    pub(super) chain: Vec<BlockHash>,
    /// Tokens of its prefix that come from another instance,
    pub(super) pulled_tokens: u32,
    /// and when they are there.
    pub(super) ready_at_s: f64,
    /// It decodes here too.
    pub(super) stays: bool,
    /// Prompts begin in order of this.
    pub(super) due_s: f64,
    /// Nobody reads along: those due earlier may take its place and its blocks.
    pub(super) gives_way: bool,
}

/// Tokens that came one after the other: `count` gaps from `first_s` to `last_s`, in equal steps between.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Gaps {
    pub(super) count: u32,
    pub(super) first_s: f64,
    pub(super) last_s: f64,
}

/// What the world must know.
pub(super) enum Outcome {
    /// A prompt's computing begins; so much of it was there.
    Began { request: u64, reused: Reused },
    /// A prompt has got so far.
    Progress { request: u64, tokens: u32 },
    /// The first token is there.
    Prefilled { request: u64 },
    /// There is room for a prompt that is to be computed elsewhere; so many tokens of it are here.
    Reserved { request: u64, held_tokens: u32 },
    /// Who had room reserved decodes now.
    Joined { request: u64 },
    /// Each of these got `tokens` tokens.
    Decoded { requests: Vec<u64>, tokens: u32 },
    /// The answer is complete.
    Finished { request: u64, gaps: Vec<Gaps> },
    /// These blocks are held there now.
    Stored(Tier, Vec<BlockHash>),
    /// These are not any more.
    Evicted(Tier, Vec<BlockHash>),
    /// What waits for blocks of a lower tier can go on then.
    Loads { until_s: f64 },
    /// The device worked so long.
    Busy { prefill_s: f64, decode_s: f64 },
}

enum Plan {
    /// One step: so many tokens for each of the first sequences in `prefilling`, some none, and a token for all that decode.
    Mixed { parts: Vec<u32>, decodes: bool, began_s: f64, time_s: f64, decode_s: f64 },
    /// Decode steps.
    Run { began_s: f64, steps: u32 },
}

pub(super) struct Engine {
    pool: u32,
    /// Only computes prompts, as far as the fleet is concerned.
    prefills: bool,
    streamed: bool,
    cost: Arc<CostModel>,
    block_tokens: u32,
    blocks_total: u64,
    step_tokens_max: u32,
    sequences_max: usize,
    cache: BlockCache,
    lower: Tiers,
    /// Given up since the world was told last.
    evicted: Vec<BlockHash>,
    private: u64,
    /// Waiting, in order of when they are due.
    queue: VecDeque<Sequence>,
    /// Who want room for KV that shall come from elsewhere, in order of when they are due,
    reserving: VecDeque<Sequence>,
    /// and who have it.
    receiving: Vec<Sequence>,
    /// Whose KV is computed, and not yet taken in elsewhere.
    sending: Vec<Sequence>,
    /// Whose KV has come from elsewhere, and who wait for blocks here.
    landed: VecDeque<Sequence>,
    prefilling: Vec<Sequence>,
    decoding: Vec<Sequence>,
    /// Tokens of all that decode.
    kv_tokens: u64,
    at: Option<Plan>,
    plans: u64,
}

impl Engine {
    pub(super) fn new(instance: &InstanceSetup, setup: &Setup) -> Self {
        let block_tokens = setup.block_tokens.max(1);
        let blocks_total = instance.cache_tokens / u64::from(block_tokens);
        Engine {
            pool: instance.pool,
            prefills: instance.role == Role::Prefill,
            streamed: setup.fleet.hand_off == HandOff::Streamed,
            cost: instance.cost.clone(),
            block_tokens,
            blocks_total,
            step_tokens_max: instance.step_tokens_max.max(1),
            sequences_max: instance.sequences_max.max(1) as usize,
            cache: BlockCache::new(usize::try_from(blocks_total).unwrap_or(usize::MAX), setup.cache_policy),
            lower: Tiers::new(
                &instance.tiers,
                block_tokens,
                f64::from(block_tokens) * setup.fleet.kv_bytes_per_token as f64,
                setup.cache_policy,
            ),
            evicted: Vec::new(),
            private: 0,
            queue: VecDeque::new(),
            reserving: VecDeque::new(),
            receiving: Vec::new(),
            sending: Vec::new(),
            landed: VecDeque::new(),
            prefilling: Vec::new(),
            decoding: Vec::new(),
            kv_tokens: 0,
            at: None,
            plans: 0,
        }
    }

    pub(super) fn pool(&self) -> u32 {
        self.pool
    }

    /// What it is given is of this role from now on; it goes on with what it has.
    pub(super) fn set_role(&mut self, role: Role) {
        self.prefills = role == Role::Prefill;
    }

    /// Number of the present plan.
    pub(super) fn plan(&self) -> u64 {
        self.plans
    }

    /// What it is at, at a time before the present plan ends.
    pub(super) fn occupation(&self, now_s: f64) -> Occupation {
        let (sequences, block_tokens) = (self.decoding.len() as u32, u64::from(self.block_tokens));
        let (steps, worked_s) = match &self.at {
            None => (0, (0.0, 0.0)),
            Some(Plan::Run { began_s, steps }) => {
                (self.steps_by(now_s - began_s, *steps), (0.0, now_s - began_s))
            }
            Some(Plan::Mixed { began_s, time_s, decode_s, .. }) => {
                let share = (now_s - began_s) / time_s.max(f64::MIN_POSITIVE);
                (1, ((time_s - decode_s) * share, decode_s * share))
            }
        };
        // a run has the blocks of all its steps from the beginning
        let ahead =
            |s: &Sequence| (s.pinned as u64 + s.private).saturating_sub(self.blocks_for(s.context + steps));
        let ahead: u64 = self.decoding.iter().map(ahead).sum();
        let kv_tokens = self.kv_tokens + u64::from(sequences) * u64::from(steps);
        let pinned = self.cache.pinned() as u64;
        Occupation {
            queued: self.queue.len() as u64,
            prefilling: self.prefilling.len() as u64,
            landed: self.landed.len() as u64,
            decoding: u64::from(sequences),
            used_tokens: (pinned + self.private).saturating_sub(ahead) * block_tokens,
            cached_tokens: (self.cache.len() as u64 - pinned) * block_tokens,
            step_s: if sequences == 0 { 0.0 } else { self.cost.decode_step_s(sequences, kv_tokens).0 },
            worked_s,
        }
    }

    /// Puts a prompt in the queue; when what it needs of lower tiers is loaded, if it needs any.
    pub(super) fn enqueue(&mut self, now_s: f64, job: Job) -> Option<f64> {
        let pulled = (job.pulled_tokens / self.block_tokens) as usize;
        let mut sequence = Sequence::new(job);
        let loaded_s = self.stage(now_s, &mut sequence, pulled);
        self.wait(sequence);
        loaded_s
    }

    fn wait(&mut self, sequence: Sequence) {
        let at = self.queue.partition_point(|s| s.place() < sequence.place());
        self.queue.insert(at, sequence);
    }

    /// Gives up a request whose prompt was just computed, here or for here.
    pub(super) fn drop_request(&mut self, request: u64) {
        let of = |s: &Sequence| s.job.request == request;
        if let Some(at) = self.decoding.iter().position(of) {
            let sequence = self.decoding.remove(at);
            self.kv_tokens -= u64::from(sequence.context);
            self.release(sequence);
        } else if let Some(at) = self.receiving.iter().position(of) {
            let sequence = self.receiving.remove(at);
            self.release(sequence);
        } else {
            self.let_go(request);
        }
    }

    /// Begins something if there is something to do; when that ends.
    pub(super) fn turn(&mut self, now_s: f64, outcomes: &mut Vec<Outcome>) -> Option<f64> {
        match self.at {
            Some(Plan::Mixed { .. }) => return self.pause(now_s),
            Some(Plan::Run { began_s, steps }) => {
                let news = !self.landed.is_empty()
                    || !self.reserving.is_empty()
                    || self.queue.front().is_some_and(|s| s.job.ready_at_s <= now_s);
                let done = if news { self.steps_by(now_s - began_s, steps) } else { steps };
                if done == steps {
                    return None;
                }
                self.plans += 1;
                self.at = Some(Plan::Run { began_s, steps: done });
                return Some(began_s + self.run_s(done));
            }
            None => {}
        }
        self.take_landed(outcomes);
        let parts = self.parts(now_s, outcomes);
        let plan = if parts.is_empty() { self.run(now_s)? } else { self.mixed(now_s, parts) };
        self.plans += 1;
        let ends_s = match &plan {
            Plan::Mixed { time_s, .. } => now_s + time_s,
            Plan::Run { steps, .. } => now_s + self.run_s(*steps),
        };
        self.at = Some(plan);
        Some(ends_s)
    }

    /// Time of `steps` steps from now, of those that decode now: each one's context grows by a token a step.
    fn run_s(&self, steps: u32) -> f64 {
        let sequences = self.decoding.len() as u32;
        let step_s = |index: u32| {
            let kv_tokens = self.kv_tokens + u64::from(sequences) * u64::from(index + 1);
            self.cost.decode_step_s(sequences, kv_tokens).0
        };
        // A step's time is a straight line in its KV tokens.
        f64::from(steps) * 0.5 * (step_s(0) + step_s(steps.max(1) - 1))
    }

    /// Steps of a run of `steps` that are done, or in progress, after `elapsed_s`.
    fn steps_by(&self, elapsed_s: f64, steps: u32) -> u32 {
        let (mut less, mut enough) = (0, steps);
        while less + 1 < enough {
            let middle = less + (enough - less) / 2;
            if self.run_s(middle) >= elapsed_s { enough = middle } else { less = middle }
        }
        enough
    }

    fn blocks_for(&self, tokens: u32) -> u64 {
        u64::from(tokens.div_ceil(self.block_tokens))
    }

    /// Blocks that nobody uses.
    fn available(&self) -> u64 {
        self.blocks_total.saturating_sub(self.private + self.cache.pinned() as u64)
    }

    fn holding(&self) -> usize {
        self.prefilling.len() + self.decoding.len() + self.receiving.len() + self.sending.len()
    }

    /// Tokens of each prompt for the next step; lets in who waits while there is room.
    fn parts(&mut self, now_s: f64, outcomes: &mut Vec<Outcome>) -> Vec<u32> {
        if self.alone() {
            if self.prefilling.is_empty() || self.is_overtaken(now_s) {
                self.admit(now_s, outcomes);
            }
            return self.prefilling.iter().take(1).map(Sequence::pending).collect();
        }
        self.let_in(now_s, outcomes);
        self.make_room(1);
        let mut budget = self.step_tokens();
        let mut parts = vec![0; self.prefilling.len()];
        // a prompt's single last token is computed as a token that decodes, and with them
        for single in [true, false] {
            for (part, sequence) in parts.iter_mut().zip(&self.prefilling) {
                if (sequence.pending() == 1) == single {
                    *part = sequence.pending().min(budget);
                    budget -= *part;
                }
            }
        }
        let last = parts.iter().rposition(|&tokens| tokens > 0);
        parts.truncate(last.map_or(0, |last| last + 1));
        parts
    }

    /// Gives blocks to the first in the queue. False if it must wait.
    fn admit(&mut self, now_s: f64, outcomes: &mut Vec<Outcome>) -> bool {
        if !self.next_is_ready(now_s)
            || !self.queue.front().is_some_and(|next| self.has_place_for(next.place()))
        {
            return false;
        }
        let Some(mut next) = self.queue.pop_front() else { return false };
        if let Some(until_s) = self.stage(now_s, &mut next, 0) {
            outcomes.push(Outcome::Loads { until_s });
            self.queue.push_front(next);
            return false;
        }
        let Some(hits) = self.claim(&mut next) else {
            self.queue.push_front(next);
            return false;
        };
        let known = self.known(&next, hits);
        next.context = known as u32 * self.block_tokens;
        self.tell_evicted(outcomes);
        if !next.started && !next.began {
            next.began = true;
            let reused = Reused::new(hits, known, next.loaded);
            outcomes.push(Outcome::Began { request: next.job.request, reused });
        }
        // one that had to wait for room elsewhere goes on before those that came after it
        let at = self.prefilling.partition_point(|s| s.place() < next.place());
        self.prefilling.insert(at, next);
        true
    }

    /// Blocks of a sequence that can be taken from the cache. At least the last token is computed, to draw the next one.
    fn reusable(&self, sequence: &Sequence) -> usize {
        ((sequence.wanted - 1) / self.block_tokens) as usize
    }

    /// Gives a sequence its place and blocks; how many of them the cache held. None if there are not enough even if flexible ones due
    /// later give way.
    fn claim(&mut self, sequence: &mut Sequence) -> Option<usize> {
        let whole = self.blocks_for(sequence.wanted);
        let chain = &sequence.job.chain[..sequence.job.chain.len().min(self.reusable(sequence))];
        let hits = self.cache.pin(chain);
        let Some(losers) = self.who_gives_way(sequence.place(), whole - hits as u64) else {
            self.cache.unpin(&chain[..hits]);
            return None;
        };
        losers.into_iter().for_each(|place| self.give_way(place));
        (sequence.pinned, sequence.private) = (hits, whole - hits as u64);
        self.private += sequence.private;
        self.fit();
        Some(hits)
    }

    /// The cache has what the private blocks leave.
    fn fit(&mut self) {
        let left = self.blocks_total.saturating_sub(self.private);
        self.cache.set_capacity(usize::try_from(left).unwrap_or(usize::MAX), &mut self.evicted);
    }

    fn mixed(&mut self, began_s: f64, parts: Vec<u32>) -> Plan {
        let alone = self.alone();
        let mut pieces = Vec::with_capacity(parts.len());
        let mut single = (0, 0);
        for (sequence, &tokens) in self.prefilling.iter().zip(&parts) {
            let (context, last) = (sequence.context, tokens == sequence.pending());
            if tokens == 0 {
                continue;
            }
            if last && tokens == 1 && !alone {
                single = (single.0 + 1, single.1 + u64::from(context) + 1);
            } else {
                pieces.push(Prefill { context, tokens, last });
            }
        }
        let decodes = self.make_room(1);
        let sequences = if decodes { self.decoding.len() as u32 } else { 0 };
        let kv_tokens = self.kv_tokens + u64::from(sequences);
        let decode_s = self.cost.decode_step_s(sequences, kv_tokens).0;
        let time_s = if alone {
            pieces.iter().map(|piece| self.cost.prefill_s(piece.context, piece.tokens).0).sum()
        } else {
            self.cost.step_s(&pieces, sequences + single.0, kv_tokens + single.1).0
        };
        Plan::Mixed { parts, decodes, began_s, time_s, decode_s: decode_s.min(time_s) }
    }

    fn run(&mut self, now_s: f64) -> Option<Plan> {
        if !self.make_room(1) {
            return None;
        }
        // as many steps as the free blocks allow, should all need one after the other
        let free = self.available() / (self.decoding.len() as u64).max(1);
        let room = u64::from(self.block_tokens).saturating_mul(free).max(1);
        let left = self.decoding.iter().map(|s| s.job.output_tokens - s.generated).min()?;
        let steps = left.min(u32::try_from(room).unwrap_or(u32::MAX)).max(1);
        self.make_room(steps);
        Some(Plan::Run { began_s: now_s, steps })
    }

    /// The plan is carried out.
    pub(super) fn steps_end(&mut self, now_s: f64, outcomes: &mut Vec<Outcome>) {
        match self.at.take() {
            None => {}
            Some(Plan::Run { began_s, steps }) => {
                self.ran(began_s, now_s, steps, outcomes);
                self.give_back_unused();
            }
            Some(Plan::Mixed { parts, decodes, began_s, time_s, decode_s }) => {
                outcomes.push(Outcome::Busy { prefill_s: time_s - decode_s, decode_s });
                if decodes {
                    let gap = Gaps { count: 1, first_s: time_s, last_s: time_s };
                    self.decoded(now_s, began_s, gap, outcomes);
                }
                self.computed(now_s, &parts, outcomes);
            }
        }
        self.fit();
        self.tell_evicted(outcomes);
    }

    /// Decode steps from `began_s` to `ended_s` are done.
    fn ran(&mut self, began_s: f64, ended_s: f64, steps: u32, outcomes: &mut Vec<Outcome>) {
        outcomes.push(Outcome::Busy { prefill_s: 0.0, decode_s: ended_s - began_s });
        let sequences = self.decoding.len() as u32;
        let last = self.kv_tokens + u64::from(sequences) * u64::from(steps);
        let first_s = self.cost.decode_step_s(sequences, self.kv_tokens + u64::from(sequences)).0;
        let last_s = self.cost.decode_step_s(sequences, last).0;
        self.decoded(ended_s, began_s, Gaps { count: steps, first_s, last_s }, outcomes);
    }

    /// Tells of the steps of a run that are done by `now_s`: a serving engine tells of each at once.
    pub(super) fn catch_up(&mut self, now_s: f64, outcomes: &mut Vec<Outcome>) {
        let Some(Plan::Run { began_s, steps }) = self.at else { return };
        let begun = self.steps_by(now_s - began_s, steps);
        let done = if began_s + self.run_s(begun) <= now_s { begun } else { begun.saturating_sub(1) };
        // the end of the last one is an event of its own
        let done = done.min(steps - 1);
        if done == 0 {
            return;
        }
        let ended_s = began_s + self.run_s(done);
        self.ran(began_s, ended_s, done, outcomes);
        self.at = Some(Plan::Run { began_s: ended_s, steps: steps - done });
    }

    /// Everyone who decodes got `gaps.count` tokens, in steps that began at `began_s`.
    fn decoded(&mut self, now_s: f64, began_s: f64, gaps: Gaps, outcomes: &mut Vec<Outcome>) {
        let requests = self.decoding.iter().map(|s| s.job.request).collect();
        outcomes.push(Outcome::Decoded { requests, tokens: gaps.count });
        self.kv_tokens += self.decoding.len() as u64 * u64::from(gaps.count);
        let mut at = 0;
        while at < self.decoding.len() {
            let sequence = &mut self.decoding[at];
            sequence.advance(now_s, began_s, gaps);
            if sequence.generated >= sequence.job.output_tokens {
                let mut sequence = self.decoding.remove(at);
                self.kv_tokens -= u64::from(sequence.context);
                let gaps = std::mem::take(&mut sequence.gaps);
                outcomes.push(Outcome::Finished { request: sequence.job.request, gaps });
                self.release(sequence);
            } else {
                at += 1;
            }
        }
    }

    /// The first prompts got these tokens computed.
    fn computed(&mut self, now_s: f64, parts: &[u32], outcomes: &mut Vec<Outcome>) {
        let mut at = 0;
        for &tokens in parts {
            if tokens == 0 {
                at += 1;
                continue;
            }
            let sequence = &mut self.prefilling[at];
            sequence.context += tokens;
            if sequence.pending() == 0 {
                let sequence = self.prefilling.remove(at);
                self.prompt_done(now_s, sequence, outcomes);
                continue;
            }
            let (request, tokens) = (sequence.job.request, sequence.context);
            outcomes.push(Outcome::Progress { request, tokens });
            let blocks = (tokens / self.block_tokens) as usize;
            if blocks > sequence.pinned {
                let mut sequence = self.prefilling.remove(at);
                self.publish(&mut sequence, blocks, outcomes);
                self.prefilling.insert(at, sequence);
            }
            at += 1;
        }
    }

    fn prompt_done(&mut self, now_s: f64, mut sequence: Sequence, outcomes: &mut Vec<Outcome>) {
        self.publish(&mut sequence, usize::MAX, outcomes);
        let request = sequence.job.request;
        if sequence.started {
            // it had lost its blocks: the next token is drawn now
            let gap = Gaps { count: 1, first_s: 0.0, last_s: 0.0 };
            let context = sequence.context;
            sequence.advance(now_s, now_s, gap);
            sequence.context = context;
            outcomes.push(Outcome::Decoded { requests: vec![request], tokens: 1 });
        } else {
            outcomes.push(Outcome::Prefilled { request });
            (sequence.started, sequence.generated, sequence.last_token_s) = (true, 1, now_s);
        }
        if !sequence.job.stays && !self.streamed {
            self.sending.push(sequence);
        } else if !sequence.job.stays {
            self.release(sequence);
        } else if sequence.generated >= sequence.job.output_tokens {
            let gaps = std::mem::take(&mut sequence.gaps);
            outcomes.push(Outcome::Finished { request, gaps });
            self.release(sequence);
        } else {
            self.kv_tokens += u64::from(sequence.context);
            self.decoding.push(sequence);
        }
    }

    /// The first `blocks` blocks of a prompt are computed: they go from its own into the cache, where others find them.
    fn publish(&mut self, sequence: &mut Sequence, blocks: usize, outcomes: &mut Vec<Outcome>) {
        let blocks = blocks.min(sequence.job.chain.len());
        if blocks == 0 {
            return;
        }
        let whole = sequence.pinned as u64 + sequence.private;
        self.give_back(sequence);
        self.fit();
        let chain = &sequence.job.chain[..blocks];
        let known = self.cache.longest_prefix(chain);
        self.cache.insert(chain, &mut self.evicted);
        sequence.pinned = self.cache.pin(chain);
        sequence.private = whole.saturating_sub(sequence.pinned as u64);
        self.private += sequence.private;
        self.tell_evicted(outcomes);
        // others cannot ask for what it made itself
        let public = sequence.pinned.min(sequence.public);
        if public > known {
            outcomes.push(Outcome::Stored(Tier::Device, sequence.job.chain[known..public].to_vec()));
        }
    }
}

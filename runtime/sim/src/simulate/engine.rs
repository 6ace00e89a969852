//! What one instance does with the requests that it was given: continuous batching with chunked prefill in the order that the
//! scheduler gives, as serving engines do it. It makes no choice of placement.
//!
//! A *plan* is what the instance is at: one step with prompt tokens in it, or a run of decode steps that nothing disturbs. A run
//! is one event, however long; who comes meanwhile cuts it short after the step in progress.

use super::timeline::Occupation;
use super::{InstanceSetup, Setup};
use mixfleet_hal::random::bits;
use mixfleet_scheduler::cost::{CostModel, Prefill};
use mixfleet_scheduler::fleet::Role;
use mixfleet_scheduler::kv::{BlockCache, BlockHash};
use std::collections::VecDeque;
use std::sync::Arc;

/// A prompt to be computed.
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
    /// A prompt's computing begins; so many tokens of it were there.
    Began { request: u64, reused_tokens: u32 },
    /// A prompt has got so far.
    Progress { request: u64, tokens: u32 },
    /// The first token is there.
    Prefilled { request: u64 },
    /// Each of these got `tokens` tokens.
    Decoded { requests: Vec<u64>, tokens: u32 },
    /// The answer is complete.
    Finished { request: u64, gaps: Vec<Gaps> },
    /// These blocks are held now.
    Stored(Vec<BlockHash>),
    /// These are not any more.
    Evicted(Vec<BlockHash>),
    /// The device worked so long.
    Busy { prefill_s: f64, decode_s: f64 },
}

/// A request with blocks here.
struct Sequence {
    job: Job,
    /// Tokens whose KV is here.
    context: u32,
    /// Tokens to have KV before the next one is drawn.
    wanted: u32,
    generated: u32,
    last_token_s: f64,
    gaps: Vec<Gaps>,
    /// Leading blocks of its chain that it holds in the cache.
    pinned: usize,
    /// Other blocks that it holds.
    private: u64,
    /// Its first token came from elsewhere, or is out.
    started: bool,
    /// Keys of its chain that others know too.
    public: usize,
}

/// Keeps the keys of a sequence's own blocks apart from a trace's.
const OWN: u64 = 0x5EED_0F0E_17B1_0C45;

enum Plan {
    /// One step: so many tokens for each of the first sequences in `prefilling`, and a token for all that decode.
    Mixed { parts: Vec<u32>, decodes: bool, began_s: f64, time_s: f64, decode_s: f64 },
    /// Decode steps.
    Run { began_s: f64, steps: u32 },
}

pub(super) struct Engine {
    pool: u32,
    role: Role,
    cost: Arc<CostModel>,
    block_tokens: u32,
    blocks_total: u64,
    step_tokens_max: u32,
    sequences_max: usize,
    cache: BlockCache,
    /// Given up since the world was told last.
    evicted: Vec<BlockHash>,
    private: u64,
    /// Waiting, in order of when they are due; those that lost their blocks first.
    queue: VecDeque<Sequence>,
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
            role: instance.role,
            cost: instance.cost.clone(),
            block_tokens,
            blocks_total,
            step_tokens_max: instance.step_tokens_max.max(1),
            sequences_max: instance.sequences_max.max(1) as usize,
            cache: BlockCache::new(usize::try_from(blocks_total).unwrap_or(usize::MAX), setup.cache_policy),
            evicted: Vec::new(),
            private: 0,
            queue: VecDeque::new(),
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

    pub(super) fn enqueue(&mut self, job: Job) {
        let later = |s: &&Sequence| !s.started && s.job.due_s > job.due_s;
        let place = self.queue.len() - self.queue.iter().rev().take_while(later).count();
        self.queue.insert(place, Sequence::new(job));
    }

    /// A request whose prompt was computed elsewhere, and whose first token is out since `since_s`.
    pub(super) fn join(&mut self, request: u64, prompt_tokens: u32, output_tokens: u32, since_s: f64) {
        let job = Job {
            request,
            prompt_tokens,
            output_tokens,
            chain: Vec::new(),
            pulled_tokens: 0,
            ready_at_s: 0.0,
            stays: true,
            due_s: 0.0,
        };
        let mut sequence = Sequence::new(job);
        (sequence.context, sequence.wanted) = (prompt_tokens, prompt_tokens + 1);
        (sequence.generated, sequence.last_token_s, sequence.started) = (1, since_s, true);
        self.landed.push_back(sequence);
    }

    /// Gives up a request whose prompt was just computed.
    pub(super) fn drop_request(&mut self, request: u64) {
        if let Some(at) = self.decoding.iter().position(|s| s.job.request == request) {
            let sequence = self.decoding.remove(at);
            self.kv_tokens -= u64::from(sequence.context);
            self.release(sequence);
        }
    }

    /// Begins something if there is something to do; when that ends.
    pub(super) fn turn(&mut self, now_s: f64, outcomes: &mut Vec<Outcome>) -> Option<f64> {
        match self.at {
            Some(Plan::Mixed { .. }) => return None,
            Some(Plan::Run { began_s, steps }) => {
                let news =
                    !self.landed.is_empty() || self.queue.front().is_some_and(|s| s.job.ready_at_s <= now_s);
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
        self.take_landed();
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
        self.prefilling.len() + self.decoding.len()
    }

    fn take_landed(&mut self) {
        while let Some(next) = self.landed.front() {
            let blocks = self.blocks_for(next.wanted);
            if self.holding() >= self.sequences_max || blocks > self.available() {
                return;
            }
            let Some(mut next) = self.landed.pop_front() else { return };
            next.private = blocks;
            self.private += blocks;
            self.kv_tokens += u64::from(next.context);
            self.decoding.push(next);
        }
    }

    /// Tokens of each prompt for the next step; takes prompts from the queue while there is room.
    fn parts(&mut self, now_s: f64, outcomes: &mut Vec<Outcome>) -> Vec<u32> {
        // Where nothing decodes there is nobody to disturb: one prompt at a time, in one go.
        if self.role == Role::Prefill {
            if self.prefilling.is_empty() {
                self.admit(now_s, outcomes);
            }
            return self.prefilling.iter().map(Sequence::pending).collect();
        }
        let mut budget = self.step_tokens_max.saturating_sub(self.decoding.len() as u32);
        let mut parts = Vec::new();
        for at in 0.. {
            if budget == 0 || (at == self.prefilling.len() && !self.admit(now_s, outcomes)) {
                break;
            }
            let tokens = self.prefilling[at].pending().min(budget);
            budget -= tokens;
            parts.push(tokens);
        }
        parts
    }

    /// Gives blocks to the first in the queue. False if it must wait.
    fn admit(&mut self, now_s: f64, outcomes: &mut Vec<Outcome>) -> bool {
        let Some(next) = self.queue.front() else { return false };
        if next.job.ready_at_s > now_s || self.holding() >= self.sequences_max {
            return false;
        }
        let tokens = next.wanted;
        let whole = self.blocks_for(tokens);
        // At least the last token is computed, to draw the next one.
        let reusable = ((tokens - 1) / self.block_tokens) as usize;
        let chain = &next.job.chain[..next.job.chain.len().min(reusable)];
        let hits = self.cache.pin(chain);
        let pulled = (next.job.pulled_tokens / self.block_tokens) as usize;
        if whole - hits as u64 > self.available() {
            let chain = chain[..hits].to_vec();
            self.cache.unpin(&chain);
            return false;
        }
        let Some(mut next) = self.queue.pop_front() else { return false };
        let reused =
            if next.started { hits } else { (hits + pulled).min(reusable) } as u32 * self.block_tokens;
        (next.pinned, next.private) = (hits, whole - hits as u64);
        self.private += next.private;
        next.context = reused;
        self.fit();
        self.tell_evicted(outcomes);
        if !next.started {
            outcomes.push(Outcome::Began { request: next.job.request, reused_tokens: reused });
        }
        self.prefilling.push(next);
        true
    }

    /// The cache has what the private blocks leave.
    fn fit(&mut self) {
        let left = self.blocks_total.saturating_sub(self.private);
        self.cache.set_capacity(usize::try_from(left).unwrap_or(usize::MAX), &mut self.evicted);
    }

    /// Says what was given up since the last time.
    fn tell_evicted(&mut self, outcomes: &mut Vec<Outcome>) {
        if !self.evicted.is_empty() {
            outcomes.push(Outcome::Evicted(std::mem::take(&mut self.evicted)));
        }
    }

    fn mixed(&mut self, began_s: f64, parts: Vec<u32>) -> Plan {
        let mut pieces = Vec::with_capacity(parts.len());
        // a prompt's single last token is computed as a token that decodes
        let mut single = (0, 0);
        for (sequence, &tokens) in self.prefilling.iter().zip(&parts) {
            let (context, last) = (sequence.context, tokens == sequence.pending());
            if last && tokens == 1 {
                single = (single.0 + 1, single.1 + u64::from(context) + 1);
            } else {
                pieces.push(Prefill { context, tokens, last });
            }
        }
        let decodes = self.make_room(1);
        let sequences = if decodes { self.decoding.len() as u32 } else { 0 };
        let kv_tokens = self.kv_tokens + u64::from(sequences);
        let decode_s = self.cost.decode_step_s(sequences, kv_tokens).0;
        let time_s = if self.role == Role::Prefill {
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

    /// Blocks for `steps` more tokens of everyone who decodes; who came last gives way. False if nobody is left.
    fn make_room(&mut self, steps: u32) -> bool {
        loop {
            let needs = |s: &Sequence| {
                let blocks = u64::from((s.context + steps).div_ceil(self.block_tokens));
                blocks.saturating_sub(s.pinned as u64 + s.private)
            };
            let needed: u64 = self.decoding.iter().map(needs).sum();
            if self.decoding.is_empty() {
                return false;
            }
            if needed <= self.available() {
                break;
            }
            let Some(last) = self.decoding.pop() else { return false };
            self.kv_tokens -= u64::from(last.context);
            self.preempt(last);
        }
        for sequence in &mut self.decoding {
            let blocks = u64::from((sequence.context + steps).div_ceil(self.block_tokens));
            let more = blocks.saturating_sub(sequence.pinned as u64 + sequence.private);
            sequence.private += more;
            self.private += more;
        }
        true
    }

    /// Takes a sequence's blocks. What they hold stays until somebody needs them: when it comes back it finds what is left.
    fn preempt(&mut self, mut sequence: Sequence) {
        self.give_back(&mut sequence);
        let full = (sequence.context / self.block_tokens) as usize;
        sequence.job.chain.truncate(full);
        for at in sequence.job.chain.len()..full {
            sequence.job.chain.push(BlockHash(bits(sequence.job.request ^ OWN, at as u64)));
        }
        self.fit();
        self.cache.insert(&sequence.job.chain, &mut self.evicted);
        sequence.wanted = sequence.job.prompt_tokens + sequence.generated;
        sequence.context = 0;
        self.queue.push_front(sequence);
    }

    fn give_back(&mut self, sequence: &mut Sequence) {
        self.private -= sequence.private;
        self.cache.unpin(&sequence.job.chain[..sequence.pinned]);
        (sequence.private, sequence.pinned) = (0, 0);
    }

    fn release(&mut self, mut sequence: Sequence) {
        self.give_back(&mut sequence);
    }

    /// The plan is carried out.
    pub(super) fn steps_end(&mut self, now_s: f64, outcomes: &mut Vec<Outcome>) {
        match self.at.take() {
            None => {}
            Some(Plan::Run { began_s, steps }) => self.ran(began_s, now_s, steps, outcomes),
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
        } else {
            outcomes.push(Outcome::Prefilled { request });
            (sequence.started, sequence.generated, sequence.last_token_s) = (true, 1, now_s);
        }
        if !sequence.job.stays {
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
            outcomes.push(Outcome::Stored(sequence.job.chain[known..public].to_vec()));
        }
    }
}

impl Sequence {
    fn new(job: Job) -> Self {
        Sequence {
            wanted: job.prompt_tokens,
            public: job.chain.len(),
            job,
            context: 0,
            generated: 0,
            last_token_s: 0.0,
            gaps: Vec::new(),
            pinned: 0,
            private: 0,
            started: false,
        }
    }

    fn pending(&self) -> u32 {
        self.wanted - self.context
    }

    /// More tokens, in steps from `began_s` to `now_s`; what lay between the last token and them belongs to the first gap.
    fn advance(&mut self, now_s: f64, began_s: f64, gaps: Gaps) {
        let waited_s = (began_s - self.last_token_s).max(0.0);
        if waited_s > 0.0 {
            let first_s = gaps.first_s + waited_s;
            self.gaps.push(Gaps { count: 1, first_s, last_s: first_s });
            if gaps.count > 1 {
                self.gaps.push(Gaps { count: gaps.count - 1, ..gaps });
            }
        } else {
            self.gaps.push(gaps);
        }
        self.generated += gaps.count;
        self.context += gaps.count;
        self.last_token_s = now_s;
    }
}

//! What each instance has to do, and when it will probably be done.
//!
//! A decision looks at every instance, so each keeps its sums up to date as events come; only the few that are left
//! in the end are asked for their forecast, which walks their requests.

use super::lengths::{Histogram, Lengths};
use super::{Instance, InstanceId, RequestId};
use crate::cost::LinkCost;
use crate::table::IdMap;
use mixfleet_hal::random::unit;
use mixfleet_hal::units::Seconds;
use std::collections::{BTreeSet, VecDeque};

/// The requests in the fleet.
pub(super) type Works = IdMap<Work>;

/// A request that has its place.
#[derive(Clone, Debug)]
pub(super) struct Work {
    pub(super) prompt_tokens: u32,
    pub(super) max_tokens: u32,
    /// Assumed length of the answer.
    pub(super) output_tokens: u32,
    /// It is its own, not that of its class.
    pub(super) hinted: bool,
    pub(super) class: u32,
    pub(super) prefill: InstanceId,
    pub(super) decode: InstanceId,
    /// Its place in the order of prompts.
    pub(super) due: Seconds,
    /// Between its tokens.
    pub(super) tbt_slo: Option<Seconds>,
    /// Predicted end of prefill and transfer, made at placement.
    pub(super) ready_at: Seconds,
    pub(super) phase: Phase,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Phase {
    /// `done` prompt tokens have their KV; the rest takes `remaining`.
    Prefill {
        done: u32,
        remaining: Seconds,
    },
    Transfer,
    Decode {
        generated: u32,
    },
}

impl Work {
    pub(super) fn generated(&self) -> u32 {
        match self.phase {
            Phase::Decode { generated } => generated,
            _ => 0,
        }
    }

    /// Tokens whose KV a step reads.
    pub(super) fn context(&self) -> u64 {
        u64::from(self.prompt_tokens) + u64::from(self.generated())
    }

    /// Tokens that it was assumed to hold in the end, when it was placed.
    pub(super) fn whole(&self) -> u64 {
        u64::from(self.prompt_tokens) + u64::from(self.output_tokens)
    }

    /// Tokens still to come, as far as is known. An answer that outlived its hint is taken to be half-way.
    fn rest(&self, lengths: Option<&Histogram>) -> u32 {
        let generated = self.generated();
        let rest = match lengths {
            Some(lengths) => (lengths.rest(generated) + 0.5) as u32,
            None if generated < self.output_tokens => self.output_tokens - generated,
            None => generated,
        };
        rest.min(self.max_tokens.saturating_sub(generated))
    }

    fn decodes_from(&self, now: Seconds) -> Seconds {
        match self.phase {
            Phase::Decode { .. } => now,
            _ => self.ready_at.max(now),
        }
    }
}

/// Sequences that decode together, with the KV that a step reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Batch {
    pub(super) sequences: u32,
    pub(super) kv_tokens: u64,
}

impl Batch {
    pub(super) fn with(self, kv_tokens: u64) -> Batch {
        Batch { sequences: self.sequences + 1, kv_tokens: self.kv_tokens + kv_tokens }
    }

    pub(super) fn without(self, kv_tokens: u64) -> Batch {
        Batch { sequences: self.sequences - 1, kv_tokens: self.kv_tokens - kv_tokens }
    }
}

/// Prefill work that waits or runs on an instance.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Backlog {
    /// Predicted time of all of it, undisturbed.
    pub(super) time: Seconds,
    /// Steps that it takes beside decodes.
    pub(super) chunks: u64,
}

/// An instance that is up, with its work.
#[derive(Clone, Debug)]
pub(super) struct Load {
    pub(super) spec: Instance,
    /// Prompts placed here with the times that they are due, in their order: the first one runs.
    prefilling: VecDeque<(Seconds, RequestId)>,
    /// Of those, with the first one's remaining time as of `moved_at`.
    backlog: Backlog,
    /// Of the first prompt, as of `moved_at`.
    first_remaining: Seconds,
    /// When the first prompt began, or will, or last made progress.
    moved_at: Seconds,
    /// Requests whose tokens come, or will come, from here.
    decoding: BTreeSet<RequestId>,
    /// Those of them that decode now.
    batch: Batch,
    /// The others, with their prompts.
    waiting: Batch,
    /// All of them, each as long as it was assumed to become.
    pub(super) committed: Batch,
    /// Their assumed answers' lengths, each squared.
    answers_squared: f64,
    /// Until when its way out and its way in are taken by transfers that were decided.
    pub(super) egress_until: Seconds,
    pub(super) ingress_until: Seconds,
    /// What loading from its tiers takes, in the order of [`Tier::ALL`](crate::kv::Tier::ALL).
    pub(super) tiers: [LinkCost; 3],
}

impl Load {
    pub(super) fn new(spec: Instance) -> Self {
        Load {
            spec,
            prefilling: VecDeque::new(),
            backlog: Backlog::default(),
            first_remaining: Seconds::ZERO,
            moved_at: Seconds::ZERO,
            decoding: BTreeSet::new(),
            batch: Batch::default(),
            waiting: Batch::default(),
            committed: Batch::default(),
            answers_squared: 0.0,
            egress_until: Seconds::ZERO,
            ingress_until: Seconds::ZERO,
            tiers: [LinkCost::default(); 3],
        }
    }

    /// Its role, cost or bounds change; its work stays.
    pub(super) fn respec(&mut self, spec: Instance, works: &Works) {
        self.spec = spec;
        let left = |id: &RequestId| match works.get(*id) {
            Some(Work { prompt_tokens, phase: Phase::Prefill { done, .. }, .. }) => prompt_tokens - done,
            _ => 0,
        };
        self.backlog.chunks = self.prefilling.iter().map(|(_, id)| self.chunks(left(id))).sum();
    }

    /// Steps beside decodes that `tokens` of prompt take.
    pub(super) fn chunks(&self, tokens: u32) -> u64 {
        u64::from(tokens.div_ceil(self.spec.prefill_tokens_beside_decode_max.max(1)))
    }

    /// A prompt whose rest takes `remaining` joins the queue at `now`.
    pub(super) fn queue(&mut self, request: RequestId, work: &Work, works: &Works, now: Seconds) {
        let Phase::Prefill { done, remaining } = work.phase else { return };
        let place = self.prefilling.len() - self.behind(work.due).count();
        if place == 0 {
            (self.moved_at, self.first_remaining) = (now + self.step_rest(now, works), remaining);
        }
        self.prefilling.insert(place, (work.due, request));
        self.backlog.time += remaining;
        self.backlog.chunks += self.chunks(work.prompt_tokens - done);
    }

    /// Prompts that a newcomer with this due time goes ahead of, the last one first.
    fn behind(&self, due: Seconds) -> impl Iterator<Item = RequestId> {
        self.prefilling.iter().rev().take_while(move |(other, _)| *other > due).map(|&(_, id)| id)
    }

    /// How long the first prompt has run since it last made progress, less than nothing while another one's step is in its way; one that is
    /// overdue is taken to end any moment.
    fn ran(&self, now: Seconds) -> Seconds {
        (now - self.moved_at).min(self.first_remaining)
    }

    /// Until the step in progress ends: whoever goes ahead of the first prompt begins then.
    fn step_rest(&self, now: Seconds, works: &Works) -> Seconds {
        let first = self.prefilling.front().and_then(|(_, id)| works.get(*id));
        let Some(Work { prompt_tokens, phase: Phase::Prefill { done, .. }, .. }) = first else {
            return Seconds::ZERO;
        };
        let steps = self.chunks(prompt_tokens - done).max(1);
        (self.first_remaining * (1.0 / steps as f64) - self.ran(now)).max(Seconds::ZERO)
    }

    /// A queued prompt got further: it was in `before`, now it is in `after`.
    pub(super) fn progress(
        &mut self,
        request: RequestId,
        prompt_tokens: u32,
        before: Phase,
        after: Phase,
        now: Seconds,
    ) {
        let (Phase::Prefill { done, remaining }, Phase::Prefill { done: done_now, remaining: remaining_now }) =
            (before, after)
        else {
            return;
        };
        if !self.prefilling.iter().any(|&(_, id)| id == request) {
            return;
        }
        self.backlog.time += remaining_now - remaining;
        self.backlog.chunks += self.chunks(prompt_tokens - done_now);
        self.backlog.chunks -= self.chunks(prompt_tokens - done);
        if self.prefilling.front().is_some_and(|&(_, id)| id == request) {
            (self.first_remaining, self.moved_at) = (remaining_now, now);
        }
    }

    /// A prompt leaves the queue, done or not; `works` knows those behind it.
    pub(super) fn leave_queue(&mut self, request: RequestId, work: &Work, works: &Works, now: Seconds) {
        let Some(place) = self.prefilling.iter().position(|&(_, id)| id == request) else { return };
        self.prefilling.remove(place);
        if let Phase::Prefill { done, remaining } = work.phase {
            self.backlog.time = (self.backlog.time - remaining).max(Seconds::ZERO);
            self.backlog.chunks -= self.chunks(work.prompt_tokens - done);
        }
        if place == 0 {
            self.moved_at = now;
            let next = self.prefilling.front().and_then(|(_, id)| works.get(*id)).map(|work| work.phase);
            self.first_remaining = match next {
                Some(Phase::Prefill { remaining, .. }) => remaining,
                _ => Seconds::ZERO,
            };
        }
        if self.prefilling.is_empty() {
            // sums of floats do not come back to zero by themselves
            self.backlog = Backlog::default();
        }
    }

    /// A request will decode here.
    pub(super) fn commit(&mut self, request: RequestId, work: &Work) {
        if self.decoding.insert(request) {
            self.committed = self.committed.with(work.whole());
            self.answers_squared += f64::from(work.output_tokens).powi(2);
            self.waiting = self.waiting.with(u64::from(work.prompt_tokens));
        }
    }

    /// A request decodes from now on.
    pub(super) fn join(&mut self, request: RequestId, prompt_tokens: u32) {
        if self.decoding.contains(&request) {
            self.waiting = self.waiting.without(u64::from(prompt_tokens));
            self.batch = self.batch.with(u64::from(prompt_tokens) + 1);
        }
    }

    /// Each of `sequences` decoding requests got `tokens` tokens.
    pub(super) fn grow(&mut self, sequences: u64, tokens: u32) {
        self.batch.kv_tokens += sequences * u64::from(tokens);
    }

    /// A request that was to decode here, or did, is gone.
    pub(super) fn release(&mut self, request: RequestId, work: &Work) {
        if self.decoding.remove(&request) {
            self.committed = self.committed.without(work.whole());
            self.answers_squared -= f64::from(work.output_tokens).powi(2);
            if matches!(work.phase, Phase::Decode { .. }) {
                self.batch = self.batch.without(work.context());
            } else {
                self.waiting = self.waiting.without(u64::from(work.prompt_tokens));
            }
        }
    }

    /// Prefill work ahead of a new arrival that is due then, and prompts behind it.
    pub(super) fn backlog(&self, now: Seconds, due: Seconds, works: &Works) -> (Backlog, u32) {
        let mut ahead = Backlog { time: self.backlog.time - self.ran(now), chunks: self.backlog.chunks };
        let mut behind = 0;
        if self.prefilling.back().is_none_or(|(last, _)| *last <= due) {
            ahead.time = ahead.time.max(Seconds::ZERO);
            return (ahead, behind);
        }
        for work in self.behind(due).filter_map(|id| works.get(id)) {
            if let Phase::Prefill { done, remaining } = work.phase {
                ahead.time = ahead.time - remaining;
                ahead.chunks -= self.chunks(work.prompt_tokens - done);
                behind += 1;
            }
        }
        if self.prefilling.front().is_some_and(|(first, _)| *first > due) {
            return (Backlog { time: self.step_rest(now, works), chunks: 1 }, behind);
        }
        ahead.time = ahead.time.max(Seconds::ZERO);
        (ahead, behind)
    }

    /// Prompts that wait or run here.
    pub(super) fn prompts(&self) -> usize {
        self.prefilling.len()
    }

    fn works<'a>(&'a self, works: &'a Works) -> impl Iterator<Item = (RequestId, &'a Work)> {
        self.decoding.iter().filter_map(|&id| Some((id, works.get(id)?)))
    }

    /// Everyone who decodes here or will, together, with what they have by now.
    pub(super) fn everyone(&self) -> Batch {
        let Batch { sequences, kv_tokens } = self.waiting;
        Batch { sequences: self.batch.sequences + sequences, kv_tokens: self.batch.kv_tokens + kv_tokens }
    }

    /// Tokens of theirs that fall beside a newcomer's `output_tokens`, were all to have as many still to come. None where answers have
    /// become longer than was assumed.
    pub(super) fn tokens_beside(&self, output_tokens: u32) -> Option<u64> {
        let everyone = self.everyone();
        let sequences = u64::from(everyone.sequences);
        let still = self.committed.kv_tokens.checked_sub(everyone.kv_tokens + sequences)?;
        Some((still + sequences).min(sequences * u64::from(output_tokens)))
    }

    /// Whether `tokens` more certainly find room, however long the answers get.
    pub(super) fn has_room(&self, tokens: u64) -> bool {
        let everyone = self.everyone();
        let partial_blocks = u64::from(everyone.sequences + 1) * u64::from(self.spec.kv_block_tokens);
        let held = self.committed.kv_tokens.max(everyone.kv_tokens);
        // as much as [`Forecast::kv_wait`] keeps free, even if nobody had begun to answer
        let spread = (held / 4).max((DEVIATIONS * self.answers_squared.sqrt()) as u64);
        held + spread + partial_blocks + tokens <= self.spec.kv_capacity_tokens
    }

    /// Who decodes here now.
    pub(super) fn batch(&self) -> Batch {
        self.batch
    }

    pub(super) fn step(&self, batch: Batch) -> Seconds {
        self.spec.cost.decode_step_s(batch.sequences, batch.kv_tokens)
    }

    /// What its decoding requests are predicted to do, all at the present step's pace.
    pub(super) fn forecast<'a>(&self, works: &Works, lengths: &'a Lengths, now: Seconds) -> Forecast<'a> {
        // looked up all at once: they lie far apart
        let works: Vec<(RequestId, &Work)> = self.works(works).collect();
        let first = works.first().map_or(0, |(_, work)| u64::from(work.prompt_tokens));
        // Nothing decodes yet: the pace is that of the first sequence alone.
        let pace =
            self.step(if self.batch.sequences == 0 { Batch::default().with(first) } else { self.batch });
        let courses = works.into_iter().map(|(request, work)| {
            let lengths = if work.hinted { None } else { lengths.of(work.class) };
            let (from, remaining) = (work.decodes_from(now), work.rest(lengths));
            let (context, generated) = (work.context(), work.generated());
            // one that is longer than any seen is not going to end soon
            let so_far = |lengths: &Histogram| lengths.beyond(f64::from(generated));
            let lengths = lengths.map(|l| (l, 1.0 / so_far(l))).filter(|(_, scale)| scale.is_finite());
            Course { request, from, context, remaining, generated, lengths }
        });
        let Instance { kv_capacity_tokens: capacity_tokens, kv_block_tokens, .. } = self.spec;
        let block_tokens = u64::from(kv_block_tokens.max(1));
        Forecast { now, pace, capacity_tokens, block_tokens, courses: courses.collect() }
    }
}
/// A request's predicted way through decode.
#[derive(Clone, Copy, Debug)]
struct Course<'a> {
    request: RequestId,
    from: Seconds,
    /// Tokens at `from`.
    context: u64,
    generated: u32,
    /// Tokens still to come.
    remaining: u32,
    /// Where that is from, with one over the weight of the answers that got so far; none: it is told.
    lengths: Option<(&'a Histogram, f64)>,
}

impl Course<'_> {
    /// When it ends, if each has its share of luck: were all to end after their mean lengths, nobody would end soon.
    fn until(&self, pace: Seconds) -> Seconds {
        let so_far = f64::from(self.generated);
        let tokens = self.lengths.map_or(f64::from(self.remaining), |(lengths, _)| {
            lengths.exceeded_by(unit(self.request, 0), so_far) - so_far
        });
        self.from + pace * tokens
    }

    /// Chance that it still decodes after `tokens` more.
    fn goes_on(&self, tokens: f64) -> f64 {
        match self.lengths {
            Some((lengths, scale)) => lengths.beyond(f64::from(self.generated) + tokens) * scale,
            None => f64::from(tokens < f64::from(self.remaining)),
        }
    }
}

/// Whoever finds too much at a decoder is dropped, and whoever finds no room waits with its answer begun, or takes the room of another: a
/// newcomer counts on nothing that is not certain by so many standard deviations. With one, twice the load of docs/results/scheduling.md
/// gives 2 % less and wastes four times as much; with three, 1 % less.
const DEVIATIONS: f64 = 2.0;

/// The near future of an instance that decodes.
#[derive(Clone, Debug)]
pub(super) struct Forecast<'a> {
    now: Seconds,
    /// Per token.
    pace: Seconds,
    capacity_tokens: u64,
    block_tokens: u64,
    courses: Vec<Course<'a>>,
}

impl Forecast<'_> {
    /// Who will probably decode at the later time `then`: without those who will have ended, with
    /// those whose prefill will have; everyone counts by the chance to be there. The load of now would be stale by the time
    /// a new prompt is done, and admission by it oscillates (Mooncake, section 7).
    pub(super) fn batch_at(&self, then: Seconds) -> Batch {
        self.likely(then, 0.0)
    }

    /// The most in the life of a newcomer who decodes from `then` on, for `tokens` tokens: those who were accepted before it may land
    /// after it.
    pub(super) fn peak(&self, then: Seconds, tokens: u32) -> Batch {
        let third = self.pace * (f64::from(tokens) / 3.0);
        let times = (0..4).map(|part| then + third * f64::from(part));
        times
            .map(|time| self.likely(time, DEVIATIONS))
            .max_by_key(|batch| batch.kv_tokens)
            .unwrap_or_default()
    }

    /// Who decodes at `then`: the mean, and so many standard deviations above it.
    fn likely(&self, then: Seconds, deviations: f64) -> Batch {
        let per_second = 1.0 / self.pace.0.max(f64::MIN_POSITIVE);
        let (mut sequences, mut kv_tokens, mut variance) = (0.0, 0.0, 0.0);
        for course in self.courses.iter().filter(|course| course.from <= then) {
            let tokens = (then - course.from).0 * per_second;
            let chance = course.goes_on(tokens);
            let context = course.context as f64 + tokens;
            sequences += chance;
            kv_tokens += chance * context;
            variance += chance * (1.0 - chance) * context * context;
        }
        kv_tokens += deviations * variance.sqrt();
        Batch { sequences: (sequences + 0.5) as u32, kv_tokens: (kv_tokens + 0.5) as u64 }
    }

    /// Tokens of theirs that fall beside a newcomer's `output_tokens`, at most.
    pub(super) fn tokens_beside(&self, output_tokens: u32) -> u64 {
        self.courses.iter().map(|course| u64::from(course.remaining.min(output_tokens))).sum()
    }

    /// Time until enough requests will probably have ended that `tokens` of KV fit beside the rest, each in blocks of its own: with
    /// blocks of 512 tokens and prompts of a thousand the last ones, half empty, take a fifth of the memory.
    pub(super) fn kv_wait(&self, tokens: u64) -> Seconds {
        let limit = self.capacity_tokens as f64 - tokens.next_multiple_of(self.block_tokens) as f64;
        if self.held(self.now) <= limit {
            return Seconds::ZERO;
        }
        let mut ends: Vec<Seconds> = self.courses.iter().map(|course| course.until(self.pace)).collect();
        ends.sort_by(|a, b| a.0.total_cmp(&b.0));
        // falls but for small humps, where some are about to end: which of the ends near by is all the same
        let at = ends.partition_point(|&end| self.held(end) > limit);
        // a request that fits at all fits when all have ended
        ends.get(at).or(ends.last()).map_or(Seconds::ZERO, |&end| end - self.now)
    }

    /// KV tokens that those who are there at `then` will hold in the end: as many as are exceeded once in 44 times.
    fn held(&self, then: Seconds) -> f64 {
        let (mut mean, mut variance) = (0.0, 0.0);
        for course in &self.courses {
            let chance = course.goes_on((then - course.from).0.max(0.0) / self.pace.0.max(f64::MIN_POSITIVE));
            let rest = f64::from(course.remaining);
            let held =
                (course.context + u64::from(course.remaining)).next_multiple_of(self.block_tokens) as f64;
            // the rest of an answer deviates by about as much as it is long on average
            let spread = course.lengths.map_or(0.0, |_| rest * rest);
            mean += chance * held;
            variance += chance * ((1.0 - chance) * held * held + spread);
        }
        mean + DEVIATIONS * variance.sqrt()
    }

    /// Time until the first request ends, if there is any.
    pub(super) fn first_end(&self) -> Option<Seconds> {
        self.courses.iter().map(|course| course.until(self.pace) - self.now).reduce(Seconds::min)
    }
}

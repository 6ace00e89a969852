//! What each instance has to do, and when it will probably be done.
//!
//! A decision looks at every instance, so each keeps its sums up to date as events come; only the few that
//! are left in the end are asked for their forecast ([`super::forecast`]), which walks their requests.

use super::forecast::{DEVIATIONS, Seat};
use super::learn::{Learner, OnItsWay};
use super::{Instance, InstanceId, RequestId};
use crate::batch::{BatchLimits, rows_beside};
use crate::cost::LinkCost;
use crate::table::IdMap;
use mixfleet_hal::units::Seconds;
use std::collections::VecDeque;

/// Memory binds a little from this share of it on, which is promised to requests.
const BINDS_FROM: f64 = 0.5;

/// The requests in the fleet.
pub(super) type Works = IdMap<Work>;

/// A request that has its place.
#[derive(Clone, Debug)]
pub(super) struct Work {
    pub(super) prompt_tokens: u32,
    pub(super) prefill: InstanceId,
    pub(super) decode: InstanceId,
    /// Its place in the order of prompts.
    pub(super) due: Seconds,
    /// Between its tokens.
    pub(super) tbt_slo: Option<Seconds>,
    /// Prompt tokens that its decode instance was thought to lack, and what its own prefill was thought to
    /// take, without any correction.
    pub(super) transfer_tokens: u32,
    pub(super) prefill_time: Seconds,
    /// Another router's: only its prompt is of interest here.
    pub(super) is_others: bool,
    pub(super) phase: Phase,
}

impl Work {
    /// The rest of its prompt takes `factor` times as long as was thought.
    pub(super) fn stretch(&mut self, factor: f64) {
        if let Phase::Prefill { remaining, .. } = &mut self.phase {
            *remaining = *remaining * factor;
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Phase {
    /// `done` prompt tokens have their KV; the rest takes `remaining`.
    Prefill {
        done: u32,
        remaining: Seconds,
    },
    /// What its KV was thought to take on ways that were free.
    Transfer(Option<OnItsWay>),
    Decode,
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
    /// Pieces of it: steps beside decodes, or tokens where the size of those follows from objectives.
    pub(super) chunks: u64,
}

/// An instance's prompts, as far as a newcomer behind all of them needs to know.
#[derive(Clone, Copy, Debug)]
pub(super) struct PromptQueue {
    /// All of it, with what the first one had left at `moved_at`.
    time: Seconds,
    first_remaining: Seconds,
    moved_at: Seconds,
    /// When the last one is due; before all times if there is none.
    pub(super) last_due: Seconds,
}

impl PromptQueue {
    /// How long the first prompt has run since it last made progress, less than nothing while another one's
    /// step is in its way; one that is overdue is taken to end any moment.
    fn ran(&self, now: Seconds) -> Seconds {
        (now - self.moved_at).min(self.first_remaining)
    }

    /// Time that is left of all, below 0 by no more than rounding.
    pub(super) fn left(&self, now: Seconds) -> Seconds {
        self.time - self.ran(now)
    }
}

fn half_step(spec: &Instance) -> Seconds {
    spec.cost.prefill_s(0, spec.step_tokens_max) * 0.5
}

/// How much a memory of `capacity_tokens` binds that `promised` tokens will need.
pub(super) fn binds(promised: f64, capacity_tokens: u64) -> f64 {
    let filled = promised / capacity_tokens.max(1) as f64;
    ((filled - BINDS_FROM) / (1.0 - BINDS_FROM)).clamp(0.0, 1.0)
}

/// The tightest TBT objective of several requests.
#[derive(Clone, Copy, Debug, Default)]
struct Tightest {
    slo: Option<Seconds>,
    /// Those that have it.
    count: usize,
}

impl Tightest {
    fn joined(&mut self, slo: Option<Seconds>) {
        let Some(slo) = slo else { return };
        match self.slo {
            Some(tightest) if slo > tightest => {}
            Some(tightest) if slo == tightest => self.count += 1,
            _ => *self = Tightest { slo: Some(slo), count: 1 },
        }
    }

    /// One has left; `rest` are still there.
    fn left(&mut self, slo: Option<Seconds>, rest: &[Seat]) {
        if slo.is_none() || slo != self.slo {
            return;
        }
        self.count -= 1;
        if self.count == 0 {
            *self = Tightest::default();
            rest.iter().for_each(|seat| self.joined(seat.tbt_slo));
        }
    }
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
    /// Requests whose tokens come, or will come, from here; in order of their ids.
    seats: Vec<Seat>,
    /// Those of them that decode now.
    batch: Batch,
    /// The others, with their prompts.
    waiting: Batch,
    /// All of them, each as long as it was assumed to become.
    pub(super) committed: Batch,
    /// Their assumed answers' lengths, each squared.
    answers_squared: f64,
    /// Of their TBT objectives.
    tightest: Tightest,
    /// Until when its way out and its way in are taken by transfers that were decided.
    pub(super) egress_until: Seconds,
    pub(super) ingress_until: Seconds,
    /// What loading from its tiers takes, in the order of [`Tier::ALL`](crate::kv::Tier::ALL).
    pub(super) tiers: [LinkCost; 3],
    /// Half of a full step of prompts.
    half_step: Seconds,
    /// What its predictions are corrected by.
    pub(super) learner: Learner,
}

impl Load {
    pub(super) fn new(spec: Instance) -> Self {
        Load {
            half_step: half_step(&spec),
            spec,
            prefilling: VecDeque::new(),
            backlog: Backlog::default(),
            first_remaining: Seconds::ZERO,
            moved_at: Seconds::ZERO,
            seats: Vec::new(),
            batch: Batch::default(),
            waiting: Batch::default(),
            committed: Batch::default(),
            answers_squared: 0.0,
            tightest: Tightest::default(),
            egress_until: Seconds::ZERO,
            ingress_until: Seconds::ZERO,
            tiers: [LinkCost::default(); 3],
            learner: Learner::default(),
        }
    }

    /// Its role, cost or bounds change; its work stays.
    pub(super) fn respec(&mut self, spec: Instance, works: &Works) {
        self.half_step = half_step(&spec);
        self.spec = spec;
        let left = |id: &RequestId| match works.get(*id) {
            Some(Work { prompt_tokens, phase: Phase::Prefill { done, .. }, .. }) => prompt_tokens - done,
            _ => 0,
        };
        self.backlog.chunks = self.prefilling.iter().map(|(_, id)| self.chunks(left(id))).sum();
    }

    /// Pieces in which `tokens` of prompt are counted.
    pub(super) fn chunks(&self, tokens: u32) -> u64 {
        u64::from(tokens.div_ceil(self.spec.prefill_tokens_beside_decode_max.unwrap_or(1).max(1)))
    }

    /// Steps that so many pieces take beside those who decode now.
    pub(super) fn steps(&self, chunks: u64) -> u64 {
        let Batch { sequences, kv_tokens } = self.batch;
        if self.spec.prefill_tokens_beside_decode_max.is_some() || sequences == 0 {
            return chunks;
        }
        let step_tokens_max = self.spec.step_tokens_max;
        let rows = self.tightest.slo.map_or(BatchLimits::PREFILL_TOKENS_BESIDE_DECODE_MAX, |slo| {
            let row = self.half_step * (2.0 / f64::from(step_tokens_max.max(1)));
            rows_beside(&self.spec.cost, (step_tokens_max, row), (sequences, kv_tokens), slo)
        });
        chunks.div_ceil(u64::from(rows))
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

    /// Until the step in progress ends: whoever goes ahead of the first prompt begins then.
    fn step_rest(&self, now: Seconds, works: &Works) -> Seconds {
        let first = self.prefilling.front().and_then(|(_, id)| works.get(*id));
        let Some(Work { prompt_tokens, phase: Phase::Prefill { done, .. }, .. }) = first else {
            return Seconds::ZERO;
        };
        let steps = self.steps(self.chunks(prompt_tokens - done)).max(1);
        (self.first_remaining * (1.0 / steps as f64) - self.prompt_queue().ran(now)).max(Seconds::ZERO)
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

    fn seat(&self, request: RequestId) -> Result<usize, usize> {
        // ids rise
        if self.seats.last().is_none_or(|last| last.request < request) {
            return Err(self.seats.len());
        }
        self.seats.binary_search_by_key(&request, |seat| seat.request)
    }

    /// A request will decode here.
    pub(super) fn commit(&mut self, seat: Seat) {
        if let Err(place) = self.seat(seat.request) {
            self.seats.insert(place, seat);
            self.committed = self.committed.with(seat.whole());
            self.answers_squared += f64::from(seat.output_tokens).powi(2);
            self.tightest.joined(seat.tbt_slo);
            self.waiting = self.waiting.with(u64::from(seat.prompt_tokens));
        }
    }

    /// A request decodes from now on, with its first token.
    pub(super) fn join(&mut self, request: RequestId) {
        if let Ok(place) = self.seat(request) {
            let seat = &mut self.seats[place];
            seat.generated = 1;
            self.waiting = self.waiting.without(u64::from(seat.prompt_tokens));
            self.batch = self.batch.with(seat.context());
        }
    }

    /// A request of another router will decode here, or has got `generated` tokens by now.
    pub(super) fn seat_of_others(&mut self, seat: Seat, generated: u32) {
        let request = seat.request;
        self.commit(seat);
        let Ok(place) = self.seat(request) else { return };
        if generated > 0 && !self.seats[place].decodes() {
            self.join(request);
        }
        let more = generated.saturating_sub(self.seats[place].generated);
        if more > 0 {
            self.grow(&[request], more);
        }
    }

    /// Those of `requests` that decode here got `tokens` tokens each.
    pub(super) fn grow(&mut self, requests: &[RequestId], tokens: u32) {
        let mut next = 0;
        for &request in requests {
            // mostly they come in the order of their ids, and all decode
            let is_next = self.seats.get(next).is_some_and(|seat| seat.request == request);
            let Ok(place) = (if is_next { Ok(next) } else { self.seat(request) }) else { continue };
            next = place + 1;
            if self.seats[place].decodes() {
                self.seats[place].generated += tokens;
                self.batch.kv_tokens += u64::from(tokens);
            }
        }
    }

    /// A request that was to decode here, or did, is gone.
    pub(super) fn release(&mut self, request: RequestId) -> Option<Seat> {
        let place = self.seat(request).ok()?;
        let seat = self.seats.remove(place);
        self.committed = self.committed.without(seat.whole());
        self.answers_squared -= f64::from(seat.output_tokens).powi(2);
        self.tightest.left(seat.tbt_slo, &self.seats);
        if seat.decodes() {
            self.batch = self.batch.without(seat.context());
        } else {
            self.waiting = self.waiting.without(u64::from(seat.prompt_tokens));
        }
        Some(seat)
    }

    /// Prefill work ahead of a new arrival that is due then, and prompts behind it.
    pub(super) fn backlog(&self, now: Seconds, due: Seconds, works: &Works) -> (Backlog, u32) {
        let queue = self.prompt_queue();
        let mut behind = 0;
        if queue.last_due <= due {
            return (Backlog { time: queue.left(now).max(Seconds::ZERO), ..self.backlog }, behind);
        }
        let mut ahead = Backlog { time: queue.left(now), ..self.backlog };
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

    /// Prompts that wait or run here, in their order.
    pub(super) fn queued(&self) -> impl Iterator<Item = RequestId> + use<'_> {
        self.prefilling.iter().map(|&(_, id)| id)
    }

    /// Its queue takes `factor` times as long as was thought.
    pub(super) fn stretch_backlog(&mut self, factor: f64) {
        self.backlog.time = self.backlog.time * factor;
        self.first_remaining = self.first_remaining * factor;
    }

    /// Prompts that wait or run here.
    pub(super) fn prompts(&self) -> usize {
        self.prefilling.len()
    }

    /// Its prompts, as one.
    pub(super) fn prompt_queue(&self) -> PromptQueue {
        PromptQueue {
            time: self.backlog.time,
            first_remaining: self.first_remaining,
            moved_at: self.moved_at,
            last_due: self.prefilling.back().map_or(Seconds(f64::NEG_INFINITY), |&(due, _)| due),
        }
    }

    /// The expected time until what is lent from here can leave: until the step ends that runs now.
    pub(super) fn lends_after(&self, now: Seconds) -> Seconds {
        let left = self.prompt_queue().left(now);
        let half_step = self.half_step * self.learner.corrections().prefill;
        if left < half_step { left.max(Seconds::ZERO) } else { half_step }
    }

    /// Those who decode here or will.
    pub(super) fn seats(&self) -> &[Seat] {
        &self.seats
    }

    /// Everyone who decodes here or will, together, with what they have by now.
    pub(super) fn everyone(&self) -> Batch {
        let Batch { sequences, kv_tokens } = self.waiting;
        Batch { sequences: self.batch.sequences + sequences, kv_tokens: self.batch.kv_tokens + kv_tokens }
    }

    /// Tokens of theirs that fall beside a newcomer's `output_tokens`, were all to have as many still to
    /// come. None where answers have become longer than was assumed.
    pub(super) fn tokens_beside(&self, output_tokens: u32) -> Option<u64> {
        let everyone = self.everyone();
        let sequences = u64::from(everyone.sequences);
        let still = self.committed.kv_tokens.checked_sub(everyone.kv_tokens + sequences)?;
        Some((still + sequences).min(sequences * u64::from(output_tokens)))
    }

    /// How much its memory binds with `tokens` more: not at all while it is half empty with all that was
    /// promised, wholly where it is full.
    pub(super) fn memory_binds(&self, tokens: u64) -> f64 {
        let promised = (self.committed.kv_tokens + tokens) as f64;
        binds(promised, self.spec.kv_capacity_tokens)
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
        self.spec.cost.decode_step_s(batch.sequences, batch.kv_tokens) * self.learner.step_factor()
    }
}

//! The work of each instance, and when it will probably be done.
//!
//! A decision considers every instance, so each keeps its sums up to date as events come; forecasts
//! ([`super::forecast`]), which visit all requests of an instance, are only made for the few remaining
//! candidates.

use super::forecast::{DEVIATIONS, Seat};
use super::learn::OnItsWay;
use super::{Instance, InstanceId, PartyId, RequestId};
use crate::batch::rows_beside;
use crate::cost::{Learner, LinkCost, Overhead};
use crate::table::IdMap;
use mixfleet_hal::cast::to_u64;
use mixfleet_hal::units::Seconds;
use std::collections::VecDeque;

/// The share of an instance's memory promised to requests at which it begins to bind.
const BINDS_FROM: f64 = 0.5;

/// The requests in the fleet.
pub(super) type Works = IdMap<Work>;

/// A placed request.
#[derive(Clone, Debug)]
pub(super) struct Work {
    pub(super) prompt_tokens: u32,
    pub(super) prefill: InstanceId,
    pub(super) decode: InstanceId,
    /// Due time of its prompt.
    pub(super) due: Seconds,
    /// Whose share it uses; that of another router's is not known.
    pub(super) party: PartyId,
    /// Its TBT objective.
    pub(super) tbt_slo: Option<Seconds>,
    /// Prompt tokens whose KV its decode instance was predicted to lack, and the predicted time of its
    /// prefill.
    pub(super) transfer_tokens: u32,
    pub(super) prefill_time: Seconds,
    /// When it was placed, and its tokens that were cached, if it is one step for which nothing waits.
    pub(super) alone_since: Option<(Seconds, u32)>,
    /// Whether it belongs to another router, so that only its prompt matters here.
    pub(super) is_others: bool,
    pub(super) phase: Phase,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Phase {
    /// The KV of `done` prompt tokens is computed; the rest takes `remaining`.
    Prefill {
        done: u32,
        remaining: Seconds,
    },
    /// Its KV is being sent; the predicted transfer, if the links were free.
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
    /// Its predicted time, without interruptions.
    pub(super) time: Seconds,
    /// Its number of chunks: steps beside decodes, or tokens if the size of chunks depends on objectives.
    pub(super) chunks: u64,
}

/// A summary of an instance's prompts, for a new request behind all of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct PromptQueue {
    /// Total time, with the first one's remaining time as of `moved_at`.
    time: Seconds,
    first_remaining: Seconds,
    moved_at: Seconds,
    /// Due time of the last one; negative infinity if there is none.
    pub(super) last_due: Seconds,
}

impl PromptQueue {
    /// Time that the first prompt has run since it last progressed, negative while another prompt's step is
    /// in its way; an overdue prompt is assumed to end any moment.
    fn ran(&self, now: Seconds) -> Seconds {
        (now - self.moved_at).min(self.first_remaining)
    }

    /// Remaining time of all, below 0 only by rounding.
    pub(super) fn left(&self, now: Seconds) -> Seconds {
        self.time - self.ran(now)
    }
}

fn half_step(spec: &Instance) -> Seconds {
    spec.cost.prefill_s(0, spec.step_tokens_max) * 0.5
}

/// How much a memory of `capacity_tokens` binds, from 0 to 1, if `promised` tokens will be needed.
pub(super) fn binds(promised: f64, capacity_tokens: u64) -> f64 {
    let filled = promised / capacity_tokens.max(1) as f64;
    ((filled - BINDS_FROM) / (1.0 - BINDS_FROM)).clamp(0.0, 1.0)
}

/// The tightest TBT objective of several requests.
#[derive(Clone, Copy, Debug, Default)]
struct Tightest {
    slo: Option<Seconds>,
    /// Number of requests that have it.
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

    /// Removes a request; `rest` are still there.
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
    /// Prompts placed here with their due times, in their order: the first one runs.
    prefilling: VecDeque<(Seconds, RequestId)>,
    /// Their total work, with the first one's remaining time as of `moved_at`.
    backlog: Backlog,
    /// Remaining time of the first prompt, as of `moved_at`.
    first_remaining: Seconds,
    /// Time at which the first prompt began, or will, or last progressed.
    moved_at: Seconds,
    /// Requests that decode here, or will, in order of their ids.
    seats: Vec<Seat>,
    /// The decoding requests.
    batch: Batch,
    /// The requests that do not decode yet, with their prompts.
    waiting: Batch,
    /// All requests at their assumed final lengths.
    pub(super) committed: Batch,
    /// Sum of the squares of their assumed answers' lengths.
    answers_squared: f64,
    /// Tokens of memory that they will then hold.
    pub(super) promised: u64,
    /// The tightest of their TBT objectives.
    tightest: Tightest,
    /// Times until which the links out and in are reserved for decided transfers.
    pub(super) egress_until: Seconds,
    pub(super) ingress_until: Seconds,
    /// Cost of loading from its tiers, in the order of [`Tier::ALL`](crate::kv::Tier::ALL).
    pub(super) tiers: [LinkCost; 3],
    /// Half of the time of a full step of prompts.
    half_step: Seconds,
    /// The learned corrections of its predictions.
    pub(super) learner: Learner,
    /// What its first tokens take beyond their prediction where nothing is in their way.
    pub(super) overhead: Overhead,
    /// Number of placements in the fleet when it was measured last.
    pub(super) measured_after: u64,
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
            promised: 0,
            tightest: Tightest::default(),
            egress_until: Seconds::ZERO,
            ingress_until: Seconds::ZERO,
            tiers: [LinkCost::default(); 3],
            learner: Learner::default(),
            overhead: Overhead::default(),
            measured_after: 0,
        }
    }

    /// Changes its role, cost or limits; its work stays.
    pub(super) fn respec(&mut self, spec: Instance, works: &Works) {
        self.half_step = half_step(&spec);
        self.spec = spec;
        self.promised = self.seats.iter().map(|seat| self.spec.tokens_held(seat.whole())).sum();
        self.answers_squared = self.seats.iter().map(|seat| self.growth(seat).powi(2)).sum();
        let left = |id: &RequestId| match works.get(*id) {
            Some(Work { prompt_tokens, phase: Phase::Prefill { done, .. }, .. }) => prompt_tokens - done,
            _ => 0,
        };
        self.backlog.chunks = self.prefilling.iter().map(|(_, id)| self.chunks(left(id))).sum();
    }

    /// Number of chunks as which `tokens` of prompt count.
    pub(super) fn chunks(&self, tokens: u32) -> u64 {
        u64::from(tokens.div_ceil(self.spec.prefill_tokens_beside_decode_max.unwrap_or(1).max(1)))
    }

    /// Number of steps for this many chunks beside the current decodes.
    pub(super) fn steps(&self, chunks: u64) -> u64 {
        let Batch { sequences, kv_tokens } = self.batch;
        if self.spec.prefill_tokens_beside_decode_max.is_some() || sequences == 0 {
            return chunks;
        }
        let step_tokens_max = self.spec.step_tokens_max;
        let row = self.half_step * (2.0 / f64::from(step_tokens_max.max(1)));
        let cost = (&*self.spec.cost, self.learner.corrections());
        let rows = rows_beside(cost, (step_tokens_max, row), (sequences, kv_tokens), self.tightest.slo);
        chunks.div_ceil(u64::from(rows))
    }

    /// Number of sequences that stand still while a prompt runs here: none where the rows of prompts are
    /// sized to keep within their TBT objectives.
    pub(super) fn stalled(&self) -> u32 {
        let sized = self.spec.prefill_tokens_beside_decode_max.is_none() && self.tightest.slo.is_some();
        if sized { 0 } else { self.batch.sequences }
    }

    /// Adds a prompt to the queue at `now`, whose rest takes `remaining`.
    pub(super) fn queue(&mut self, request: RequestId, work: &Work, works: &Works, now: Seconds) {
        let Phase::Prefill { done, remaining } = work.phase else { return };
        let place = self.prefilling.len() - self.behind(work.due).count();
        if place == 0 {
            (self.moved_at, self.first_remaining) = (now + self.running_step(now, works), remaining);
        }
        if let Some(stalls) = self.stalls_of(work.prompt_tokens - done, remaining) {
            self.stall(stalls);
        }
        self.prefilling.insert(place, (work.due, request));
        self.backlog.time += remaining;
        self.backlog.chunks += self.chunks(work.prompt_tokens - done);
    }

    /// Prompts that a new request with this due time precedes, the last one first.
    fn behind(&self, due: Seconds) -> impl Iterator<Item = RequestId> {
        self.prefilling.iter().rev().take_while(move |(other, _)| *other > due).map(|&(_, id)| id)
    }

    /// Time until the current step ends, when a request that precedes the first prompt starts.
    pub(super) fn running_step(&self, now: Seconds, works: &Works) -> Seconds {
        let first = self.prefilling.front().and_then(|(_, id)| works.get(*id));
        let Some(Work { prompt_tokens, phase: Phase::Prefill { done, .. }, .. }) = first else {
            return Seconds::ZERO;
        };
        let steps = self.steps(self.chunks(prompt_tokens - done)).max(1);
        (self.first_remaining * (1.0 / steps as f64) - self.prompt_queue().ran(now)).max(Seconds::ZERO)
    }

    /// Updates a queued prompt's progress from `before` to `after`.
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

    /// Removes a prompt from the queue, done or not; `works` has those behind it.
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
            // Sums of floats do not return to exactly zero.
            self.backlog = Backlog::default();
        }
    }

    fn seat(&self, request: RequestId) -> Result<usize, usize> {
        // Ids rise, so most requests are appended.
        if self.seats.last().is_none_or(|last| last.request < request) {
            return Err(self.seats.len());
        }
        self.seats.binary_search_by_key(&request, |seat| seat.request)
    }

    /// Tokens of memory that its assumed answer takes.
    fn growth(&self, seat: &Seat) -> f64 {
        let prompt = self.spec.tokens_held(seat.prompt_tokens.into());
        self.spec.tokens_held(seat.whole()).saturating_sub(prompt) as f64
    }

    /// Adds a request that will decode here.
    pub(super) fn commit(&mut self, seat: Seat) {
        if let Err(place) = self.seat(seat.request) {
            self.seats.insert(place, seat);
            self.committed = self.committed.with(seat.whole());
            self.promised += self.spec.tokens_held(seat.whole());
            self.answers_squared += self.growth(&seat).powi(2);
            self.tightest.joined(seat.tbt_slo);
            self.waiting = self.waiting.with(u64::from(seat.prompt_tokens));
        }
    }

    /// Lets a request decode from now on, with its first token.
    pub(super) fn join(&mut self, request: RequestId) {
        if let Ok(place) = self.seat(request) {
            let seat = &mut self.seats[place];
            seat.generated = 1;
            self.waiting = self.waiting.without(u64::from(seat.prompt_tokens));
            self.batch = self.batch.with(seat.context());
        }
    }

    /// Adds a request of another router that will decode here, or updates its `generated` tokens.
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

    /// Adds `tokens` tokens to each of `requests` that decodes here.
    pub(super) fn grow(&mut self, requests: &[RequestId], tokens: u32) {
        let mut next = 0;
        for &request in requests {
            // They mostly come in order of their ids, and all decode.
            let is_next = self.seats.get(next).is_some_and(|seat| seat.request == request);
            let Ok(place) = (if is_next { Ok(next) } else { self.seat(request) }) else { continue };
            next = place + 1;
            if self.seats[place].decodes() {
                self.seats[place].generated += tokens;
                self.batch.kv_tokens += u64::from(tokens);
            }
        }
    }

    /// Removes a request that was to decode here, or did.
    pub(super) fn release(&mut self, request: RequestId) -> Option<Seat> {
        let place = self.seat(request).ok()?;
        let seat = self.seats.remove(place);
        self.committed = self.committed.without(seat.whole());
        self.promised -= self.spec.tokens_held(seat.whole());
        self.answers_squared -= self.growth(&seat).powi(2);
        self.tightest.left(seat.tbt_slo, &self.seats);
        if seat.decodes() {
            self.batch = self.batch.without(seat.context());
        } else {
            self.waiting = self.waiting.without(u64::from(seat.prompt_tokens));
        }
        Some(seat)
    }

    /// Prefill work ahead of a new request with this due time, and the number of prompts behind it.
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
            return (Backlog { time: self.running_step(now, works), chunks: 1 }, behind);
        }
        ahead.time = ahead.time.max(Seconds::ZERO);
        (ahead, behind)
    }

    /// Prompts that wait or run here, in their order.
    pub(super) fn queued(&self) -> impl Iterator<Item = RequestId> + use<'_> {
        self.prefilling.iter().map(|&(_, id)| id)
    }

    /// Corrects the time of its queue, whose prompts have changed from the first to the second time each.
    pub(super) fn correct_backlog(&mut self, queued: &[(Seconds, Seconds)]) {
        self.backlog.time += queued.iter().map(|&(before, after)| after - before).sum();
        if let Some(&(before, after)) = queued.first().filter(|(before, _)| before.0 > 0.0) {
            self.first_remaining = self.first_remaining * (after / before);
        }
    }

    /// Number of prompts that wait or run here.
    pub(super) fn prompts(&self) -> usize {
        self.prefilling.len()
    }

    /// Whether it has any work.
    pub(super) fn is_busy(&self) -> bool {
        !(self.prefilling.is_empty() && self.seats.is_empty())
    }

    /// A summary of its prompts.
    pub(super) fn prompt_queue(&self) -> PromptQueue {
        PromptQueue {
            time: self.backlog.time,
            first_remaining: self.first_remaining,
            moved_at: self.moved_at,
            last_due: self.prefilling.back().map_or(Seconds(f64::NEG_INFINITY), |&(due, _)| due),
        }
    }

    /// Expected time until a lent prefix can be sent: until the current step ends.
    pub(super) fn lends_after(&self, now: Seconds) -> Seconds {
        let left = self.prompt_queue().left(now);
        let half_step = self.half_step * self.learner.prefill_factor(self.spec.step_tokens_max);
        if left < half_step { left.max(Seconds::ZERO) } else { half_step }
    }

    /// Number of tokens of a request that are generated here.
    pub(super) fn generated(&self, request: RequestId) -> u32 {
        let place = self.seats.binary_search_by_key(&request, |seat| seat.request);
        place.map_or(0, |place| self.seats[place].generated)
    }

    /// Requests that decode here, or will.
    pub(super) fn seats(&self) -> &[Seat] {
        &self.seats
    }

    /// The same, to be changed.
    pub(super) fn seats_mut(&mut self) -> &mut [Seat] {
        &mut self.seats
    }

    /// All requests that decode here, or will, at their current lengths.
    pub(super) fn everyone(&self) -> Batch {
        let Batch { sequences, kv_tokens } = self.waiting;
        Batch { sequences: self.batch.sequences + sequences, kv_tokens: self.batch.kv_tokens + kv_tokens }
    }

    /// Tokens of theirs that are generated beside a new request's `output_tokens`, if all had equally many to
    /// come. None if answers have become longer than assumed.
    pub(super) fn tokens_beside(&self, output_tokens: u32) -> Option<u64> {
        let everyone = self.everyone();
        let sequences = u64::from(everyone.sequences);
        let still = self.committed.kv_tokens.checked_sub(everyone.kv_tokens + sequences)?;
        Some((still + sequences).min(sequences * u64::from(output_tokens)))
    }

    /// How much its memory binds with a sequence of `tokens` more: 0 while at most half of it is promised, 1
    /// when it is full.
    pub(super) fn memory_binds(&self, tokens: u64) -> f64 {
        let promised = (self.promised + self.spec.tokens_held(tokens)) as f64;
        binds(promised, self.spec.kv_capacity_tokens)
    }

    /// Whether `tokens` of one request fit into the empty instance: all tokens in all layers, since a
    /// preempted sequence is admitted again as a whole.
    pub(super) fn fits(&self, tokens: u64) -> bool {
        let block = u64::from(self.spec.kv_block_tokens.max(1));
        tokens.div_ceil(block) * block <= self.spec.kv_capacity_tokens
    }

    /// Whether `tokens` more certainly fit, however long the answers get.
    pub(super) fn has_room(&self, tokens: u64) -> bool {
        let everyone = self.everyone();
        let partial_blocks = u64::from(everyone.sequences + 1) * u64::from(self.spec.kv_block_tokens);
        // at most what answers are longer by than assumed
        let held = self.promised + everyone.kv_tokens.saturating_sub(self.committed.kv_tokens);
        // As much as [`Forecast::kv_wait`] keeps free, even if no answer had begun.
        let spread = (held / 4).max(to_u64(DEVIATIONS * self.answers_squared.sqrt()));
        held + spread + partial_blocks + self.spec.tokens_held(tokens) <= self.spec.kv_capacity_tokens
    }

    /// The requests that decode here now.
    pub(super) fn batch(&self) -> Batch {
        self.batch
    }

    pub(super) fn step(&self, batch: Batch) -> Seconds {
        self.spec.cost.decode_step_s(batch.sequences, batch.kv_tokens)
            * self.learner.step_factor(batch.sequences)
    }
}

//! Predicting which requests will decode on an instance, and when there will be room.

use super::landing::KvLandings;
use super::lengths::{Histogram, Lengths};
use super::load::{Batch, Load};
use super::stalls::Stalls;
use super::{Instance, RequestId};
use crate::cost::KvCopy;
use mixfleet_hal::cast::{to_u32, to_u64};
use mixfleet_hal::random::unit;
use mixfleet_hal::units::Seconds;

/// A request on the instance that generates its tokens, or will.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seat {
    pub(super) request: RequestId,
    /// Predicted end of prefill and transfer, made at placement.
    pub(super) ready_at: Seconds,
    pub(super) prompt_tokens: u32,
    pub(super) max_tokens: u32,
    /// Assumed length of the answer.
    pub(super) output_tokens: u32,
    /// Whether the assumed length is the request's hint, not its class's mean.
    pub(super) hinted: bool,
    pub(super) class: u32,
    /// The request's TBT objective.
    pub(super) tbt_slo: Option<Seconds>,
    /// Number of tokens so far; none until it decodes.
    pub(super) generated: u32,
    /// By prompts that ran beside it, or will.
    pub(super) stalls: Stalls,
    /// Its KV, which lands until it is ready; nothing where its prompt is computed on this instance.
    pub(super) lands: KvCopy,
}

impl Seat {
    pub(super) fn decodes(&self) -> bool {
        self.generated > 0
    }

    /// Number of tokens whose KV a step reads.
    pub(super) fn context(&self) -> u64 {
        u64::from(self.prompt_tokens) + u64::from(self.generated)
    }

    /// The final length that was assumed when it was placed.
    pub(super) fn whole(&self) -> u64 {
        u64::from(self.prompt_tokens) + u64::from(self.output_tokens)
    }

    /// The lengths by which it is predicted, with the weight of the answers that were longer than it is now,
    /// and the expected further tokens. The lengths are none if it has a hint.
    #[inline]
    fn outlook<'a>(&self, lengths: &'a Lengths) -> (Option<(&'a Histogram, f64)>, u32) {
        let generated = self.generated;
        let (known, rest) = match lengths.of(self.class).filter(|_| !self.hinted) {
            Some(lengths) => {
                let (rest, beyond) = lengths.rest_and_beyond(generated);
                (Some((lengths, beyond)), to_u32(rest + 0.5))
            }
            None if generated < self.output_tokens => (None, self.output_tokens - generated),
            // An answer that outlived its hint is assumed to be half-way.
            None => (None, generated),
        };
        (known, rest.min(self.max_tokens.saturating_sub(generated)))
    }

    // It is inlined so that courses are constructed in place, since copying them stalls on the preceding
    // stores.
    #[inline]
    fn course<'a>(&self, lengths: &'a Lengths, now: Seconds) -> Course<'a> {
        let generated = self.generated;
        let (known, remaining) = self.outlook(lengths);
        // An answer longer than any observed one is not going to end soon.
        let lengths = known.map(|(l, beyond)| (l, 1.0 / beyond)).filter(|(_, scale)| scale.is_finite());
        Course {
            request: self.request,
            from: if self.decodes() { now } else { self.ready_at.max(now) },
            context: self.context(),
            generated,
            remaining,
            lengths,
            lands: if self.decodes() { KvCopy::default() } else { self.lands },
        }
    }
}

impl Load {
    /// Tokens of other answers on this instance that are generated beside a new request's `output_tokens`, at
    /// most.
    pub(super) fn tokens_left_beside(&self, lengths: &Lengths, output_tokens: u32) -> u64 {
        self.seats().iter().map(|seat| u64::from(seat.outlook(lengths).1.min(output_tokens))).sum()
    }

    /// The forecast of its decoding requests, all at the current step's pace.
    pub(super) fn forecast<'a>(&'a self, lengths: &'a Lengths, now: Seconds) -> Forecast<'a> {
        let batch = self.batch();
        let first = self.seats().first().map_or(0, |seat| u64::from(seat.prompt_tokens));
        // Nothing decodes yet, so the pace is that of the first sequence alone.
        let pace = self.step(if batch.sequences == 0 { Batch::default().with(first) } else { batch });
        let courses = self.seats().iter().map(|seat| seat.course(lengths, now)).collect();
        Forecast { now, pace, spec: &self.spec, courses }
    }
}

/// The predicted decoding of a request.
#[derive(Clone, Copy, Debug)]
struct Course<'a> {
    request: RequestId,
    from: Seconds,
    /// Its tokens at `from`.
    context: u64,
    generated: u32,
    /// Expected further tokens.
    remaining: u32,
    /// The lengths by which that is predicted, with the reciprocal weight of longer answers; none if it has a
    /// hint.
    lengths: Option<(&'a Histogram, f64)>,
    /// Its KV that is still to land, until `from`.
    lands: KvCopy,
}

impl Course<'_> {
    /// When it ends, if lengths are spread evenly over the requests: if all had their mean length, none would
    /// end soon.
    fn until(&self, pace: Seconds) -> Seconds {
        let so_far = f64::from(self.generated);
        let tokens = self.lengths.map_or(f64::from(self.remaining), |(lengths, _)| {
            lengths.exceeded_by(unit(self.request, 0), so_far) - so_far
        });
        self.from + pace * tokens
    }

    /// What KV of its lands between `first` and `last`.
    fn lands_between(&self, first: Seconds, last: Seconds) -> KvCopy {
        let KvCopy { takes, over } = self.lands;
        let within = self.from.min(last) - (self.from - over).max(first);
        let part = if over.0 > 0.0 { within / over } else { 1.0 };
        if takes.0 > 0.0 && within.0 >= 0.0 {
            KvCopy { takes: takes * part, over: within }
        } else {
            KvCopy::default()
        }
    }

    /// The probability that it still decodes after `tokens` more. Its `max_tokens` does not count: observed
    /// lengths are limited by theirs already, so that counting it again predicts answers that are too short.
    fn goes_on(&self, tokens: f64) -> f64 {
        match self.lengths {
            Some((lengths, scale)) => lengths.beyond(f64::from(self.generated) + tokens) * scale,
            None => f64::from(tokens < f64::from(self.remaining)),
        }
    }
}

/// Safety margin of predictions in standard deviations. A request that finds its decoder too busy is dropped,
/// and one that finds no room waits with its answer started, or displaces another one. With a margin of one,
/// twice the load of docs/results/scheduling.md gives 2 % less and wastes four times as much; with three, 1 %
/// less.
pub(super) const DEVIATIONS: f64 = 2.0;

/// The requests that will probably decode at a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Likely {
    then: Seconds,
    sequences: f64,
    kv_tokens: f64,
    /// Variances of their number and of their tokens.
    variance: [f64; 2],
    /// Number and tokens of all requests that will have begun, including those that will have ended.
    most: [f64; 2],
}

impl Likely {
    /// The mean, plus this many standard deviations: the longer requests run, the more tokens they have.
    pub(super) fn batch(&self, deviations: f64) -> Batch {
        let [more_sequences, more_tokens] = self.variance.map(|variance| deviations * variance.sqrt());
        let sequences = (self.sequences + more_sequences).min(self.most[0]);
        let kv_tokens = (self.kv_tokens + more_tokens).min(self.most[1]);
        Batch { sequences: to_u32(sequences + 0.5), kv_tokens: to_u64(kv_tokens + 0.5) }
    }
}

/// The near future of an instance that decodes.
#[derive(Clone, Debug)]
pub(super) struct Forecast<'a> {
    now: Seconds,
    /// Time per token.
    pace: Seconds,
    spec: &'a Instance,
    courses: Vec<Course<'a>>,
}

impl Forecast<'_> {
    /// The requests that will probably decode at the later time `then`: without those that will have ended,
    /// with those whose prefill will be done, each weighted by its probability. The current load would be
    /// outdated by the time a new prompt is computed, and admission by it oscillates (Mooncake, section 7).
    pub(super) fn likely(&self, then: Seconds) -> Likely {
        let per_second = 1.0 / self.pace.0.max(f64::MIN_POSITIVE);
        let mut likely = Likely { then, sequences: 0.0, kv_tokens: 0.0, variance: [0.0; 2], most: [0.0; 2] };
        for course in self.courses.iter().filter(|course| course.from <= then) {
            let tokens = (then - course.from).0 * per_second;
            let chance = course.goes_on(tokens);
            let context = course.context as f64 + tokens;
            likely.sequences += chance;
            likely.kv_tokens += chance * context;
            let variance = chance * (1.0 - chance);
            likely.most[0] += 1.0;
            likely.most[1] += context;
            likely.variance[0] += variance;
            likely.variance[1] += variance * context * context;
        }
        likely
    }

    /// The largest batch while a new request decodes from `first` on, for `tokens` tokens: requests that were
    /// accepted before it may land after it.
    pub(super) fn peak(&self, first: Likely, tokens: u32) -> Batch {
        let third = self.pace * (f64::from(tokens) / 3.0);
        let later = (1..4).map(|part| self.likely(first.then + third * f64::from(part)));
        let all = std::iter::once(first).chain(later);
        let larger = |a: Batch, b: Batch| Batch {
            sequences: a.sequences.max(b.sequences),
            kv_tokens: a.kv_tokens.max(b.kv_tokens),
        };
        all.map(|likely| likely.batch(DEVIATIONS)).reduce(larger).unwrap_or_default()
    }

    /// What the KV takes that lands from `first` on, for `time`, of requests that were accepted before.
    pub(super) fn landing(&self, first: Likely, time: Seconds) -> KvLandings {
        let (first, last) = (first.then, first.then + time);
        self.courses.iter().map(|course| course.lands_between(first, last)).collect()
    }

    /// Time until enough requests will probably have ended that a sequence of `tokens` fits beside the rest.
    /// Each request needs whole blocks: with blocks of 512 tokens and prompts of a thousand, the last,
    /// half-empty ones take a fifth of the memory.
    pub(super) fn kv_wait(&self, tokens: u64) -> Seconds {
        let limit = self.spec.kv_capacity_tokens as f64 - self.spec.block_tokens_held(tokens) as f64;
        if self.held(self.now) <= limit {
            return Seconds::ZERO;
        }
        let mut ends: Vec<Seconds> = self.courses.iter().map(|course| course.until(self.pace)).collect();
        ends.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        // The total falls except for small humps, where some are about to end; which of the near ends is
        // found does not matter.
        let at = ends.partition_point(|&end| self.held(end) > limit);
        // A request that fits at all fits when all have ended.
        ends.get(at).or(ends.last()).map_or(Seconds::ZERO, |&end| end - self.now)
    }

    /// Tokens of memory that the requests present at `then` will finally hold, exceeded with a probability of
    /// one in 44.
    fn held(&self, then: Seconds) -> f64 {
        let (mut mean, mut variance) = (0.0, 0.0);
        for course in &self.courses {
            let chance = course.goes_on((then - course.from).0.max(0.0) / self.pace.0.max(f64::MIN_POSITIVE));
            let whole = course.context + u64::from(course.remaining);
            let held = self.spec.block_tokens_held(whole) as f64;
            let rest =
                self.spec.tokens_held(whole).saturating_sub(self.spec.tokens_held(course.context)) as f64;
            // The standard deviation of an answer's rest is about its mean.
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

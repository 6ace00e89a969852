//! Who will probably decode on an instance, and when there will be room.

use super::lengths::{Histogram, Lengths};
use super::load::{Batch, Load};
use super::{Instance, RequestId};
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
    /// It is its own, not that of its class.
    pub(super) hinted: bool,
    pub(super) class: u32,
    /// Objective for the time between its tokens.
    pub(super) tbt_slo: Option<Seconds>,
    /// Tokens so far; none until it decodes.
    pub(super) generated: u32,
}

impl Seat {
    pub(super) fn decodes(&self) -> bool {
        self.generated > 0
    }

    /// Tokens whose KV a step reads.
    pub(super) fn context(&self) -> u64 {
        u64::from(self.prompt_tokens) + u64::from(self.generated)
    }

    /// Tokens that it was assumed to hold in the end, when it was placed.
    pub(super) fn whole(&self) -> u64 {
        u64::from(self.prompt_tokens) + u64::from(self.output_tokens)
    }

    /// The lengths that it goes by, with the weight of the answers that got so far, and the tokens still to
    /// come. None: it is told.
    #[inline]
    fn outlook<'a>(&self, lengths: &'a Lengths) -> (Option<(&'a Histogram, f64)>, u32) {
        let generated = self.generated;
        let (known, rest) = match lengths.of(self.class).filter(|_| !self.hinted) {
            Some(lengths) => {
                let (rest, beyond) = lengths.rest_and_beyond(generated);
                (Some((lengths, beyond)), (rest + 0.5) as u32)
            }
            None if generated < self.output_tokens => (None, self.output_tokens - generated),
            // an answer that outlived its hint is taken to be half-way
            None => (None, generated),
        };
        (known, rest.min(self.max_tokens.saturating_sub(generated)))
    }

    // inlined, so that courses are written where they stay: copies of what was just written wait for it
    #[inline]
    fn course<'a>(&self, lengths: &'a Lengths, now: Seconds) -> Course<'a> {
        let generated = self.generated;
        let (known, remaining) = self.outlook(lengths);
        // one that is longer than any seen is not going to end soon
        let lengths = known.map(|(l, beyond)| (l, 1.0 / beyond)).filter(|(_, scale)| scale.is_finite());
        Course {
            request: self.request,
            from: if self.decodes() { now } else { self.ready_at.max(now) },
            context: self.context(),
            generated,
            remaining,
            lengths,
        }
    }
}

impl Load {
    /// Tokens of those who decode here, or will, that fall beside a newcomer's `output_tokens`, at most.
    pub(super) fn tokens_left_beside(&self, lengths: &Lengths, output_tokens: u32) -> u64 {
        self.seats().iter().map(|seat| u64::from(seat.outlook(lengths).1.min(output_tokens))).sum()
    }

    /// What its decoding requests are predicted to do, all at the present step's pace.
    pub(super) fn forecast<'a>(&self, lengths: &'a Lengths, now: Seconds) -> Forecast<'a> {
        let batch = self.batch();
        let first = self.seats().first().map_or(0, |seat| u64::from(seat.prompt_tokens));
        // Nothing decodes yet: the pace is that of the first sequence alone.
        let pace = self.step(if batch.sequences == 0 { Batch::default().with(first) } else { batch });
        let courses = self.seats().iter().map(|seat| seat.course(lengths, now)).collect();
        let Instance { kv_capacity_tokens: capacity_tokens, kv_block_tokens, .. } = self.spec;
        let block_tokens = u64::from(kv_block_tokens.max(1));
        Forecast { now, pace, capacity_tokens, block_tokens, courses }
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
    /// When it ends, if each has its share of luck: were all to end after their mean lengths, nobody would
    /// end soon.
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

/// Whoever finds too much at a decoder is dropped, and whoever finds no room waits with its answer begun, or
/// takes the room of another: a newcomer counts on nothing that is not certain by so many standard
/// deviations. With one, twice the load of docs/results/scheduling.md gives 2 % less and wastes four times as
/// much; with three, 1 % less.
pub(super) const DEVIATIONS: f64 = 2.0;

/// Who will probably decode at a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Likely {
    then: Seconds,
    sequences: f64,
    kv_tokens: f64,
    /// Of the tokens.
    variance: f64,
}

impl Likely {
    /// The mean, and so many standard deviations above it.
    pub(super) fn batch(&self, deviations: f64) -> Batch {
        let kv_tokens = self.kv_tokens + deviations * self.variance.sqrt();
        Batch { sequences: (self.sequences + 0.5) as u32, kv_tokens: (kv_tokens + 0.5) as u64 }
    }
}

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
    /// Who will probably decode at the later time `then`: without those who will have ended, with those whose
    /// prefill will have; everyone counts by the chance to be there. The load of now would be stale by the
    /// time a new prompt is done, and admission by it oscillates (Mooncake, section 7).
    pub(super) fn likely(&self, then: Seconds) -> Likely {
        let per_second = 1.0 / self.pace.0.max(f64::MIN_POSITIVE);
        let mut likely = Likely { then, sequences: 0.0, kv_tokens: 0.0, variance: 0.0 };
        for course in self.courses.iter().filter(|course| course.from <= then) {
            let tokens = (then - course.from).0 * per_second;
            let chance = course.goes_on(tokens);
            let context = course.context as f64 + tokens;
            likely.sequences += chance;
            likely.kv_tokens += chance * context;
            likely.variance += chance * (1.0 - chance) * context * context;
        }
        likely
    }

    /// The most in the life of a newcomer who decodes from `first` on, for `tokens` tokens: those who were
    /// accepted before it may land after it.
    pub(super) fn peak(&self, first: Likely, tokens: u32) -> Batch {
        let third = self.pace * (f64::from(tokens) / 3.0);
        let later = (1..4).map(|part| self.likely(first.then + third * f64::from(part)));
        let all = std::iter::once(first).chain(later);
        all.map(|likely| likely.batch(DEVIATIONS)).max_by_key(|batch| batch.kv_tokens).unwrap_or_default()
    }

    /// Time until enough requests will probably have ended that `tokens` of KV fit beside the rest, each in
    /// blocks of its own: with blocks of 512 tokens and prompts of a thousand the last ones, half empty, take
    /// a fifth of the memory.
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

    /// KV tokens that those who are there at `then` will hold in the end: as many as are exceeded once in 44
    /// times.
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

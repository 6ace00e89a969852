//! The lengths of answers, learned from completed ones.
//!
//! Each class of requests has a histogram over logarithmic buckets (8 per octave) of the lengths of its last
//! thousand or two answers. It gives the expected rest of an answer of a given length, and the probability
//! that it is still being generated a number of tokens later. One uniform decode time for all (Mooncake v3,
//! section 7.4, assumes one t_d) would give neither.

use mixfleet_hal::cast::{to_u32, to_usize};

/// Eight buckets per octave: a bucket is at most an eighth wide.
const PER_OCTAVE_LOG2: u32 = 3;
const BUCKETS: usize = 31 << PER_OCTAVE_LOG2;
/// The number of answers as which the initial assumption counts.
const ASSUMED: f64 = 16.0;
/// The number of answers at which all weights are halved, so that recent ones count most.
const HALVED_AT: f64 = 2048.0;

/// Lengths of answers by class.
#[derive(Clone, Debug)]
pub(super) struct Lengths {
    assumed_tokens: u32,
    /// Histograms in order of the class's number.
    classes: Vec<(u32, Histogram)>,
}

impl Lengths {
    /// Assumes exponentially distributed lengths of this mean for every class until answers were observed.
    pub(super) fn new(assumed_tokens: u32) -> Self {
        Lengths { assumed_tokens, classes: Vec::new() }
    }

    /// Adds the length of a complete answer of `class`.
    pub(super) fn observe(&mut self, class: u32, tokens: u32) {
        let at = match self.classes.binary_search_by_key(&class, |&(class, _)| class) {
            Ok(at) => at,
            Err(at) => {
                self.classes.insert(at, (class, Histogram::assumed(self.assumed_tokens)));
                at
            }
        };
        self.classes[at].1.observe(tokens);
    }

    /// The lengths of `class`; none before its first answer ended.
    pub(super) fn of(&self, class: u32) -> Option<&Histogram> {
        let at = self.classes.binary_search_by_key(&class, |&(class, _)| class).ok()?;
        Some(&self.classes[at].1)
    }

    /// Mean length of an answer of `class`, in tokens.
    pub(super) fn mean(&self, class: u32) -> u32 {
        self.of(class).map_or(self.assumed_tokens, |histogram| to_u32(histogram.rest(0).round().max(1.0)))
    }
}

/// Lengths of one class, as the weight beyond each bucket's lower end.
#[derive(Clone, Debug)]
pub(super) struct Histogram(Box<[Knot]>);

/// The lower end of a bucket.
#[derive(Clone, Copy, Debug)]
struct Knot {
    tokens: f64,
    /// Weight of the answers in this bucket and above.
    beyond: f64,
    /// The decrease of that weight per token, up to the next knot.
    falls: f64,
    /// The total tokens of these answers.
    tokens_beyond: f64,
}

impl Histogram {
    fn assumed(mean_tokens: u32) -> Self {
        let mean = f64::from(mean_tokens.max(1));
        let knot = |bucket: usize| {
            let (tokens, next) = (lower(bucket), lower(bucket + 1));
            let [beyond, above] = [tokens, next].map(|tokens| ASSUMED * (-tokens / mean).exp());
            // A memoryless length that exceeds x is x + mean on average.
            let tokens_beyond = beyond * (tokens + mean);
            Knot { tokens, beyond, falls: (beyond - above) / (next - tokens), tokens_beyond }
        };
        Histogram((0..BUCKETS).map(knot).collect())
    }

    fn observe(&mut self, tokens: u32) {
        if self.0[0].beyond >= HALVED_AT {
            for knot in &mut self.0 {
                (knot.beyond, knot.falls) = (0.5 * knot.beyond, 0.5 * knot.falls);
                knot.tokens_beyond *= 0.5;
            }
        }
        let bucket = bucket(tokens);
        for knot in &mut self.0[..=bucket] {
            knot.beyond += 1.0;
            knot.tokens_beyond += f64::from(tokens);
        }
        self.0[bucket].falls += 1.0 / (lower(bucket + 1) - lower(bucket));
    }

    /// Weight of the answers longer than `tokens`, interpolated linearly within the bucket.
    pub(super) fn beyond(&self, tokens: f64) -> f64 {
        self.0[bucket_at(tokens)].beyond_at(tokens)
    }

    /// The length that a `share` of the answers longer than `tokens` exceed.
    pub(super) fn exceeded_by(&self, share: f64, tokens: f64) -> f64 {
        let weight = share * self.beyond(tokens);
        let bucket = self.0.partition_point(|knot| knot.beyond > weight).max(1) - 1;
        let knot = self.0[bucket];
        let more = if knot.falls > 0.0 { (knot.beyond - weight) / knot.falls } else { 0.0 };
        (knot.tokens + more).clamp(tokens, lower(bucket + 1).max(tokens))
    }

    /// Expected further tokens of an answer that has `generated` tokens: at least one, and `generated` more
    /// if no observed answer was so long.
    pub(super) fn rest(&self, generated: u32) -> f64 {
        self.rest_and_beyond(generated).0
    }

    /// [`Histogram::rest`] and [`Histogram::beyond`] of the same length, with one look-up.
    pub(super) fn rest_and_beyond(&self, generated: u32) -> (f64, f64) {
        let tokens = f64::from(generated);
        let knot = &self.0[bucket_at(tokens)];
        let mean = knot.tokens_beyond / knot.beyond;
        let rest = if mean.is_finite() && mean > tokens { (mean - tokens).max(1.0) } else { tokens.max(1.0) };
        (rest, knot.beyond_at(tokens))
    }
}

impl Knot {
    /// Weight of the answers longer than `tokens`, which are in this bucket.
    fn beyond_at(&self, tokens: f64) -> f64 {
        (self.beyond - self.falls * (tokens - self.tokens)).max(0.0)
    }
}

/// The bucket of a length: exact below 8, then eight to the octave.
fn bucket(tokens: u32) -> usize {
    let steps = 1 << PER_OCTAVE_LOG2;
    if tokens < steps {
        return tokens as usize;
    }
    let octave = tokens.ilog2() - PER_OCTAVE_LOG2;
    ((octave << PER_OCTAVE_LOG2) + (tokens >> octave)) as usize
}

/// The bucket of a fractional length; the last one for all longer answers. From 8 on the exponent gives the
/// octave and the first bits of the fraction the eighth of it: two cycles instead of ten with integers.
fn bucket_at(tokens: f64) -> usize {
    const FRACTION_BITS: u32 = f64::MANTISSA_DIGITS - 1;
    const STEPS: u64 = 1 << PER_OCTAVE_LOG2;
    let tokens = tokens.min(f64::from(u32::MAX));
    let eighths = tokens.to_bits() >> (FRACTION_BITS - PER_OCTAVE_LOG2);
    // These are the bits of the length 8, which has bucket 8.
    let first = (STEPS as f64).to_bits() >> (FRACTION_BITS - PER_OCTAVE_LOG2);
    let bucket = if tokens < STEPS as f64 { to_usize(tokens) } else { to_usize(eighths - first + STEPS) };
    bucket.min(BUCKETS - 1)
}

/// The lowest length in a bucket.
fn lower(bucket: usize) -> f64 {
    let steps = 1usize << PER_OCTAVE_LOG2;
    if bucket < steps {
        return bucket as f64;
    }
    let octave = bucket / steps - 1;
    ((steps + bucket % steps) << octave) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hal::random::{Stream, unit};

    #[test]
    fn every_length_is_in_its_bucket() {
        let mut random = Stream::new(1);
        for _ in 0..10_000 {
            let tokens = (random.next_u64() >> (32 + random.next_u64() % 32)) as u32;
            let at = bucket(tokens);
            assert!(at + 1 < BUCKETS, "{tokens}");
            assert!(lower(at) <= f64::from(tokens) && f64::from(tokens) < lower(at + 1), "{tokens} in {at}");
            assert_eq!(bucket_at(f64::from(tokens) + unit(random.next_u64(), 0)), at, "{tokens} and a part");
        }
    }

    #[test]
    fn what_was_seen_replaces_what_was_assumed() {
        let mut lengths = Lengths::new(256);
        assert_eq!(lengths.mean(3), 256);
        for _ in 0..1500 {
            // Nine answers of ten are short.
            (0..9).for_each(|_| lengths.observe(3, 20));
            lengths.observe(3, 1000);
        }
        let mean = f64::from(lengths.mean(3));
        assert!((mean - 118.0).abs() < 4.0, "{mean}");
        assert_eq!(lengths.mean(4), 256, "another class has not been seen");
        let seen = lengths.of(3).unwrap();
        assert!((seen.beyond(100.0) / seen.beyond(0.0) - 0.1).abs() < 0.01);
        assert!(seen.beyond(600.0) / seen.beyond(100.0) > 0.98, "answers beyond 20 reach 1000");
        assert!(seen.beyond(f64::from(u32::MAX)) >= 0.0);
        for share in [0.9, 0.5, 0.2, 0.05] {
            let length = seen.exceeded_by(share, 10.0);
            let exceeds = seen.beyond(length) / seen.beyond(10.0);
            assert!((exceeds - share).abs() < 1e-9, "{share}: {length} tokens are exceeded by {exceeds}");
        }
        assert!((seen.rest(100) - 900.0).abs() < 20.0, "{}", seen.rest(100));
        assert!((seen.rest(5000) - 5000.0).abs() < 1e-9, "longer than any: half-way");
    }
}

//! Transformations of a stream of requests.

use super::{Request, TraceError};
use mixfleet_hal::random::{Stream, bits};
use mixfleet_hal::units::Seconds;
use std::collections::VecDeque;

/// A stream of requests in order of time, and its transformations. `take(n)` limits it.
pub trait Requests: Iterator<Item = Result<Request, TraceError>> + Sized {
    /// Makes arrivals `factor` times as fast. Think times stay, since users do not think faster.
    ///
    /// # Panics
    /// When `factor` is not a positive number.
    fn speedup(self, factor: f64) -> impl Iterator<Item = Self::Item> {
        assert!(factor.is_finite() && factor > 0.0, "a speed-up is a positive number");
        self.map(move |item| {
            let at = item.as_ref().map_or(Seconds::ZERO, |request| request.at / factor);
            TraceError::unless_late("with this speed-up a request arrives", at.0)?;
            item.map(|request| Request { at, ..request })
        })
    }

    /// Spreads requests of equal arrival uniformly at random over the following time: at most `bin`, and at
    /// most up to the next arrival, so that the order stays. Mooncake's timestamps are in bins of 3 s. Keeps
    /// the requests of one arrival in memory.
    fn jitter(self, bin: Seconds, seed: u64) -> impl Iterator<Item = Self::Item> {
        let mut inner = self.peekable();
        let mut ready = VecDeque::new();
        // Each group of equal arrivals has its own random numbers.
        let mut groups = 0..;
        std::iter::from_fn(move || {
            if ready.is_empty() {
                let first = inner.next()?;
                let Ok(Request { at, .. }) = first else { return Some(first) };
                ready.push_back(first);
                let is_equal = |item: &Self::Item| item.as_ref().is_ok_and(|request| request.at == at);
                ready.extend(std::iter::from_fn(|| inner.next_if(is_equal)));
                let width = match inner.peek() {
                    Some(Ok(next)) => bin.min(next.at - at),
                    _ => bin,
                };
                let mut random = Stream::new(bits(seed, groups.next()?));
                let mut shifts: Vec<f64> = ready.iter().map(|_| random.next_unit()).collect();
                shifts.sort_by(f64::total_cmp);
                for (request, shift) in ready.iter_mut().flatten().zip(shifts) {
                    request.at += width * shift;
                }
            }
            ready.pop_front()
        })
    }

    /// Converts chains to blocks of `to` tokens from `from`; see [`Request::rechain`].
    ///
    /// # Panics
    /// When a block size is zero.
    fn rechain(self, from: u32, to: u32) -> impl Iterator<Item = Self::Item> {
        assert!(from > 0 && to > 0, "a block has at least one token");
        self.map(move |item| item.map(|request| request.rechain(from, to)))
    }
}

impl<I: Iterator<Item = Result<Request, TraceError>>> Requests for I {}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn request(id: usize, at: f64) -> Request {
        Request {
            id: id as u64,
            at: Seconds(at),
            prompt_tokens: 1,
            output_tokens: 1,
            chain: Vec::new(),
            session: None,
            class: None,
        }
    }

    fn stream(times: &[u32]) -> impl Iterator<Item = Result<Request, TraceError>> {
        times.iter().enumerate().map(|(id, &at)| Ok(request(id, f64::from(at))))
    }

    proptest! {
        #[test]
        fn jitter_keeps_the_order_and_stays_in_its_bin(
            gaps in proptest::collection::vec(0u32..4, 0..60),
            seed in any::<u64>(),
        ) {
            let times: Vec<u32> = gaps.iter().scan(0, |at, gap| { *at += gap; Some(*at) }).collect();
            let moved: Vec<Request> = stream(&times).jitter(Seconds(3.0), seed).map(|r| r.unwrap()).collect();
            prop_assert_eq!(moved.len(), times.len());
            prop_assert!(moved.windows(2).all(|pair| pair[0].at <= pair[1].at && pair[0].id < pair[1].id));
            for (request, &at) in moved.iter().zip(&times) {
                let next = times.iter().find(|&&later| later > at).map_or(3.0, |&next| f64::from(next - at));
                let shift = request.at.0 - f64::from(at);
                prop_assert!((0.0..next.min(3.0)).contains(&shift), "{}", shift);
            }
            let again: Vec<Request> = stream(&times).jitter(Seconds(3.0), seed).map(|r| r.unwrap()).collect();
            prop_assert_eq!(moved, again);
        }
    }

    #[test]
    fn jitter_spreads_evenly() {
        let moved = stream(&[0; 10_000]).jitter(Seconds(3.0), 1).map(|r| r.unwrap().at.0);
        let mean = moved.sum::<f64>() / 10_000.0;
        assert!((mean - 1.5).abs() < 0.03, "{mean}");
    }

    #[test]
    fn an_error_comes_after_what_was_read_before_it() {
        let error = || Err(TraceError::Empty { name: "t".into() });
        let items = [Ok(request(0, 0.0)), Ok(request(1, 0.0)), error()];
        let seen: Vec<bool> = items.into_iter().jitter(Seconds(3.0), 1).map(|item| item.is_ok()).collect();
        assert_eq!(seen, [true, true, false]);
    }

    #[test]
    fn speedup_scales_arrivals() {
        let times: Vec<f64> = stream(&[0, 4, 6]).speedup(2.0).map(|r| r.unwrap().at.0).collect();
        assert_eq!(times, [0.0, 2.0, 3.0]);
    }
}

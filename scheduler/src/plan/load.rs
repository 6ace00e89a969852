//! A load as classes of requests of like size.

use super::candidates::RequestSize;
use mixfleet_hal::cast::{to_u32, to_u64};
use mixfleet_hal::units::Seconds;
use serde::Serialize;
use std::collections::BTreeMap;

/// Share of all requests below which a class joins its nearest neighbour.
const SHARE_MIN: f64 = 0.005;
/// Maximum number of classes.
const CLASSES_MAX: usize = 24;
/// Shortest time over which requests may arrive: a trace without times would have an infinite rate.
const SPAN_S_MIN: f64 = 1.0;

/// Requests of like size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SizeClass {
    /// Their mean size.
    pub size: RequestSize,
    /// Requests per second.
    pub rate: f64,
}

/// Sums over the requests of a cell.
#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    requests: u64,
    input: u64,
    output: u64,
    cached: u64,
}

impl Cell {
    fn joined(self, other: Cell) -> Cell {
        Cell {
            requests: self.requests + other.requests,
            input: self.input + other.input,
            output: self.output + other.output,
            cached: self.cached + other.cached,
        }
    }

    /// Logarithms of the mean lengths, by which cells are near to each other.
    fn place(&self) -> [f64; 2] {
        [self.input, self.output].map(|sum| (sum as f64 / self.requests.max(1) as f64).max(1.0).log2())
    }

    fn class(&self, span_s: f64) -> SizeClass {
        let mean = |sum: u64| to_u32(to_u64((sum as f64 / self.requests.max(1) as f64).round())).max(1);
        let size = RequestSize {
            input_tokens: mean(self.input),
            output_tokens: mean(self.output),
            cached_share: self.cached as f64 / self.input.max(1) as f64,
        };
        SizeClass { size, rate: self.requests as f64 / span_s }
    }
}

/// Counts requests by length: prompts by doublings, answers by quadruplings.
#[derive(Clone, Debug, Default)]
pub struct LoadTally {
    cells: BTreeMap<(u32, u32), Cell>,
}

impl LoadTally {
    /// Counts a request; of its prompt's tokens a cache without limits would hold `cached`.
    pub fn add(&mut self, input_tokens: u32, output_tokens: u32, cached: u32) {
        let key = (input_tokens.max(1).ilog2(), output_tokens.max(1).ilog2() / 2);
        let one = Cell {
            requests: 1,
            input: input_tokens.into(),
            output: output_tokens.into(),
            cached: cached.into(),
        };
        let cell = self.cells.entry(key).or_default();
        *cell = cell.joined(one);
    }

    /// The classes of all requests, which arrived over `span`, by length. Rare ones have joined their nearest
    /// neighbours.
    pub fn classes(self, span: Seconds) -> Vec<SizeClass> {
        let mut cells: Vec<Cell> = self.cells.into_values().collect();
        let all: u64 = cells.iter().map(|cell| cell.requests).sum();
        while cells.len() > 1 {
            let (rarest, cell) = (0..).zip(&cells).min_by_key(|(_, cell)| cell.requests).expect("several");
            if cells.len() <= CLASSES_MAX && cell.requests as f64 >= SHARE_MIN * all as f64 {
                break;
            }
            let cell = cells.remove(rarest);
            let [input, output] = cell.place();
            let far = |other: &Cell| (other.place()[0] - input).abs() + (other.place()[1] - output).abs();
            let near = cells.iter_mut().min_by(|a, b| far(a).total_cmp(&far(b))).expect("one is left");
            *near = near.joined(cell);
        }
        cells.iter().map(|cell| cell.class(span.0.max(SPAN_S_MIN))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_keep_requests_and_tokens_and_the_rare_join_the_near() {
        let mut tally = LoadTally::default();
        for at in 0..1000 {
            tally.add(1000 + at % 20, 100, 500);
        }
        (0..100).for_each(|_| tally.add(30_000, 900, 0));
        tally.add(17_000, 800, 0);
        let classes = tally.classes(Seconds(100.0));
        assert_eq!(classes.len(), 2, "{classes:?}");
        let rate: f64 = classes.iter().map(|class| class.rate).sum();
        assert!((rate - 11.01).abs() < 1e-9);
        let tokens: f64 = classes.iter().map(|class| class.rate * f64::from(class.size.input_tokens)).sum();
        assert!((tokens / 40_265.0 - 1.0).abs() < 1e-3, "{tokens}");
        let long = classes.last().unwrap();
        assert_eq!(long.size.input_tokens, 29_871, "the mean with the one request of 17,000 tokens");
        assert!((classes[0].size.cached_share - 0.5).abs() < 0.01);
    }

    #[test]
    fn there_are_few_classes_whatever_the_lengths() {
        let mut tally = LoadTally::default();
        for input in 0..17 {
            for output in 0..8 {
                (0..10).for_each(|_| tally.add(1 << input, 1 << (2 * output), 0));
            }
        }
        assert_eq!(tally.classes(Seconds(1.0)).len(), CLASSES_MAX);
        assert!(LoadTally::default().classes(Seconds(1.0)).is_empty());
    }
}

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
/// Share of the requests which may miss the objectives that are left to waiting: the rest may be too slow.
const TOO_SLOW: f64 = 0.5;
/// Shortest time over which requests may arrive: a trace without times would have an infinite rate.
const SPAN_S_MIN: f64 = 1.0;

/// Requests of like size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SizeClass {
    /// Their mean size.
    pub size: RequestSize,
    /// The request with the longest prompt time, except those that may miss the objectives.
    pub slowest: RequestSize,
    /// Requests per second.
    pub rate: f64,
}

/// Sums over the requests of a cell.
#[derive(Clone, Debug, Default)]
struct Cell {
    requests: u64,
    input: u64,
    output: u64,
    cached: u64,
    /// Requests of each hour.
    hours: Vec<u64>,
    /// Uncached tokens and tokens of prompts, and requests that have them.
    prompts: Vec<([u32; 2], u64)>,
}

impl Cell {
    fn join(&mut self, other: &Cell) {
        self.requests += other.requests;
        self.input += other.input;
        self.output += other.output;
        self.cached += other.cached;
        self.hours.resize(self.hours.len().max(other.hours.len()), 0);
        self.hours.iter_mut().zip(&other.hours).for_each(|(own, more)| *own += more);
        self.prompts.extend(&other.prompts);
    }

    /// Logarithms of the mean lengths, by which cells are near to each other.
    fn place(&self) -> [f64; 2] {
        [self.input, self.output].map(|sum| (sum as f64 / self.requests.max(1) as f64).max(1.0).log2())
    }

    /// The class of its requests, of which those with more than `most` uncached tokens may be too slow.
    fn class(&self, span_s: f64, most: u32) -> SizeClass {
        let mean = |sum: u64| to_u32(to_u64((sum as f64 / self.requests.max(1) as f64).round())).max(1);
        let size = RequestSize {
            input_tokens: mean(self.input),
            output_tokens: mean(self.output),
            cached_share: self.cached as f64 / self.input.max(1) as f64,
        };
        let in_time =
            self.prompts.iter().map(|(prompt, _)| *prompt).filter(|[uncached, _]| *uncached <= most);
        let slowest = in_time.max().map_or(size, |[uncached, input_tokens]| {
            let cached_share = f64::from(input_tokens - uncached) / f64::from(input_tokens.max(1));
            RequestSize { input_tokens, cached_share, ..size }
        });
        SizeClass { size, slowest, rate: self.requests as f64 / span_s }
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
        self.add_many(0, 1, [input_tokens, output_tokens, cached]);
    }

    /// Counts requests of one size that arrive within an hour: tokens of the prompt, of the answer, and of
    /// the prompt's cached ones.
    pub fn add_many(&mut self, hour: usize, requests: u64, [input, output, cached]: [u32; 3]) {
        let cell = self.cells.entry((input.max(1).ilog2(), output.max(1).ilog2() / 2)).or_default();
        cell.requests += requests;
        cell.input += requests * u64::from(input);
        cell.output += requests * u64::from(output);
        cell.cached += requests * u64::from(cached);
        cell.hours.resize(cell.hours.len().max(hour + 1), 0);
        cell.hours[hour] += requests;
        cell.prompts.push(([input - cached.min(input), input], requests));
    }

    /// The classes of all requests, which arrived over `span`, by length, where `attain` of them are to meet
    /// the objectives. Rare classes have joined their nearest neighbours.
    pub fn classes(self, span: Seconds, attain: f64) -> Vec<SizeClass> {
        self.classes_by_hour(span, attain).0
    }

    /// The same classes, and the number of requests of each of them in every hour.
    pub fn classes_by_hour(self, span: Seconds, attain: f64) -> (Vec<SizeClass>, Vec<Vec<u64>>) {
        let cells = self.cells();
        let most = uncached_max(&cells, TOO_SLOW * (1.0 - attain));
        let hours = cells.iter().map(|cell| cell.hours.len()).max().unwrap_or(0);
        let of = |hour: usize| cells.iter().map(|cell| cell.hours.get(hour).copied().unwrap_or(0)).collect();
        let by_hour = (0..hours).map(of).collect();
        (cells.iter().map(|cell| cell.class(span.0.max(SPAN_S_MIN), most)).collect(), by_hour)
    }

    /// The cells; rare ones have joined their nearest neighbours.
    fn cells(self) -> Vec<Cell> {
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
            near.join(&cell);
        }
        cells
    }
}

/// The uncached tokens that no more than a share of the requests exceed.
fn uncached_max(cells: &[Cell], share: f64) -> u32 {
    let mut prompts: Vec<(u32, u64)> = cells
        .iter()
        .flat_map(|cell| &cell.prompts)
        .map(|&([uncached, _], requests)| (uncached, requests))
        .collect();
    prompts.sort_unstable_by_key(|(uncached, _)| std::cmp::Reverse(*uncached));
    let all: u64 = prompts.iter().map(|(_, requests)| requests).sum();
    let mut over = 0;
    for (uncached, requests) in prompts {
        over += requests;
        if over as f64 > share * all as f64 {
            return uncached;
        }
    }
    0
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
        let classes = tally.classes(Seconds(100.0), 0.99);
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
    fn the_slowest_of_a_class_is_the_longest_uncached_prompt_but_for_those_that_may_be_late() {
        let mut tally = LoadTally::default();
        (0..994).for_each(|at| tally.add(1000 + at % 20, 100, 0));
        tally.add(1023, 100, 512);
        [1020, 1021].into_iter().for_each(|input| tally.add(input, 100, 0));
        (0..3).for_each(|_| tally.add(60_000, 100, 0));
        let slowest = |attain: f64| {
            let classes = tally.clone().classes(Seconds(1.0), attain);
            assert_eq!(classes.len(), 1, "three in a thousand join the others");
            classes[0].slowest
        };
        // a half of 1 % is five requests; a half of 0.6 % are the three long ones
        assert_eq!(slowest(0.99).input_tokens, 1019);
        assert_eq!(slowest(0.994).input_tokens, 1021);
        assert_eq!(slowest(0.996).input_tokens, 60_000);
        assert_eq!(slowest(0.99).output_tokens, 100);
        assert_eq!(slowest(0.99).cached_share, 0.0);
    }

    #[test]
    fn hours_of_a_class_are_those_of_the_cells_that_joined_it() {
        let mut tally = LoadTally::default();
        tally.add_many(0, 500, [1000, 100, 0]);
        tally.add_many(2, 300, [1000, 100, 0]);
        tally.add_many(2, 400, [9000, 100, 0]);
        tally.add_many(1, 2, [2100, 100, 0]);
        let (classes, hours) = tally.clone().classes_by_hour(Seconds(10_800.0), 0.99);
        assert_eq!(classes, tally.classes(Seconds(10_800.0), 0.99));
        assert_eq!(hours, [[500, 0], [2, 0], [300, 400]], "the two requests joined the shorter ones");
    }

    #[test]
    fn there_are_few_classes_whatever_the_lengths() {
        let mut tally = LoadTally::default();
        for input in 0..17 {
            for output in 0..8 {
                (0..10).for_each(|_| tally.add(1 << input, 1 << (2 * output), 0));
            }
        }
        assert_eq!(tally.classes(Seconds(1.0), 0.99).len(), CLASSES_MAX);
        assert!(LoadTally::default().classes(Seconds(1.0), 0.99).is_empty());
    }
}

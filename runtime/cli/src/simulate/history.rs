//! The history of a run for the page: as few points as a chart can show, however long the run.

use mixfleet_sim::simulate::{AnswerTimes, Quantiles, Sample};

/// Maximum number of points of a curve.
const POINTS_MAX: usize = 400;

/// The values kept of a sample; counts of an interval are kept as rates, so that all values can be averaged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum HistoryQuantity {
    PrefillLoad,
    DecodeLoad,
    PrefillUtilisation,
    DecodeUtilisation,
    Queued,
    Decoding,
    UsedTokens,
    CachedTokens,
    Completed,
    Dropped,
    Arrived,
    Rejected,
}

const QUANTITIES: usize = 12;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct HistoryPoint {
    pub(super) time_s: f64,
    interval_s: f64,
    values: [f64; QUANTITIES],
}

impl HistoryPoint {
    fn new(s: &Sample) -> Self {
        let rate = |count: u64| if s.interval_s > 0.0 { count as f64 / s.interval_s } else { 0.0 };
        let values = [
            s.prefill_load,
            s.decode_load,
            s.prefill_utilisation,
            s.decode_utilisation,
            s.queued as f64,
            s.decoding as f64,
            s.used_tokens as f64,
            s.cached_tokens as f64,
            rate(s.completed),
            rate(s.dropped),
            rate(s.fleet_arrived),
            rate(s.fleet_rejected),
        ];
        HistoryPoint { time_s: s.time_s, interval_s: s.interval_s, values }
    }

    pub(super) fn get(&self, quantity: HistoryQuantity) -> f64 {
        self.values[quantity as usize]
    }

    /// The mean of both points, weighted by time.
    fn merge(&mut self, later: &HistoryPoint) {
        let interval_s = self.interval_s + later.interval_s;
        let share = if interval_s > 0.0 { later.interval_s / interval_s } else { 1.0 };
        for (value, other) in self.values.iter_mut().zip(later.values) {
            *value += (other - *value) * share;
        }
        (self.time_s, self.interval_s) = (later.time_s, interval_s);
    }
}

/// The history of one pool. Where its points become too many, each pair is merged into one.
#[derive(Clone, Debug)]
pub(super) struct PoolHistory {
    points: Vec<HistoryPoint>,
    /// Number of samples in a point.
    stride: u32,
    /// Number of samples in the last point.
    filled: u32,
}

impl PoolHistory {
    fn new() -> Self {
        PoolHistory { points: Vec::new(), stride: 1, filled: 1 }
    }

    fn add(&mut self, point: &HistoryPoint) {
        if let Some(last) = self.points.last_mut().filter(|_| self.filled < self.stride) {
            last.merge(point);
            self.filled += 1;
            return;
        }
        if self.points.len() == POINTS_MAX {
            let pairs = self.points.chunks_exact(2).map(|pair| {
                let mut first = pair[0];
                first.merge(&pair[1]);
                first
            });
            self.points = pairs.collect();
            self.stride *= 2;
        }
        self.points.push(*point);
        self.filled = 1;
    }

    pub(super) fn points(&self) -> &[HistoryPoint] {
        &self.points
    }
}

/// The history of all pools, and of the requests' outcomes.
pub(super) struct RunHistory {
    pub(super) pools: Vec<PoolHistory>,
    pub(super) ttft_s: Quantiles,
    pub(super) tbt_s: Quantiles,
    pub(super) e2e_s: Quantiles,
}

impl RunHistory {
    pub(super) fn new(pools: usize) -> Self {
        let none = Quantiles::default;
        RunHistory { pools: vec![PoolHistory::new(); pools], ttft_s: none(), tbt_s: none(), e2e_s: none() }
    }

    pub(super) fn add(&mut self, sample: &Sample) {
        self.pools[sample.pool as usize].add(&HistoryPoint::new(sample));
    }

    pub(super) fn finished(&mut self, answer: &AnswerTimes) {
        self.ttft_s.add(answer.ttft_s);
        self.e2e_s.add(answer.e2e_s);
        if let Some(tbt_s) = answer.tbt_s {
            self.tbt_s.add(tbt_s);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn however_many_samples_the_points_are_few_and_nothing_is_lost() {
        let mut history = RunHistory::new(1);
        for i in 1..=100_001u32 {
            let (time_s, completed) = (f64::from(i), u64::from(i % 3));
            history.add(&Sample { time_s, interval_s: 1.0, completed, queued: 7, ..Sample::default() });
            assert!(history.pools[0].points().len() <= POINTS_MAX);
        }
        let points = history.pools[0].points();
        assert!(points.len() > POINTS_MAX / 2 - 1);
        assert_eq!(points.last().map(|point| point.time_s), Some(100_001.0));
        let completed: f64 = points.iter().map(|p| p.get(HistoryQuantity::Completed) * p.interval_s).sum();
        let all: u32 = (1..=100_001u32).map(|i| i % 3).sum();
        assert!((completed - f64::from(all)).abs() < 1e-6 * f64::from(all), "{completed} {all}");
        assert!(points.iter().all(|point| (point.get(HistoryQuantity::Queued) - 7.0).abs() < 1e-9));
    }
}

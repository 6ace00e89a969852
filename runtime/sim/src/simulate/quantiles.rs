//! Quantiles of any number of values in bounded memory.

use mixfleet_hal::cast::{to_u64, to_usize};
use serde::{Deserialize, Serialize};

/// Bins per doubling: a bin is 0.54 % wide, so a quantile is within 0.27 % of one of the values around it.
const BINS_PER_DOUBLING: f64 = 128.0;
/// The smallest distinguished value, in the unit of the values.
const LEAST: f64 = 1e-6;

/// Counts by logarithmic bins; mean and extremes are exact.
#[derive(Clone, Debug, Default)]
pub struct Quantiles {
    bins: Vec<u64>,
    count: u64,
    sum: f64,
    max: f64,
}

impl Quantiles {
    /// Adds a value; negative ones count as 0.
    pub fn add(&mut self, value: f64) {
        let bin = to_usize((value.max(LEAST) / LEAST).log2() * BINS_PER_DOUBLING);
        if self.bins.len() <= bin {
            self.bins.resize(bin + 1, 0);
        }
        self.bins[bin] += 1;
        self.count += 1;
        self.sum += value.max(0.0);
        self.max = self.max.max(value);
    }

    /// Number of values.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Mean of the values; 0 without values.
    pub fn mean(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum / self.count as f64 }
    }

    /// The value below which a share `q` of all values is; 0 without values.
    pub fn at(&self, q: f64) -> f64 {
        let rank = to_u64((q * self.count as f64).ceil().max(1.0));
        let mut seen = 0;
        for (bin, count) in self.bins.iter().enumerate() {
            seen += count;
            if seen >= rank && seen > 0 {
                return (LEAST * ((bin as f64 + 0.5) / BINS_PER_DOUBLING).exp2()).min(self.max);
            }
        }
        0.0
    }
}

/// Mean and quantiles; as JSON `null` where there are no values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Option<KnownDistribution>", into = "Option<KnownDistribution>")]
pub struct Distribution {
    /// Number of values; the others are 0 if it is.
    pub count: u64,
    /// Exact.
    pub mean: f64,
    /// Within 0.3 %, as are the others.
    pub p50: f64,
    #[allow(missing_docs)]
    pub p90: f64,
    #[allow(missing_docs)]
    pub p99: f64,
}

/// A distribution of at least one value, as JSON has it.
#[derive(Serialize, Deserialize)]
struct KnownDistribution {
    count: u64,
    mean: f64,
    p50: f64,
    p90: f64,
    p99: f64,
}

impl From<&Quantiles> for Distribution {
    fn from(q: &Quantiles) -> Self {
        Distribution { count: q.count(), mean: q.mean(), p50: q.at(0.5), p90: q.at(0.9), p99: q.at(0.99) }
    }
}

impl From<Distribution> for Option<KnownDistribution> {
    fn from(Distribution { count, mean, p50, p90, p99 }: Distribution) -> Self {
        (count > 0).then_some(KnownDistribution { count, mean, p50, p90, p99 })
    }
}

impl From<Option<KnownDistribution>> for Distribution {
    fn from(known: Option<KnownDistribution>) -> Self {
        known.map_or_else(Distribution::default, |KnownDistribution { count, mean, p50, p90, p99 }| {
            Distribution { count, mean, p50, p90, p99 }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hal::random::Stream;

    #[test]
    fn quantiles_are_those_of_the_sorted_values() {
        let mut random = Stream::new(3);
        let mut values: Vec<f64> = (0..5000).map(|_| random.next_normal().exp()).collect();
        let mut quantiles = Quantiles::default();
        values.iter().for_each(|&value| quantiles.add(value));
        values.sort_by(f64::total_cmp);
        for q in [0.01, 0.5, 0.9, 0.99] {
            let exact = values[(q * values.len() as f64).ceil() as usize - 1];
            assert!((quantiles.at(q) / exact - 1.0).abs() < 0.006, "{q}: {} {exact}", quantiles.at(q));
        }
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        assert!((quantiles.mean() - mean).abs() < 1e-9);
        assert_eq!(Quantiles::default().at(0.5), 0.0);
    }

    #[test]
    fn a_distribution_without_values_is_null() {
        let mut quantiles = Quantiles::default();
        let none = Distribution::from(&quantiles);
        assert_eq!(serde_json::to_value(none).unwrap(), serde_json::Value::Null);
        quantiles.add(2.0);
        let one = Distribution::from(&quantiles);
        for distribution in [none, one] {
            let text = serde_json::to_string(&distribution).unwrap();
            assert_eq!(serde_json::from_str::<Distribution>(&text).unwrap(), distribution, "{text}");
        }
        assert_eq!((one.count, one.mean), (1, 2.0));
    }
}

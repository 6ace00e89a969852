//! Quantiles of any number of values in bounded memory.

use mixfleet_hal::cast::{to_u64, to_usize};

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
}

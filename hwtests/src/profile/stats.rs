//! Statistics of a few samples.

use mixfleet_hal::cast::to_usize;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Statistics of a point's samples, in seconds per command (or transfer).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SampleStats {
    /// Median, which is what a scheduler should expect.
    pub median: f64,
    /// 5th percentile.
    pub p5: f64,
    /// 95th percentile.
    pub p95: f64,
    /// Minimum, which is what the part can do undisturbed.
    pub min: f64,
    /// Coefficient of variation: standard deviation over mean.
    pub cv: f64,
    /// All samples, in order.
    pub samples: Vec<f64>,
}

impl SampleStats {
    /// Computes the statistics of finite samples; `None` if there are none.
    pub fn new(samples: Vec<f64>) -> Option<SampleStats> {
        if samples.is_empty() || samples.iter().any(|s| !s.is_finite()) {
            return None;
        }
        let mut sorted = samples.clone();
        sorted.sort_by(f64::total_cmp);
        let mean = samples.iter().sum::<f64>() / samples.len() as f64;
        let variance = samples.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / samples.len() as f64;
        Some(SampleStats {
            median: quantile(&sorted, 0.5),
            p5: quantile(&sorted, 0.05),
            p95: quantile(&sorted, 0.95),
            min: sorted[0],
            cv: if mean > 0.0 { variance.sqrt() / mean } else { 0.0 },
            samples,
        })
    }
}

/// Returns a quantile of ascending samples, with linear interpolation (type 7 of Hyndman & Fan 1996).
pub(crate) fn quantile(sorted: &[f64], q: f64) -> f64 {
    let at = q * (sorted.len() - 1) as f64;
    let (low, share) = (to_usize(at.floor()), at.fract());
    let high = (low + 1).min(sorted.len() - 1);
    sorted[low] + share * (sorted[high] - sorted[low])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_of_known_samples() {
        let stats = SampleStats::new(vec![3.0, 1.0, 2.0, 5.0, 4.0]).unwrap();
        assert_eq!((stats.median, stats.min, stats.samples[0]), (3.0, 1.0, 3.0));
        assert!((stats.p5 - 1.2).abs() < 1e-12 && (stats.p95 - 4.8).abs() < 1e-12);
        assert!((stats.cv - 2f64.sqrt() / 3.0).abs() < 1e-12);
        assert_eq!(SampleStats::new(vec![7.0]).unwrap().p95, 7.0);
        assert_eq!(SampleStats::new(vec![]), None);
        assert_eq!(SampleStats::new(vec![f64::NAN]), None);
    }
}

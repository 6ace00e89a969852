//! Arrival times of sessions.

use mixfleet_hal::random::{Stream, bits};

/// How sessions arrive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    /// Independently of each other, as a Poisson process.
    Poisson,
    /// In bursts, as observed for users of a large model.
    Bursty(Burst),
}

/// Gaps drawn from a gamma distribution, under a drifting load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Burst {
    /// Coefficient of variation of the gaps between arrivals; 1 is Poisson.
    pub gap_cv: f64,
    /// Time for which the load is constant.
    pub window_s: f64,
    /// Standard deviation of the load's logarithm.
    pub load_sigma: f64,
    /// Correlation of the logarithms of the load in two consecutive windows.
    pub load_correlation: f64,
}

impl Arrivals {
    /// ServeGen's m-large: gaps of its synthesised hour (coefficient of variation 1.52), and its two weeks of
    /// load in windows of 600 s (log-deviation 0.407, lag-1 correlation 0.916).
    pub const BURSTY: Arrivals =
        Arrivals::Bursty(Burst { gap_cv: 1.52, window_s: 600.0, load_sigma: 0.407, load_correlation: 0.916 });
}

/// A generator of the times at which sessions start.
pub(super) struct Starts {
    burst: Burst,
    rate: f64,
    random: Stream,
    now: f64,
    window_end: f64,
    /// The load's logarithm in standard deviations.
    state: f64,
}

impl Starts {
    pub(super) fn new(arrivals: Arrivals, rate: f64, seed: u64) -> Self {
        let burst = match arrivals {
            Arrivals::Poisson => {
                Burst { gap_cv: 1.0, window_s: f64::INFINITY, load_sigma: 0.0, load_correlation: 0.0 }
            }
            Arrivals::Bursty(burst) => burst,
        };
        // Sessions use the indices from 0 on.
        let mut random = Stream::new(bits(seed, u64::MAX));
        let state = random.next_normal();
        Starts { burst, rate, random, now: 0.0, window_end: burst.window_s, state }
    }

    /// The next start in seconds. Gaps are drawn in units of their mean, and pass faster at a higher load.
    pub(super) fn next(&mut self) -> f64 {
        let shape = self.burst.gap_cv.powi(-2);
        let mut gap = gamma(&mut self.random, shape) / shape;
        loop {
            let sigma = self.burst.load_sigma;
            // A log-normal factor of mean 1.
            let rate = self.rate * (sigma * self.state - sigma * sigma / 2.0).exp();
            let left = (self.window_end - self.now) * rate;
            if gap <= left {
                self.now += gap / rate;
                return self.now;
            }
            gap -= left;
            self.now = self.window_end;
            self.window_end += self.burst.window_s;
            let correlation = self.burst.load_correlation;
            let noise = (1.0 - correlation * correlation).sqrt() * self.random.next_normal();
            self.state = correlation * self.state + noise;
        }
    }
}

/// A gamma variate of this shape and scale 1 (Marsaglia & Tsang 2000; below shape 1 by their power of a
/// uniform).
fn gamma(random: &mut Stream, shape: f64) -> f64 {
    if shape == 1.0 {
        return -(1.0 - random.next_unit()).ln();
    }
    if shape < 1.0 {
        let power = (1.0 - random.next_unit()).powf(1.0 / shape);
        return gamma_from_1(random, shape + 1.0) * power;
    }
    gamma_from_1(random, shape)
}

fn gamma_from_1(random: &mut Stream, shape: f64) -> f64 {
    let d = shape - 1.0 / 3.0;
    let c = 1.0 / (9.0 * d).sqrt();
    loop {
        let x = random.next_normal();
        let v = (1.0 + c * x).powi(3);
        if v <= 0.0 {
            continue;
        }
        let u = 1.0 - random.next_unit();
        if u.ln() < 0.5 * x * x + d - d * v + d * v.ln() {
            return d * v;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moments(values: &[f64]) -> (f64, f64) {
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / values.len() as f64;
        (mean, variance.sqrt() / mean)
    }

    fn gaps(arrivals: Arrivals, count: usize) -> Vec<f64> {
        let mut starts = Starts::new(arrivals, 10.0, 7);
        let mut last = 0.0;
        (0..count)
            .map(|_| {
                let now = starts.next();
                now - std::mem::replace(&mut last, now)
            })
            .collect()
    }

    #[test]
    fn gaps_have_their_mean_and_variation() {
        let steady = |gap_cv| {
            let burst = Burst { gap_cv, window_s: 600.0, load_sigma: 0.0, load_correlation: 0.0 };
            moments(&gaps(Arrivals::Bursty(burst), 200_000))
        };
        let poisson = moments(&gaps(Arrivals::Poisson, 200_000));
        for ((mean, cv), expected) in [(poisson, 1.0), (steady(1.52), 1.52), (steady(0.5), 0.5)] {
            assert!((mean / 0.1 - 1.0).abs() < 0.02 && (cv / expected - 1.0).abs() < 0.02, "{mean} {cv}");
        }
    }

    #[test]
    fn the_load_drifts_as_published() {
        // 2,000 windows of about 600 arrivals.
        let mut starts = Starts::new(Arrivals::BURSTY, 1.0, 3);
        let mut counts = vec![0.0; 2_000];
        while let Some(count) = counts.get_mut((starts.next() / 600.0) as usize) {
            *count += 1.0;
        }
        let logs: Vec<f64> = counts.iter().map(|count: &f64| count.max(1.0).ln()).collect();
        let mean = logs.iter().sum::<f64>() / logs.len() as f64;
        let variance = logs.iter().map(|l| (l - mean).powi(2)).sum::<f64>();
        let lagged = logs.windows(2).map(|pair| (pair[0] - mean) * (pair[1] - mean)).sum::<f64>();
        let sigma = (variance / logs.len() as f64).sqrt();
        assert!((sigma / 0.407 - 1.0).abs() < 0.1, "{sigma}");
        assert!((lagged / variance - 0.916).abs() < 0.03, "{}", lagged / variance);
        let (mean, _) = moments(&counts);
        assert!((mean / 600.0 - 1.0).abs() < 0.1, "{mean}");
    }
}

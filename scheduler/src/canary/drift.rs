//! The drift between two answers without corruption, as learned from controls.

use std::collections::VecDeque;

/// Smallest and largest distance that count, in nats: below, answers are equal; above, larger distances are
/// no stronger evidence.
const LEAST: f64 = 1e-3;
const MOST: f64 = 30.0;
/// Number of kept controls, and the number from which on drift is learned from them.
const KEPT: usize = 256;
const LEARNED_MIN: usize = 16;
/// Drift before that: its median, in nats, and its scale.
const MEDIAN_BEFORE: f64 = 0.05;
const SCALE_BEFORE: f64 = 1.0;
/// Least scale: prompts differ more than a few equal controls show.
const SCALE_MIN: f64 = 0.5;
/// A standard deviation over the median absolute deviation, of a normal distribution.
const DEVIATIONS: f64 = 1.4826;
/// The scale is widened by this over the root of the number of controls, for its own error.
const WIDENED: f64 = 2.0;
/// Part of the uniform density of damage that is used: distances beyond [`MOST`] count as that, which would
/// otherwise make the mean ratio without damage larger than 1.
const DENSITY_USED: f64 = 2.0 / 3.0;

/// A distribution of the logarithm of distances: Student's t with 5 degrees of freedom.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drift {
    /// Its median.
    location: f64,
    /// Its scale.
    scale: f64,
}

impl Drift {
    /// The median distance, in nats.
    pub fn median(&self) -> f64 {
        self.location.exp()
    }

    /// The distance that is exceeded with this probability at most, by Student's t: a number for display.
    pub fn exceeded_once_in_a_thousand(&self) -> f64 {
        // the quantile 0.999 of Student's t with 5 degrees of freedom
        (self.location + 5.893 * self.scale).exp().min(MOST)
    }

    /// Likelihood of this distance where `fault_share` of transfers are damaged, over that without any.
    pub(super) fn likelihood_ratio(&self, distance: f64, fault_share: f64) -> f64 {
        let x = logarithm(distance);
        if x <= self.location {
            return 1.0 - fault_share;
        }
        let z = (x - self.location) / self.scale;
        // 8 / (3 pi sqrt 5) (1 + z^2 / 5)^-3
        let drift = 0.379_606_689_822_494_4 * (1.0 + z * z / 5.0).powi(-3) / self.scale;
        let damage = DENSITY_USED / (MOST.ln() - self.location).max(1.0);
        1.0 - fault_share + fault_share * damage / drift
    }
}

/// The latest distances between two engines that each answered alone.
#[derive(Clone, Debug, Default)]
pub(super) struct Controls(VecDeque<f64>);

impl Controls {
    pub(super) fn learn(&mut self, distance: f64) {
        if self.0.len() == KEPT {
            self.0.pop_front();
        }
        self.0.push_back(logarithm(distance));
    }

    /// Whether there are enough to go by.
    pub(super) fn is_learned(&self) -> bool {
        self.0.len() >= LEARNED_MIN
    }

    pub(super) fn drift(&self) -> Drift {
        if !self.is_learned() {
            return Drift { location: MEDIAN_BEFORE.ln(), scale: SCALE_BEFORE };
        }
        let location = median(self.0.iter().copied());
        let spread = DEVIATIONS * median(self.0.iter().map(|x| (x - location).abs()));
        let scale = spread.max(SCALE_MIN) * (1.0 + WIDENED / (self.0.len() as f64).sqrt());
        Drift { location, scale }
    }
}

/// The logarithm of a distance within bounds; one that is no number is as large as any.
fn logarithm(distance: f64) -> f64 {
    let known = if distance.is_nan() { MOST } else { distance };
    known.clamp(LEAST, MOST).ln()
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_ratio_without_damage_is_at_most_one() {
        for controls in [
            vec![],
            vec![0.0; 20],
            vec![0.3; 20],
            (1..200).map(|at| 0.001 * f64::from(at)).collect::<Vec<_>>(),
        ] {
            let mut learned = Controls::default();
            controls.iter().for_each(|&distance| learned.learn(distance));
            let drift = learned.drift();
            // the mean of the ratio under drift itself, by the midpoint rule; mass beyond counts as its edge
            let (step, mut mean, mut mass) = (1e-3, 0.0, 0.0);
            for at in 0..60_000 {
                let x = drift.location + (f64::from(at) - 30_000.0) * step;
                let z = (x - drift.location) / drift.scale;
                let density = 0.379_606_689_822_494_4 * (1.0 + z * z / 5.0).powi(-3) / drift.scale;
                mean += density * step * drift.likelihood_ratio(x.exp(), 0.1);
                mass += density * step;
            }
            assert!((mass - 1.0).abs() < 1e-3 && mean < 1.0, "{drift:?}: {mass} {mean}");
        }
    }

    #[test]
    fn few_outliers_among_controls_change_little() {
        let mut clean = Controls::default();
        let mut mixed = Controls::default();
        for at in 0..100 {
            let distance = 0.01 * 1.01_f64.powi(at);
            clean.learn(distance);
            mixed.learn(if at % 10 == 0 { 20.0 } else { distance });
        }
        let (clean, mixed) = (clean.drift(), mixed.drift());
        assert!((clean.location - mixed.location).abs() < 0.2 && mixed.scale < 1.3 * clean.scale);
    }

    #[test]
    fn what_is_no_number_is_as_far_as_anything() {
        let drift = Controls::default().drift();
        let worst = drift.likelihood_ratio(1e9, 0.1);
        assert_eq!(drift.likelihood_ratio(f64::NAN, 0.1), worst);
        assert_eq!(drift.likelihood_ratio(f64::INFINITY, 0.1), worst);
        assert!(worst > 10.0 && drift.likelihood_ratio(0.0, 0.1) < 1.0);
    }
}

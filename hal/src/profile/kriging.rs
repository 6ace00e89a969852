//! Ordinary kriging (Matheron 1963): the best linear estimate at a point from nearby values with unknown
//! mean.

use super::place::{DIMENSIONS, FeaturePoint, distance};

/// Number of values that an estimate uses.
pub(super) const NEIGHBOURS: usize = 16;
/// Distance at which the correlation of two values falls to 1/e (covariance `exp(-distance / LENGTH)`).
const LENGTH: f64 = 4.0;
/// Variance of a measurement around the surface, relative to the surface's own variance.
const NOISE: f64 = 0.2;
/// Variance added per unit of mismatch, for operations that differ in form (accumulating GEMMs, say).
const NOISE_PER_MISMATCH: f64 = 0.1;

/// A measured value near the query point.
#[derive(Clone, Copy, Debug)]
pub(super) struct Near<'a> {
    /// Coordinates of the measurement.
    pub(super) at: &'a FeaturePoint,
    /// The measured value.
    pub(super) value: f64,
    /// Difference between the operations beyond their coordinates.
    pub(super) mismatch: f64,
}

/// Estimates the value at `at` from 1 to [`NEIGHBOURS`] nearby values.
pub(super) fn guess(near: &[Near<'_>], at: &[f64; DIMENSIONS]) -> f64 {
    const N: usize = NEIGHBOURS;
    let n = near.len().min(N);
    let covariance = |a: &FeaturePoint, b: &FeaturePoint| (-distance(a, b) / LENGTH).exp();
    // the lower triangle becomes its own Cholesky factor
    let mut factor = [[0.0; N]; N]; // [n, n]
    for i in 0..n {
        for j in 0..=i {
            let noise = if i == j { NOISE + NOISE_PER_MISMATCH * near[i].mismatch } else { 0.0 };
            let known: f64 = (0..j).map(|k| factor[i][k] * factor[j][k]).sum();
            let left = covariance(near[i].at, near[j].at) + noise - known;
            factor[i][j] = if i == j { left.max(1e-12).sqrt() } else { left / factor[j][j] };
        }
    }
    // with L the factor: all products with the inverse covariance are products of L^-1 x
    let (mut ones, mut values, mut here) = ([0.0; N], [0.0; N], [0.0; N]);
    for i in 0..n {
        let solve =
            |of: f64, x: &[f64; N]| (of - (0..i).map(|k| factor[i][k] * x[k]).sum::<f64>()) / factor[i][i];
        ones[i] = solve(1.0, &ones);
        values[i] = solve(near[i].value, &values);
        here[i] = solve(covariance(near[i].at, at), &here);
    }
    let dot = |a: &[f64; N], b: &[f64; N]| (0..n).map(|i| a[i] * b[i]).sum::<f64>();
    let mean = dot(&ones, &values) / dot(&ones, &ones);
    mean + dot(&here, &values) - mean * dot(&here, &ones)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn places(count: usize) -> impl Strategy<Value = Vec<(FeaturePoint, f64)>> {
        let place = proptest::array::uniform6(0.0..20.0);
        proptest::collection::vec((place, -2.0..2.0), 1..=count)
    }

    proptest! {
        /// Kriging weights sum to 1, so a constant offset passes through unchanged.
        #[test]
        fn a_shift_of_all_values_shifts_the_guess(points in places(NEIGHBOURS), shift in -3.0..3.0) {
            let near = |shift: f64| -> Vec<Near<'_>> {
                points.iter().map(|(at, value)| Near { at, value: value + shift, mismatch: 0.0 }).collect()
            };
            let at = [7.0; DIMENSIONS];
            let moved = guess(&near(shift), &at) - guess(&near(0.0), &at);
            prop_assert!((moved - shift).abs() < 1e-9, "{moved}");
        }

        /// The estimate does not depend on the order of the points.
        #[test]
        fn any_order_gives_the_same(points in places(NEIGHBOURS)) {
            let mut near: Vec<Near<'_>> =
                points.iter().map(|(at, value)| Near { at, value: *value, mismatch: 0.0 }).collect();
            let at = [3.0; DIMENSIONS];
            let before = guess(&near, &at);
            near.reverse();
            prop_assert!((guess(&near, &at) - before).abs() < 1e-9);
        }
    }

    #[test]
    fn the_nearer_of_two_counts_more_and_an_unlike_form_less() {
        let (here, there) = ([0.0; DIMENSIONS], [2.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        let of = |mismatch: f64| {
            let near =
                [Near { at: &here, value: 0.0, mismatch }, Near { at: &there, value: 1.0, mismatch: 0.0 }];
            guess(&near, &[0.5, 0.0, 0.0, 0.0, 0.0, 0.0])
        };
        assert!(of(0.0) > 0.1 && of(0.0) < 0.5, "{}", of(0.0));
        assert!(of(5.0) > of(0.0));
    }
}

//! Ordinary kriging (Matheron 1963): the best linear guess at a place from values nearby, whose mean is not known.

use super::place::{DIMENSIONS, Place, distance};

/// Values that a guess is made from.
pub(super) const NEIGHBOURS: usize = 24;
/// Distance at which the correlation of two values falls to 1/e (covariance `exp(-distance / LENGTH)`).
const LENGTH: f64 = 4.0;
/// Variance of a measurement around the surface, relative to the surface's own.
const NOISE: f64 = 0.08;
/// How much a form that differs (adding to the output, say) adds to that variance, by its mismatch.
const NOISE_PER_MISMATCH: f64 = 0.1;

/// A value near the place asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Near<'a> {
    /// Where it was measured.
    pub(super) at: &'a Place,
    /// What was measured.
    pub(super) value: f64,
    /// How unlike the operation is beyond its place.
    pub(super) mismatch: f64,
}

/// The value at `at`; `near` has 1 to [`NEIGHBOURS`] entries.
pub(super) fn guess(near: &[Near<'_>], at: &[f64; DIMENSIONS]) -> f64 {
    const N: usize = NEIGHBOURS;
    let n = near.len().min(N);
    let covariance = |a: &Place, b: &Place| (-distance(a, b) / LENGTH).exp();
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

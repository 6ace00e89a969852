//! The cost of a class of operations as a sum of a few terms with non-negative coefficients.
//!
//! `time = sum of coefficient x term`. The terms are the roofline with its kink smoothed (`hypot` of
//! arithmetic and memory), memory traffic alone, traffic served by a cache, arithmetic alone, a fixed cost, a
//! cost per work item (one KV head of one sequence in attention), and a cost per key of a sequence for
//! ungrouped decode attention: such kernels walk a sequence's keys serially, so that one sequence takes as
//! long as four. Unlike a surface through the points, such a sum extrapolates: fitted to all batches but the
//! largest, it predicts the cost of one more sequence.

use super::{DeviceProfile, Point};
use crate::{KvShape, OpSig};

/// Number of terms.
const TERMS: usize = 7;
/// Index of the fixed-cost term.
const FIXED: usize = 4;
/// Minimum number of points needed to determine the coefficients.
const POINTS_MIN: usize = 6;
/// Rounds of reweighting, which turn the fit into one of least absolute error (Schlossmacher 1973).
const ROUNDS: usize = 4;
/// Relative error below which a point's weight stops growing.
const ERROR_MIN: f64 = 0.05;
/// Regularisation towards the roofline, as a share of the points' weight: it only decides what they leave
/// open.
const PULL_ROOFLINE: f64 = 1e-3;
/// Number of points below which that pull no longer gets weaker with them.
const PULL_POINTS: f64 = 32.0;
/// Regularisation of the fixed cost towards the smallest measured time, which is mostly fixed cost. If the
/// smallest weights are already some megabytes and fit in a cache, little else separates a fixed cost from
/// cache traffic.
const PULL_FIXED: f64 = 0.05;
/// Number of coordinate descent sweeps.
const SWEEPS: usize = 100;
/// Cache sizes to try in bytes, in steps of a factor of 2.
const CACHE_LEAST: f64 = (1 << 20) as f64;
const CACHE_MOST: f64 = (1 << 29) as f64;
/// Numbers of points for which half such steps are tried too: fewer do not tell them apart, and of more, the
/// near ones say what a law does not.
const HALF_POINTS: std::ops::Range<usize> = 32..256;
/// Number of points of a class that cache sizes are tried on; a larger set is thinned out evenly.
const TRIAL_POINTS: usize = 256;
/// Error ratio below which a cache is accepted.
const CACHE_GAIN: f64 = 0.97;
/// Steepness of the cache's edge: the cache serves half of a working set of its own size; doubling the set
/// divides that share by 2 to this power.
const CACHE_EDGE: f64 = 8.0;
/// Squared share of the time below which a term counts as absent and keeps its coefficient.
const ABSENT: f64 = 1e-3;
/// Cap on errors, so that a few outliers do not choose the cache size.
const ERROR_MAX: f64 = 1.0;

/// The coefficients of the terms, and the size of the cache in bytes (0 if none was detected).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Law {
    coefficients: [f64; TERMS],
    cache_bytes: f64,
}

impl Law {
    /// The exact roofline, without smoothing.
    pub(super) const ROOFLINE: Law =
        Law { coefficients: [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0], cache_bytes: 0.0 };

    /// Evaluates the law for `sig` on `profile`, in seconds.
    pub(super) fn seconds(&self, profile: &DeviceProfile, sig: &OpSig) -> f64 {
        let terms = terms(profile, self.cache_bytes, sig);
        terms.iter().zip(self.coefficients).map(|(term, coefficient)| term * coefficient).sum()
    }

    /// Fits a law of least absolute relative error to each of `classes`, the points of classes of one kind,
    /// staying near the roofline where too few points determine it. They have one cache size, the one with
    /// the least error over all: the classes run on one device, and few points of each tell little about it.
    pub(super) fn fit(profile: &DeviceProfile, classes: &[&[&Point]]) -> Vec<Law> {
        let trials: Vec<Vec<&Point>> = classes.iter().map(|points| thinned(points)).collect();
        let fits = |cache_bytes: f64| -> (f64, Vec<Law>) {
            let each = trials.iter().map(|trial| Law::with_cache(profile, trial, cache_bytes));
            let (errors, laws): (Vec<f64>, Vec<Law>) = each.unzip();
            (errors.iter().sum(), laws)
        };
        let without = fits(0.0);
        let count = classes.iter().map(|points| points.len()).sum::<usize>();
        let step = if HALF_POINTS.contains(&count) { 0.5 } else { 1.0 };
        let sizes = (0..).map(|steps| CACHE_LEAST * (step * f64::from(steps)).exp2());
        let with = sizes.take_while(|size| *size <= CACHE_MOST).map(fits).min_by(|a, b| a.0.total_cmp(&b.0));
        let (_, mut laws) = with.filter(|with| with.0 < CACHE_GAIN * without.0).unwrap_or(without);
        for ((law, points), trial) in laws.iter_mut().zip(classes).zip(&trials) {
            if trial.len() < points.len() {
                *law = Law::with_cache(profile, points, law.cache_bytes).1;
            }
        }
        laws
    }

    /// Fits a law to points of one class with this law's cache size; for points without the one that is to be
    /// predicted.
    pub(super) fn again(&self, profile: &DeviceProfile, points: &[&Point]) -> Law {
        Law::with_cache(profile, points, self.cache_bytes).1
    }

    /// Fits a law with a cache of this size, and returns its error too.
    fn with_cache(profile: &DeviceProfile, points: &[&Point], cache_bytes: f64) -> (f64, Law) {
        if points.len() < POINTS_MIN {
            return (0.0, Law { cache_bytes, ..Law::ROOFLINE });
        }
        let least_s = points.iter().map(|point| point.time.0).fold(f64::INFINITY, f64::min);
        let mut near = Law { cache_bytes, ..Law::ROOFLINE };
        near.coefficients[FIXED] = least_s * 1e6;
        let mut pull = [PULL_ROOFLINE * (PULL_POINTS / points.len() as f64).max(1.0); TERMS];
        pull[FIXED] = PULL_FIXED;
        Fit::new(profile, points, near, pull).solve()
    }

    /// Fits this law of another device to few `points`, staying near it: `pull` is its weight relative to
    /// theirs.
    pub(super) fn moved(&self, profile: &DeviceProfile, points: &[&Point], pull: f64) -> Law {
        Fit::new(profile, points, *self, [pull; TERMS]).solve().1
    }
}

/// Returns at most [`TRIAL_POINTS`] of the points.
fn thinned<'a>(points: &[&'a Point]) -> Vec<&'a Point> {
    points.iter().copied().step_by(points.len().div_ceil(TRIAL_POINTS).max(1)).collect()
}

/// Returns each term at the roofline's rates, with a microsecond for the fixed cost and a nanosecond per work
/// item and per key.
fn terms(profile: &DeviceProfile, cache_bytes: f64, sig: &OpSig) -> [f64; TERMS] {
    let (arithmetic, memory) = profile.floors(sig);
    let items = match *sig {
        OpSig::AttnDecode { sequences, kv: KvShape { kv_heads, .. }, .. }
        | OpSig::AttnPrefill { sequences, kv: KvShape { kv_heads, .. }, .. } => {
            f64::from(sequences) * f64::from(kv_heads)
        }
        _ => 0.0,
    };
    let held =
        if cache_bytes > 0.0 { 1.0 / (1.0 + (sig.bytes() / cache_bytes).powf(CACHE_EDGE)) } else { 0.0 };
    let beyond = memory.0 * (1.0 - held);
    let walked = match *sig {
        OpSig::AttnDecode { sequences, kv_tokens, heads, kv: KvShape { kv_heads, .. }, .. }
            if heads == kv_heads =>
        {
            kv_tokens as f64 / f64::from(sequences.max(1))
        }
        _ => 0.0,
    };
    [arithmetic.0.hypot(beyond), beyond, memory.0 * held, arithmetic.0, 1e-6, 1e-9 * items, 1e-9 * walked]
}

/// A least-squares problem in which each row holds a point's terms divided by its time, so that the sum
/// should be 1.
struct Fit {
    rows: Vec<[f64; TERMS]>,
    near: Law,
    /// Regularisation strength of each coefficient.
    stiffness: [f64; TERMS],
}

impl Fit {
    fn new(profile: &DeviceProfile, points: &[&Point], near: Law, pull: [f64; TERMS]) -> Self {
        let row =
            |point: &&Point| terms(profile, near.cache_bytes, &point.sig).map(|term| term / point.time.0);
        let usable = |row: &[f64; TERMS]| row.iter().all(|x| x.is_finite());
        let rows: Vec<[f64; TERMS]> = points.iter().map(row).filter(usable).collect();
        let squares = |i: usize| rows.iter().map(|row| row[i] * row[i] + ABSENT).sum::<f64>();
        let stiffness = std::array::from_fn(|i| pull[i] * squares(i));
        Fit { rows, near, stiffness }
    }

    /// Solves for the law and its error by coordinate descent under iteratively reweighted least squares.
    fn solve(&self) -> (f64, Law) {
        let mut weights = vec![1.0; self.rows.len()];
        let mut coefficients = self.near.coefficients;
        for _ in 0..ROUNDS {
            let (mut normal, mut right) = ([[0.0; TERMS]; TERMS], [0.0; TERMS]);
            for (row, weight) in self.rows.iter().zip(&weights) {
                for i in 0..TERMS {
                    right[i] += weight * row[i];
                    for j in 0..TERMS {
                        normal[i][j] += weight * row[i] * row[j];
                    }
                }
            }
            for i in 0..TERMS {
                normal[i][i] += self.stiffness[i];
                right[i] += self.stiffness[i] * self.near.coefficients[i];
            }
            descend(&normal, &right, &mut coefficients);
            for (row, weight) in self.rows.iter().zip(&mut weights) {
                *weight = 1.0 / (off(row, &coefficients) + ERROR_MIN);
            }
            let scale = weights.len() as f64 / weights.iter().sum::<f64>();
            weights.iter_mut().for_each(|weight| *weight *= scale);
        }
        let error = self.rows.iter().map(|row| off(row, &coefficients).min(ERROR_MAX)).sum();
        (error, Law { coefficients, ..self.near })
    }
}

/// Returns |ln(law / measured)| of a row.
fn off(row: &[f64; TERMS], coefficients: &[f64; TERMS]) -> f64 {
    row.iter().zip(coefficients).map(|(x, c)| x * c).sum::<f64>().max(1e-12).ln().abs()
}

/// Minimises `c.normal.c / 2 - right.c` over c >= 0 by coordinate descent.
fn descend(normal: &[[f64; TERMS]; TERMS], right: &[f64; TERMS], c: &mut [f64; TERMS]) {
    for _ in 0..SWEEPS {
        let before = *c;
        for i in 0..TERMS {
            if normal[i][i] > 0.0 {
                let others: f64 = (0..TERMS).filter(|&j| j != i).map(|j| normal[i][j] * c[j]).sum();
                c[i] = ((right[i] - others) / normal[i][i]).max(0.0);
            }
        }
        if c.iter().zip(before).all(|(new, old)| (new - old).abs() <= 1e-6 * (1.0 + old)) {
            break;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::units::{Bytes, BytesPerSecond, FlopPerSecond, Seconds};

    fn decode(sequences: u32, context: u32) -> OpSig {
        attention(32, sequences, context)
    }

    fn attention(heads: u32, sequences: u32, context: u32) -> OpSig {
        OpSig::AttnDecode {
            sequences,
            kv_tokens: u64::from(sequences) * u64::from(context),
            heads,
            pages_max: context.div_ceil(16),
            x: DType::Bf16,
            kv: KvShape { kv_heads: 8, head_dim: 128, page_tokens: 16, dtype: DType::Bf16, latent: None },
            cap: None,
        }
    }

    fn device() -> DeviceProfile {
        DeviceProfile::roof(vec![(DType::Bf16, FlopPerSecond(1e14))], BytesPerSecond(1e12), Bytes(1e10))
    }

    /// A synthetic device: 10 us, 20 ns per KV head, traffic at 80 % of the claim and at twice the claim from
    /// a 32 MiB cache.
    fn truth(sig: &OpSig) -> f64 {
        let law =
            Law { coefficients: [0.0, 1.25, 0.5, 0.0, 10.0, 20.0, 0.0], cache_bytes: f64::from(1 << 25) };
        law.seconds(&device(), sig)
    }

    fn fit(points: &[Point]) -> Law {
        Law::fit(&device(), &[&points.iter().collect::<Vec<_>>()])[0]
    }

    #[test]
    fn a_law_is_found_again_and_goes_on_beyond_its_points() {
        let sigs = (0..9).flat_map(|b| (4..13).map(move |c| decode(1 << b, 1 << c)));
        let points: Vec<Point> = sigs.map(|sig| Point { time: Seconds(truth(&sig)), sig }).collect();
        let law = fit(&points);
        assert_eq!(law.cache_bytes, f64::from(1 << 25));
        for sig in [decode(2048, 64), decode(2048, 4096), decode(1, 131_072), decode(16, 700)] {
            let ratio = law.seconds(&device(), &sig) / truth(&sig);
            assert!((ratio - 1.0).abs() < 0.02, "{sig:?}: {ratio}");
        }
    }

    /// A kernel that walks each sequence's keys serially takes as long for one sequence as for four.
    #[test]
    fn keys_that_are_walked_over_one_by_one_are_known_beyond_the_points() {
        let ungrouped = |sequences, context| attention(8, sequences, context);
        let took =
            |sequences: u32, context: u32| 10e-6 + 20e-9 * f64::from(context) + 1e-9 * f64::from(sequences);
        let shapes = (0..4).flat_map(|b| (4..14).map(move |c| (1 << b, 1 << c)));
        let point = |(b, c)| Point { sig: ungrouped(b, c), time: Seconds(took(b, c)) };
        let points: Vec<Point> = shapes.map(point).collect();
        let law = fit(&points);
        for (b, c) in [(1, 131_072), (4, 131_072), (2, 40_000)] {
            let ratio = law.seconds(&device(), &ungrouped(b, c)) / took(b, c);
            assert!((ratio - 1.0).abs() < 0.1, "{b} x {c}: {ratio}");
        }
    }

    #[test]
    fn odd_points_do_not_move_the_law() {
        let sigs = (0..9).flat_map(|b| (4..13).map(move |c| decode(1 << b, 1 << c)));
        let odd = |index: usize| if index % 7 == 3 { 3.0 } else { 1.0 };
        let points: Vec<Point> = sigs
            .enumerate()
            .map(|(index, sig)| Point { time: Seconds(truth(&sig) * odd(index)), sig })
            .collect();
        let law = fit(&points);
        let ratio = law.seconds(&device(), &decode(2048, 1024)) / truth(&decode(2048, 1024));
        assert!((ratio - 1.0).abs() < 0.1, "{ratio}");
    }

    #[test]
    fn without_points_the_law_is_that_of_the_other() {
        let other = Law { coefficients: [0.0, 1.0, 1.0, 0.0, 4.0, 0.0, 0.0], cache_bytes: 0.0 };
        assert_eq!(other.moved(&device(), &[], 1.0), other);
        assert_eq!(fit(&[]), Law::ROOFLINE);
    }
}

//! Chooses the few of many measured points that predict the rest best.

use super::{DeviceProfile, Point, Predictor, worth_measuring};
use crate::random::Stream;

/// Number of points that a choice is judged by; a larger set is thinned out evenly.
const JUDGES_MAX: usize = 400;
/// Exchanges of one point for another that are tried.
const EXCHANGES: usize = 4000;
/// Seed of the exchanges.
const SEED: u64 = 20_261_123;

/// Chooses `count` of `points`, operations of one kind, so that a predictor of `roof` with nothing else is
/// off by as little as possible over all of them: from the operations [`worth_measuring`], points are
/// exchanged for others as long as that lowers the mean relative error. The same input gives the same choice.
pub fn distil(roof: &DeviceProfile, points: &[Point], count: usize) -> Vec<Point> {
    let sigs: Vec<_> = points.iter().map(|point| point.sig).collect();
    let start = worth_measuring(&sigs, count);
    let (mut chosen, mut left): (Vec<Point>, Vec<Point>) =
        points.iter().cloned().partition(|point| start.contains(&point.sig));
    if left.is_empty() {
        return chosen;
    }
    let judges: Vec<&Point> = points.iter().step_by(points.len().div_ceil(JUDGES_MAX)).collect();
    let mut profile = roof.without_points();
    let mut off_by = |chosen: &[Point], at_most: f64| {
        profile.points.clear();
        profile.points.extend_from_slice(chosen);
        total_error(&Predictor::new(&profile), &judges, at_most)
    };
    let mut least = off_by(&chosen, f64::INFINITY).unwrap_or(f64::INFINITY);
    let mut stream = Stream::new(SEED);
    for _ in 0..EXCHANGES {
        let (from, to) = (below(&mut stream, chosen.len()), below(&mut stream, left.len()));
        std::mem::swap(&mut chosen[from], &mut left[to]);
        match off_by(&chosen, least) {
            Some(error) => least = error,
            None => std::mem::swap(&mut chosen[from], &mut left[to]),
        }
    }
    chosen
}

/// Draws an index of `count` values.
fn below(stream: &mut Stream, count: usize) -> usize {
    usize::try_from(stream.below(count as u64)).unwrap_or(0)
}

/// Returns the sum of relative errors over `judges`; `None` as soon as it is no less than `at_most`.
fn total_error(predictor: &Predictor, judges: &[&Point], at_most: f64) -> Option<f64> {
    let mut sum = 0.0;
    for judge in judges {
        sum += (predictor.time(&judge.sig) / judge.time - 1.0).abs();
        if sum >= at_most {
            return None;
        }
    }
    Some(sum)
}

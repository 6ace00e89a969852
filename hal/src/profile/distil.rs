//! Chooses the few of many measured points that predict the rest best.

use super::place::{coordinates, distance};
use super::{DeviceProfile, Point, Predictor, worth_measuring};
use crate::cast;
use crate::random::Stream;

/// Exchanges of one point for another that are tried.
const EXCHANGES: usize = 12_000;
/// Percentage of exchanges that try a near point instead of a random one.
const NEAR: usize = 65;
/// Number of candidates; the nearest is taken.
const NEAREST_OF: usize = 9;
/// Judged points between two comparisons of an exchange with what it would replace.
const LEG: usize = 25;
/// Ratio of their errors so far above which the exchange is given up.
const BEHIND: f64 = 1.02;
/// Seed of the exchanges.
const SEED: u64 = 20_261_123;

/// Chooses `count` of `points`, operations of one kind, so that a predictor of `roof` with these points alone
/// has the least error over all of them. Starting with the operations [`worth_measuring`], points are
/// exchanged for others while that lowers the mean relative error. An exchange that is clearly worse after
/// some of the points is dropped early (racing; Maron & Moore 1994). The same input gives the same choice.
pub fn distil(roof: &DeviceProfile, points: &[Point], count: usize) -> Vec<Point> {
    let sigs: Vec<_> = points.iter().map(|point| point.sig).collect();
    let start = worth_measuring(&sigs, count);
    let (mut chosen, mut left): (Vec<Point>, Vec<Point>) =
        points.iter().cloned().partition(|point| start.contains(&point.sig));
    if left.is_empty() {
        return chosen;
    }
    let mut stream = Stream::new(SEED);
    let mut below = |count: usize| cast::to_usize(stream.below(count as u64));
    let mut judges: Vec<&Point> = points.iter().collect();
    for last in (1..judges.len()).rev() {
        judges.swap(last, below(last + 1));
    }
    let mut profile = roof.without_points();
    let mut errors = |chosen: &[Point], least: &[f64]| {
        profile.points.clear();
        profile.points.extend_from_slice(chosen);
        race(&Predictor::new(&profile), &judges, least)
    };
    let mut least = errors(&chosen, &[]).unwrap_or_default();
    for _ in 0..EXCHANGES {
        let (from, mut to) = (below(chosen.len()), below(left.len()));
        if below(100) < NEAR {
            let at = coordinates(&chosen[from].sig);
            let far = |index: usize| distance(&at, &coordinates(&left[index].sig));
            for other in (1..NEAREST_OF).map(|_| below(left.len())) {
                to = if far(other) < far(to) { other } else { to };
            }
        }
        std::mem::swap(&mut chosen[from], &mut left[to]);
        match errors(&chosen, &least) {
            Some(errors) => least = errors,
            None => std::mem::swap(&mut chosen[from], &mut left[to]),
        }
    }
    chosen
}

/// Returns the running sums of relative errors after each leg of `judges`; `None` as soon as one is clearly
/// above that of `least`, or if the last one is no less.
fn race(predictor: &Predictor, judges: &[&Point], least: &[f64]) -> Option<Vec<f64>> {
    let (mut sum, mut sums) = (0.0, Vec::with_capacity(judges.len().div_ceil(LEG)));
    for (index, leg) in judges.chunks(LEG).enumerate() {
        sum += leg.iter().map(|judge| (predictor.time(&judge.sig) / judge.time - 1.0).abs()).sum::<f64>();
        if least.get(index).is_some_and(|least| sum > BEHIND * least) {
            return None;
        }
        sums.push(sum);
    }
    least.last().is_none_or(|least| sum < *least).then_some(sums)
}

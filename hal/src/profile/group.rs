//! The points of one class of operations: their law, and how far each deviates from it.

use super::kriging::{self, NEIGHBOURS, Near};
use super::law::Law;
use super::place::{DIMENSIONS, FeaturePoint, along_bytes, coordinates, distance, mismatch};
use super::{DeviceProfile, Point};
use crate::OpSig;
use std::collections::HashMap;

/// Bracketing neighbours decide alone if their row counts differ by at most a factor of 2 to this power.
const STEP_MAX: f64 = 0.9;
/// Row count (log2) up to which bracketing neighbours decide alone: beyond 128 the next tile of 8 rows adds
/// less than 7 %, and two points are noisier than many.
const STEP_ROWS_MAX: f64 = 7.0;
/// Mismatch above which two forms of an operation (accumulating or not, say) count as different kernels.
const FORMS_MAX: f64 = 0.3;

/// A point prepared for distance computations.
#[derive(Clone, Debug)]
struct PreparedPoint {
    sig: OpSig,
    at: FeaturePoint,
    /// ln(time / law), less its expected value.
    rest: f64,
}

/// All points of one class.
#[derive(Clone, Debug)]
pub(super) struct ClassPoints {
    pub(super) law: Law,
    /// The points, in ascending order of bytes.
    rows: Vec<PreparedPoint>,
    /// Indices into `rows`, by shape without the row count.
    series: HashMap<[u64; DIMENSIONS - 2], Vec<usize>>,
}

impl ClassPoints {
    /// Prepares the points of one class with their law. `expected` is the prior mean of ln(time / law) of
    /// each point, in their order.
    pub(super) fn new(
        profile: &DeviceProfile,
        law: Law,
        points: &[&Point],
        expected: impl IntoIterator<Item = f64>,
    ) -> Self {
        let beyond = |(point, expected): (&&Point, f64)| {
            let rest = (point.time.0 / law.seconds(profile, &point.sig)).ln() - expected;
            rest.is_finite().then(|| PreparedPoint { sig: point.sig, at: coordinates(&point.sig), rest })
        };
        let mut rows: Vec<PreparedPoint> = points.iter().zip(expected).filter_map(beyond).collect();
        rows.sort_by(|a, b| a.at[0].total_cmp(&b.at[0]));
        let mut series: HashMap<_, Vec<usize>> = HashMap::new();
        for (index, row) in rows.iter().enumerate() {
            series.entry(series_of(&row.at)).or_default().push(index);
        }
        ClassPoints { law, rows, series }
    }

    /// Returns this device's correction for `sig`, beyond the law and the prior mean.
    pub(super) fn rest(&self, sig: &OpSig) -> f64 {
        let at = coordinates(sig);
        self.between(sig, &at).unwrap_or_else(|| {
            let near = self.nearest(sig, &at);
            if near.is_empty() { 0.0 } else { kriging::guess(&near, &at) }
        })
    }

    /// Predicts the time of `sig` in seconds, where `expected` is known beforehand about ln(time / law).
    pub(super) fn seconds(&self, profile: &DeviceProfile, sig: &OpSig, expected: f64) -> f64 {
        self.law.seconds(profile, sig) * (self.rest(sig) + expected).exp()
    }

    /// Returns the nearest rows, nearest first, by walking away from `at` in both directions until bytes
    /// alone put them too far away.
    fn nearest<'a>(&'a self, sig: &OpSig, at: &FeaturePoint) -> Vec<Near<'a>> {
        let mut found: Vec<(f64, &'a PreparedPoint)> = Vec::with_capacity(NEIGHBOURS + 1);
        let middle = self.rows.partition_point(|row| row.at[0] < at[0]);
        let (mut below, mut above) =
            (self.rows[..middle].iter().rev().peekable(), self.rows[middle..].iter().peekable());
        loop {
            let gap =
                |row: Option<&&PreparedPoint>| row.map_or(f64::INFINITY, |row| along_bytes(&row.at, at));
            let (down, up) = (gap(below.peek()), gap(above.peek()));
            let full = found.len() == NEIGHBOURS;
            if full && down.min(up) > found[NEIGHBOURS - 1].0 {
                break;
            }
            let Some(row) = (if down < up { below.next() } else { above.next() }) else { break };
            let far = distance(&row.at, at) + mismatch(&row.sig, sig);
            if !full || far < found[NEIGHBOURS - 1].0 {
                let place = found.partition_point(|(other, _)| *other <= far);
                found.insert(place, (far, row));
                found.truncate(NEIGHBOURS);
            }
        }
        let near = |(_, row): (f64, &'a PreparedPoint)| Near {
            at: &row.at,
            value: row.rest,
            mismatch: mismatch(&row.sig, sig),
        };
        found.into_iter().map(near).collect()
    }

    /// Interpolates between the next points below and above that differ only in rows, if they are near: a
    /// kernel's time is a staircase over rows, and a surface through more points would smooth out the step.
    fn between(&self, sig: &OpSig, at: &FeaturePoint) -> Option<f64> {
        if at[1] > STEP_ROWS_MAX {
            return None;
        }
        let (mut below, mut above) = (None::<&PreparedPoint>, None::<&PreparedPoint>);
        for row in self.series.get(&series_of(at))?.iter().map(|&index| &self.rows[index]) {
            if mismatch(&row.sig, sig) >= FORMS_MAX {
                continue;
            }
            let nearer = |old: Option<&PreparedPoint>| {
                let key = |r: &PreparedPoint| ((r.at[1] - at[1]).abs(), mismatch(&r.sig, sig));
                old.is_none_or(|old| key(row) < key(old))
            };
            if row.at[1] <= at[1] && nearer(below) {
                below = Some(row);
            }
            if row.at[1] >= at[1] && nearer(above) {
                above = Some(row);
            }
        }
        let (below, above) = (below?, above?);
        let width = above.at[1] - below.at[1];
        let share = if width > 0.0 { (at[1] - below.at[1]) / width } else { 0.0 };
        (width <= STEP_MAX).then_some(below.rest + share * (above.rest - below.rest))
    }
}

/// Returns the shape without the row count and what depends on it, namely bytes.
fn series_of(at: &FeaturePoint) -> [u64; DIMENSIONS - 2] {
    std::array::from_fn(|d| at[d + 2].to_bits())
}

//! Predicts the time of any operation from measured points.
//!
//! `time = law x exp(shape + residual)`. The law is a sum of a few physical terms, fitted to all points of
//! the class (`law.rs`). The residual is the logarithm of measured over law, kriged from the nearest points
//! (`kriging.rs`) over the base-2 logarithms of shape and bytes (`place.rs`), because it varies slowly where
//! time varies by orders of magnitude. As an exception, two nearby points with few rows that bracket the
//! query and differ from it only in rows decide alone. The shape is what the points of other devices say
//! about the residual, if there are any ([`Predictor::borrowing`]). Checked against published kernel times of
//! five GPUs in `hal/tests/predict.rs`.

use super::kriging::{self, NEIGHBOURS, Near};
use super::law::Law;
use super::place::{DIMENSIONS, FeaturePoint, KernelClass, along_bytes, coordinates, distance, mismatch};
use super::{DeviceProfile, Point};
use crate::OpSig;
use crate::units::Seconds;
use std::collections::HashMap;
use std::sync::Arc;

/// Bracketing neighbours decide alone if their row counts differ by at most a factor of 2 to this power.
const STEP_MAX: f64 = 0.9;
/// Row count (log2) up to which bracketing neighbours decide alone: beyond 128 the next tile of 8 rows adds
/// less than 7 %, and two points are noisier than many.
const STEP_ROWS_MAX: f64 = 7.0;
/// Mismatch above which two forms of an operation (accumulating or not, say) count as different kernels.
const FORMS_MAX: f64 = 0.3;
/// Mean squared log difference below which other devices are indistinguishable: errors of 7 %.
const LIKENESS: f64 = 0.005;

/// A point prepared for distance computations.
#[derive(Clone, Debug)]
struct Row {
    sig: OpSig,
    at: FeaturePoint,
    /// ln(time / law) minus what other devices predict for it.
    rest: f64,
}

/// All points of one class.
#[derive(Clone, Debug)]
struct Group {
    law: Law,
    /// The points, in ascending order of bytes.
    rows: Vec<Row>,
    /// Indices into `rows`, by shape without the row count.
    series: HashMap<[u64; DIMENSIONS - 2], Vec<usize>>,
    /// Weights of the other devices, which sum to 1; empty if there are none.
    weights: Vec<f64>,
}

/// A profile prepared for many queries: the same answers as [`DeviceProfile::time`], but faster.
#[derive(Clone, Debug)]
pub struct Predictor {
    /// The profile, without its points.
    profile: DeviceProfile,
    groups: HashMap<KernelClass, Group>,
    /// For each kind, the class that stands in for classes without points.
    largest: HashMap<&'static str, KernelClass>,
    exact: HashMap<OpSig, Seconds>,
    others: Arc<[Predictor]>,
}

impl Predictor {
    /// Prepares `profile` for queries.
    pub fn new(profile: &DeviceProfile) -> Self {
        Self::prepare(profile, &[])
    }

    /// Prepares a sparsely measured device with the help of `others`. 32 points over all operations suffice
    /// if they are [`super::worth_measuring`]. Its roofline must be a datasheet, as must theirs. The laws'
    /// coefficients are shares of the datasheet and start at the mean of the others'. The residual starts at
    /// that of the others for the same operation, each weighted by the inverse of its mean squared difference
    /// from the points; what remains at the points is kriged as usual. Operations that only the others
    /// measured are predicted too.
    pub fn borrowing(profile: &DeviceProfile, others: &[Predictor]) -> Self {
        Self::prepare(profile, others)
    }

    fn prepare(profile: &DeviceProfile, others: &[Predictor]) -> Self {
        let mut classes: HashMap<KernelClass, Vec<&Point>> = HashMap::new();
        for other in others {
            classes.extend(other.groups.keys().map(|class| (*class, Vec::new())));
        }
        let mut exact = HashMap::new();
        for point in &profile.points {
            exact.entry(point.sig).or_insert(point.time);
            classes.entry(KernelClass::of(&point.sig)).or_default().push(point);
        }
        let mut largest: HashMap<&'static str, KernelClass> = HashMap::new();
        for class in profile.points.iter().map(|point| KernelClass::of(&point.sig)) {
            let old = largest.entry(class.name).or_insert(class);
            if classes[&class].len() > classes[old].len() {
                *old = class;
            }
        }
        let group = |(class, points): (KernelClass, Vec<&Point>)| {
            (class, Group::new(profile, class, &points, others))
        };
        let groups = classes.into_iter().map(group).collect();
        Predictor { profile: profile.without_points(), groups, largest, exact, others: others.into() }
    }

    /// Predicts the time of `sig`, excluding launch cost; see [`DeviceProfile::time`].
    pub fn time(&self, sig: &OpSig) -> Seconds {
        if let Some(time) = self.exact.get(sig) {
            return *time;
        }
        let class = KernelClass::of(sig);
        let stand_in = || self.groups.get(self.largest.get(class.name)?);
        match self.groups.get(&class).or_else(stand_in) {
            Some(group) => {
                let rest = group.rest(sig) + group.shape(&self.others, sig);
                Seconds(group.law.seconds(&self.profile, sig) * rest.exp())
            }
            None => self.profile.roofline(sig),
        }
    }

    /// Predicts a batch on an idle queue, including its launch; see [`DeviceProfile::batch_time`].
    pub fn batch_time<'a>(&self, sigs: impl IntoIterator<Item = &'a OpSig>) -> Seconds {
        let each = |sig| self.time(sig) + self.profile.launch_per_command;
        self.profile.launch + sigs.into_iter().map(each).sum()
    }

    /// Returns the profile, without its points.
    pub fn profile(&self) -> &DeviceProfile {
        &self.profile
    }

    /// Returns ln(predicted / law) of `sig`, from points of its own class alone.
    fn beyond_law(&self, sig: &OpSig) -> Option<f64> {
        let group = self.groups.get(&KernelClass::of(sig))?;
        Some(group.rest(sig) + group.shape(&self.others, sig))
    }
}

/// Answers one query on an unprepared profile, using only the points of one class.
pub(super) fn time(profile: &DeviceProfile, sig: &OpSig) -> Seconds {
    let class = KernelClass::of(sig);
    let (mut same, mut classes) = (Vec::new(), Vec::<(KernelClass, Vec<&Point>)>::new());
    for point in profile.points.iter().filter(|point| point.sig.name() == class.name) {
        if point.sig == *sig {
            return point.time;
        }
        let of = KernelClass::of(&point.sig);
        if of == class {
            same.push(point);
        } else if let Some((_, points)) = classes.iter_mut().find(|(known, _)| *known == of) {
            points.push(point);
        } else {
            classes.push((of, vec![point]));
        }
    }
    if same.is_empty() {
        let larger =
            |a: (KernelClass, Vec<_>), b: (KernelClass, Vec<_>)| if b.1.len() > a.1.len() { b } else { a };
        same = classes.into_iter().reduce(larger).map_or_else(Vec::new, |(_, points)| points);
    }
    if same.is_empty() {
        return profile.roofline(sig);
    }
    let group = Group::new(profile, class, &same, &[]);
    Seconds(group.law.seconds(profile, sig) * group.rest(sig).exp())
}

impl Group {
    fn new(profile: &DeviceProfile, class: KernelClass, points: &[&Point], others: &[Predictor]) -> Self {
        let laws: Vec<Law> = others.iter().filter_map(|other| Some(other.groups.get(&class)?.law)).collect();
        let law = match laws.as_slice() {
            [] => Law::fit(profile, points),
            laws => Law::near_others(profile, points, laws),
        };
        let beyond = |point: &&Point| {
            let rest = (point.time.0 / law.seconds(profile, &point.sig)).ln();
            rest.is_finite().then(|| Row { sig: point.sig, at: coordinates(&point.sig), rest })
        };
        let mut rows: Vec<Row> = points.iter().filter_map(beyond).collect();
        rows.sort_by(|a, b| a.at[0].total_cmp(&b.at[0]));
        let mut series: HashMap<_, Vec<usize>> = HashMap::new();
        for (index, row) in rows.iter().enumerate() {
            series.entry(series_of(&row.at)).or_default().push(index);
        }
        let weights = likeness(class, &rows, others);
        let mut group = Group { law, rows, series, weights };
        if !others.is_empty() {
            let shapes: Vec<f64> = group.rows.iter().map(|row| group.shape(others, &row.sig)).collect();
            group.rows.iter_mut().zip(shapes).for_each(|(row, shape)| row.rest -= shape);
        }
        group
    }

    /// Returns what the other devices say about the residual of `sig`.
    fn shape(&self, others: &[Predictor], sig: &OpSig) -> f64 {
        let share = |(other, weight): (&Predictor, &f64)| Some(weight * other.beyond_law(sig)?);
        others.iter().zip(&self.weights).filter(|(_, weight)| **weight > 0.0).filter_map(share).sum()
    }

    /// Returns what this device's points say about `sig` beyond law and shape.
    fn rest(&self, sig: &OpSig) -> f64 {
        let at = coordinates(sig);
        self.between(sig, &at).unwrap_or_else(|| {
            let near = self.nearest(sig, &at);
            if near.is_empty() { 0.0 } else { kriging::guess(&near, &at) }
        })
    }

    /// Returns the nearest rows, nearest first, by walking away from `at` in both directions until bytes
    /// alone put them too far away.
    fn nearest<'a>(&'a self, sig: &OpSig, at: &FeaturePoint) -> Vec<Near<'a>> {
        let mut found: Vec<(f64, &'a Row)> = Vec::with_capacity(NEIGHBOURS + 1);
        let middle = self.rows.partition_point(|row| row.at[0] < at[0]);
        let (mut below, mut above) =
            (self.rows[..middle].iter().rev().peekable(), self.rows[middle..].iter().peekable());
        loop {
            let gap = |row: Option<&&Row>| row.map_or(f64::INFINITY, |row| along_bytes(&row.at, at));
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
        let near = |(_, row): (f64, &'a Row)| Near {
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
        let (mut below, mut above) = (None::<&Row>, None::<&Row>);
        for row in self.series.get(&series_of(at))?.iter().map(|&index| &self.rows[index]) {
            if mismatch(&row.sig, sig) >= FORMS_MAX {
                continue;
            }
            let nearer = |old: Option<&Row>| {
                let key = |r: &Row| ((r.at[1] - at[1]).abs(), mismatch(&r.sig, sig));
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

/// Returns the weight of each of the other devices: the inverse of its mean squared difference over `rows`.
fn likeness(class: KernelClass, rows: &[Row], others: &[Predictor]) -> Vec<f64> {
    let like = |other: &Predictor| {
        if !other.groups.contains_key(&class) {
            return 0.0;
        }
        let square = |row: &Row| Some((row.rest - other.beyond_law(&row.sig)?).powi(2));
        let squares: f64 = rows.iter().filter_map(square).sum();
        1.0 / (squares / rows.len().max(1) as f64 + LIKENESS)
    };
    let likes: Vec<f64> = others.iter().map(like).collect();
    let total: f64 = likes.iter().sum();
    likes.into_iter().map(|like| if total > 0.0 { like / total } else { 0.0 }).collect()
}

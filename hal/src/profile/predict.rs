//! Predicts the time of any operation from measured points.
//!
//! `time = law x exp(residual)`. The law is a sum of a few physical terms, fitted to all points of the class
//! (`law.rs`). The residual is the logarithm of measured over law, kriged from the nearest points
//! (`kriging.rs`) over the base-2 logarithms of shape and bytes (`place.rs`), because it varies slowly where
//! time varies by orders of magnitude. As an exception, two nearby points with few rows that bracket the
//! query and differ from it only in rows decide alone (`group.rs`). Predictions of other devices are mixed in
//! as far as they predict the measured points (`lent.rs`). Checked against published kernel times of five
//! GPUs in `hal/tests/predict.rs`.

use super::group::ClassPoints;
use super::law::Law;
use super::lent::{ExpectedError, LentProfiles};
use super::place::KernelClass;
use super::{DeviceProfile, Point};
use crate::OpSig;
use crate::units::Seconds;
use std::collections::HashMap;

/// A profile prepared for many queries: the same answers as [`DeviceProfile::time`], but faster.
#[derive(Clone, Debug)]
pub struct Predictor {
    /// The profile, without its points.
    profile: DeviceProfile,
    groups: HashMap<KernelClass, ClassPoints>,
    /// For each kind, the class that stands in for classes without points.
    largest: HashMap<&'static str, KernelClass>,
    exact: HashMap<OpSig, Seconds>,
    lent: LentProfiles,
}

impl Predictor {
    /// Prepares `profile` for queries.
    pub fn new(profile: &DeviceProfile) -> Self {
        let classes = PointsByClass::of(&profile.points);
        let groups = classes.groups(profile);
        let mut exact = HashMap::new();
        for point in &profile.points {
            exact.entry(point.sig).or_insert(point.time);
        }
        let (profile, largest) = (profile.without_points(), classes.largest());
        Predictor { profile, groups, largest, exact, lent: LentProfiles::default() }
    }

    /// Prepares a sparsely measured device with the help of `others`. 32 points over all operations are
    /// enough if they are [`super::worth_measuring`]. Its roofline must be a datasheet, as must theirs: laws
    /// are shares of the datasheet. The law of each other device is moved towards the points, and the
    /// residual starts at that device's residual for the same operation. These predictions and the one from
    /// the points alone are averaged, weighted per kind by their leave-one-out errors; others that predict
    /// little better than the points alone get no weight. Operations that only other devices measured are
    /// predicted too.
    pub fn borrowing(profile: &DeviceProfile, others: &[Predictor]) -> Self {
        let mut predictor = Predictor::new(profile);
        let classes = PointsByClass::of(&profile.points);
        predictor.lent = LentProfiles::new(&predictor.profile, &predictor.groups, &classes.0, others);
        predictor
    }

    /// Returns how far predictions of each kind with points are likely to be off: each point is left out in
    /// turn. Empty unless it was prepared by [`Predictor::borrowing`].
    pub fn expected_errors(&self) -> &[ExpectedError] {
        &self.lent.expected
    }

    /// Predicts the time of `sig`, excluding launch cost; see [`DeviceProfile::time`].
    pub fn time(&self, sig: &OpSig) -> Seconds {
        if let Some(time) = self.exact.get(sig) {
            return *time;
        }
        let class = KernelClass::of(sig);
        let stand_in = || self.groups.get(self.largest.get(class.name)?);
        let own = self.groups.get(&class).or_else(stand_in);
        let own = own.map(|group| group.seconds(&self.profile, sig, 0.0));
        let mixed = self.lent.mixed(&self.profile, sig, class, own);
        let unlike = || match sig.equivalent() {
            Some(plain) => self.time(&plain),
            None => self.profile.roofline(sig),
        };
        mixed.map_or_else(unlike, Seconds)
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

    /// Returns the law of a class from the class's points.
    pub(super) fn law(&self, class: &KernelClass) -> Option<Law> {
        Some(self.groups.get(class)?.law)
    }

    /// Returns the classes that have points.
    pub(super) fn classes(&self) -> impl Iterator<Item = &KernelClass> {
        self.groups.keys()
    }

    /// Returns ln(predicted / law) of `sig`, from the points of the class alone.
    pub(super) fn beyond_law(&self, sig: &OpSig) -> Option<f64> {
        Some(self.groups.get(&KernelClass::of(sig))?.rest(sig))
    }
}

/// The points of a profile by class, in order of appearance.
struct PointsByClass<'a>(Vec<(KernelClass, Vec<&'a Point>)>);

impl<'a> PointsByClass<'a> {
    fn of(points: impl IntoIterator<Item = &'a Point>) -> Self {
        let (mut classes, mut places) = (Vec::<(KernelClass, Vec<&Point>)>::new(), HashMap::new());
        for point in points {
            let class = KernelClass::of(&point.sig);
            let place = *places.entry(class).or_insert(classes.len());
            if place == classes.len() {
                classes.push((class, Vec::new()));
            }
            classes[place].1.push(point);
        }
        PointsByClass(classes)
    }

    /// Returns the class of each kind with the most points; the first of several.
    fn largest(&self) -> HashMap<&'static str, KernelClass> {
        let mut largest: HashMap<&str, (KernelClass, usize)> = HashMap::new();
        for (class, points) in &self.0 {
            let known = largest.entry(class.name).or_insert((*class, points.len()));
            if points.len() > known.1 {
                *known = (*class, points.len());
            }
        }
        largest.into_iter().map(|(name, (class, _))| (name, class)).collect()
    }

    /// Prepares all classes; classes of one kind and the same dtypes share a cache.
    fn groups(&self, profile: &DeviceProfile) -> HashMap<KernelClass, ClassPoints> {
        let mut groups = HashMap::new();
        for (class, _) in &self.0 {
            if groups.contains_key(class) {
                continue;
            }
            let alike =
                |(other, _): &&(KernelClass, _)| (other.name, other.dtypes) == (class.name, class.dtypes);
            let of: Vec<_> = self.0.iter().filter(alike).collect();
            let points: Vec<&[&Point]> = of.iter().map(|(_, points)| points.as_slice()).collect();
            for ((class, points), law) in of.into_iter().zip(Law::fit(profile, &points)) {
                groups.insert(*class, ClassPoints::new(profile, law, points, std::iter::repeat(0.0)));
            }
        }
        groups
    }
}

/// Answers one query on an unprepared profile, using only the points of its kind.
pub(super) fn time(profile: &DeviceProfile, sig: &OpSig) -> Seconds {
    if let Some(point) = profile.points.iter().find(|point| point.sig == *sig) {
        return point.time;
    }
    let class = KernelClass::of(sig);
    let classes = PointsByClass::of(profile.points.iter().filter(|point| point.sig.name() == class.name));
    let groups = classes.groups(profile);
    let stand_in = || groups.get(classes.largest().get(class.name)?);
    let group = groups.get(&class).or_else(stand_in);
    match (group, sig.equivalent()) {
        (Some(group), _) => Seconds(group.seconds(profile, sig, 0.0)),
        (None, Some(plain)) => time(profile, &plain),
        (None, None) => profile.roofline(sig),
    }
}

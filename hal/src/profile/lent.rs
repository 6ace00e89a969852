//! Corrections that other devices lend to a sparsely measured one, and their weights.
//!
//! Stacked regressions (Breiman 1996): each prediction is tested on every point of the device without that
//! point, and the weights of the average are those with which it would have missed them least.

use super::group::ClassPoints;
use super::place::KernelClass;
use super::predict::Predictor;
use super::shares::{Miss, shares};
use super::{DeviceProfile, Point};
use crate::OpSig;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::Arc;

/// Weights of another device's law relative to the points that it is moved towards: it counts more than they
/// do, or only decides what they leave open.
const PULLS: [f64; 2] = [2.0, 0.2];
/// Number of points of a class that are left out in turn; a larger set is thinned out evenly.
const LEFT_OUT_MAX: usize = 64;

/// One other device's law and residuals, moved towards the points of this one.
#[derive(Clone, Debug)]
struct Loan {
    from: usize,
    groups: HashMap<KernelClass, ClassPoints>,
}

/// Corrections borrowed from other devices; none by default.
#[derive(Clone, Debug, Default)]
pub(super) struct LentProfiles {
    others: Arc<[Predictor]>,
    /// Each of the others with each of [`PULLS`].
    loans: Vec<Loan>,
    /// By kind, the weight of the device's own prediction and of each loan.
    shares: HashMap<&'static str, Vec<f64>>,
    /// By kind, in order of appearance.
    pub(super) expected: Vec<ExpectedError>,
}

/// How far the predictions of one kind of operation are likely to be off.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ExpectedError {
    /// Kind of operation: `gemm`, `attn_decode`, `attn_prefill` and so on.
    pub op: String,
    /// Number of measured points, each of which was predicted from the others.
    pub points: usize,
    /// Mean of |predicted / measured - 1| over them.
    pub error: f64,
    /// The names of the devices whose measurements the predictions use beside the points.
    pub from: Vec<String>,
}

impl LentProfiles {
    /// Prepares what `others` say about a device with these points; `own` is what they say themselves.
    pub(super) fn new(
        profile: &DeviceProfile,
        own: &HashMap<KernelClass, ClassPoints>,
        classes: &[(KernelClass, Vec<&Point>)],
        others: &[Predictor],
    ) -> Self {
        let of = |class: &KernelClass| classes.iter().find(|(known, _)| known == class);
        let loan = |(from, pull): (usize, f64)| {
            let other = &others[from];
            let group = |class: &KernelClass| {
                let points = of(class).map_or(&[][..], |(_, points)| points);
                Some((*class, lend(profile, other, pull, *class, points)?))
            };
            Loan { from, groups: other.classes().filter_map(group).collect() }
        };
        let each = || PULLS.into_iter().flat_map(|pull| (0..others.len()).map(move |from| (from, pull)));
        let loans: Vec<Loan> = each().map(loan).collect();

        let mut misses = Vec::new();
        for (class, points) in classes {
            for out in (0..points.len()).step_by(points.len().div_ceil(LEFT_OUT_MAX)) {
                let (left, rest) = (points[out], [&points[..out], &points[out + 1..]].concat());
                let law = own[class].law.again(profile, &rest);
                let group = ClassPoints::new(profile, law, &rest, std::iter::repeat(0.0));
                let off = |seconds: f64| (seconds / left.time.0).ln();
                let alone = off(group.seconds(profile, &left.sig, 0.0));
                let borrowed = |(from, pull): (usize, f64)| {
                    let group = lend(profile, &others[from], pull, *class, &rest)?;
                    let expected = others[from].beyond_law(&left.sig)?;
                    Some(off(group.seconds(profile, &left.sig, expected)))
                };
                let by = std::iter::once(alone).chain(each().map(|how| borrowed(how).unwrap_or(alone)));
                misses.push(Miss { kind: class.name, by: by.collect() });
            }
        }
        let lent: Vec<&str> = others.iter().flat_map(Predictor::classes).map(|class| class.name).collect();
        let comparable: Vec<&Miss> = misses.iter().filter(|miss| lent.contains(&miss.kind)).collect();
        let even = || {
            let each = 1.0 / loans.len() as f64;
            std::iter::once(0.0).chain(loans.iter().map(|_| each)).collect()
        };
        let kinds = others.iter().flat_map(Predictor::classes).map(|class| class.name);
        let shares: HashMap<_, _> =
            kinds.map(|kind| (kind, shares(kind, &comparable).unwrap_or_else(even))).collect();
        let mut lent = LentProfiles { others: others.into(), loans, shares, expected: Vec::new() };
        lent.expected = lent.expected(&misses);
        lent
    }

    fn expected(&self, misses: &[Miss]) -> Vec<ExpectedError> {
        let kinds = misses.iter().fold(Vec::new(), |mut kinds, miss| {
            if !kinds.contains(&miss.kind) {
                kinds.push(miss.kind);
            }
            kinds
        });
        let of = |kind: &'static str| {
            let own = [1.0];
            let shares = self.shares.get(kind).map_or(&own[..], Vec::as_slice);
            let off = |miss: &Miss| {
                let ln: f64 = miss.by.iter().zip(shares).map(|(miss, share)| miss * share).sum();
                (ln.exp() - 1.0).abs()
            };
            let errors: Vec<f64> = misses.iter().filter(|miss| miss.kind == kind).map(off).collect();
            let used = |from: usize| {
                let mut loans = self.loans.iter().zip(shares.iter().skip(1));
                loans.any(|(loan, share)| loan.from == from && *share > 0.0)
            };
            let names = self.others.iter().enumerate().filter(|(from, _)| used(*from));
            ExpectedError {
                op: kind.to_owned(),
                points: errors.len(),
                error: errors.iter().sum::<f64>() / errors.len() as f64,
                from: names.map(|(_, other)| other.profile().name.clone()).collect(),
            }
        };
        kinds.into_iter().map(of).collect()
    }

    /// Averages the device's own prediction of `sig`, if there is one, and those of other devices, in
    /// seconds.
    pub(super) fn mixed(
        &self,
        profile: &DeviceProfile,
        sig: &OpSig,
        class: KernelClass,
        own: Option<f64>,
    ) -> Option<f64> {
        let Some(shares) = self.shares.get(class.name).filter(|shares| own.is_none() || shares[0] < 1.0)
        else {
            return own;
        };
        let (mut sum, mut weight) = (0.0, 0.0);
        let mut add = |share: f64, seconds: Option<f64>| {
            if let Some(seconds) = seconds.filter(|_| share > 0.0) {
                sum += share * seconds.ln();
                weight += share;
            }
        };
        add(shares[0], own);
        let expected: Vec<Option<f64>> = self.others.iter().map(|other| other.beyond_law(sig)).collect();
        for (loan, share) in self.loans.iter().zip(&shares[1..]) {
            let seconds = |group: &ClassPoints| Some(group.seconds(profile, sig, expected[loan.from]?));
            add(*share, loan.groups.get(&class).and_then(seconds));
        }
        if weight > 0.0 { Some((sum / weight).exp()) } else { own }
    }
}

/// Moves what `other` knows about a class towards `points`; `None` if it knows nothing.
fn lend(
    profile: &DeviceProfile,
    other: &Predictor,
    pull: f64,
    class: KernelClass,
    points: &[&Point],
) -> Option<ClassPoints> {
    let law = other.law(&class)?.moved(profile, points, pull);
    let expected = points.iter().map(|point| other.beyond_law(&point.sig).unwrap_or(0.0));
    Some(ClassPoints::new(profile, law, points, expected))
}

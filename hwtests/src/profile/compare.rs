//! Compares two profiles point by point, taking the spread of the samples into account.

use super::control::drift;
use super::document::{PointResult, ProfileDocument};
use super::stats::SampleStats;
use mixfleet_hal::cast::to_u32;
use mixfleet_report::numbers::scaled;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::fmt::Write as _;

/// The verdict on two measurements of one point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ComparisonVerdict {
    /// The second is faster, beyond the spread of both.
    Faster,
    /// The second is slower, beyond the spread of both.
    Slower,
    /// The spread explains the difference.
    Same,
    /// They differ, but so do the control measurements next to them.
    Drifted,
}

/// Smallest difference that counts: clocks and alignment vary by as much between runs.
const LEAST: f64 = 0.03;

impl ComparisonVerdict {
    /// Judges a ratio of speeds whose `noise` and `drift` are shares.
    pub(crate) fn of(ratio: f64, noise: f64, drift: f64) -> ComparisonVerdict {
        let beyond = |margin: f64| ratio > 1.0 + margin || ratio < 1.0 / (1.0 + margin);
        match ratio {
            _ if !beyond(noise) => ComparisonVerdict::Same,
            _ if !beyond(noise.max(drift)) => ComparisonVerdict::Drifted,
            r if r > 1.0 => ComparisonVerdict::Faster,
            _ => ComparisonVerdict::Slower,
        }
    }
}

/// Returns the noise of a ratio of two measurements, each with its relative spread. Independent errors add in
/// squares.
pub(crate) fn noise(a: f64, b: f64) -> f64 {
    a.hypot(b).max(LEAST)
}

/// One point measured in both profiles.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PointPair {
    /// Name of the point.
    pub id: String,
    /// Median seconds of the first.
    pub a_s: f64,
    /// Median seconds of the second.
    pub b_s: f64,
    /// Speed of the second over the first; above 1 is faster.
    pub ratio: f64,
    /// The speed ratio per dollar, if both have a price.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ratio_per_dollar: Option<f64>,
    /// Noise, as a share: ratios between 1 - noise and 1 + noise mean nothing.
    pub noise: f64,
    /// Difference, as a share, between the controls next to the two measurements.
    pub drift: f64,
    /// The verdict.
    pub verdict: ComparisonVerdict,
}

/// Two profiles side by side.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Comparison {
    /// Name and version of the document schema: [`Comparison::SCHEMA`].
    pub schema: String,
    /// Name of the first device.
    pub a: String,
    /// Name of the second device.
    pub b: String,
    /// Whether the fingerprints are equal: same part, driver and kernels.
    pub same_fingerprint: bool,
    /// Points measured in both, in the order of the first.
    pub points: Vec<PointPair>,
    /// Names of points measured only in the first.
    pub only_a: Vec<String>,
    /// Names of points measured only in the second.
    pub only_b: Vec<String>,
    /// Geometric mean of the ratios by group.
    pub groups: Vec<GroupRatio>,
}

/// A group of points, summarised.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct GroupRatio {
    /// Name of the group.
    pub group: String,
    /// Number of points in the group.
    pub points: u32,
    /// Number of points that are faster in the second.
    pub faster: u32,
    /// Number of points that are slower in the second.
    pub slower: u32,
    /// Number of points that differ, but so do the controls.
    pub drifted: u32,
    /// Number of points within 5 % of each other, at any verdict.
    pub within_5_percent: u32,
    /// Geometric mean of the ratios.
    pub ratio: f64,
}

impl Comparison {
    /// The schema that this version writes.
    pub const SCHEMA: &'static str = "mixfleet.profile-comparison/1";

    /// Compares the points that both have.
    pub fn new(a: &ProfileDocument, b: &ProfileDocument) -> Comparison {
        let of_b: HashMap<&str, &PointResult> =
            b.points.iter().filter(|p| p.is_ok()).map(|p| (p.id.as_str(), p)).collect();
        let of_a: HashMap<&str, &PointResult> =
            a.points.iter().filter(|p| p.is_ok()).map(|p| (p.id.as_str(), p)).collect();
        let prices = a.economics.as_ref().zip(b.economics.as_ref());
        let cheaper = prices.map(|(a, b)| a.usd_per_hour / b.usd_per_hour);
        let (mut points, mut groups) =
            (Vec::new(), Vec::<(&'static str, Vec<(f64, ComparisonVerdict)>)>::new());
        for p in a.points.iter().filter(|p| p.is_ok()) {
            let Some(other) = of_b.get(p.id.as_str()) else { continue };
            let (Some(first), Some(second)) = (&p.seconds, &other.seconds) else { continue };
            let drift = drift(a, p.at_s, b, other.at_s);
            let Some(pair) = pair(&p.id, first, second, drift, cheaper) else { continue };
            let name = p.group.name();
            match groups.iter_mut().find(|(group, _)| *group == name) {
                Some((_, ratios)) => ratios.push((pair.ratio, pair.verdict)),
                None => groups.push((name, vec![(pair.ratio, pair.verdict)])),
            }
            points.push(pair);
        }
        let only = |these: &ProfileDocument, others: &HashMap<&str, &PointResult>| {
            let alone = these.points.iter().filter(|p| p.is_ok() && !others.contains_key(p.id.as_str()));
            alone.map(|p| p.id.clone()).collect()
        };
        Comparison {
            schema: Self::SCHEMA.to_owned(),
            a: a.device.name.clone(),
            b: b.device.name.clone(),
            same_fingerprint: a.device.fingerprint == b.device.fingerprint,
            points,
            only_a: only(a, &of_b),
            only_b: only(b, &of_a),
            groups: groups.into_iter().map(|(group, ratios)| GroupRatio::new(group, &ratios)).collect(),
        }
    }

    /// Returns the points of the second that are slower than `ratio` times the first, beyond noise.
    pub fn below(&self, ratio: f64) -> Vec<&PointPair> {
        self.points.iter().filter(|p| p.verdict == ComparisonVerdict::Slower && p.ratio < ratio).collect()
    }
}

impl GroupRatio {
    fn new(group: &str, ratios: &[(f64, ComparisonVerdict)]) -> GroupRatio {
        let count = |verdict| to_u32(ratios.iter().filter(|(_, v)| *v == verdict).count());
        let mean = ratios.iter().map(|(ratio, _)| ratio.ln()).sum::<f64>() / ratios.len() as f64;
        GroupRatio {
            group: group.to_owned(),
            points: to_u32(ratios.len()),
            faster: count(ComparisonVerdict::Faster),
            slower: count(ComparisonVerdict::Slower),
            drifted: count(ComparisonVerdict::Drifted),
            within_5_percent: to_u32(ratios.iter().filter(|(r, _)| (1.0 / 1.05..=1.05).contains(r)).count()),
            ratio: mean.exp(),
        }
    }
}

/// Returns half the width of the central nine tenths of the samples, as a share of the median.
fn spread(stats: &SampleStats) -> f64 {
    (stats.p95 - stats.p5) / 2.0 / stats.median
}

fn pair(id: &str, a: &SampleStats, b: &SampleStats, drift: f64, cheaper: Option<f64>) -> Option<PointPair> {
    if !(a.median > 0.0 && b.median > 0.0) {
        return None;
    }
    let ratio = a.median / b.median;
    let noise = noise(spread(a), spread(b));
    let verdict = ComparisonVerdict::of(ratio, noise, drift);
    let ratio_per_dollar = cheaper.map(|cheaper| ratio * cheaper);
    Some(PointPair {
        id: id.to_owned(),
        a_s: a.median,
        b_s: b.median,
        ratio,
        ratio_per_dollar,
        noise,
        drift,
        verdict,
    })
}

impl std::fmt::Display for Comparison {
    /// Prints a summary by group, then every point with a difference.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "  a: {}\n  b: {}", self.a, self.b)?;
        if !self.same_fingerprint {
            writeln!(f, "  the fingerprints differ: another part, driver or version")?;
        }
        if self.points.is_empty() {
            return writeln!(f, "  no point was measured in both");
        }
        writeln!(
            f,
            "\n  {:<10} {:>7} {:>10} {:>7} {:>7} {:>7} {:>10}",
            "part", "points", "within 5 %", "faster", "slower", "drifted", "b over a"
        )?;
        for g in &self.groups {
            let GroupRatio { group, points, faster, slower, drifted, within_5_percent: close, ratio } = g;
            writeln!(
                f,
                "  {group:<10} {points:>7} {close:>10} {faster:>7} {slower:>7} {drifted:>7} {ratio:>10.3}"
            )?;
        }
        if self.groups.iter().any(|g| g.drifted > 0) {
            writeln!(f, "\n  drifted: different, but so are the controls that were measured beside them")?;
        }
        let real =
            |p: &&PointPair| matches!(p.verdict, ComparisonVerdict::Faster | ComparisonVerdict::Slower);
        let mut different: Vec<_> = self.points.iter().filter(real).collect();
        different.sort_by(|x, y| x.ratio.total_cmp(&y.ratio));
        if different.is_empty() {
            return writeln!(f, "\n  no point differs beyond noise");
        }
        writeln!(f)?;
        for p in different {
            let word = if p.verdict == ComparisonVerdict::Faster { "faster" } else { "slower" };
            let mut line = format!(
                "  {:<44} {:>8} -> {:>8}  {word} x{:.3} (noise {:.0} %)",
                p.id,
                scaled(p.a_s, "s"),
                scaled(p.b_s, "s"),
                p.ratio,
                100.0 * p.noise
            );
            if let Some(ratio) = p.ratio_per_dollar {
                let _ = write!(line, ", per dollar x{ratio:.3}");
            }
            writeln!(f, "{line}")?;
        }
        Ok(())
    }
}

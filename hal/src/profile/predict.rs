//! From measured points to the time of any operation.
//!
//! What is interpolated is the logarithm of `time / hypot(arithmetic, memory)`, the inverse of
//! utilisation: it changes slowly where time changes by magnitudes. (The roofline's own maximum has a kink
//! between measured points, which would show as a bump.) Around the operation asked for, a plane is fitted to the
//! nearest points (locally weighted regression, Cleveland 1979) over the base-2 logarithms of its
//! shape and of its bytes; but where points with the same shape and near row counts lie on both sides, these two decide. Bytes count double in the distance: caches make efficiency jump along lines
//! of equal traffic. Checked on published kernel times of five GPUs in `hal/tests/predict.rs`.

use super::{DeviceProfile, Point};
use crate::units::Seconds;
use crate::{DType, OpSig};
use std::collections::HashMap;

/// Coordinates of an operation: log2 of its bytes, then of its shape; unused ones are 0.
const DIMENSIONS: usize = 6;
/// Points that a plane is fitted to.
const NEIGHBOURS: usize = 16;
/// Weight of bytes in the distance; the others have 1.
const BYTES_WEIGHT: f64 = 2.0;
/// Pull of the slopes towards 0, relative to the points' weight: it decides directions in which the
/// neighbours do not spread.
const RIDGE: f64 = 0.02;
/// Distance at which a point counts half of one in the same place.
const SOFTENING: f64 = 0.05;
/// How far the plane may leave the neighbours' range, in units of that range.
const OVERSHOOT: f64 = 0.5;
/// Neighbours in rows alone decide if one has at most 2 to this times the rows of the other.
const STEP_MAX: f64 = 0.9;
/// Mismatch above which two forms of an operation (adding to its output, say) are not the same kernel.
const FORMS_MAX: f64 = 0.3;
/// Distance added where an input dtype differs: such points count only if there are no others.
const OTHER_DTYPE: f64 = 32.0;

/// A point prepared for distances.
#[derive(Clone, Debug)]
struct Row {
    sig: OpSig,
    at: [f64; DIMENSIONS],
    /// ln(time / [`smooth`]).
    slowness: f64,
    time: Seconds,
}

/// A profile prepared for many questions: the same answers as [`DeviceProfile::time`], faster.
#[derive(Clone, Debug)]
pub struct Predictor {
    /// The profile without its points.
    profile: DeviceProfile,
    rows: HashMap<&'static str, Vec<Row>>,
    exact: HashMap<OpSig, Seconds>,
}

impl Predictor {
    /// Prepares `profile`.
    pub fn new(profile: &DeviceProfile) -> Self {
        let mut rows: HashMap<&'static str, Vec<Row>> = HashMap::new();
        let mut exact = HashMap::new();
        for point in &profile.points {
            exact.entry(point.sig).or_insert(point.time);
            if let Some(row) = row(profile, point) {
                rows.entry(point.sig.name()).or_default().push(row);
            }
        }
        Predictor { profile: DeviceProfile { points: Vec::new(), ..profile.clone() }, rows, exact }
    }

    /// Predicted time of `sig` without launch cost; see [`DeviceProfile::time`].
    pub fn time(&self, sig: &OpSig) -> Seconds {
        if let Some(time) = self.exact.get(sig) {
            return *time;
        }
        let rows = self.rows.get(sig.name()).map_or(&[][..], Vec::as_slice);
        interpolate(&self.profile, rows, sig)
    }

    /// A batch on an idle queue: its launch and all its commands; see [`DeviceProfile::batch_time`].
    pub fn batch_time<'a>(&self, sigs: impl IntoIterator<Item = &'a OpSig>) -> Seconds {
        let each = |sig| self.time(sig) + self.profile.launch_per_command;
        self.profile.launch + sigs.into_iter().map(each).sum()
    }

    /// Everything but the points.
    pub fn profile(&self) -> &DeviceProfile {
        &self.profile
    }
}

/// One question to an unprepared profile.
pub(super) fn time(profile: &DeviceProfile, sig: &OpSig) -> Seconds {
    let kind = profile.points.iter().filter(|point| point.sig.name() == sig.name());
    let rows: Vec<Row> = kind.filter_map(|point| row(profile, point)).collect();
    rows.iter().find(|row| row.sig == *sig).map_or_else(|| interpolate(profile, &rows, sig), |row| row.time)
}

fn row(profile: &DeviceProfile, point: &Point) -> Option<Row> {
    let slowness = (point.time / smooth(profile, &point.sig)).ln();
    slowness.is_finite().then(|| Row {
        sig: point.sig,
        at: coordinates(&point.sig),
        slowness,
        time: point.time,
    })
}

/// The roofline without its kink.
fn smooth(profile: &DeviceProfile, sig: &OpSig) -> Seconds {
    let (arithmetic, memory) = profile.floors(sig);
    Seconds(arithmetic.0.hypot(memory.0))
}

fn interpolate(profile: &DeviceProfile, rows: &[Row], sig: &OpSig) -> Seconds {
    let at = coordinates(sig);
    if let Some(slowness) = between(rows, sig, &at) {
        return smooth(profile, sig) * slowness.exp();
    }
    let mut near: Vec<(f64, &Row)> = rows
        .iter()
        .map(|row| {
            let squares = (0..DIMENSIONS).map(|d| (weight(d) * (row.at[d] - at[d])).powi(2));
            (squares.sum::<f64>().sqrt() + mismatch(&row.sig, sig), row)
        })
        .collect();
    if near.is_empty() {
        return profile.roofline(sig);
    }
    let by_distance = |a: &(f64, &Row), b: &(f64, &Row)| a.0.total_cmp(&b.0);
    if near.len() > NEIGHBOURS {
        near.select_nth_unstable_by(NEIGHBOURS, by_distance);
        near.truncate(NEIGHBOURS);
    }
    near.sort_by(by_distance);
    // points of another dtype only where there is none of this
    if near[0].0 < OTHER_DTYPE {
        near.retain(|(distance, _)| *distance < OTHER_DTYPE);
    }
    smooth(profile, sig) * plane(&near, &at).exp()
}

/// From the points that differ in their rows alone, next below and next above, if these are near: a kernel's
/// time is a staircase over rows, and a plane through more points would smooth the step.
fn between(rows: &[Row], sig: &OpSig, at: &[f64; DIMENSIONS]) -> Option<f64> {
    let same =
        |row: &&Row| (2..DIMENSIONS).all(|d| row.at[d] == at[d]) && mismatch(&row.sig, sig) < FORMS_MAX;
    let (mut below, mut above) = (None::<&Row>, None::<&Row>);
    for row in rows.iter().filter(same) {
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
    (width <= STEP_MAX).then_some(below.slowness + share * (above.slowness - below.slowness))
}

const fn weight(dimension: usize) -> f64 {
    if dimension == 0 { BYTES_WEIGHT } else { 1.0 }
}

/// The value at `at` of the plane through `near`, in the least-squares sense; `near` is not empty.
fn plane(near: &[(f64, &Row)], at: &[f64; DIMENSIONS]) -> f64 {
    const N: usize = DIMENSIONS + 1;
    let radius = near.iter().map(|n| n.0).fold(0.0, f64::max) * 1.0001 + 1e-9;
    let (mut normal, mut right, mut total) = ([[0.0; N]; N], [0.0; N], 0.0);
    for (distance, row) in near {
        let weight = (1.0 - (distance / radius).powi(2)).powi(2) / (distance + SOFTENING) + 1e-9;
        let mut x = [1.0; N];
        for d in 0..DIMENSIONS {
            x[d + 1] = row.at[d] - at[d];
        }
        for i in 0..N {
            right[i] += weight * x[i] * row.slowness;
            for j in 0..N {
                normal[i][j] += weight * x[i] * x[j];
            }
        }
        total += weight;
    }
    for (d, row) in normal.iter_mut().enumerate().skip(1) {
        row[d] += RIDGE * total;
    }
    let (low, high) = near
        .iter()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), n| (l.min(n.1.slowness), h.max(n.1.slowness)));
    let margin = OVERSHOOT * (high - low);
    solve(normal, right)[0].clamp(low - margin, high + margin)
}

/// Solves a symmetric positive definite system by elimination without pivoting.
fn solve<const N: usize>(mut a: [[f64; N]; N], mut b: [f64; N]) -> [f64; N] {
    for i in 0..N {
        let (pivot, value) = (a[i], b[i]);
        for r in i + 1..N {
            let factor = a[r][i] / pivot[i];
            a[r].iter_mut().zip(pivot).for_each(|(entry, above)| *entry -= factor * above);
            b[r] -= factor * value;
        }
    }
    for i in (0..N).rev() {
        let known: f64 = (i + 1..N).map(|c| a[i][c] * b[c]).sum();
        b[i] = (b[i] - known) / a[i][i];
    }
    b
}

/// Where an operation lies among those of its kind.
fn coordinates(sig: &OpSig) -> [f64; DIMENSIONS] {
    let log = |value: f64| value.max(0.25).log2();
    let n = |value: u32| log(f64::from(value));
    let per = |a: u64, b: u32| log(a as f64 / f64::from(b.max(1)));
    let shape: [f64; 5] = match *sig {
        OpSig::Gemm { m, n: columns, k, .. } => [n(m), n(columns), n(k), 0.0, 0.0],
        OpSig::AttnPrefill { tokens, sequences, pairs, heads, kv_heads, head_dim, .. } => [
            per(u64::from(tokens), sequences),
            per(pairs, tokens),
            n(sequences),
            per(u64::from(heads), kv_heads),
            n(kv_heads) + n(head_dim),
        ],
        OpSig::AttnDecode { sequences, kv_tokens, heads, kv_heads, head_dim, .. } => [
            n(sequences),
            per(kv_tokens, sequences),
            per(u64::from(heads), kv_heads),
            n(kv_heads),
            n(head_dim),
        ],
        OpSig::Embed { tokens, hidden, .. } => [n(tokens), n(hidden), 0.0, 0.0, 0.0],
        OpSig::RmsNorm { rows, cols, .. } | OpSig::Argmax { rows, cols } => [n(rows), n(cols), 0.0, 0.0, 0.0],
        OpSig::Rope { tokens, heads, head_dim, .. } => [n(tokens), n(heads), n(head_dim), 0.0, 0.0],
        OpSig::KvWrite { tokens, kv_heads, head_dim, .. }
        | OpSig::KvGather { tokens, kv_heads, head_dim, .. }
        | OpSig::KvScatter { tokens, kv_heads, head_dim, .. } => {
            [n(tokens), n(kv_heads), n(head_dim), 0.0, 0.0]
        }
        OpSig::AttnMerge { parts, rows, head_dim, .. } => [n(parts), n(rows), n(head_dim), 0.0, 0.0],
        OpSig::SiluMul { .. } | OpSig::Add { .. } | OpSig::Copy { .. } | OpSig::Fill { .. } => [0.0; 5],
    };
    [log(sig.bytes()), shape[0], shape[1], shape[2], shape[3], shape[4]]
}

/// Distance between two operations of one kind beyond their shapes.
fn mismatch(a: &OpSig, b: &OpSig) -> f64 {
    let unlike = |differs: bool, distance: f64| if differs { distance } else { 0.0 };
    let pages = |p: u32, q: u32| 0.5 * (f64::from(p.max(1)) / f64::from(q.max(1))).log2().abs();
    match (*a, *b) {
        (
            OpSig::Gemm { x, weight, out, bias, accumulate, .. },
            OpSig::Gemm { x: x2, weight: weight2, out: out2, bias: bias2, accumulate: accumulate2, .. },
        ) => {
            unlike(x != x2 || weight != weight2, OTHER_DTYPE)
                + unlike(out != out2, 0.25)
                + unlike(accumulate != accumulate2, 0.25)
                + unlike(bias != bias2, 0.25)
        }
        (
            OpSig::AttnPrefill { x, kv, page_tokens, window, .. },
            OpSig::AttnPrefill { x: x2, kv: kv2, page_tokens: page2, window: window2, .. },
        ) => {
            unlike(x != x2 || kv != kv2, OTHER_DTYPE)
                + unlike(window.is_some() != window2.is_some(), 1.0)
                + pages(page_tokens, page2)
        }
        (
            OpSig::AttnDecode { x, kv, page_tokens, .. },
            OpSig::AttnDecode { x: x2, kv: kv2, page_tokens: page2, .. },
        ) => unlike(x != x2 || kv != kv2, OTHER_DTYPE) + pages(page_tokens, page2),
        _ => unlike(narrowest(a) != narrowest(b), 2.0),
    }
}

/// The dtype by which the small operations' kernels differ most.
fn narrowest(sig: &OpSig) -> DType {
    match *sig {
        OpSig::Embed { table: a, out: b, .. }
        | OpSig::RmsNorm { x: a, out: b, .. }
        | OpSig::KvWrite { x: a, kv: b, .. }
        | OpSig::KvGather { kv: a, wire: b, .. }
        | OpSig::KvScatter { wire: a, kv: b, .. } => {
            if a.size_bytes() <= b.size_bytes() {
                a
            } else {
                b
            }
        }
        OpSig::Rope { x, .. }
        | OpSig::SiluMul { x, .. }
        | OpSig::Add { x, .. }
        | OpSig::AttnMerge { out: x, .. } => x,
        _ => DType::F32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elimination_solves_what_it_was_given() {
        let a = [[4.0, 1.0, 0.5], [1.0, 3.0, 0.25], [0.5, 0.25, 2.0]];
        let want = [1.5, -2.0, 0.75];
        let right = std::array::from_fn(|i| (0..3).map(|j| a[i][j] * want[j]).sum());
        let got = solve(a, right);
        assert!(got.iter().zip(want).all(|(g, w)| (g - w).abs() < 1e-12), "{got:?}");
    }
}

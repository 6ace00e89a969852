//! Reads measured device profiles from files.

use anyhow::{Context, Result, bail, ensure};
use mixfleet_hal::catalog::is_claim;
use mixfleet_hal::profile::{DeviceProfile, Point};
use mixfleet_hwtests::profile::{Document, Group, Work};
use std::path::Path;

/// The measured profile in a file: what `mixfleet profile --json` writes, or a device profile alone.
pub(crate) fn read(path: &Path) -> Result<DeviceProfile> {
    let file = path.display();
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read the profile {file}"))?;
    parse(&text).with_context(|| format!("{file} is no profile of a device"))
}

fn parse(text: &str) -> Result<DeviceProfile> {
    let document: serde_json::Value = serde_json::from_str(text)?;
    let schema = document.get("schema").and_then(serde_json::Value::as_str).unwrap_or_default();
    let profile: DeviceProfile = match schema {
        DeviceProfile::SCHEMA => serde_json::from_value(document)?,
        Document::SCHEMA => {
            let document = Document::from_json(text).map_err(anyhow::Error::msg)?;
            timed_sensibly(&document)?;
            document
                .device_profile()
                .context("it lacks a measured bandwidth or matrix product; profile without --only")?
        }
        other => {
            let (short, long) = (DeviceProfile::SCHEMA, Document::SCHEMA);
            bail!("its schema is '{other}', and this version reads '{long}' and '{short}'")
        }
    };
    ensure!(!is_claim(&profile), "it restates a datasheet; name the part instead, or measure one");
    sensible(&profile)?;
    Ok(profile)
}

/// A time below the roofline's by more than this is no measurement: caches are 10 to 60 times as fast as memory.
const ABOVE_ROOFLINE_MAX: f64 = 100.0;

fn positive(value: f64) -> bool {
    value.is_finite() && value > 0.0
}

/// Refuses times that no clock shows, by the point's name.
fn timed_sensibly(document: &Document) -> Result<()> {
    for point in &document.points {
        let Some(stats) = point.seconds.as_ref().filter(|_| point.is_ok()) else { continue };
        // an empty batch may cost nothing beyond its launch
        let free = point.group == Group::Launch;
        for seconds in [stats.median, stats.p5, stats.p95, stats.min] {
            let usable = positive(seconds) || free && seconds == 0.0;
            ensure!(usable, "the point {} claims a time of {seconds:e} s; measure again", point.id);
        }
    }
    Ok(())
}

fn sensible(profile: &DeviceProfile) -> Result<()> {
    for (what, value) in [("bandwidth", profile.bandwidth.0), ("memory", profile.memory.0)] {
        ensure!(positive(value), "its {what} is {value:e}, which is not positive; measure again");
    }
    ensure!(!profile.compute.is_empty(), "it has no rate of arithmetic; measure again");
    for (dtype, rate) in &profile.compute {
        ensure!(positive(rate.0), "its {dtype} rate is {:e}, which is not positive; measure again", rate.0);
    }
    for (what, cost) in [("launch", profile.launch), ("launch_per_command", profile.launch_per_command)] {
        ensure!(cost.0.is_finite() && cost.0 >= 0.0, "its {what} is {:e} s; measure again", cost.0);
    }
    for bandwidth in &profile.bandwidths {
        let (rate, set) = (bandwidth.rate.0, bandwidth.working_set.0);
        let usable = positive(rate) && rate < ABOVE_ROOFLINE_MAX * profile.bandwidth.0;
        ensure!(
            usable,
            "it claims {rate:e} B/s over {set:.0} B beside {:e} B/s of memory; measure again",
            profile.bandwidth.0
        );
    }
    for Point { sig, time } in &profile.points {
        let name = Work::Op(*sig).id();
        ensure!(positive(time.0), "the point {name} claims a time of {:e} s; measure again", time.0);
        let above = profile.roofline(sig) / *time;
        ensure!(
            above < ABOVE_ROOFLINE_MAX,
            "the point {name} claims {:e} s, {above:.0} times as fast as the profile's own roofline; measure again",
            time.0
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hal::DType;
    use mixfleet_hal::catalog::part;
    use mixfleet_hal::units::{Bytes, BytesPerSecond, FlopPerSecond, Seconds};

    #[test]
    fn a_measured_profile_is_read_and_others_refused_with_the_reason() {
        let compute = vec![(DType::F32, FlopPerSecond(1e11))];
        let profile = DeviceProfile::roof(compute, BytesPerSecond(2e10), Bytes(8e9));
        let text = |profile: &DeviceProfile| serde_json::to_string(profile).unwrap();
        assert_eq!(parse(&text(&profile)).unwrap(), profile);
        let error = |text: &str| format!("{:#}", parse(text).unwrap_err());
        assert!(error("{").contains("EOF"), "{}", error("{"));
        assert!(error("{}").contains("its schema is ''"));
        assert!(error(&text(&part("L4").unwrap().profile())).contains("restates a datasheet"));
        let with_point = |seconds| {
            let Some(Work::Op(sig)) = Work::parse("gemm.f32.m512.n4096.k4096", 16) else { panic!() };
            DeviceProfile { points: vec![Point { sig, time: Seconds(seconds) }], ..profile.clone() }
        };
        assert!(parse(&text(&with_point(0.2))).is_ok());
        for seconds in [-1.0, 0.0, 1e-5] {
            let error = error(&text(&with_point(seconds)));
            assert!(error.contains("the point gemm.f32.m512.n4096.k4096 claims"), "{error}");
        }
        let slow = DeviceProfile { bandwidth: BytesPerSecond(0.0), ..profile };
        assert!(error(&text(&slow)).contains("measure again"));
    }
}

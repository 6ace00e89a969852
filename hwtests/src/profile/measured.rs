//! Reads measured profiles, and checks their claims against what a clock can show.

use super::{PointGroup, ProfileDocument, WorkItem};
use mixfleet_hal::catalog::is_claim;
use mixfleet_hal::profile::{DeviceProfile, Point};

/// Parses the text of a [`ProfileDocument`] or of a device profile.
///
/// # Errors
/// A message for text that is neither, for a datasheet's claims, and for implausible times.
pub fn measured(text: &str) -> Result<DeviceProfile, String> {
    let document: serde_json::Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let schema = document.get("schema").and_then(serde_json::Value::as_str).unwrap_or_default();
    let profile: DeviceProfile = match schema {
        DeviceProfile::SCHEMA => serde_json::from_value(document).map_err(|error| error.to_string())?,
        ProfileDocument::SCHEMA => {
            let document = ProfileDocument::from_json(text)?;
            timed_sensibly(&document)?;
            document
                .device_profile()
                .ok_or("it lacks a measured bandwidth or matrix product; profile without --only")?
        }
        other => {
            let (short, long) = (DeviceProfile::SCHEMA, ProfileDocument::SCHEMA);
            return Err(format!("its schema is '{other}', and this version reads '{long}' and '{short}'"));
        }
    };
    ensure(!is_claim(&profile), || "it restates a datasheet; name the part instead, or measure one".into())?;
    sensible(&profile)?;
    Ok(profile)
}

/// Factor below the roofline's time beyond which a time is implausible; caches are 10 to 60 times as fast as
/// memory.
const ABOVE_ROOFLINE_MAX: f64 = 100.0;

fn positive(value: f64) -> bool {
    value.is_finite() && value > 0.0
}

/// Rejects implausible times, by the point's name.
fn timed_sensibly(document: &ProfileDocument) -> Result<(), String> {
    for point in &document.points {
        let Some(stats) = point.seconds.as_ref().filter(|_| point.is_ok()) else { continue };
        // an empty batch may cost nothing beyond its launch
        let free = point.group == PointGroup::Launch;
        for seconds in [stats.median, stats.p5, stats.p95, stats.min] {
            let usable = positive(seconds) || free && seconds == 0.0;
            ensure(usable, || {
                format!("the point {} claims a time of {seconds:e} s; measure again", point.id)
            })?;
        }
    }
    Ok(())
}

fn sensible(profile: &DeviceProfile) -> Result<(), String> {
    for (what, value) in [("bandwidth", profile.bandwidth.0), ("memory", profile.memory.0)] {
        ensure(positive(value), || format!("its {what} is {value:e}, which is not positive; measure again"))?;
    }
    ensure(!profile.compute.is_empty(), || "it has no rate of arithmetic; measure again".into())?;
    for (dtype, rate) in &profile.compute {
        ensure(positive(rate.0), || {
            format!("its {dtype} rate is {:e}, which is not positive; measure again", rate.0)
        })?;
    }
    for (what, cost) in [("launch", profile.launch), ("launch_per_command", profile.launch_per_command)] {
        ensure(cost.0.is_finite() && cost.0 >= 0.0, || {
            format!("its {what} is {:e} s; measure again", cost.0)
        })?;
    }
    for bandwidth in &profile.bandwidths {
        let (rate, set) = (bandwidth.rate.0, bandwidth.working_set.0);
        let usable = positive(rate) && rate < ABOVE_ROOFLINE_MAX * profile.bandwidth.0;
        ensure(usable, || {
            format!(
                "it claims {rate:e} B/s over {set:.0} B beside {:e} B/s of memory; measure again",
                profile.bandwidth.0
            )
        })?;
    }
    for Point { sig, time } in &profile.points {
        let name = WorkItem::Op(*sig).id();
        ensure(positive(time.0), || {
            format!("the point {name} claims a time of {:e} s; measure again", time.0)
        })?;
        let above = profile.roofline(sig) / *time;
        ensure(above < ABOVE_ROOFLINE_MAX, || {
            format!(
                "the point {name} claims {:e} s, {above:.0} times as fast as the profile's own roofline; measure again",
                time.0
            )
        })?;
    }
    Ok(())
}

fn ensure(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(otherwise()) }
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
        assert_eq!(measured(&text(&profile)).unwrap(), profile);
        let error = |text: &str| measured(text).unwrap_err();
        assert!(error("{").contains("EOF"), "{}", error("{"));
        assert!(error("{}").contains("its schema is ''"));
        assert!(error(&text(&part("L4").unwrap().profile())).contains("restates a datasheet"));
        let with_point = |seconds| {
            let Some(WorkItem::Op(sig)) = WorkItem::parse("gemm.f32.m512.n4096.k4096", 16) else { panic!() };
            DeviceProfile { points: vec![Point { sig, time: Seconds(seconds) }], ..profile.clone() }
        };
        assert!(measured(&text(&with_point(0.2))).is_ok());
        for seconds in [-1.0, 0.0, 1e-5] {
            let error = error(&text(&with_point(seconds)));
            assert!(error.contains("the point gemm.f32.m512.n4096.k4096 claims"), "{error}");
        }
        let slow = DeviceProfile { bandwidth: BytesPerSecond(0.0), ..profile };
        assert!(error(&text(&slow)).contains("measure again"));
    }
}

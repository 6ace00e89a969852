//! Reads measured device profiles from files.

use anyhow::{Context, Result, bail, ensure};
use mixfleet_hal::catalog::is_claim;
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hwtests::profile::Document;
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
        Document::SCHEMA => Document::from_json(text)
            .map_err(anyhow::Error::msg)?
            .device_profile()
            .context("it lacks a measured bandwidth or matrix product; profile without --only")?,
        other => {
            let (short, long) = (DeviceProfile::SCHEMA, Document::SCHEMA);
            bail!("its schema is '{other}', and this version reads '{long}' and '{short}'")
        }
    };
    ensure!(!is_claim(&profile), "it restates a datasheet; name the part instead, or measure one");
    let positive = |value: f64| value.is_finite() && value > 0.0;
    let usable = positive(profile.bandwidth.0)
        && positive(profile.memory.0)
        && !profile.compute.is_empty()
        && profile.compute.iter().all(|(_, rate)| positive(rate.0))
        && profile.points.iter().all(|point| positive(point.time.0));
    ensure!(usable, "a rate, the bandwidth, the memory or a time is missing or not positive; measure again");
    Ok(profile)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hal::DType;
    use mixfleet_hal::catalog::part;
    use mixfleet_hal::units::{Bytes, BytesPerSecond, FlopPerSecond};

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
        let slow = DeviceProfile { bandwidth: BytesPerSecond(0.0), ..profile };
        assert!(error(&text(&slow)).contains("measure again"));
    }
}

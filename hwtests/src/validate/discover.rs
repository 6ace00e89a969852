//! Level 0: the device's own description, and the properties that could not be read.

use super::case::{CaseResult, CaseStatus};
use super::protocol::Settings;
use mixfleet_hal::{Device, DeviceInfo, Health};

/// Checks that need only the device; the caller's facts add one case each, `l0.facts.<name>`.
const CHECKS: [fn(&dyn Device) -> CaseResult; 3] = [identity, limits, counters];

/// Runs every case of the level.
pub(crate) fn run(device: &dyn Device, settings: &Settings) -> Vec<CaseResult> {
    let mut results: Vec<CaseResult> = CHECKS.iter().map(|check| check(device)).collect();
    for fact in &settings.facts {
        let id = format!("l0.facts.{}", fact.name);
        results.push(match (&fact.value, &fact.remark) {
            (Some(value), None) => CaseResult::pass(id).fact("value", value),
            (Some(value), Some(remark)) => {
                CaseResult::new(id, CaseStatus::QualityWarning, remark).fact("value", value)
            }
            (None, remark) => {
                let why = remark.as_deref().unwrap_or("no reason given");
                CaseResult::new(id, CaseStatus::Unsupported, format!("could not be read: {why}"))
            }
        });
    }
    results
}

/// Returns a failure that lists `wrong`, or a pass if it is empty.
fn judged(id: &str, wrong: &[String]) -> CaseResult {
    if wrong.is_empty() {
        CaseResult::pass(id)
    } else {
        CaseResult::new(id, CaseStatus::Fail, wrong.join("; "))
    }
}

fn identity(device: &dyn Device) -> CaseResult {
    described(device.info())
}

/// Checks the identity; a count of units is not required, since some interfaces have none.
fn described(info: &DeviceInfo) -> CaseResult {
    let mut wrong = Vec::new();
    for (what, value) in [("id", &info.id), ("name", &info.name), ("fingerprint", &info.fingerprint)] {
        if value.trim().is_empty() {
            wrong.push(format!("the {what} is empty"));
        }
    }
    if !(info.memory.0.is_finite() && info.memory.0 > 0.0) {
        wrong.push(format!("{} bytes of memory", info.memory.0));
    }
    judged("l0.identity", &wrong).fact("info", info)
}

fn limits(device: &dyn Device) -> CaseResult {
    let limits = device.limits();
    let mut wrong = Vec::new();
    if limits.allocation_bytes_max < 1 << 20 {
        wrong.push(format!("the largest allocation is {} bytes", limits.allocation_bytes_max));
    }
    if !limits.alignment_bytes.is_power_of_two() {
        wrong.push(format!("alignment {} is not a power of two", limits.alignment_bytes));
    }
    if limits.kv_page_tokens == 0 {
        wrong.push("a KV page of no tokens".to_owned());
    }
    judged("l0.limits", &wrong)
        .fact("allocation_bytes_max", limits.allocation_bytes_max)
        .fact("alignment_bytes", limits.alignment_bytes)
        .fact("imports_host_memory", limits.imports_host_memory)
        .fact("kv_page_tokens", limits.kv_page_tokens)
}

/// Checks the counters. They are optional, and missing ones are reported; implausible ones are wrong.
fn counters(device: &dyn Device) -> CaseResult {
    let health = device.health();
    let mut wrong = Vec::new();
    let finite = |what: &str, value: Option<f64>, least: f64, wrong: &mut Vec<String>| {
        if value.is_some_and(|v| !(v.is_finite() && v >= least)) {
            wrong.push(format!("{what} reads {value:?}"));
        }
    };
    finite("temperature", health.temperature_c, -273.15, &mut wrong);
    finite("power", health.power_w, 0.0, &mut wrong);
    finite("clock", health.clock_mhz, 0.0, &mut wrong);
    let absent = absent(&health);
    let result = if wrong.is_empty() && absent.len() == 5 {
        CaseResult::new("l0.counters", CaseStatus::Unsupported, "no counter could be read")
    } else {
        judged("l0.counters", &wrong)
    };
    result.fact("health", health).fact("unreadable", absent)
}

/// Lists the counters that could not be read.
fn absent(health: &Health) -> Vec<&'static str> {
    let read = [
        ("temperature", health.temperature_c.is_some()),
        ("power", health.power_w.is_some()),
        ("clock", health.clock_mhz.is_some()),
        ("errors_corrected", health.errors_corrected.is_some()),
        ("errors_uncorrected", health.errors_uncorrected.is_some()),
    ];
    read.iter().filter(|(_, read)| !read).map(|(name, _)| *name).collect()
}

#[cfg(test)]
mod tests {
    use super::super::protocol::DeviceFact;
    use super::*;
    use crate::reference::ReferenceDevice;

    #[test]
    fn a_count_of_units_need_not_be_known_and_a_name_must_be() {
        let info = ReferenceDevice::default().info().clone();
        let unknown = DeviceInfo { compute_units: 0, ..info };
        assert_eq!(described(&unknown).status, CaseStatus::Pass);
        assert_eq!(described(&DeviceInfo { name: " ".to_owned(), ..unknown }).status, CaseStatus::Fail);
    }

    #[test]
    fn what_could_not_be_read_is_said_and_never_passes() {
        let facts = vec![
            DeviceFact::known("numa", "0"),
            DeviceFact::suspect("link", "gen4 x8", "half of its x16 lanes"),
            DeviceFact::unknown("driver", "no such file"),
        ];
        let settings = Settings { facts, ..Settings::quick() };
        let results = run(&ReferenceDevice::default(), &settings);
        let status = |id: &str| results.iter().find(|r| r.id == id).unwrap().status;
        assert_eq!(status("l0.identity"), CaseStatus::Pass);
        assert_eq!(status("l0.limits"), CaseStatus::Pass);
        assert_eq!(status("l0.counters"), CaseStatus::Unsupported, "the reference device has no counters");
        assert_eq!(status("l0.facts.numa"), CaseStatus::Pass);
        assert_eq!(status("l0.facts.link"), CaseStatus::QualityWarning);
        assert_eq!(status("l0.facts.driver"), CaseStatus::Unsupported);
    }
}

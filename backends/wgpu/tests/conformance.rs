//! The conformance suite on the first adapter here (Mesa's lavapipe stands in for a GPU): with subgroups,
//! without, and with bindings so small that nearly everything is cut.
//!
//! lavapipe needs about 0.1 s to compile a kernel, and the suite needs some 200 specialisations: it runs on
//! the quick level unless `MIXFLEET_WGPU_LEVEL=full`.

use mixfleet_hal::{Backend, Device};
use mixfleet_hwtests::{CheckOutcome, SuiteLevel, SuiteOptions, SuiteVerdict, run};
use mixfleet_wgpu::{AdapterOverrides, WgpuBackend, WgpuDevice};
use std::collections::BTreeSet;
use std::time::Duration;

fn conforms(tuning: AdapterOverrides) {
    if let Err(absent) = WgpuBackend.probe() {
        return eprintln!("SKIPPED: no wgpu device: {absent}");
    }
    let full = std::env::var("MIXFLEET_WGPU_LEVEL").is_ok_and(|level| level == "full");
    let level = if full { SuiteLevel::Full } else { SuiteLevel::Quick };
    let device = WgpuDevice::open(0, tuning).unwrap();
    // a driver may compile at first use, which takes long where others have the cores
    let options = SuiteOptions { timeout: Duration::from_secs(600), ..SuiteOptions::new(level) };
    let report = run(&device, &options, &mut |_| {});
    eprintln!("{tuning:?}, {level:?}\n{report}");
    assert_eq!(report.verdict(), SuiteVerdict::Pass, "{} with {tuning:?}:\n{report}", device.info().id);
    let names: BTreeSet<&str> = report.cases.iter().map(|case| case.name.as_str()).collect();
    let passed = |case: &&_| matches!(case, mixfleet_hwtests::CaseReport { outcome: CheckOutcome::Pass, .. });
    let passed: BTreeSet<&str> = report.cases.iter().filter(passed).map(|case| case.name.as_str()).collect();
    assert_eq!(names.difference(&passed).collect::<Vec<_>>(), [&"import"], "checks that never passed");
}

#[test]
fn kernels_with_subgroups_conform() {
    conforms(AdapterOverrides::default());
}

#[test]
fn kernels_without_subgroups_conform() {
    conforms(AdapterOverrides { without_subgroups: true, ..AdapterOverrides::default() });
}

#[test]
fn weights_and_pools_beyond_a_binding_are_cut() {
    conforms(AdapterOverrides { binding_bytes_max: Some(32 << 10), ..AdapterOverrides::default() });
}

//! The conformance suite on the first adapter here (Mesa's lavapipe stands in for a GPU): with subgroups,
//! without, and with bindings so small that everything is cut.
//!
//! lavapipe compiles a kernel in some 0.1 s, and the suite needs hundreds of specialisations: it runs on the
//! quick level unless `MIXFLEET_WGPU_LEVEL=full`.

use mixfleet_hal::{Backend, Device};
use mixfleet_hwtests::{Level, Options, Verdict, run};
use mixfleet_wgpu::{Tuning, WgpuBackend, WgpuDevice};

fn conforms(tuning: Tuning) {
    if let Err(absent) = WgpuBackend.probe() {
        return eprintln!("SKIPPED: no wgpu device: {absent}");
    }
    let full = std::env::var("MIXFLEET_WGPU_LEVEL").is_ok_and(|level| level == "full");
    let level = if full { Level::Full } else { Level::Quick };
    let device = WgpuDevice::open(0, tuning).unwrap();
    let report = run(&device, &Options::new(level), &mut |_| {});
    eprintln!("{tuning:?}, {level:?}\n{report}");
    assert_eq!(report.verdict(), Verdict::Pass, "{} with {tuning:?}:\n{report}", device.info().id);
}

#[test]
fn kernels_with_subgroups_conform() {
    conforms(Tuning::default());
}

//! The conformance suite on every OpenCL device here, with the kernels of CPUs and of GPUs: on the quick
//! level, or with `MIXFLEET_OPENCL_LEVEL=full` in full for the CPU kernels.
#![cfg(feature = "opencl")]

use mixfleet_hal::{Backend, Device};
use mixfleet_hwtests::{SuiteLevel, SuiteOptions, SuiteVerdict, run};
use mixfleet_opencl::{KernelTuning, OpenClBackend, OpenClDevice};

fn conforms(tuning: KernelTuning, level: SuiteLevel) {
    let devices = match OpenClBackend.probe() {
        Ok(devices) => devices,
        Err(absent) => return eprintln!("SKIPPED: no OpenCL device: {absent}"),
    };
    for index in 0..devices.len() {
        let device = OpenClDevice::open(index, Some(tuning)).unwrap();
        let report = run(&device, &SuiteOptions::new(level), &mut |_| {});
        eprintln!("{tuning:?} kernels, {level:?}\n{report}");
        assert_eq!(
            report.verdict(),
            SuiteVerdict::Pass,
            "{} with {tuning:?} kernels:\n{report}",
            device.info().id
        );
    }
}

#[test]
fn kernels_for_cpus_conform() {
    let full = std::env::var("MIXFLEET_OPENCL_LEVEL").is_ok_and(|level| level == "full");
    conforms(KernelTuning::Cpu, if full { SuiteLevel::Full } else { SuiteLevel::Quick });
}

#[test]
fn kernels_for_gpus_conform() {
    conforms(KernelTuning::Gpu, SuiteLevel::Quick);
}

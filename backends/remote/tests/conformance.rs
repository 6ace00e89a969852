//! The conformance suite over a connection.

use crate::common::{lend, lend_pages, open};
use mixfleet_hal::Backend;
use mixfleet_hwtests::{SuiteLevel, SuiteOptions, SuiteVerdict, run};
use mixfleet_remote::RemoteDevice;

fn conforms(device: RemoteDevice) {
    let report = run(&device, &SuiteOptions::new(SuiteLevel::Quick), &mut |_| {});
    assert_eq!(report.verdict(), SuiteVerdict::Pass, "{report}");
}

#[test]
fn a_device_of_another_process_conforms_as_one_of_this_does() {
    conforms(open(lend(mixfleet_cpu::CpuBackend.open("cpu").unwrap())));
}

#[test]
#[cfg(target_os = "linux")]
fn a_device_over_shared_memory_does_too() {
    let (address, _file) = lend_pages(mixfleet_cpu::CpuBackend.open("cpu").unwrap(), "conforms");
    conforms(open(address));
}

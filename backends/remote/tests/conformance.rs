//! The conformance suite over a connection.

use crate::common::{lend, open};
use mixfleet_hal::Backend;
use mixfleet_hwtests::{SuiteLevel, SuiteOptions, SuiteVerdict, run};

#[test]
fn a_device_of_another_process_conforms_as_one_of_this_does() {
    let device = open(lend(mixfleet_cpu::CpuBackend.open("cpu").unwrap()));
    let report = run(&device, &SuiteOptions::new(SuiteLevel::Quick), &mut |_| {});
    assert_eq!(report.verdict(), SuiteVerdict::Pass, "{report}");
}

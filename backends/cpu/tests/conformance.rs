//! The conformance suite on this machine's cores, at every instruction level that it has.

use mixfleet_cpu::{CpuBackend, isa::Isa};
use mixfleet_hal::Device;
use mixfleet_hwtests::{SuiteLevel, SuiteOptions, SuiteVerdict, run};

fn conforms(device: &dyn Device, what: &str, level: SuiteLevel) {
    let report = run(device, &SuiteOptions::new(level), &mut |_| {});
    eprintln!("{what}, {level:?}\n{report}");
    assert_eq!(report.verdict(), SuiteVerdict::Pass, "{what}:\n{report}");
}

#[test]
fn all_cores_conform() {
    for isa in Isa::available() {
        let device = CpuBackend.open_at("cpu", isa).unwrap();
        conforms(device.as_ref(), &isa.to_string(), SuiteLevel::Full);
    }
}

#[test]
fn one_core_conforms() {
    for isa in Isa::available() {
        let all = CpuBackend.open_at("cpu", isa).unwrap();
        let first = all.info().notes.iter().find(|(name, _)| name == "cores").map_or("0", |(_, list)| list);
        let first: String = first.chars().take_while(char::is_ascii_digit).collect();
        let device = CpuBackend.open_at(&format!("cpu@{first}"), isa).unwrap();
        conforms(device.as_ref(), &format!("{isa} on core {first}"), SuiteLevel::Quick);
    }
}

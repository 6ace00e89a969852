//! What the backend says where there is no NVIDIA device; the rest of the conformance suite runs where there
//! is.

use mixfleet_cuda::CudaBackend;
use mixfleet_hal::{Backend, ErrorKind};
use mixfleet_hwtests::{SuiteLevel, SuiteOptions, SuiteVerdict, run};

#[test]
fn selectors_that_name_nothing_are_refused() {
    for selector in ["cuda:", "cuda:x", "cuda:4000000000", "cuda0", "cpu", ""] {
        let error = CudaBackend.open(selector).err().expect("no such device");
        assert_eq!(error.kind, ErrorKind::Invalid, "{selector}: {error}");
    }
}

#[test]
fn without_a_device_there_is_a_reason_and_no_panic() {
    if CudaBackend.probe().is_ok() {
        return eprintln!("SKIPPED: there is an NVIDIA device here");
    }
    let absent = CudaBackend.probe().unwrap_err();
    assert!(absent.reason.contains("driver") || absent.reason.contains("install"), "{absent}");
    let error = CudaBackend.open("cuda").err().expect("nothing to open");
    assert!(error.detail.contains(&absent.reason), "{error}");
}

#[test]
fn every_device_here_conforms() {
    let devices = match CudaBackend.probe() {
        Ok(devices) => devices,
        Err(absent) => return eprintln!("SKIPPED: no NVIDIA device: {absent}"),
    };
    for info in devices {
        let device = CudaBackend.open(&info.id).expect("a device that was found opens");
        let report = run(&*device, &SuiteOptions::new(SuiteLevel::Full), &mut |_| {});
        eprintln!("{report}");
        assert_eq!(report.verdict(), SuiteVerdict::Pass, "{report}");
    }
}

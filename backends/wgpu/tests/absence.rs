//! What the backend says where there is nothing.

use mixfleet_hal::{Backend, ErrorKind};
use mixfleet_wgpu::WgpuBackend;

#[test]
fn selectors_that_name_nothing_are_refused() {
    for selector in ["wgpu:", "wgpu:x", "wgpu:4000000000", "wgpu0", "cpu", ""] {
        let error = WgpuBackend.open(selector).err().unwrap();
        assert_eq!(error.kind, ErrorKind::Invalid, "{selector}: {error}");
    }
}

/// Drivers are loaded once per process, so a child looks for them in a directory that is empty.
#[test]
fn without_a_driver_there_is_a_reason_and_no_panic() {
    const INSIDE: &str = "MIXFLEET_TEST_WITHOUT_ICD";
    if std::env::var_os(INSIDE).is_some() {
        let absent = WgpuBackend.probe().unwrap_err();
        assert!(absent.reason.contains("mesa-vulkan-drivers"), "{absent}");
        let error = WgpuBackend.open("wgpu").err().unwrap();
        assert!(error.detail.contains("install"), "{error}");
        return;
    }
    let nowhere = std::env::temp_dir().join(format!("mixfleet-no-driver-{}", std::process::id()));
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "absence::without_a_driver_there_is_a_reason_and_no_panic", "--nocapture"])
        .env(INSIDE, "1")
        // the loader's names for its list of drivers, before and after its version 1.3.207
        .env("VK_ICD_FILENAMES", &nowhere)
        .env("VK_DRIVER_FILES", &nowhere)
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&child.stdout);
    let said = format!("{stdout}{}", String::from_utf8_lossy(&child.stderr));
    assert!(child.status.success() && stdout.contains("1 passed"), "{said}");
}

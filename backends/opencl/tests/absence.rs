//! What the backend says where there is nothing.

use mixfleet_hal::Backend;
#[cfg(feature = "opencl")]
use mixfleet_hal::ErrorKind;
use mixfleet_opencl::OpenClBackend;

#[cfg(not(feature = "opencl"))]
#[test]
fn without_the_feature_the_backend_says_so() {
    let absent = OpenClBackend.probe().unwrap_err();
    assert!(absent.reason.starts_with("built without the feature `opencl`"), "{absent}");
    assert!(OpenClBackend.open("opencl").is_err_and(|e| e.detail.contains("--features opencl")));
}

#[cfg(feature = "opencl")]
#[test]
fn selectors_that_name_nothing_are_refused() {
    for selector in ["opencl:", "opencl:x", "opencl:4000000000", "opencl0", "cpu", ""] {
        let error = OpenClBackend.open(selector).err().unwrap();
        assert_eq!(error.kind, ErrorKind::Invalid, "{selector}: {error}");
    }
}

/// The loader reads its environment once per process, so a child looks for drivers in an empty directory.
#[cfg(feature = "opencl")]
#[test]
fn without_a_driver_there_is_a_reason_and_no_panic() {
    const INSIDE: &str = "MIXFLEET_TEST_WITHOUT_ICD";
    if std::env::var_os(INSIDE).is_some() {
        let absent = OpenClBackend.probe().unwrap_err();
        assert!(absent.reason.contains("driver"), "{absent}");
        let error = OpenClBackend.open("opencl").err().unwrap();
        assert!(error.detail.contains("install"), "{error}");
        return;
    }
    let empty = std::env::temp_dir().join(format!("mixfleet-no-icd-{}", std::process::id()));
    std::fs::create_dir_all(&empty).unwrap();
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "absence::without_a_driver_there_is_a_reason_and_no_panic", "--nocapture"])
        .env(INSIDE, "1")
        .env("OCL_ICD_VENDORS", &empty)
        .output()
        .unwrap();
    std::fs::remove_dir_all(&empty).unwrap();
    let stdout = String::from_utf8_lossy(&child.stdout);
    let said = format!("{stdout}{}", String::from_utf8_lossy(&child.stderr));
    assert!(child.status.success() && stdout.contains("1 passed"), "{said}");
}

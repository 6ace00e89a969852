//! Parsers of device profiles and of vendors' claims.

use super::refused;
use mixfleet_hal::op::OpSig;
use mixfleet_hwtests::profile::{WorkItem, measured};
use mixfleet_hwtests::validate::part::PartFile;
use std::sync::LazyLock;

/// Operations of a small and of a large model.
static OPERATIONS: LazyLock<Vec<OpSig>> = LazyLock::new(|| {
    let names = [
        "gemm.f32.m1.n64.k64",
        "gemm.bf16.m512.n4096.k4096",
        "rms_norm.bf16.t1.h64",
        "rms_norm.f32.t4096.h4096",
    ];
    let operation = |name: &str| match WorkItem::parse(name, 16) {
        Some(WorkItem::Op(operation)) => operation,
        _ => panic!("{name} is no operation"),
    };
    names.map(operation).into()
});

/// Checks that an accepted profile predicts plausible times.
pub(super) fn device_profile(bytes: &[u8]) -> bool {
    let profile = match measured(&String::from_utf8_lossy(bytes)) {
        Ok(profile) => profile,
        Err(error) => return refused(&error),
    };
    for operation in OPERATIONS.iter() {
        let time = profile.time(operation).0;
        assert!(time.is_finite() && time > 0.0, "{time:e} s for {operation:?}");
    }
    let batch = profile.batch_time(OPERATIONS.iter()).0;
    assert!(batch.is_finite() && batch > 0.0, "{batch:e} s");
    let text = serde_json::to_string(&profile).expect("a profile is JSON");
    assert_eq!(measured(&text).as_ref(), Ok(&profile));
    true
}

pub(super) fn part_file(bytes: &[u8]) -> bool {
    match PartFile::parse(&String::from_utf8_lossy(bytes)) {
        Ok(part) => {
            let about = part.is_about("NVIDIA L4", Some("10de:27b8"));
            about.map_or_else(|error| refused(&error), |()| true);
            true
        }
        Err(error) => refused(&error),
    }
}

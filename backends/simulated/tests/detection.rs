//! The validation suite against faults of every kind: which level catches which, and that none cries wolf.

use mixfleet_hal::Device;
use mixfleet_hal::fault::{Fault, FaultPlan};
use mixfleet_hwtests::reference::ReferenceDevice;
use mixfleet_hwtests::validate::{Detection, DetectionTrial, FaultyTrial, detect};
use mixfleet_simulated::FaultyDevice;
use std::sync::Arc;

fn wrap(base: Arc<dyn Device>, plan: FaultPlan, transfers: bool) -> FaultyTrial {
    let device = FaultyDevice::new(base, plan);
    let device = Arc::new(if transfers { device.striking_transfers() } else { device });
    let (counting, striking) = (device.clone(), device.clone());
    FaultyTrial {
        device,
        operations: Box::new(move || counting.commands()),
        struck: Box::new(move || striking.struck()),
    }
}

fn rows(levels: &[u8], faults: &[Fault], rates: &[f64]) -> Vec<Detection> {
    let trial = DetectionTrial {
        levels: levels.to_vec(),
        faults: faults.to_vec(),
        rates: rates.to_vec(),
        passes_max: 2,
        operations: ["gemm", "attn_decode", "copy", "order"].map(str::to_owned).to_vec(),
        ..DetectionTrial::thorough()
    };
    let rows = detect(Arc::new(ReferenceDevice::default()), &wrap, &trial, &mut |_| {}).unwrap();
    for row in &rows {
        eprintln!("{row}");
        if row.fault.is_none() {
            assert_eq!((row.caught, row.passes), (0, 1), "a pass without faults: {row}");
            assert!(row.operations > 10, "{row}");
        }
    }
    rows
}

const CORRUPTION: [Fault; 3] = [Fault::BitFlip, Fault::Drop, Fault::Stale];

#[test]
fn conformance_memory_and_soak_catch_corruption() {
    for row in rows(&[1, 2, 5], &CORRUPTION, &[0.05]).iter().filter(|row| row.fault.is_some()) {
        assert_eq!((row.caught, row.passes), (2, 2), "{row}");
        assert!(row.struck_share > 0.5, "{row}");
    }
}

#[test]
fn a_hang_is_told_as_a_timeout_by_every_level() {
    for row in rows(&[1, 2, 3, 5], &[Fault::Hang], &[0.05]).iter().filter(|row| row.fault.is_some()) {
        assert_eq!((row.caught, row.timeouts, row.passes), (2, 2, 2), "{row}");
    }
}

/// On a device whose clock is computed, so that no other slowness comes in.
#[test]
fn a_claim_catches_slowness() {
    let rows = rows(&[3], &[Fault::Slow { times: 10 }], &[0.5, 1e-6]);
    assert_eq!((rows[1].caught, rows[1].passes), (2, 2), "{}", rows[1]);
    // medians pass over a rare slow command, as they should over a rare disturbance
    assert_eq!(rows[2].caught, 0, "{}", rows[2]);
}

/// One operation in a million is rarer than a pass is long: the suite says so instead of promising.
#[test]
fn rare_faults_are_reported_as_rarely_seen() {
    for row in rows(&[1], &CORRUPTION, &[1e-6]).iter().filter(|row| row.fault.is_some()) {
        let share = row.struck_share;
        assert!(share > 0.0 && share < 0.05, "{row}");
        assert!(row.passes > 0 && row.chance().is_some_and(|chance| chance <= share), "{row}");
    }
}

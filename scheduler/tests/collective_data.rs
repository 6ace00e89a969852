//! Compares the restated all-reduce times with the measurements they were taken from.

use mixfleet_hal::catalog::part;
use mixfleet_hal::units::Bytes;
use mixfleet_scheduler::cost::AllReduce;

/// Columns: device, engine, op_name, num_gpus, message_size in 2-byte elements, latency in ms.
const MEASURED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/data/measured/nccl.csv");

#[test]
fn all_reduces_are_near_every_measured_size() {
    let Ok(text) = std::fs::read_to_string(MEASURED) else {
        eprintln!("SKIPPED: {MEASURED} is absent; it belongs beside the repository");
        return;
    };
    let ids = [
        ("a100_sxm", "A100-SXM-80GB"),
        ("h100_sxm", "H100-SXM-80GB"),
        ("h200_sxm", "H200-SXM-141GB"),
        ("l40s", "L40S"),
        ("rtx_pro_6000_server", "RTX-PRO-6000-SE"),
    ];
    let mut misses: Vec<f64> = Vec::new();
    for line in text.lines().skip(1) {
        let [device, _, "all_reduce", devices, elements, ms] = line.split(',').collect::<Vec<_>>()[..] else {
            continue;
        };
        let Some((_, id)) = ids.iter().find(|(name, _)| *name == device) else { continue };
        let all_reduce = AllReduce::of(part(id).unwrap(), devices.parse().unwrap()).unwrap();
        let bytes = Bytes(2.0 * elements.parse::<f64>().unwrap());
        misses.push((all_reduce.time(bytes).0 * 1e3 / ms.parse::<f64>().unwrap()).ln().abs());
    }
    assert!(misses.len() >= 300, "{} rows of five devices and three counts", misses.len());
    misses.sort_by(f64::total_cmp);
    let mean = misses.iter().sum::<f64>() / misses.len() as f64;
    let worst = misses[misses.len() - 1];
    // Half of the sizes are restated; between them NCCL changes its algorithm in steps.
    assert!(mean < 0.06 && worst < 0.5, "mean {mean}, worst {worst}");
}

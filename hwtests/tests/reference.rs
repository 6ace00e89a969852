//! The suite over the reference device: everything is tried and passes, and the report says so.

use mixfleet_hal::{DType, Device, KvShape, OpSig};
use mixfleet_hwtests::reference::ReferenceDevice;
use mixfleet_hwtests::{CheckOutcome, ConformanceReport, SuiteLevel, SuiteOptions, SuiteVerdict, cases, run};
use std::collections::BTreeSet;

#[test]
fn the_reference_device_passes_everything() {
    let report = run(&ReferenceDevice::default(), &SuiteOptions::new(SuiteLevel::Full), &mut |_| {});
    assert_eq!(report.verdict(), SuiteVerdict::Pass, "{report}");
    assert!(report.cases.iter().all(|case| case.outcome == CheckOutcome::Pass), "{report}");
    // f64 arithmetic errs by its final rounding alone, which every bound contains
    for (name, summary) in report.summary() {
        assert!(summary.ratio_max <= 1.0, "{name}: {}", summary.ratio_max);
        let (same, tried) = summary.batch_invariant;
        assert_eq!(same, tried, "{name}");
    }
}

#[test]
fn both_levels_hold_every_operation_and_dtype() {
    let limits = ReferenceDevice::default().limits();
    for level in [SuiteLevel::Quick, SuiteLevel::Full] {
        let cases = cases::cases(level, &limits);
        let names: BTreeSet<_> = cases.iter().map(|case| case.sig.name()).collect();
        assert_eq!(names.len(), 24, "{names:?}");
        let gemms: BTreeSet<_> = cases
            .iter()
            .filter_map(|case| match case.sig {
                OpSig::Gemm { x, weight, out, .. } => Some((x, weight, out)),
                _ => None,
            })
            .collect();
        assert_eq!(gemms.len(), 27);
        let attention: BTreeSet<(DType, DType)> = cases
            .iter()
            .filter_map(|case| match case.sig {
                OpSig::AttnDecode { x, kv: KvShape { dtype: kv, .. }, .. } => Some((x, kv)),
                _ => None,
            })
            .collect();
        assert_eq!(attention.len(), 15);
        let seeds: BTreeSet<_> = cases.iter().map(|case| case.seed).collect();
        assert_eq!(seeds.len(), cases.len(), "each case has a different seed");
    }
}

#[test]
fn operands_follow_from_the_case_alone() {
    let limits = ReferenceDevice::default().limits();
    let bits = |case: &cases::Case| -> Vec<Vec<u64>> {
        let operands = case.operands();
        operands.iter().map(|values| values.iter().map(|v| v.to_bits()).collect()).collect()
    };
    for case in cases::cases(SuiteLevel::Quick, &limits) {
        let text = serde_json::to_string(&case).unwrap();
        let read: cases::Case = serde_json::from_str(&text).unwrap();
        assert_eq!(read, case);
        assert_eq!(bits(&read), bits(&case));
    }
}

#[test]
fn a_report_survives_json() {
    let mut options = SuiteOptions::new(SuiteLevel::Quick);
    options.only = ["memory", "sample", "copy"].map(str::to_owned).to_vec();
    let report = run(&ReferenceDevice::default(), &options, &mut |_| {});
    assert_eq!(report.schema, "mixfleet.conformance/1");
    let text = serde_json::to_string(&report).unwrap();
    assert_eq!(serde_json::from_str::<ConformanceReport>(&text).unwrap(), report);
    let nothing = ConformanceReport { cases: Vec::new(), ..report };
    assert_eq!(nothing.verdict(), SuiteVerdict::Incomplete, "nothing tried is nothing passed");
}

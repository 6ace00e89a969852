//! The example in C against the suite that checks all devices.

use crate::made::{blas, libraries, released};
use mixfleet_hal::op::LatentKv;
use mixfleet_hal::{Backend, DType, ExpertRouting, GroupedRows, KvShape, MatrixKind, OpSig, Scalar, Support};
use mixfleet_hwtests::{SuiteLevel, SuiteOptions, SuiteVerdict, run};
use mixfleet_plugin::PluginBackend;

/// Operations whose kinds came after the first header: of latents, sinks and experts.
fn later() -> [OpSig; 5] {
    let x = DType::F32;
    let latent = Some(LatentKv { rank: 24, scale: Scalar(0.2) });
    let kv = KvShape { kv_heads: 1, head_dim: 32, page_tokens: 16, dtype: x, latent };
    let grouped = GroupedRows { choices: 4, fan: 2, experts: 3, touched: 2, others: 0 };
    [
        OpSig::KvWrite { tokens: 2, x, kv },
        OpSig::AttnDecode { sequences: 1, kv_tokens: 5, heads: 4, pages_max: 1, x, kv, cap: None },
        OpSig::AttnMerge { parts: 2, rows: 8, head_dim: 32, sinks: 4, out: x },
        OpSig::Route { tokens: 2, bias: false, routing: ExpertRouting::softmax(3, 2, true) },
        OpSig::GroupedGemm { grouped, n: 4, k: 8, x, weight: MatrixKind::Plain(x), out: x, bias: true },
    ]
}

#[test]
fn a_library_in_plain_c_conforms() {
    let Some(folder) = libraries() else { return };
    let backend = PluginBackend::load(&folder.join("loops.so")).unwrap();
    assert_eq!(backend.name(), "loops");
    let found = backend.probe().unwrap();
    assert_eq!((found.len(), found[0].id.as_str(), found[0].name.as_str()), (1, "loops:0", "loops in C"));
    let device = backend.open("loops").unwrap();
    assert_eq!(device.support(&OpSig::Sample { rows: 1, cols: 9, history: 0, tops: 0 }), Support::No);
    assert!(later().iter().all(|sig| device.support(sig) == Support::Native));
    let report = run(&*device, &SuiteOptions::new(SuiteLevel::Quick), &mut |_| {});
    assert_eq!(report.verdict(), SuiteVerdict::Pass, "{report}");
    println!("{report}");
}

/// It has every operation in 32-bit floats, and parts are cut and recombined in those.
#[test]
fn the_first_library_conforms() {
    let Some(folder) = libraries() else { return };
    let device = PluginBackend::load(&folder.join("first.so")).unwrap().open("first:0").unwrap();
    let report = run(&*device, &SuiteOptions::new(SuiteLevel::Quick), &mut |_| {});
    assert_eq!(report.verdict(), SuiteVerdict::Pass, "{report}");
    for check in ["partition_by_tokens", "partition_by_heads", "partition_by_requests"] {
        assert_eq!(report.summary()[check].pass, 1, "{check}: {report}");
    }
}

/// A plug-in compiled against an older header keeps working: that header is kept, and must not be edited. A
/// breaking change gets a new interface number, and a new header beside this one.
#[test]
fn a_library_that_was_compiled_against_the_first_header_conforms() {
    let Some(library) = released(1) else { return };
    let device = PluginBackend::load(&library).unwrap().open("loops:0").unwrap();
    assert!(later().iter().all(|sig| device.support(sig) == Support::No));
    let report = run(&*device, &SuiteOptions::new(SuiteLevel::Quick), &mut |_| {});
    assert_eq!(report.verdict(), SuiteVerdict::Pass, "{report}");
}

#[test]
fn the_same_with_a_blas_conforms_too() {
    let Some(library) = blas() else { return };
    let device = PluginBackend::load(&library).unwrap().open("blas:0").unwrap();
    let report = run(&*device, &SuiteOptions::new(SuiteLevel::Quick), &mut |_| {});
    assert_eq!(report.verdict(), SuiteVerdict::Pass, "{report}");
}

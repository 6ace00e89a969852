//! The conformance suite on the computing kind: its results are the CPU backend's, at every dilation.

use crate::common;
use mixfleet_hal::{DType, KvShape, OpSig, Support};
use mixfleet_hwtests::{SuiteLevel, SuiteOptions, SuiteVerdict, run};
use mixfleet_simulated::{ComputeDevice, VirtualClock};
use std::sync::Arc;

#[test]
fn the_computing_kind_conforms() {
    let device = ComputeDevice::new("sim:test,compute", common::profile(), Arc::new(VirtualClock::default()));
    let device = device.unwrap();
    let report = run(&device, &SuiteOptions::new(SuiteLevel::Full), &mut |_| {});
    assert_eq!(report.verdict(), SuiteVerdict::Pass, "{report}");
}

#[test]
fn support_follows_the_profile_and_the_shape() {
    let gemm = |x| {
        let (m, n, k, weight, out) = (2, 16, 16, DType::Bf16, DType::F32);
        OpSig::Gemm { m, n, k, x, weight, out, bias: false, accumulate: false }
    };
    let attention = |heads, head_dim| {
        let (sequences, kv_tokens, kv_heads, page_tokens, pages_max) = (1, 4, 2, 4, 1);
        let (x, kv) = (DType::F32, DType::Bf16);
        OpSig::AttnDecode {
            sequences,
            kv_tokens,
            heads,
            pages_max,
            x,
            kv: KvShape { kv_heads, head_dim, page_tokens, dtype: kv, latent: None },
            cap: None,
        }
    };
    let device = common::device("sim:test");
    // the profile has f32 and bf16
    assert_eq!(device.support(&gemm(DType::F32)), Support::Native);
    assert_eq!(device.support(&gemm(DType::Bf16)), Support::Native);
    assert_eq!(device.support(&gemm(DType::F16)), Support::Emulated);
    assert_eq!(device.support(&gemm(DType::F8E4m3)), Support::No);
    assert_eq!(device.support(&gemm(DType::U32)), Support::No);
    assert_eq!(device.support(&attention(4, 16)), Support::Native);
    assert_eq!(device.support(&attention(3, 16)), Support::No);
    assert_eq!(device.support(&attention(4, 1)), Support::No);
    assert_eq!(device.support(&OpSig::Sample { rows: 2, cols: 5, history: 0, tops: 0 }), Support::Native);
    assert_eq!(device.support(&OpSig::Copy { bytes: 8 }), Support::Native);
}

//! Products of matrices: by cuBLASLt, and where it cannot.

use super::{Driver, LONG, counts, in_children, with_fake_driver};
use mixfleet_hal::{DType, OpSig};
use mixfleet_hwtests::cases::{Case, TokenSpread};
use mixfleet_hwtests::{CheckOutcome, SuiteEntry, attempt};

/// Shapes that go to cuBLASLt, and rows alone, which do not.
#[test]
fn large_products_conform() {
    use DType::{Bf16, F8E4m3, F16, F32};
    with_fake_driver("products::large_products_conform", |device| {
        for (x, out) in [(Bf16, Bf16), (Bf16, F32), (F16, F16), (F32, F32), (F8E4m3, Bf16)] {
            for (bias, accumulate) in [(false, false), (x == out, false), (false, true), (x == out, true)] {
                let sig = OpSig::Gemm { m: 24, n: 48, k: 64, x, weight: x, out, bias, accumulate };
                let case = Case { sig, spread: TokenSpread::Even, seed: 3 };
                let report = attempt(&*device, &SuiteEntry { name: "gemm", case: Some(case) }, LONG);
                assert_eq!(report.outcome, CheckOutcome::Pass, "{sig:?}");
            }
        }
    });
}

/// Neither a bias of another dtype than the output's nor rows of a length that cuBLASLt does not take send a
/// product to a slow kernel.
#[test]
fn large_products_avoid_the_slow_kernel() {
    use DType::{Bf16, F8E4m3, F16, F32};
    with_fake_driver("products::large_products_avoid_the_slow_kernel", |device| {
        for (n, x, weight, out, bias, by_blas) in [
            (48, Bf16, Bf16, F32, true, true),
            (48, F16, F16, F32, true, true),
            (48, F8E4m3, F8E4m3, F32, true, true),
            (48, F8E4m3, F8E4m3, Bf16, true, true),
            (33, Bf16, Bf16, F32, true, false),
            (48, F32, Bf16, F32, false, false),
        ] {
            for accumulate in [false, true] {
                let sig = OpSig::Gemm { m: 37, n, k: 64, x, weight, out, bias, accumulate };
                let case = Case { sig, spread: TokenSpread::Even, seed: 3 };
                let products = || counts::count(&counts::calls("libcublasLt.so.13"), "cublasLtMatmul");
                let before = products();
                let report = attempt(&*device, &SuiteEntry { name: "gemm", case: Some(case) }, LONG);
                assert_eq!(report.outcome, CheckOutcome::Pass, "{sig:?}");
                // the sum of an f8 bias and the previous content need not be a bf16
                let by_blas = by_blas && (out == F32 || !accumulate);
                assert_eq!(products() > before, by_blas, "{sig:?}");
            }
        }
    });
}

/// Codes become floats a slab at a time, or few rows are multiplied at a time where cuBLASLt cannot take the
/// output.
#[test]
fn quantised_products_of_many_rows_conform() {
    use DType::{Bf16, F16, F32};
    with_fake_driver("products::quantised_products_of_many_rows_conform", |device| {
        for (index, weight) in crate::emulated::formats().into_iter().enumerate() {
            let all = [(Bf16, F32, true), (F16, F16, false), (F32, F32, true), (Bf16, Bf16, true)];
            for (x, out, added) in [all[index % 4], all[(index + 1) % 4]] {
                let (m, n, k) = (33, 48, 512);
                let sig = OpSig::QuantisedGemm { m, n, k, x, weight, out, bias: added, accumulate: added };
                let case = Case { sig, spread: TokenSpread::Even, seed: 3 };
                let products = || counts::count(&counts::calls("libcublasLt.so.13"), "cublasLtMatmul");
                let before = products();
                let report = attempt(&*device, &SuiteEntry { name: "gemm", case: Some(case) }, LONG);
                assert_eq!(report.outcome, CheckOutcome::Pass, "{sig:?}");
                assert_eq!(products() > before, out == F32 || !added, "{sig:?}");
            }
        }
    });
}

#[test]
fn a_product_that_cublaslt_refuses_is_asked_for_once() {
    with_fake_driver("products::a_product_that_cublaslt_refuses_is_asked_for_once", |device| {
        let sig = |m| OpSig::Gemm {
            m,
            n: 176, // which the fake refuses
            k: 64,
            x: DType::Bf16,
            weight: DType::Bf16,
            out: DType::F32,
            bias: false,
            accumulate: false,
        };
        let asked = || counts::count(&counts::calls("libcublasLt.so.13"), "cublasLtMatmulAlgoGetHeuristic");
        let (one, other) = (counts::command(&*device, sig(24)), counts::command(&*device, sig(40)));
        let mut queue = device.queue().unwrap();
        for (command, times) in [(&one, 1), (&one, 1), (&other, 2), (&one, 2)] {
            let ticket = queue.submit(std::slice::from_ref(command)).unwrap();
            queue.wait(ticket, LONG).unwrap();
            assert_eq!(asked(), times);
        }
        assert_eq!(counts::count(&counts::calls("libcublasLt.so.13"), "cublasLtMatmul"), 0);
    });
}

#[test]
fn a_cublaslt_that_does_not_start_leaves_a_device_that_works() {
    const NAME: &str = "products::a_cublaslt_that_does_not_start_leaves_a_device_that_works";
    in_children(NAME, Driver::New, &[&[("FAKE_CUBLAS_BROKEN", "1")]], |device| {
        let info = device.info();
        assert!(info.fingerprint.contains("/noblas/"), "{}", info.fingerprint);
        assert!(
            info.notes.iter().any(|(key, value)| key == "cublaslt" && value.contains("cannot be opened"))
        );
        let x = DType::Bf16;
        let sig = OpSig::Gemm { m: 37, n: 48, k: 64, x, weight: x, out: x, bias: true, accumulate: false };
        let case = Case { sig, spread: TokenSpread::Even, seed: 3 };
        let report = attempt(&*device, &SuiteEntry { name: "gemm", case: Some(case) }, LONG);
        assert_eq!(report.outcome, CheckOutcome::Pass);
    });
}

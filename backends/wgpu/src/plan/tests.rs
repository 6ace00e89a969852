//! Checks, without a device, that an adapter accepts every dispatch, however it is split.

use super::*;
use crate::memory::testing::slices;
use mixfleet_hal::Cmd;
use mixfleet_hwtests::{SuiteLevel, cases};

pub(super) const LIMITS: mixfleet_hal::DeviceLimits = mixfleet_hal::DeviceLimits {
    allocation_bytes_max: u64::MAX,
    alignment_bytes: 4,
    imports_host_memory: false,
    kv_page_tokens: 16,
    replay_pays: false,
    copies_beside: false,
};

/// Returns the violations of a unit of work; `sizes` are those of the scratch memories.
fn fault(work: &WgpuStep, demands: Demands, planner: &Planner) -> Option<String> {
    let ends_inside = |window: &MemoryWindow| {
        let size = match &window.place {
            OperandLocation::Buffer(slice) => slice.buffer.size_bytes().next_multiple_of(16) + 16,
            OperandLocation::Aside => planner.aside_bytes + 32,
            OperandLocation::Scratch => planner.scratch_bytes + 32,
        };
        window.offset + window.bytes <= size
    };
    let (bindings, words, grid) = match work {
        WgpuStep::Copy { from, to } => {
            let whole = [from.offset, to.offset, from.bytes].iter().all(|n| n % 4 == 0);
            let fine = whole && from.bytes == to.bytes && !from.place.shares(&to.place);
            return (!(fine && ends_inside(from) && ends_inside(to))).then(|| format!("{work:?}"));
        }
        WgpuStep::Dispatch { bindings, words, grid, .. } => (bindings, words, grid),
    };
    let wrong = bindings.iter().find(|(_, window)| {
        window.bytes > demands.binding_bytes_max
            || window.offset % demands.binding_align != 0
            || window.bytes % 16 != 0
            || !ends_inside(window)
    });
    let (outputs, inputs): (Vec<_>, Vec<_>) = bindings.iter().partition(|(number, _)| *number >= OUTPUTS);
    let mixed = inputs.iter().find(|(_, a)| outputs.iter().any(|(_, b)| a.place.shares(&b.place)));
    let bad = wrong.or(mixed.copied()).map(|binding| format!("{binding:?}"));
    let large = words.len() > 32 || grid.0 > GRID_MAX || grid.1 > GRID_MAX;
    bad.or(large.then(|| format!("{} words, grid {grid:?}", words.len())))
}

#[test]
fn whatever_is_cut_every_dispatch_is_within_the_limits() {
    let mut counts = Vec::new();
    for (binding_bytes_max, binding_align) in [(1 << 27, 32), (32 << 10, 256), (9 << 10, 64)] {
        let demands = Demands { binding_bytes_max, binding_align, matrices: None };
        let mut dispatches = 0;
        for case in cases::cases(SuiteLevel::Full, &LIMITS) {
            if !Planner::supports(demands, &case.sig) {
                continue;
            }
            for together in [false, true] {
                let mut planner = Planner::new(demands);
                let cmd = Cmd::new(case.sig, &slices(&case.sig, together)).unwrap();
                match planner.add(&cmd) {
                    Ok(()) => {}
                    // the parts of paged KV are only known together with it
                    Err(error) if error.detail.contains("attn_") => continue,
                    Err(error) => panic!("{:?}: {error}", case.sig),
                }
                for work in &planner.works {
                    let fault = fault(work, demands, &planner);
                    assert_eq!(
                        fault, None,
                        "{:?} at {binding_bytes_max} bytes, together: {together}",
                        case.sig
                    );
                }
                dispatches += planner.works.len();
            }
        }
        counts.push(dispatches);
    }
    assert!(counts.is_sorted() && counts[0] * 4 < counts[2] * 3, "nothing was cut: {counts:?}");
}

#[test]
fn what_cannot_be_cut_is_unsupported() {
    let demands = Demands { binding_bytes_max: 4096, binding_align: 64, matrices: None };
    let sample = |cols| OpSig::Sample { rows: 100, cols, history: 0, tops: 0 };
    assert!(Planner::supports(demands, &sample(500)));
    assert!(!Planner::supports(demands, &sample(1000)));
    let merge = |parts| OpSig::AttnMerge { parts, rows: 4, head_dim: 16, sinks: 0, out: DType::F32 };
    assert!(Planner::supports(demands, &merge(10)) && !Planner::supports(demands, &merge(20)));
}

#[test]
fn products_of_f16_and_many_rows_are_by_matrices_where_the_adapter_has_them() {
    use crate::kernels::MatrixUnit;
    use DType::{Bf16, F16, F32};
    let unit = MatrixUnit::new(16, 32);
    assert_eq!(unit, Some(MatrixUnit { edge: 16, parts: 2 }));
    // 2 subgroups for 4 rows of matrices
    assert_eq!(MatrixUnit::new(16, 128), None);
    let by_matrices = |matrices, m, x, weight| {
        let sig = OpSig::Gemm { m, n: 64, k: 32, x, weight, out: F32, bias: false, accumulate: false };
        let mut planner = Planner::new(Demands { binding_bytes_max: 1 << 27, binding_align: 32, matrices });
        planner.add(&Cmd::new(sig, &slices(&sig, false)).unwrap()).unwrap();
        let [WgpuStep::Dispatch { kernel, .. }] = &planner.works[..] else { panic!("{:?}", planner.works) };
        kernel.matrices
    };
    assert_eq!(by_matrices(unit, 17, F16, F16), unit);
    let others = [(None, 17, F16, F16), (unit, 16, F16, F16), (unit, 17, F32, F16), (unit, 17, Bf16, Bf16)];
    for (unit, m, x, weight) in others {
        assert_eq!(by_matrices(unit, m, x, weight), None, "{m} rows of {x} by {weight}");
    }
}

#[test]
fn weights_are_read_once_for_up_to_sixteen_rows() {
    let demands = Demands { binding_bytes_max: 1 << 27, binding_align: 32, matrices: None };
    let (n, k, x) = (64, 32, DType::F32);
    for (m, groups) in [(1, n / 4), (2, n / 4), (5, n / 4), (16, n / 4), (17, 1)] {
        let sig = OpSig::Gemm { m, n, k, x, weight: x, out: x, bias: false, accumulate: false };
        let mut planner = Planner::new(demands);
        planner.add(&Cmd::new(sig, &slices(&sig, false)).unwrap()).unwrap();
        let grids = planner.works.iter().map(|work| match work {
            WgpuStep::Dispatch { grid, .. } => *grid,
            WgpuStep::Copy { .. } => (0, 0),
        });
        assert_eq!(grids.collect::<Vec<_>>(), [(groups, 1)], "{m} rows");
    }
}

//! Selects the kernel of a GEMM.
//!
//! | kernel | when |
//! |---|---|
//! | `gemm_few_rows`, tensor cores | up to 16 rows; bf16 or f16 twice, or f32 rows over bf16 weights |
//! | cuBLASLt | equal dtypes (bf16, f16, f32; f8 from 8.9 on), narrow or f32 output |
//! | `gemm_few_rows`, 16 rows at a time | more rows of its dtypes where cuBLASLt has no way |
//! | `gemv` | up to 4 rows, or up to 16 where cuBLASLt has no way: any dtypes |
//! | `gemm` | the rest; f32 arithmetic without tensor cores, so slow |
//!
//! cuBLASLt adds to a bias of another dtype than the output, which `gemm` over no columns puts there before.

use super::few_rows::{ALONE, FEW_ROWS_MAX, FewRows};
use super::{DeviceRange, KernelArg, Matmul, PlanStep, PlanTarget, VEC_BYTES, launch, vector};
use crate::kernels::{KernelProgram, KernelSource, Macro};
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::{DType, OpSig, Result, Support};

/// Rows per block in `gemv`, up to which it reads the weights once.
const GEMV_ROWS: u32 = 4;
const GEMV_THREADS: u32 = 128;
/// Edge length of a tile in `gemm`, and its threads.
const TILE: u32 = 64;
const TILE_THREADS: u32 = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GemmPath {
    FewRows {
        split: u32,
    },
    Blas {
        /// Whether a kernel of ours adds the bias before, because cuBLASLt's would be of another dtype.
        bias_before: bool,
    },
    Gemv,
    Tiles,
}

/// The number of parts that an `x` is cut into for `gemm_few_rows`, if it has these dtypes.
fn few_rows_split(x: DType, weight: DType) -> Option<u32> {
    // f16 cannot represent the remainder of an f32 after rounding it to f16
    match (x, weight) {
        (DType::Bf16, DType::Bf16) | (DType::F16, DType::F16) => Some(1),
        (DType::F32, DType::Bf16) => Some(3),
        _ => None,
    }
}

/// The parts that `x` is cut into, if `sig` is a product that `gemm_few_rows` takes in one launch.
pub(super) fn few_rows_split_of(sig: &OpSig, operands: &[DeviceRange], target: &PlanTarget) -> Option<u32> {
    match (sig, way(sig, aligned(operands), target)) {
        (OpSig::Gemm { m, .. }, GemmPath::FewRows { split }) if *m <= FEW_ROWS_MAX => Some(split),
        _ => None,
    }
}

fn way(sig: &OpSig, aligned: bool, target: &PlanTarget) -> GemmPath {
    let OpSig::Gemm { m, k, x, weight, .. } = *sig else { unreachable!("called for gemm") };
    let few_rows = few_rows_split(x, weight).filter(|_| k % 8 == 0 && k > 0 && aligned);
    let blas = blas_takes(sig, aligned, target);
    match (few_rows, blas) {
        (Some(split), _) if m <= FEW_ROWS_MAX => GemmPath::FewRows { split },
        (_, Some(bias_before)) if m > GEMV_ROWS => GemmPath::Blas { bias_before },
        _ if m <= FEW_ROWS_MAX => GemmPath::Gemv,
        (Some(split), _) => GemmPath::FewRows { split },
        _ => GemmPath::Tiles,
    }
}

/// Whether cuBLASLt has kernels for this product: equal dtypes, and rows that are whole 16-byte vectors. If
/// so, whether the bias must be added before: cuBLASLt's bias has the output's dtype while ours has the
/// weights', and its f8 bias is bf16. A bias added before is rounded to the output's dtype, which must be
/// exact.
fn blas_takes(sig: &OpSig, aligned: bool, target: &PlanTarget) -> Option<bool> {
    let OpSig::Gemm { n, k, x, weight, out, bias, accumulate, .. } = *sig else {
        unreachable!("called for gemm")
    };
    let vectors = |elements: u32, dtype: DType| {
        (u64::from(elements) * dtype.size_bytes()).is_multiple_of(VEC_BYTES) && elements > 0
    };
    let dtypes = match x {
        DType::F32 => out == DType::F32,
        DType::Bf16 | DType::F16 => out == x || out == DType::F32,
        // n must be a multiple of 16 too
        DType::F8E4m3 => target.capability >= 89 && out != DType::F16 && n % 16 == 0,
        DType::I8 | DType::U32 => false,
    };
    let bias_before = bias && (out != weight || weight == DType::F8E4m3);
    // it rounds a product to the output's dtype before it adds the previous content, seen with bf16 on Hopper
    // (CUDA 13.0)
    let exact = out == DType::F32 || !accumulate;
    let takes = target.blas && aligned && x == weight && dtypes && exact && vectors(k, x) && vectors(n, out);
    takes.then_some(bias_before)
}

/// Says why a product is slow, if it is.
pub(super) fn slow(sig: &OpSig, operands: &[DeviceRange], target: &PlanTarget) -> Option<&'static str> {
    let OpSig::Gemm { m, x, weight, .. } = *sig else { return None };
    let aligned = aligned(operands);
    match way(sig, aligned, target) {
        GemmPath::FewRows { .. } if m <= FEW_ROWS_MAX => None,
        GemmPath::Blas { .. } | GemmPath::Gemv => None,
        _ if x != weight => Some("no matrix library takes rows and weights of unlike dtypes"),
        _ if !aligned => Some("an operand is not aligned to 16 bytes"),
        _ if !target.blas => Some("it runs without cuBLASLt"),
        _ => Some("cuBLASLt takes no such dtypes, or no rows of such a length"),
    }
}

pub(super) fn aligned(operands: &[DeviceRange]) -> bool {
    operands.iter().all(|place| place.address.is_multiple_of(VEC_BYTES))
}

pub(super) fn support(sig: &OpSig, target: &PlanTarget) -> Support {
    if slow(sig, &[], target).is_some() { Support::Emulated } else { Support::Native }
}

pub(super) fn plan(
    sig: &OpSig,
    operands: &[DeviceRange],
    mut args: Vec<KernelArg>,
    target: &PlanTarget,
) -> Result<Vec<PlanStep>> {
    let OpSig::Gemm { m, n, k, x, weight, out, bias, accumulate } = *sig else {
        unreachable!("called for gemm")
    };
    if !bias {
        args.insert(2, args[1]); // never read
    }
    let last = [n, k, u32::from(bias), u32::from(accumulate)].map(KernelArg::U32);
    let dtypes: [(&'static str, &dyn Macro); 3] = [("X", &x), ("WEIGHT", &weight), ("OUT", &out)];
    match way(sig, aligned(operands), target) {
        GemmPath::Blas { bias_before } => {
            let product = PlanStep::Matmul(Matmul {
                shape: (m, n, k),
                dtype: x,
                out_dtype: out,
                x: operands[0].address,
                weight: operands[1].address,
                bias: (bias && !bias_before).then(|| operands[2].address),
                out: operands[operands.len() - 1].address,
                out_columns: n,
                accumulate: accumulate || bias_before,
            });
            if !bias_before {
                return Ok(vec![product]);
            }
            // a product over no columns is its bias
            let nothing = [m, n, 0, 1, u32::from(accumulate)].map(KernelArg::U32);
            Ok(vec![tiles(m, n, &dtypes, [args, nothing.into()].concat())?, product])
        }
        GemmPath::FewRows { split } => {
            let [from, to] = [0, 3].map(|i: usize| args[i]);
            let blocks = (0..m).step_by(to_usize(FEW_ROWS_MAX)).map(|row| {
                let rows = FEW_ROWS_MAX.min(m - row);
                let mut args = args.clone();
                args[0] = from.further(u64::from(row) * u64::from(k) * x.size_bytes());
                args[3] = to.further(u64::from(row) * u64::from(n) * out.size_bytes());
                args.push(KernelArg::U32(rows));
                args.extend(last);
                args.push(KernelArg::Settled(operands[1]));
                let kernel = FewRows::new(rows, u64::from(n), split, target);
                kernel.launch(ALONE, &dtypes, kernel.blocks(n), args)
            });
            blocks.collect()
        }
        GemmPath::Gemv => {
            // the last vector of a row must be whole
            let vec = vector(k.into(), &operands[..2]);
            let macros = [&dtypes[..], &[("VEC", &vec), ("GROUP", &GEMV_THREADS)]].concat();
            let grid = [n.into(), m.div_ceil(GEMV_ROWS).into(), 1];
            args.push(KernelArg::U32(m));
            args.extend(last);
            let program = KernelProgram::new(KernelSource::Gemm, &macros);
            Ok(vec![launch(program, "gemv", grid, GEMV_THREADS, args)?])
        }
        GemmPath::Tiles => {
            args.push(KernelArg::U32(m));
            args.extend(last);
            Ok(vec![tiles(m, n, &dtypes, args)?])
        }
    }
}

/// The kernel for any dtypes and shapes.
fn tiles(m: u32, n: u32, dtypes: &[(&'static str, &dyn Macro)], args: Vec<KernelArg>) -> Result<PlanStep> {
    let macros = [dtypes, &[("VEC", &1u32), ("GROUP", &GEMV_THREADS)]].concat();
    let grid = [n.div_ceil(TILE).into(), m.div_ceil(TILE).into(), 1];
    launch(KernelProgram::new(KernelSource::Gemm, &macros), "gemm", grid, TILE_THREADS, args)
}

#[cfg(test)]
mod tests {
    use super::super::tests::HOPPER;
    use super::*;
    use DType::{Bf16, F8E4m3, F16, F32};

    fn way_of((m, n, k): (u32, u32, u32), (x, weight, out): (DType, DType, DType), bias: bool) -> GemmPath {
        let sig = OpSig::Gemm { m, n, k, x, weight, out, bias, accumulate: false };
        way(&sig, true, &HOPPER)
    }

    #[test]
    fn each_shape_and_dtype_has_its_way() {
        let large = (64, 4096, 4096);
        assert_eq!(way_of((1, 4096, 4096), (Bf16, Bf16, F32), true), GemmPath::FewRows { split: 1 });
        assert_eq!(way_of((16, 4096, 4096), (F32, Bf16, F32), false), GemmPath::FewRows { split: 3 });
        const BLAS: GemmPath = GemmPath::Blas { bias_before: false };
        const BLAS_AFTER_BIAS: GemmPath = GemmPath::Blas { bias_before: true };
        assert_eq!(way_of((17, 4096, 4096), (Bf16, Bf16, F32), false), BLAS);
        assert_eq!(way_of(large, (F32, F32, F32), true), BLAS);
        assert_eq!(way_of((4, 4096, 4096), (F32, F32, F32), true), GemmPath::Gemv);
        assert_eq!(way_of((5, 4096, 4096), (F32, F32, F32), true), BLAS);
        assert_eq!(way_of(large, (F8E4m3, F8E4m3, Bf16), false), BLAS);
        // a bias in another dtype than the output's
        assert_eq!(way_of(large, (Bf16, Bf16, F32), true), BLAS_AFTER_BIAS);
        assert_eq!(way_of(large, (F8E4m3, F8E4m3, Bf16), true), BLAS_AFTER_BIAS);
        // mixed dtypes, odd rows
        assert_eq!(way_of(large, (F32, Bf16, F32), false), GemmPath::FewRows { split: 3 });
        assert_eq!(way_of((64, 4097, 4096), (Bf16, Bf16, Bf16), false), GemmPath::FewRows { split: 1 });
        assert_eq!(way_of(large, (F32, F16, F32), false), GemmPath::Tiles);
        assert_eq!(way_of((64, 4096, 4097), (Bf16, Bf16, Bf16), false), GemmPath::Tiles);
        assert_eq!(way_of((3, 33, 65), (Bf16, Bf16, Bf16), false), GemmPath::Gemv);
    }
}

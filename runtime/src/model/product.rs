//! The command of a matrix product.

use super::Tensor;
use mixfleet_hal::{Cmd, DType, OpSig, Result, Slice};

/// What a Gemm does with its output.
pub(super) enum Out<'a> {
    Set(&'a Slice, DType),
    /// Adds it to the f32 residual.
    Add(&'a Slice),
}

#[expect(clippy::too_many_arguments, reason = "the operands of a Gemm; a struct would only rename them")]
pub(super) fn gemm(
    m: u32,
    x: &Slice,
    x_dtype: DType,
    weight: &Tensor,
    bias: Option<&Tensor>,
    n: u32,
    k: u32,
    out: Out<'_>,
) -> Result<Cmd> {
    let (out, out_dtype, accumulate) = match out {
        Out::Set(slice, dtype) => (slice, dtype, false),
        Out::Add(slice) => (slice, DType::F32, true),
    };
    let sig = OpSig::Gemm {
        m,
        n,
        k,
        x: x_dtype,
        weight: weight.dtype,
        out: out_dtype,
        bias: bias.is_some(),
        accumulate,
    };
    let mut args = vec![x.clone(), weight.slice.clone()];
    args.extend(bias.map(|b| b.slice.clone()));
    args.push(out.clone());
    Cmd::new(sig, &args)
}

//! The command of a matrix product.

use super::Tensor;
use mixfleet_hal::{Cmd, DType, MatrixKind, OpSig, Result, Slice};

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
    let sig = product(m, (n, k), (x_dtype, weight.kind(), out_dtype), bias.is_some(), accumulate);
    let mut args = vec![x.clone()];
    args.extend(weight.arrays().cloned());
    args.extend(bias.map(|b| b.slice.clone()));
    args.push(out.clone());
    Cmd::new(sig, &args)
}

/// The operation of a product with weights of any kind.
pub(crate) fn product(
    m: u32,
    (n, k): (u32, u32),
    (x, weight, out): (DType, MatrixKind, DType),
    bias: bool,
    accumulate: bool,
) -> OpSig {
    match weight {
        MatrixKind::Plain(weight) => OpSig::Gemm { m, n, k, x, weight, out, bias, accumulate },
        MatrixKind::Quantised(weight) => OpSig::QuantisedGemm { m, n, k, x, weight, out, bias, accumulate },
    }
}

/// The operation of a lookup of embeddings in a table of any kind, to f32.
pub(crate) fn embedding(tokens: u32, vocab: u32, hidden: u32, table: MatrixKind) -> OpSig {
    let out = DType::F32;
    match table {
        MatrixKind::Plain(table) => OpSig::Embed { tokens, vocab, hidden, table, out },
        MatrixKind::Quantised(table) => OpSig::QuantisedEmbed { tokens, vocab, hidden, table, out },
    }
}

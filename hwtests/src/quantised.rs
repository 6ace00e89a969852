//! Operations with quantised weights: their meaning, operands and cases. The weights themselves are decoded by
//! the description ([`Quantised::decode`]), which no backend uses.

use crate::cases::Builder;
use mixfleet_hal::cast::{to_u32, to_usize};
use mixfleet_hal::random::Stream;
use mixfleet_hal::{CodeKind, DType, OpSig, Operand, Quantised, ScaleKind, ZeroKind};

/// The quantised weights of an operation: how, rows and columns. None for other operations.
pub(crate) fn weights_of(sig: &OpSig) -> Option<(Quantised, u32, u32)> {
    match *sig {
        OpSig::QuantisedGemm { n, k, weight, .. } => Some((weight, n, k)),
        OpSig::QuantisedEmbed { vocab, hidden, table, .. } => Some((table, vocab, hidden)),
        _ => None,
    }
}

/// The weights of an operation and how large the terms are that each is the sum of, `[rows, columns]`.
pub(crate) fn decoded(sig: &OpSig, operands: &[Vec<f64>]) -> Vec<(f64, f64)> {
    let Some((quantised, rows, columns)) = weights_of(sig) else { return Vec::new() };
    let parts: Vec<&[f64]> =
        operands[1..=quantised.part_count()].iter().map(|part| part.as_slice()).collect();
    quantised.decode(&parts, 1, rows, columns)
}

/// Replaces the written operand by the correct result.
pub(crate) fn run(sig: &OpSig, operands: &mut [Vec<f64>]) -> Result<(), String> {
    let weights = decoded(sig, operands);
    let last = operands.len() - 1;
    let result = match *sig {
        OpSig::QuantisedEmbed { hidden, .. } => {
            let mut rows = Vec::with_capacity(operands[last].len());
            for &id in &operands[0] {
                let start = to_usize(id) * hidden as usize;
                let row = weights.get(start..start + hidden as usize);
                rows.extend(row.ok_or_else(|| format!("id {id} is outside the table"))?.iter().map(|w| w.0));
            }
            rows
        }
        OpSig::QuantisedGemm { n, k, bias, accumulate, .. } => {
            let (n, k) = (n as usize, k as usize);
            let element = |(i, before): (usize, &f64)| {
                let (x, row) = (&operands[0][i / n * k..][..k], &weights[i % n * k..][..k]);
                let sum: f64 = x.iter().zip(row).map(|(x, w)| x * w.0).sum();
                let bias = if bias { operands[last - 1][i % n] } else { 0.0 };
                sum + bias + if accumulate { *before } else { 0.0 }
            };
            operands[last].iter().enumerate().map(element).collect()
        }
        _ => return Err(format!("{} has no quantised weights", sig.name())),
    };
    operands[last] = result;
    Ok(())
}

/// The values of one of the arrays of quantised weights; `None` for other operands.
pub(crate) fn values(sig: &OpSig, operand: &Operand, n: usize, stream: &mut Stream) -> Option<Vec<f64>> {
    let (quantised, _, _) = weights_of(sig)?;
    let mut words = |byte: &mut dyn FnMut(u8) -> u8| {
        let word = |_| {
            let bytes = to_u32(stream.next_u64() >> 32).to_le_bytes();
            f64::from(u32::from_le_bytes(bytes.map(&mut *byte)))
        };
        (0..n).map(word).collect()
    };
    match (operand.name, operand.dtype) {
        // a weight that is no number is in no checkpoint
        ("codes", _) if quantised.code == CodeKind::E4m3 => {
            Some(words(&mut |byte| if byte & 0x7F == 0x7F { byte ^ 1 } else { byte }))
        }
        ("codes" | "high", _) | ("scales", DType::U32) => Some(words(&mut |byte| byte)),
        ("zeros", DType::U32) => Some(words(&mut |byte| byte & 0x3F)),
        ("zeros", _) if quantised.zero == ZeroKind::Points => {
            let codes = 1u64 << quantised.code.bits();
            Some((0..n).map(|_| stream.below(codes) as f64 - signed_below(quantised.code)).collect())
        }
        // of the size that makes weights about one
        ("scales" | "supers" | "outer" | "zeros", _) => {
            let scale = 1.0 / f64::from(1u32 << (quantised.code.bits() - 2));
            Some((0..n).map(|_| scale * (0.5 + stream.next_unit()) * sign(stream)).collect())
        }
        _ => None,
    }
}

fn signed_below(code: CodeKind) -> f64 {
    if code == CodeKind::I8 { 128.0 } else { 0.0 }
}

fn sign(stream: &mut Stream) -> f64 {
    if stream.below(4) == 0 { -1.0 } else { 1.0 }
}

/// Whole rows share a scale.
const WHOLE: u32 = 1 << 20;

/// The formats that checkpoints have, and the other combinations of codes, scales and zeros.
fn kinds() -> Vec<Quantised> {
    use CodeKind::{E2m1, E4m3, I8, U4, U5, U6};
    use ScaleKind as Scale;
    use ZeroKind::{Middle, Minima, Points};
    let of = |code, group_columns, scale, zero| Quantised {
        code,
        group_rows: 1,
        group_columns,
        scale,
        zero,
        outer: false,
    };
    vec![
        of(U4, 32, Scale::Bf16, Middle),
        of(U4, 32, Scale::Bf16, Points),
        of(U4, 64, Scale::F16, Points),
        of(U4, 128, Scale::F32, Middle),
        of(U4, 32, Scale::F16, Middle),
        of(U4, 32, Scale::F16, Minima),
        of(U4, WHOLE, Scale::F32, Points),
        of(U4, 32, Scale::I8, Minima),
        of(U5, 32, Scale::I8, Minima),
        of(U6, 16, Scale::I8, Middle),
        of(U5, 32, Scale::F16, Points),
        of(U6, 32, Scale::Bf16, Middle),
        of(I8, 32, Scale::F16, Middle),
        of(I8, WHOLE, Scale::Bf16, Middle),
        of(I8, 64, Scale::F32, Points),
        of(I8, 32, Scale::F16, Minima),
        of(E4m3, WHOLE, Scale::Bf16, Middle),
        Quantised { group_rows: 128, ..of(E4m3, 128, Scale::F32, Middle) },
        Quantised { group_rows: 16, ..of(E4m3, 24, Scale::F32, Middle) },
        Quantised { group_rows: WHOLE, ..of(I8, WHOLE, Scale::F32, Middle) },
        of(E2m1, 32, Scale::F32, Middle),
        Quantised::MXFP4,
        Quantised::NVFP4,
    ]
}

/// All cases with quantised weights.
pub(crate) fn cases(b: &mut Builder) {
    use DType::{Bf16, F16, F32};
    let gemm = |(m, n, k), weight, (x, out), (bias, accumulate)| OpSig::QuantisedGemm {
        m,
        n,
        k,
        x,
        weight,
        out,
        bias,
        accumulate,
    };
    for weight in kinds() {
        let (one, more) = if weight.scale == ScaleKind::I8 { (256, 768) } else { (32, 160) };
        for (k, other) in [(one, more), (more, one)] {
            b.even(gemm((1, 35, k), weight, (F32, F32), (true, true)));
            b.even(gemm((3, 19, other), weight, (F32, F32), (false, false)));
            b.even(gemm((17, 33, k), weight, (F32, F32), (false, true)));
            b.even(gemm((2, 9, other), weight, (Bf16, Bf16), (true, false)));
            b.even(gemm((9, 21, k), weight, (Bf16, F32), (false, true)));
            b.even(gemm((1, 5, k), weight, (F16, F16), (false, false)));
            b.even(OpSig::QuantisedEmbed { tokens: 5, vocab: 37, hidden: k, table: weight, out: F32 });
        }
        b.even(OpSig::QuantisedEmbed { tokens: 3, vocab: 19, hidden: one, table: weight, out: Bf16 });
        if b.full {
            for m in [2, 4, 5, 6, 7, 8, 9, 16, 31, 65] {
                b.even(gemm((m, 18, more), weight, (F32, F32), (false, false)));
                b.even(gemm((m, 40, more), weight, (Bf16, Bf16), (false, false)));
            }
            b.even(gemm((1, 131, 4 * more), weight, (F32, F32), (false, false)));
            b.even(gemm((70, 129, more), weight, (F32, F32), (true, true)));
            b.even(gemm((70, 129, more), weight, (F16, F32), (true, true)));
        }
    }
}

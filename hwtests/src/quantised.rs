//! Operations with quantised weights: their meaning and operands. The weights themselves are decoded by
//! the description ([`Quantised::decode`]), which no backend uses.

use mixfleet_hal::cast::{to_u32, to_usize};
use mixfleet_hal::random::Stream;
use mixfleet_hal::{CodeKind, DType, MatrixKind, OpSig, Operand, Quantised, ZeroKind};

/// The quantised weights of an operation: how, matrices, rows and columns. None for other operations.
pub(crate) fn weights_of(sig: &OpSig) -> Option<(Quantised, [u32; 3])> {
    match *sig {
        OpSig::QuantisedGemm { n, k, weight, .. } => Some((weight, [1, n, k])),
        OpSig::QuantisedEmbed { vocab, hidden, table, .. } => Some((table, [1, vocab, hidden])),
        OpSig::GroupedGemm { grouped, n, k, weight: MatrixKind::Quantised(weight), .. } => {
            Some((weight, [grouped.experts, n, k]))
        }
        _ => None,
    }
}

/// The weights of an operation and how large the terms are that each is the sum of, `[matrices, rows,
/// columns]`.
pub(crate) fn decoded(sig: &OpSig, operands: &[Vec<f64>]) -> Vec<(f64, f64)> {
    let Some((quantised, [matrices, rows, columns])) = weights_of(sig) else { return Vec::new() };
    let parts: Vec<&[f64]> =
        operands[1..=quantised.part_count()].iter().map(|part| part.as_slice()).collect();
    quantised.decode(&parts, matrices, rows, columns)
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
    let (quantised, _) = weights_of(sig)?;
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

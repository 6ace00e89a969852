//! KV of eight bits in float64: what a head holds once it is stored, and its bytes. The definition is that of
//! [`mixfleet_hal::scaled`]; the code is not.

use mixfleet_hal::cast::to_usize;
use mixfleet_hal::scaled::SCALE_BYTES;
use mixfleet_hal::{DType, OpSig, Operand};

/// The length of an operand's heads if they have scales.
fn head_dim(sig: &OpSig, operand: &Operand) -> Option<usize> {
    sig.kv().filter(|_| sig.has_scales(operand)).map(|kv| kv.head_dim as usize)
}

/// Number of elements of an operand that are not scales, among this many.
pub(crate) fn values_of(sig: &OpSig, operand: &Operand, elements: u64) -> u64 {
    head_dim(sig, operand).map_or(elements, |dim| elements / (dim + SCALE_BYTES) as u64 * dim as u64)
}

/// Encodes `values` in `dtype`, without scales.
pub(crate) fn encoded_as(dtype: DType, values: &[f64]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(values.len() * to_usize(dtype.size_bytes()));
    values.iter().for_each(|&v| dtype.encode(v, &mut bytes));
    bytes
}

/// The bytes of an operand.
pub(crate) fn encoded(sig: &OpSig, operand: &Operand, values: &[f64]) -> Vec<u8> {
    let dtype = operand.dtype;
    let Some(dim) = head_dim(sig, operand) else { return encoded_as(dtype, values) };
    let mut bytes = Vec::new();
    for head in values.chunks(dim) {
        let scale = scale(dtype, head);
        head.iter().for_each(|value| dtype.encode(value / scale, &mut bytes));
        DType::F32.encode(scale, &mut bytes);
    }
    bytes
}

/// The values of an operand.
pub(crate) fn decoded(sig: &OpSig, operand: &Operand, bytes: &[u8]) -> Vec<f64> {
    let dtype = operand.dtype;
    let Some(dim) = head_dim(sig, operand) else { return dtype.decode(bytes) };
    let mut values = Vec::new();
    for head in bytes.chunks(dim + SCALE_BYTES) {
        let (codes, scale) = head.split_at(dim);
        let scale = DType::F32.decode(scale)[0];
        values.extend(dtype.decode(codes).iter().map(|number| number * scale));
    }
    values
}

/// Heads as they are once they were stored as `dtype`, if that rounds them to codes.
pub(crate) fn stored(dtype: DType, head_dim: u32, values: &[f64]) -> Vec<f64> {
    if !dtype.is_scaled() {
        return values.to_vec();
    }
    let of_head = |head: &[f64]| {
        let scale = scale(dtype, head);
        let numbers: Vec<f64> = head.iter().map(|value| value / scale).collect();
        dtype
            .decode(&encoded_as(dtype, &numbers))
            .into_iter()
            .map(move |number| number * scale)
            .collect::<Vec<f64>>()
    };
    values.chunks(head_dim as usize).flat_map(of_head).collect()
}

/// The least power of two times which the largest code is no less than any magnitude.
fn scale(dtype: DType, head: &[f64]) -> f64 {
    if !head.iter().all(|value| value.is_finite()) {
        return f64::NAN;
    }
    let code = if dtype == DType::I8 { 127.0 } else { 448.0 };
    let largest = head.iter().fold(f64::powi(2.0, -100), |largest, value| largest.max(value.abs()));
    let mut scale = 1.0;
    while code * scale < largest {
        scale *= 2.0;
    }
    while code * scale / 2.0 >= largest {
        scale /= 2.0;
    }
    scale
}

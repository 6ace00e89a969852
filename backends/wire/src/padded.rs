//! Messages of fixed length from bytes of any length, for fuzzing.

/// Returns the first bytes of `bytes`, padded with zeros.
pub(crate) fn padded<const N: usize>(bytes: &[u8]) -> [u8; N] {
    std::array::from_fn(|at| bytes.get(at).copied().unwrap_or(0))
}

//! Rows with one clear winner.
//!
//! The host draws tokens from the logits, so that a row of logits must say which token its digest
//! stands for: one element is [`PEAK`], by far the largest. All other elements are finite and at most
//! 255, which leaves nothing to chance at any usual temperature. Which Gemm makes logits cannot be
//! known, so each does that writes f32 anew. The first elements hold the digest and never win, unless
//! there are no others.

use super::rows;
use crate::digest;
use crate::memory::{BufferContents, Live, WriteEffect};
use mixfleet_hal::cast::{low_u32, to_u32, to_usize};
use mixfleet_hal::sample::{NO_TOKEN, ONE, PARAMETER_WORDS};
use mixfleet_hal::{Cmd, DType, OpSig, Result, Slice};

const PEAK: f32 = 1024.0;
const ELEMENT_BYTES: usize = size_of::<f32>();

/// Returns the winning element in a row of `cols` with this digest.
fn winner(digest: u64, cols: u64) -> u64 {
    let lanes = digest::lanes(DType::F32).0 as u64;
    match cols.checked_sub(lanes) {
        Some(free) if free > 0 => lanes + digest::mix(digest, cols) % free,
        _ => digest % cols.max(1),
    }
}

/// Writes each row's digest and peak to `slice`.
pub(super) fn put(store: &mut BufferContents, slice: &Slice, digests: &[u64]) -> Result<()> {
    let row_bytes = slice.bytes / digests.len().max(1) as u64;
    if row_bytes == 0 {
        return Ok(());
    }
    store.clear_rows(slice, row_bytes)?;
    rows::put(store, slice, DType::F32, digests)?;
    let (content, range) = store.content_mut(slice)?;
    let offsets = digests.iter().enumerate().map(|(row, &digest)| {
        let at = range.start as u64 + row as u64 * row_bytes;
        at + winner(digest, row_bytes / ELEMENT_BYTES as u64) * ELEMENT_BYTES as u64
    });
    let offsets: Vec<u64> = offsets.collect();
    if content.live != Live::All {
        content.peaks.extend(&offsets);
    }
    let bytes = content.as_bytes_mut()?;
    for offset in offsets {
        bytes[to_usize(offset)..][..ELEMENT_BYTES].copy_from_slice(&PEAK.to_le_bytes());
    }
    Ok(())
}

/// Draws each row's winner, however it is to be drawn: its probability is 1, and no other tokens are listed.
pub(super) fn sample(store: &mut BufferContents, cmd: &Cmd) -> Result<()> {
    let OpSig::Sample { cols, history, tops, .. } = *cmd.sig() else { return Ok(()) };
    let (args, out) = (cmd.args(), if history > 0 { 4 } else { 2 });
    let ids = winners(store, &args[0], cols)?;
    let parameters = store.words(&args[1])?;
    let high = low_u32(ONE >> 32);
    let drawn: Vec<u8> = ids
        .into_iter()
        .zip(parameters.chunks(PARAMETER_WORDS as usize))
        // the last parameter says whether log-probabilities are requested
        .flat_map(|(id, row)| [id, 0, 0, high * (row[row.len() - 1] & 1)])
        .flat_map(u32::to_le_bytes)
        .collect();
    store.edit(&args[out], WriteEffect::Any)?.copy_from_slice(&drawn);
    if tops > 0 {
        let nothing = [NO_TOKEN, f32::NEG_INFINITY.to_bits()].map(u32::to_le_bytes);
        store
            .edit(&args[out + 1], WriteEffect::Any)?
            .as_chunks_mut::<4>()
            .0
            .as_chunks_mut::<2>()
            .0
            .fill(nothing);
    }
    Ok(())
}

/// Returns the lowest index of the largest element of each row. A row whose single peak is known is not read.
fn winners(store: &mut BufferContents, logits: &Slice, cols: u32) -> Result<Vec<u32>> {
    let (content, range) = store.content(logits)?;
    let row_bytes = cols as usize * ELEMENT_BYTES;
    let known = matches!(content.live, Live::Rows(rows) if rows.dtype == DType::F32);
    let best = range.clone().step_by(row_bytes.max(1)).map(|start| {
        let mut peaks = content.peaks.range(start as u64..(start + row_bytes) as u64);
        match (known, peaks.next(), peaks.next()) {
            (true, Some(&peak), None) => to_u32((to_usize(peak) - start) / ELEMENT_BYTES),
            _ => largest(&content.as_bytes()[start..][..row_bytes]),
        }
    });
    Ok(best.collect())
}

/// Returns the index of the largest element; NaN never wins.
fn largest(row: &[u8]) -> u32 {
    let mut best = (f32::NEG_INFINITY, 0);
    let mut none = true;
    for (at, &element) in row.as_chunks::<ELEMENT_BYTES>().0.iter().enumerate() {
        let value = f32::from_le_bytes(element);
        if value > best.0 || (none && !value.is_nan()) {
            (best, none) = ((value, to_u32(at)), false);
        }
    }
    best.1
}

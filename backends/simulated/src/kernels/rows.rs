//! Operations on rows: the digest of an output row follows from those of the input rows, from the
//! operation's shape (not the number of rows) and from the first bytes of its weights.

use super::{Tag, logits};
use crate::digest::{self, mix, of_bytes};
use crate::memory::{BufferContents, Content, Live, WriteEffect};
use mixfleet_hal::cast::{to_u8, to_usize};
use mixfleet_hal::{Cmd, DType, Error, OpSig, Result, Slice};
use std::ops::Range;

/// Bytes read of a weight: enough to distinguish models without reading gigabytes.
const WEIGHT_BYTES: usize = 64;

pub(super) fn head(bytes: &[u8]) -> &[u8] {
    &bytes[..bytes.len().min(WEIGHT_BYTES)]
}

/// Returns the digest of each of `rows` rows of `slice`.
pub(super) fn digests(store: &BufferContents, slice: &Slice, rows: u32, dtype: DType) -> Result<Vec<u64>> {
    let bytes = store.bytes(slice)?;
    let row_bytes = bytes.len() / rows.max(1) as usize;
    Ok((0..rows as usize).map(|row| digest::read(dtype, &bytes[row * row_bytes..][..row_bytes])).collect())
}

/// Writes each row's digest to `slice`.
pub(super) fn put(store: &mut BufferContents, slice: &Slice, dtype: DType, digests: &[u64]) -> Result<()> {
    let row_bytes = to_usize(slice.bytes) / digests.len().max(1);
    let bytes = store.edit(slice, WriteEffect::Rows(row_bytes as u64, dtype))?;
    for (row, &digest) in digests.iter().enumerate() {
        digest::write(dtype, &mut bytes[row * row_bytes..][..row_bytes], digest);
    }
    Ok(())
}

/// Mixes rows of weights with their ids; selected rows of activations stay unchanged.
pub(super) fn embed(store: &mut BufferContents, cmd: &Cmd) -> Result<()> {
    let OpSig::Embed { vocab, hidden, table, out, .. } = *cmd.sig() else {
        unreachable!("dispatched by kind")
    };
    let args = cmd.args();
    let ids = store.words(&args[0])?;
    if let Some(id) = ids.iter().find(|&&id| id >= vocab) {
        return Err(Error::invalid(format!("embed: id {id} is outside a table of {vocab} rows")));
    }
    let row_bytes = hidden as usize * to_usize(table.size_bytes());
    let (content, range) = store.content(&args[1])?;
    let row = |id: u32| &content.as_bytes()[range.clone()][id as usize * row_bytes..][..row_bytes];
    if content.is_weights() {
        let digest = |&id: &u32| mix(of_bytes(Tag::Embed as u64, head(row(id))), u64::from(id));
        let digests: Vec<u64> = ids.iter().map(digest).collect();
        return put(store, &args[2], out, &digests);
    }
    let picked: Vec<Vec<f64>> =
        ids.iter().map(|&id| table.decode(&row(id)[..digest::lane_bytes(table, row_bytes)])).collect();
    let out_bytes = hidden as usize * to_usize(out.size_bytes());
    let target = store.edit(&args[2], WriteEffect::Rows(out_bytes as u64, out))?;
    for (at, values) in picked.iter().enumerate() {
        let mut lanes = Vec::with_capacity(64);
        values.iter().for_each(|&value| out.encode(value, &mut lanes));
        target[at * out_bytes..][..lanes.len()].copy_from_slice(&lanes);
    }
    Ok(())
}

/// As [`embed`] from weights: of a row its first codes count.
pub(super) fn quantised_embed(store: &mut BufferContents, cmd: &Cmd) -> Result<()> {
    let OpSig::QuantisedEmbed { vocab, out, .. } = *cmd.sig() else { unreachable!("dispatched by kind") };
    let args = cmd.args();
    let ids = store.words(&args[0])?;
    if let Some(id) = ids.iter().find(|&&id| id >= vocab) {
        return Err(Error::invalid(format!("embed: id {id} is outside a table of {vocab} rows")));
    }
    let codes = store.bytes(&args[1])?;
    let row_bytes = codes.len() / vocab.max(1) as usize;
    let row = |id: u32| head(&codes[id as usize * row_bytes..][..row_bytes]);
    let digest = |&id: &u32| mix(of_bytes(Tag::Embed as u64, row(id)), u64::from(id));
    let digests: Vec<u64> = ids.iter().map(digest).collect();
    put(store, &args[args.len() - 1], out, &digests)
}

pub(super) fn rms_norm(store: &mut BufferContents, cmd: &Cmd) -> Result<()> {
    let OpSig::RmsNorm { rows, cols, x, out, .. } = *cmd.sig() else { unreachable!("dispatched by kind") };
    let args = cmd.args();
    let seed = mix(of_bytes(Tag::RmsNorm as u64, head(store.bytes(&args[1])?)), u64::from(cols));
    let digests: Vec<u64> = digests(store, &args[0], rows, x)?.into_iter().map(|d| mix(seed, d)).collect();
    put(store, &args[2], out, &digests)
}

pub(super) fn gemm(store: &mut BufferContents, cmd: &Cmd) -> Result<()> {
    let (OpSig::Gemm { m, n, k, x, out, bias, accumulate, .. }
    | OpSig::QuantisedGemm { m, n, k, x, out, bias, accumulate, .. }) = *cmd.sig()
    else {
        unreachable!("dispatched by kind")
    };
    let args = cmd.args();
    let target = &args[args.len() - 1];
    let mut seed = mix(of_bytes(Tag::Gemm as u64, head(store.bytes(&args[1])?)), u64::from(n));
    if bias {
        seed = of_bytes(seed, head(store.bytes(&args[args.len() - 2])?));
    }
    seed = mix(seed, u64::from(k));
    let mut results: Vec<u64> =
        digests(store, &args[0], m, x)?.into_iter().map(|digest| mix(seed, digest)).collect();
    if accumulate {
        let before = digests(store, target, m, out)?;
        for (result, before) in results.iter_mut().zip(before) {
            *result = mix(mix(Tag::Accumulate as u64, before), *result);
        }
        return put(store, target, out, &results);
    }
    if out == DType::F32 {
        // may be logits, which the signature does not reveal
        return logits::put(store, target, &results);
    }
    put(store, target, out, &results)
}

/// The digest of a token is that of its first head.
pub(super) fn rope(store: &mut BufferContents, cmd: &Cmd) -> Result<()> {
    let OpSig::Rope { tokens, x, .. } = *cmd.sig() else { unreachable!("dispatched by kind") };
    let args = cmd.args();
    let mut digests = digests(store, &args[0], tokens, x)?;
    let table = store.bytes(&args[1])?;
    let row_bytes = table.len() / tokens.max(1) as usize;
    for (at, digest) in digests.iter_mut().enumerate() {
        *digest = mix(of_bytes(Tag::Rope as u64, &table[at * row_bytes..][..row_bytes]), *digest);
    }
    put(store, &args[0], x, &digests)
}

/// What becomes the first columns of a row says its digest, other columns change it.
pub(super) fn copy_columns(store: &mut BufferContents, cmd: &Cmd) -> Result<()> {
    let OpSig::CopyColumns { rows, cols, from, to, x } = *cmd.sig() else {
        unreachable!("dispatched by kind")
    };
    let args = cmd.args();
    let seed = mix(Tag::CopyColumns as u64, u64::from(from.first) << 32 | u64::from(cols));
    let mut results: Vec<u64> =
        digests(store, &args[0], rows, x)?.into_iter().map(|digest| mix(seed, digest)).collect();
    if to.first > 0 {
        for (result, before) in results.iter_mut().zip(digests(store, &args[1], rows, x)?) {
            *result = mix(before, *result);
        }
    }
    put(store, &args[1], x, &results)
}

/// Works element by element, since the signature does not give the length of rows; two zeros give zero. If
/// both inputs hold only the lanes of equal rows, only those are processed.
pub(super) fn elementwise(store: &mut BufferContents, tag: Tag, args: &[Slice], dtype: DType) -> Result<()> {
    let stride = match (lanes_alone(store, &args[0], dtype)?, lanes_alone(store, &args[1], dtype)?) {
        (a, b) if a == b => a,
        _ => None,
    };
    let bytes = to_usize(args[0].bytes);
    let (stride, edit) = match stride {
        Some(stride) => (to_usize(stride), WriteEffect::Rows(stride, dtype)),
        None => (bytes, WriteEffect::Any),
    };
    let live = match edit {
        WriteEffect::Rows(..) => digest::lane_bytes(dtype, stride),
        WriteEffect::Any => bytes,
    };
    let spans: Vec<Range<usize>> =
        (0..bytes).step_by(stride.max(1)).map(|start| start..(start + live).min(bytes)).collect();
    let (size, bits) = (to_usize(dtype.size_bytes()), digest::lanes(dtype).1);
    let mut results = Vec::with_capacity(spans.len() * live);
    let (a, b) = (store.bytes(&args[0])?, store.bytes(&args[1])?);
    for span in spans.iter().cloned() {
        for (a, b) in a[span.clone()].chunks_exact(size).zip(b[span].chunks_exact(size)) {
            results.push(combined(tag, digest::value_bits(dtype, a), digest::value_bits(dtype, b), bits));
        }
    }
    let out = store.edit(&args[2], edit)?;
    let mut results = results.into_iter();
    for span in spans {
        for (element, result) in out[span].chunks_exact_mut(size).zip(&mut results) {
            digest::put_small(dtype, element, result);
        }
    }
    Ok(())
}

fn combined(tag: Tag, a: u32, b: u32, bits: u32) -> u8 {
    if a == 0 && b == 0 {
        return 0;
    }
    to_u8(mix(tag as u64, u64::from(a) | u64::from(b) << 32) & ((1 << bits) - 1))
}

/// Returns the bytes of a row, if `slice` starts with one and holds only lanes of such rows.
fn lanes_alone(store: &BufferContents, slice: &Slice, dtype: DType) -> Result<Option<u64>> {
    let (content, range): (&Content, _) = store.content(slice)?;
    let Live::Rows(rows) = content.live else { return Ok(None) };
    let start = range.start as u64;
    let starts = start % rows.stride == rows.phase;
    Ok((starts && rows.dtype == dtype).then_some(rows.stride))
}

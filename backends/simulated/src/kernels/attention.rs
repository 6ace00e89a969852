//! Attention: the digest of a query and the *sum* of the hashes of the slots that it sees.
//!
//! A sum does not depend on how keys are divided among chunks, pages or parts. `AttnDecode` passes on sum and
//! query, split into pieces of 22 bits, which f32 represents exactly, and `AttnMerge` adds the sums of its
//! parts. A head too short for six pieces keeps the lowest of each; prefill drops the same bits.
//!
//! A token's digest is that of its first head, and a slot's hash covers all KV heads: parts may be ranges of
//! tokens or requests, but not heads.

use super::{Tag, rows};
use crate::digest::{mix, of_bytes};
use crate::memory::{BufferContents, WriteEffect};
use crate::slots::{Division, SlotPools, Slots};
use mixfleet_hal::cast::{low_u32, to_u32, to_usize};
use mixfleet_hal::{Cmd, DType, Error, KvShape, OpSig, Result, Slice};

const PIECE_BITS: u32 = 22;
const PIECES_MAX: u32 = 3;

/// Maximum number of ways in which one buffer is divided into pages at a time.
const DIVISIONS_MAX: usize = 4;

/// Returns the number of pieces of the sum, and of the query, that a head of `head_dim` elements holds.
fn pieces(head_dim: u32) -> u32 {
    (head_dim / 2).min(PIECES_MAX)
}

fn mask(head_dim: u32) -> u64 {
    1u64.checked_shl(pieces(head_dim) * PIECE_BITS).map_or(u64::MAX, |bit| bit - 1)
}

/// Returns the digest of the attention's result.
fn attended(query: u64, sum: u64, head_dim: u32) -> u64 {
    let mask = mask(head_dim);
    mix(mix(Tag::Attention as u64, query & mask), sum & mask)
}

fn short(what: &str) -> Error {
    Error::invalid(format!("attention: {what}"))
}

/// Runs `body` on keys and values, whose hashes it may complete.
fn with_pools<T>(
    store: &mut BufferContents,
    pools: &[Slice],
    kv: KvShape,
    body: impl FnOnce(&mut SlotPools<'_>, u64) -> Result<T>,
) -> Result<T> {
    let mut taken = Vec::with_capacity(2);
    let mut pages = u64::MAX;
    for pool in pools {
        let division = Division::new(pool, kv);
        pages = pages.min(division.pages());
        let (content, _) = store.content_mut(pool)?;
        let known = content.slots.iter().position(|slots| slots.division == division);
        taken.push(known.map_or_else(|| Slots::new(division), |at| content.slots.swap_remove(at)));
    }
    let bytes = |pool: &Slice| store.content(pool).map(|(content, _)| content.as_bytes());
    let (keys, values) = taken.split_first_mut().ok_or_else(|| short("no pool of keys"))?;
    let values = match (values.first_mut(), pools.get(1)) {
        (Some(slots), Some(pool)) => Some((slots, bytes(pool)?)),
        _ => None,
    };
    let result = body(&mut SlotPools { keys: (keys, bytes(&pools[0])?), values }, pages);
    for (pool, slots) in pools.iter().zip(taken) {
        let known = &mut store.content_mut(pool)?.0.slots;
        known.truncate(DIVISIONS_MAX - 1);
        known.push(slots);
    }
    result
}

/// Returns the pages that hold a sequence's tokens up to `end`, after checking that they exist.
fn covering(row: &[u32], end: u64, page_tokens: u32, pages: u64) -> Result<&[u32]> {
    let count = to_usize(end.div_ceil(u64::from(page_tokens.max(1))));
    let used = row.get(..count).ok_or_else(|| short(&format!("{end} tokens in {} pages", row.len())))?;
    match used.iter().find(|&&page| u64::from(page) >= pages) {
        Some(page) => Err(short(&format!("page {page} is outside a pool of {pages}"))),
        None => Ok(used),
    }
}

pub(super) fn prefill(store: &mut BufferContents, cmd: &Cmd) -> Result<()> {
    let OpSig::AttnPrefill { tokens, heads, pages_max, window, sinks, x, kv, .. } = *cmd.sig() else {
        unreachable!("dispatched by kind")
    };
    let args = cmd.args();
    let queries = rows::digests(store, &args[0], tokens, x)?;
    let (starts, contexts, table) = (store.words(&args[1])?, store.words(&args[2])?, store.words(&args[3])?);
    let (pools, rest) = args[4..].split_at(kv.pools() as usize);
    let (page_tokens, head_dim) = (kv.page_tokens, kv.value_dim());
    let results = with_pools(store, pools, kv, |pools, pages| {
        let mut results = vec![0; queries.len()];
        for (sequence, (ends, &context)) in starts.windows(2).zip(&contexts).enumerate() {
            let (first, last) = (ends[0] as usize, ends[1] as usize);
            let new = last.checked_sub(first).filter(|_| last <= queries.len());
            let old = new.and_then(|new| u64::from(context).checked_sub(new as u64));
            let old = old.ok_or_else(|| short(&format!("queries {ends:?} with a context of {context}")))?;
            let row = &table[sequence * pages_max as usize..][..pages_max as usize];
            let row = covering(row, u64::from(context), page_tokens, pages)?;
            let start_of =
                |position: u64| (position + 1).saturating_sub(u64::from(window.unwrap_or(u32::MAX)).max(1));
            let mut start = start_of(old);
            let mut sum = pools.sum(row, start..old);
            for (position, at) in (old..).zip(first..last) {
                sum = sum.wrapping_add(pools.slot(pools.slot_at(row, position)));
                if start < start_of(position) {
                    sum = sum.wrapping_sub(pools.slot(pools.slot_at(row, start)));
                    start += 1;
                }
                results[at] = attended(queries[at], sum, head_dim);
            }
        }
        Ok(results)
    })?;
    let mut results = results;
    if sinks {
        let sink = sink(store, &rest[0])?;
        results.iter_mut().for_each(|result| *result = mix(sink, *result));
    }
    put_heads(store, &rest[usize::from(sinks)], x, &results, heads)
}

/// The digest of sinks, which is that of the first head's, as a token's is.
fn sink(store: &BufferContents, sinks: &Slice) -> Result<u64> {
    let bytes = store.bytes(sinks)?;
    Ok(of_bytes(Tag::Attention as u64, bytes.get(..4).unwrap_or(bytes)))
}

/// Writes each token's digest to all of its heads.
fn put_heads(
    store: &mut BufferContents,
    out: &Slice,
    dtype: DType,
    digests: &[u64],
    heads: u32,
) -> Result<()> {
    let repeated: Vec<u64> =
        digests.iter().flat_map(|&digest| std::iter::repeat_n(digest, heads as usize)).collect();
    rows::put(store, out, dtype, &repeated)
}

pub(super) fn decode(store: &mut BufferContents, cmd: &Cmd) -> Result<()> {
    let OpSig::AttnDecode { sequences, heads, pages_max, x, kv, .. } = *cmd.sig() else {
        unreachable!("dispatched by kind")
    };
    let args = cmd.args();
    let queries = rows::digests(store, &args[0], sequences, x)?;
    let (ranges, table) = (store.words(&args[1])?, store.words(&args[2])?);
    let (pools, rest) = args[3..].split_at(kv.pools() as usize);
    let (page_tokens, head_dim) = (kv.page_tokens, kv.value_dim());
    let sums = with_pools(store, pools, kv, |pools, pages| {
        let sum = |(sequence, range): (usize, &[u32])| {
            let (first, end) = (u64::from(range[0]), u64::from(range[1]));
            if first >= end {
                return Ok(None);
            }
            let row = &table[sequence * pages_max as usize..][..pages_max as usize];
            Ok(Some(pools.sum(covering(row, end, page_tokens, pages)?, first..end)))
        };
        ranges.chunks_exact(2).enumerate().map(sum).collect::<Result<Vec<Option<u64>>>>()
    })?;
    let row_bytes = head_dim as usize * 4;
    let acc = store.edit(&rest[0], WriteEffect::Rows(row_bytes as u64, DType::F32))?;
    for (at, row) in acc.chunks_exact_mut(row_bytes.max(1)).enumerate() {
        let sequence = at / heads as usize;
        let (query, sum) = sums[sequence].map(|sum| (queries[sequence], sum)).unwrap_or_default();
        put_part(row, head_dim, query, sum);
    }
    let stat = store.edit(&rest[1], WriteEffect::Any)?;
    for (at, row) in stat.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let sequence = at / heads as usize;
        let keys = sums[sequence].map(|_| (ranges[2 * sequence + 1] - ranges[2 * sequence]) as f32);
        let max = keys.map_or(f32::NEG_INFINITY, |_| 0.0);
        row[..4].copy_from_slice(&max.to_le_bytes());
        row[4..].copy_from_slice(&keys.unwrap_or(0.0).to_le_bytes());
    }
    Ok(())
}

/// Writes sum and query of one part to the first elements of a head.
fn put_part(row: &mut [u8], head_dim: u32, query: u64, sum: u64) {
    let count = pieces(head_dim);
    let both = [sum, query].into_iter().flat_map(|word| {
        (0..count).map(move |piece| low_u32(word >> (piece * PIECE_BITS)) & ((1 << PIECE_BITS) - 1))
    });
    for (element, piece) in row.as_chunks_mut::<4>().0.iter_mut().zip(both) {
        *element = (piece as f32).to_le_bytes();
    }
}

/// Reads what [`put_part`] wrote; other values are taken as their bits.
fn part(row: &[u8], head_dim: u32) -> (u64, u64) {
    let elements = row.as_chunks::<4>().0;
    let word = |from: usize| {
        (0..pieces(head_dim)).fold(0u64, |word, piece| {
            let value = f32::from_le_bytes(elements[from + piece as usize]);
            let whole = to_u32(value);
            let plain = (whole as f32).to_bits() == value.to_bits() && whole < 1 << PIECE_BITS;
            let bits =
                if plain { u64::from(whole) } else { mix(Tag::Attention as u64, u64::from(value.to_bits())) };
            word.wrapping_add(bits << (piece * PIECE_BITS))
        })
    };
    (word(pieces(head_dim) as usize), word(0))
}

pub(super) fn merge(store: &mut BufferContents, cmd: &Cmd) -> Result<()> {
    let OpSig::AttnMerge { parts, rows, head_dim, sinks, out } = *cmd.sig() else {
        unreachable!("dispatched by kind")
    };
    let args = cmd.args();
    let (acc, stat) = (store.bytes(&args[0])?, store.bytes(&args[1])?);
    let row_bytes = head_dim as usize * 4;
    let mut results: Vec<Option<u64>> = Vec::with_capacity(rows as usize);
    for row in 0..rows as usize {
        let mut merged: Option<(u64, u64)> = None;
        for at in (0..parts as usize).map(|part| part * rows as usize + row) {
            let stat = &stat[at * 8..][..8];
            if stat[..4] == f32::NEG_INFINITY.to_le_bytes() {
                continue;
            }
            let (query, sum) = part(&acc[at * row_bytes..][..row_bytes], head_dim);
            merged = Some(match merged {
                None => (query, sum),
                Some((other, total)) if other == query => (query, total.wrapping_add(sum)),
                // parts of two queries belong to neither
                Some((other, total)) => (mix(other, query), total.wrapping_add(sum)),
            });
        }
        results.push(merged.map(|(query, sum)| attended(query, sum, head_dim)));
    }
    if sinks > 0 {
        let sink = sink(store, &args[2])?;
        results.iter_mut().flatten().for_each(|result| *result = mix(sink, *result));
    }
    put_merged(store, &args[2 + usize::from(sinks > 0)], out, &results)
}

/// A row whose parts are all empty gives 0.
fn put_merged(store: &mut BufferContents, out: &Slice, dtype: DType, results: &[Option<u64>]) -> Result<()> {
    let digests: Vec<u64> = results.iter().map(|result| result.unwrap_or_default()).collect();
    rows::put(store, out, dtype, &digests)
}

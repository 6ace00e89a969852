//! KV pools: rows of `[slots, kv_heads, head_dim]`, every element filled.
//!
//! The elements are integers from 0 to 15, which all dtypes hold exactly, so that a conversion on the
//! way to another device keeps them.

use super::{Tag, rows};
use crate::digest::{self, mix};
use crate::memory::{Edit, Store};
use half::{bf16, f16};
use mixfleet_hal::{Cmd, DType, Error, OpSig, Result, Slice};

/// Elements after which a row repeats itself: 256 bits of its digest.
const PATTERN: usize = 64;

/// A row of `elements` elements that follow from `digest`.
fn filled(dtype: DType, elements: usize, digest: u64, out: &mut Vec<u8>) {
    let size = dtype.size_bytes() as usize;
    let mut pattern = [0u8; PATTERN * 4];
    let pattern = &mut pattern[..PATTERN * size];
    for (word, chunk) in (0u64..).zip(pattern.chunks_exact_mut(16 * size)) {
        let mut nibbles = mix(digest, word);
        for element in chunk.chunks_exact_mut(size) {
            digest::put_small(dtype, element, (nibbles & 0xF) as u8);
            nibbles >>= 4;
        }
    }
    let end = out.len() + elements * size;
    while out.len() < end {
        let part = pattern.len().min(end - out.len());
        out.extend_from_slice(&pattern[..part]);
    }
}

pub(super) fn write(store: &mut Store, cmd: &Cmd) -> Result<()> {
    let OpSig::KvWrite { tokens, kv_heads, head_dim, x, kv, .. } = *cmd.sig() else {
        unreachable!("dispatched by kind")
    };
    let args = cmd.args();
    let slots = store.words(&args[2])?;
    let elements = (kv_heads * head_dim) as usize;
    for (tag, from, pool) in [(Tag::Key, &args[0], &args[3]), (Tag::Value, &args[1], &args[4])] {
        let digests = rows::digests(store, from, tokens, x)?;
        let mut rows = Vec::with_capacity(slots.len() * elements * kv.size_bytes() as usize);
        digests.iter().for_each(|&digest| filled(kv, elements, mix(tag as u64, digest), &mut rows));
        store.write_slots(pool, &slots, &rows)?;
    }
    Ok(())
}

pub(super) fn gather(store: &mut Store, cmd: &Cmd) -> Result<()> {
    let OpSig::KvGather { tokens, kv_heads, head_dim, kv, wire, .. } = *cmd.sig() else {
        unreachable!("dispatched by kind")
    };
    let args = cmd.args();
    let slots = store.words(&args[0])?;
    let row_bytes = (kv_heads * head_dim) as usize * kv.size_bytes() as usize;
    let mut rows = Vec::with_capacity(2 * row_bytes * tokens as usize); // [tokens, 2, kv_heads, head_dim]
    for &slot in &slots {
        for pool in &args[1..3] {
            let bytes = store.bytes(pool)?;
            let row = bytes.get(slot as usize * row_bytes..).and_then(|rest| rest.get(..row_bytes));
            let outside = || Error::invalid(format!("kv_gather: slot {slot} is outside the pool"));
            rows.extend_from_slice(row.ok_or_else(outside)?);
        }
    }
    let out = store.edit(&args[3], Edit::Any)?;
    out.copy_from_slice(&converted(kv, wire, rows));
    Ok(())
}

pub(super) fn scatter(store: &mut Store, cmd: &Cmd) -> Result<()> {
    let OpSig::KvScatter { kv, wire, .. } = *cmd.sig() else { unreachable!("dispatched by kind") };
    let args: &[Slice] = cmd.args();
    let slots = store.words(&args[1])?;
    let rows = converted(wire, kv, store.bytes(&args[0])?.to_vec());
    let token_bytes = rows.len() / slots.len().max(1);
    let (mut keys, mut values) = (Vec::with_capacity(rows.len() / 2), Vec::with_capacity(rows.len() / 2));
    for token in rows.chunks_exact(token_bytes.max(1)) {
        let (key, value) = token.split_at(token_bytes / 2);
        keys.extend_from_slice(key);
        values.extend_from_slice(value);
    }
    store.write_slots(&args[2], &slots, &keys)?;
    store.write_slots(&args[3], &slots, &values)
}

/// The values of `bytes`, rounded to another dtype.
fn converted(from: DType, to: DType, bytes: Vec<u8>) -> Vec<u8> {
    let words = || bytes.as_chunks::<2>().0.iter().map(|&pair| u16::from_le_bytes(pair));
    let singles = || bytes.as_chunks::<4>().0.iter().map(|&word| f32::from_le_bytes(word));
    match (from, to) {
        _ if from == to => bytes,
        (DType::Bf16, DType::F32) => words().flat_map(|w| (u32::from(w) << 16).to_le_bytes()).collect(),
        (DType::F16, DType::F32) => words().flat_map(|w| f16::from_bits(w).to_f32().to_le_bytes()).collect(),
        (DType::F32, DType::Bf16) => singles().flat_map(|v| bf16::from_f32(v).to_le_bytes()).collect(),
        (DType::F32, DType::F16) => singles().flat_map(|v| f16::from_f32(v).to_le_bytes()).collect(),
        _ => {
            let mut out = Vec::with_capacity(bytes.len());
            from.decode(&bytes).into_iter().for_each(|value| to.encode(value, &mut out));
            out
        }
    }
}

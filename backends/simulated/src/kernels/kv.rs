//! Paged KV: rows of `[slots, kv_heads, head_dim]` with every element filled.
//!
//! The elements are integers from 0 to 15, which all dtypes represent exactly, so that conversion on the way
//! to another device preserves them.

use super::{Tag, rows};
use crate::digest::{self, mix};
use crate::memory::{Edit, Store};
use half::{bf16, f16};
use mixfleet_hal::cast::{to_u8, to_usize};
use mixfleet_hal::{Cmd, DType, Error, OpSig, Result, Slice};

/// Number of elements after which a row repeats: 256 bits of its digest.
const PATTERN: usize = 64;

/// Appends a row of `elements` elements of `N` bytes for each digest.
fn filled<const N: usize>(dtype: DType, elements: usize, digests: &[u64], out: &mut Vec<u8>) {
    let codes: [[u8; N]; 16] = std::array::from_fn(|value| {
        let mut code = [0; N];
        digest::put_small(dtype, &mut code, to_u8(value));
        code
    });
    for &digest in digests {
        let mut pattern = [[0; N]; PATTERN];
        for (word, chunk) in (0u64..).zip(pattern.chunks_exact_mut(16)) {
            let mut nibbles = mix(digest, word);
            for element in chunk {
                *element = codes[(nibbles & 0xF) as usize];
                nibbles >>= 4;
            }
        }
        let end = out.len() + elements * N;
        while out.len() < end {
            let part = (end - out.len()).min(PATTERN * N);
            out.extend_from_slice(&pattern.as_flattened()[..part]);
        }
    }
}

pub(super) fn write(store: &mut Store, cmd: &Cmd) -> Result<()> {
    let OpSig::KvWrite { tokens, x, kv: shape } = *cmd.sig() else { unreachable!("dispatched by kind") };
    let args = cmd.args();
    let (rows, rest) = args.split_at(shape.pools() as usize);
    let slots = store.words(&rest[0])?;
    let (elements, kv) = (to_usize(shape.row()), shape.dtype);
    for ((tag, from), pool) in [Tag::Key, Tag::Value].into_iter().zip(rows).zip(&rest[1..]) {
        let mut digests = rows::digests(store, from, tokens, x)?;
        digests.iter_mut().for_each(|digest| *digest = mix(tag as u64, *digest));
        let mut rows = Vec::with_capacity(slots.len() * elements * to_usize(kv.size_bytes()));
        match kv.size_bytes() {
            1 => filled::<1>(kv, elements, &digests, &mut rows),
            2 => filled::<2>(kv, elements, &digests, &mut rows),
            _ => filled::<4>(kv, elements, &digests, &mut rows),
        }
        store.write_slots(pool, &slots, &rows)?;
    }
    Ok(())
}

pub(super) fn gather(store: &mut Store, cmd: &Cmd) -> Result<()> {
    let OpSig::KvGather { tokens, wire, kv: shape } = *cmd.sig() else { unreachable!("dispatched by kind") };
    let args = cmd.args();
    let slots = store.words(&args[0])?;
    let (pools, rest) = args[1..].split_at(shape.pools() as usize);
    let kv = shape.dtype;
    let row_bytes = to_usize(shape.row() * kv.size_bytes());
    let mut rows = Vec::with_capacity(pools.len() * row_bytes * tokens as usize); // the wire layout
    for &slot in &slots {
        for pool in pools {
            let bytes = store.bytes(pool)?;
            let row = bytes.get(slot as usize * row_bytes..).and_then(|rest| rest.get(..row_bytes));
            let outside = || Error::invalid(format!("kv_gather: slot {slot} is outside the pool"));
            rows.extend_from_slice(row.ok_or_else(outside)?);
        }
    }
    let out = store.edit(&rest[0], Edit::Any)?;
    out.copy_from_slice(&converted(kv, wire, rows));
    Ok(())
}

pub(super) fn scatter(store: &mut Store, cmd: &Cmd) -> Result<()> {
    let OpSig::KvScatter { wire, kv: shape, .. } = *cmd.sig() else { unreachable!("dispatched by kind") };
    let args: &[Slice] = cmd.args();
    let slots = store.words(&args[1])?;
    let rows = converted(wire, shape.dtype, store.bytes(&args[0])?.to_vec());
    let token_bytes = rows.len() / slots.len().max(1);
    let (pools, row_bytes) = (&args[2..], token_bytes / shape.pools() as usize);
    for (at, pool) in pools.iter().enumerate() {
        let tokens = rows.chunks_exact(token_bytes.max(1));
        let own: Vec<u8> = tokens.flat_map(|token| &token[at * row_bytes..][..row_bytes]).copied().collect();
        store.write_slots(pool, &slots, &own)?;
    }
    Ok(())
}

/// Converts the values of `bytes` to another dtype.
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

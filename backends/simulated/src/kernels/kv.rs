//! Paged KV: rows of `[slots, kv_heads, head_dim]` with every element filled.
//!
//! The elements are integers from 0 to 15, which all dtypes represent exactly (eight-bit codes with a scale),
//! so that conversion for another device preserves them.

use super::{Tag, rows};
use crate::digest::{self, decoded, mix};
use crate::memory::{BufferContents, WriteEffect};
use half::{bf16, f16};
use mixfleet_hal::cast::{to_f32, to_u8, to_usize};
use mixfleet_hal::{Cmd, DType, Error, OpSig, Result, Slice, scaled};

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

pub(super) fn write(store: &mut BufferContents, cmd: &Cmd) -> Result<()> {
    let OpSig::KvWrite { tokens, x, kv: shape } = *cmd.sig() else { unreachable!("dispatched by kind") };
    let args = cmd.args();
    let (rows, rest) = args.split_at(shape.pools() as usize);
    let slots = store.words(&rest[0])?;
    let (elements, kv, head_dim) = ((shape.kv_heads * shape.head_dim) as usize, shape.dtype, shape.head_dim);
    let wide = if kv.is_scaled() { DType::F32 } else { kv };
    for ((tag, from), pool) in [Tag::Key, Tag::Value].into_iter().zip(rows).zip(&rest[1..]) {
        let mut digests = rows::digests(store, from, tokens, x)?;
        digests.iter_mut().for_each(|digest| *digest = mix(tag as u64, *digest));
        let mut rows = Vec::with_capacity(slots.len() * elements * to_usize(wide.size_bytes()));
        match wide.size_bytes() {
            2 => filled::<2>(wide, elements, &digests, &mut rows),
            _ => filled::<4>(wide, elements, &digests, &mut rows),
        }
        store.write_slots(pool, &slots, &converted(wide, kv, head_dim, rows))?;
    }
    Ok(())
}

pub(super) fn gather(store: &mut BufferContents, cmd: &Cmd) -> Result<()> {
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
    let out = store.edit(&rest[0], WriteEffect::Any)?;
    out.copy_from_slice(&converted(kv, wire, shape.head_dim, rows));
    Ok(())
}

pub(super) fn scatter(store: &mut BufferContents, cmd: &Cmd) -> Result<()> {
    let OpSig::KvScatter { wire, kv: shape, .. } = *cmd.sig() else { unreachable!("dispatched by kind") };
    let args: &[Slice] = cmd.args();
    let slots = store.words(&args[1])?;
    let rows = converted(wire, shape.dtype, shape.head_dim, store.bytes(&args[0])?.to_vec());
    let token_bytes = rows.len() / slots.len().max(1);
    let (pools, row_bytes) = (&args[2..], token_bytes / shape.pools() as usize);
    for (at, pool) in pools.iter().enumerate() {
        let tokens = rows.chunks_exact(token_bytes.max(1));
        let own: Vec<u8> = tokens.flat_map(|token| &token[at * row_bytes..][..row_bytes]).copied().collect();
        store.write_slots(pool, &slots, &own)?;
    }
    Ok(())
}

/// Converts the values of heads to another dtype.
fn converted(from: DType, to: DType, head_dim: u32, bytes: Vec<u8>) -> Vec<u8> {
    if from != to && from.is_scaled() {
        return converted(DType::F32, to, head_dim, decoded(from, head_dim, &bytes));
    }
    if from != to && to.is_scaled() {
        let head_bytes = head_dim as usize * to_usize(from.size_bytes());
        let mut coded = vec![0; head_dim as usize + scaled::SCALE_BYTES];
        let of_head = |head: &[u8]| {
            let values: Vec<f32> = from.decode(head).into_iter().map(to_f32).collect();
            scaled::encode(to, &values, &mut coded);
            coded.clone()
        };
        return bytes.chunks_exact(head_bytes).flat_map(of_head).collect();
    }
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

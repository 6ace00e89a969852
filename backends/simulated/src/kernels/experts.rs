//! Mixtures of experts: a token's digest determines its experts, and the experts' output.

use super::Tag;
use super::rows::{digests, head, put};
use crate::digest::{mix, of_bytes, of_values};
use crate::memory::{BufferContents, WriteEffect};
use mixfleet_hal::cast::{low_u32, to_u32, to_usize};
use mixfleet_hal::{Cmd, DType, Error, OpSig, Result};

/// Writes words.
fn put_words(store: &mut BufferContents, cmd: &Cmd, at: usize, words: &[u32]) -> Result<()> {
    let to = store.edit(&cmd.args()[at], WriteEffect::Any)?;
    to.as_chunks_mut::<4>().0.iter_mut().zip(words).for_each(|(to, word)| *to = word.to_le_bytes());
    Ok(())
}

/// A row's pairs have no order here.
pub(super) fn swiglu(store: &mut BufferContents, cmd: &Cmd) -> Result<()> {
    let OpSig::ClampedSwiglu { elements, x, .. } = *cmd.sig() else { unreachable!("dispatched by kind") };
    let (bytes, element) = (store.bytes(&cmd.args()[0])?.to_vec(), to_usize(x.size_bytes()));
    let out = store.edit(&cmd.args()[1], WriteEffect::Any)?;
    for at in 0..to_usize(elements) {
        let pair = &bytes[2 * at * element..][..2 * element];
        let is_zero = pair.iter().all(|&byte| byte == 0);
        let digest = if is_zero { 0 } else { of_values(Tag::Swiglu as u64, x, pair) };
        crate::digest::write(x, &mut out[at * element..][..element], digest);
    }
    Ok(())
}

/// The experts of a token are those after one that its digest says.
pub(super) fn route(store: &mut BufferContents, cmd: &Cmd) -> Result<()> {
    let OpSig::Route { tokens, bias, routing } = *cmd.sig() else { unreachable!("dispatched by kind") };
    let (experts, active) = (routing.experts, routing.active);
    let of = digests(store, &cmd.args()[0], tokens, DType::F32)?;
    let first = |digest: u64| low_u32(mix(Tag::Route as u64, digest)) % experts;
    let each = |digest: u64| (0..active).map(move |i| (first(digest) + i) % experts);
    let chosen: Vec<u32> = of.into_iter().flat_map(each).collect();
    let mut order: Vec<u32> = (0..to_u32(chosen.len())).collect();
    order.sort_by_key(|&choice| chosen[choice as usize]);
    let below = |expert: u32| to_u32(order.partition_point(|&choice| chosen[choice as usize] < expert));
    let starts: Vec<u32> = (0..=experts).map(below).collect();
    let at = 1 + usize::from(bias);
    put_words(store, cmd, at, &chosen)?;
    let share = (1.0f32 / active as f32).to_bits();
    put_words(store, cmd, at + 1, &vec![share; chosen.len()])?;
    put_words(store, cmd, at + 2, &order)?;
    put_words(store, cmd, at + 3, &starts)
}

pub(super) fn grouped_gemm(store: &mut BufferContents, cmd: &Cmd) -> Result<()> {
    let OpSig::GroupedGemm { grouped, n, k, x, weight, out, bias } = *cmd.sig() else {
        unreachable!("dispatched by kind")
    };
    let args = cmd.args();
    let (bias_at, at) = (1 + weight.part_count(), 1 + weight.part_count() + usize::from(bias));
    let (order, starts) = (store.words(&args[at])?, store.words(&args[at + 1])?);
    let rows = digests(store, &args[0], grouped.choices / grouped.fan, x)?;
    let mut results = vec![0; grouped.choices as usize];
    for (expert, ends) in starts.windows(2).enumerate() {
        let mut seed = Tag::Gemm as u64;
        for (array, of_one) in args[1..].iter().zip(weight.parts(1, n, k)) {
            let bytes = to_usize(of_one.elements() * of_one.dtype.size_bytes());
            seed = of_bytes(seed, head(&store.bytes(array)?[expert * bytes..]));
        }
        seed = mix(seed, u64::from(n));
        if bias {
            let bytes = to_usize(weight.bias().size_bytes()) * n as usize;
            seed = of_bytes(seed, head(&store.bytes(&args[bias_at])?[expert * bytes..]));
        }
        seed = mix(seed, u64::from(k));
        let outside = || Error::invalid(format!("grouped_gemm: expert {expert} has rows {ends:?}"));
        for &choice in order.get(ends[0] as usize..ends[1] as usize).ok_or_else(outside)? {
            let row = rows.get((choice / grouped.fan) as usize).ok_or_else(outside)?;
            results[choice as usize] = mix(seed, *row);
        }
    }
    put(store, &args[at + 2], out, &results)
}

pub(super) fn combine(store: &mut BufferContents, cmd: &Cmd) -> Result<()> {
    let OpSig::Combine { tokens, active, x, accumulate, .. } = *cmd.sig() else {
        unreachable!("dispatched by kind")
    };
    let args = cmd.args();
    let of = digests(store, &args[0], tokens * active, x)?;
    let sum = |choices: &[u64]| choices.iter().fold(Tag::Combine as u64, |sum, choice| mix(sum, *choice));
    let mut results: Vec<u64> = of.chunks(active.max(1) as usize).map(sum).collect();
    if accumulate {
        let before = digests(store, &args[2], tokens, DType::F32)?;
        for (result, before) in results.iter_mut().zip(before) {
            *result = mix(mix(Tag::Accumulate as u64, before), *result);
        }
    }
    put(store, &args[2], DType::F32, &results)
}

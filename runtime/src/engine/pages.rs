//! KV in a device's pages: the slots of tokens, and the commands that copy it to the wire layout and back.

use crate::model::graph::Forward;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::{BufferUsage, Cmd, DType, Device, KvShape, OpSig, Result, Slice};
use std::ops::Range;
use xxhash_rust::xxh3::xxh3_64;

/// An instance's page geometry; the pools themselves belong to the forward pass.
pub struct Pages {
    pub(super) shape: KvShape,
    /// Slot numbers of the tokens to copy, on the device.
    slot_ids: Slice, // [tokens_max]
}

impl Pages {
    /// Allocates slot numbers for copies of up to `tokens_max` tokens.
    ///
    /// # Errors
    /// Those of the device.
    pub fn new(device: &dyn Device, shape: KvShape, tokens_max: u64) -> Result<Self> {
        Ok(Pages { shape, slot_ids: device.alloc(tokens_max * 4, BufferUsage::Staging)? })
    }

    /// Uploads the slots of `tokens` of a sequence that has these pages, for one copy at a time.
    ///
    /// # Errors
    /// Those of the device.
    pub fn slots(&self, device: &dyn Device, pages: &[u32], tokens: Range<u32>) -> Result<Slice> {
        let page_tokens = self.shape.page_tokens;
        let slot = |i: u32| pages[(i / page_tokens) as usize] * page_tokens + i % page_tokens;
        let slots: Vec<u32> = tokens.map(slot).collect();
        let target = self.slot_ids.range(0, slots.len() as u64 * 4);
        device.write(&target, bytemuck::cast_slice(&slots))?;
        Ok(target)
    }

    /// Copies from `slots` of a layer to the wire layout.
    pub(super) fn gather(
        &self,
        forward: &Forward,
        layer: usize,
        slots: Slice,
        (to, wire): (Slice, DType),
    ) -> Result<Cmd> {
        let tokens = to_u32(slots.bytes / 4);
        let (k, v) = forward.pools(layer)?;
        let sig = OpSig::KvGather { tokens, wire, kv: self.shape };
        Cmd::new(sig, &[slots, k.clone(), v.clone(), to])
    }

    /// Copies from the wire layout to `slots` of a layer.
    ///
    /// # Errors
    /// `Invalid` if the operands do not fit.
    pub fn scatter(
        &self,
        forward: &Forward,
        layer: usize,
        slots: Slice,
        (from, wire): (Slice, DType),
    ) -> Result<Cmd> {
        let tokens = to_u32(slots.bytes / 4);
        let (k, v) = forward.pools(layer)?;
        let sig = OpSig::KvScatter { tokens, wire, kv: self.shape };
        Cmd::new(sig, &[from, slots, k.clone(), v.clone()])
    }
}

/// Hashes the first `bytes` bytes of `private`, a copy that nobody else writes to, and writes them to the
/// staging buffer `to` if the hash is right; returns whether it is.
///
/// # Errors
/// Those of the memory and of the device.
pub fn check_piece(
    device: &dyn Device,
    private: &dyn SharedMemory,
    (bytes, hash): (u64, u64),
    to: Option<&Slice>,
) -> Result<bool> {
    let (mut intact, mut written) = (false, Ok(()));
    private.view(0, bytes, &mut |copy| {
        intact = xxh3_64(copy) == hash;
        if let (Some(to), true) = (to, intact) {
            written = device.write(to, copy);
        }
    })?;
    written.map(|()| intact)
}

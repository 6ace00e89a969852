//! KV in a device's pages: where tokens lie in them, and the commands that copy it from there to the wire layout and back.

use crate::model::ModelConfig;
use crate::model::graph::{Forward, StepShape};
use mixfleet_hal::{BufferUsage, Cmd, DType, Device, OpSig, Result, Slice};
use std::ops::Range;

/// An instance's pages, without the pools, which are the forward pass's.
pub(super) struct Pages {
    pub(super) page_tokens: u32,
    kv_heads: u32,
    head_dim: u32,
    /// Dtype of the KV in them.
    pub(super) kv: DType,
    /// Slot numbers of the tokens that are copied, on the device.
    slot_ids: Slice, // [tokens_max]
}

impl Pages {
    /// For copies of up to `tokens_max` tokens.
    pub(super) fn new(
        device: &dyn Device,
        config: &ModelConfig,
        shape: &StepShape,
        tokens_max: u64,
    ) -> Result<Self> {
        Ok(Pages {
            page_tokens: shape.block_tokens,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            kv: shape.kv,
            slot_ids: device.alloc(tokens_max * 4, BufferUsage::Staging)?,
        })
    }

    /// Bytes of one token of one layer on the wire.
    pub(super) fn token_bytes(&self, wire: DType) -> u64 {
        2 * u64::from(self.kv_heads * self.head_dim) * wire.size_bytes()
    }

    /// Uploads where `tokens` of a sequence lie that has these pages. One copy at a time has use for it.
    pub(super) fn slots(&self, device: &dyn Device, pages: &[u32], tokens: Range<u32>) -> Result<Slice> {
        let page_tokens = self.page_tokens;
        let slot = |i: u32| pages[(i / page_tokens) as usize] * page_tokens + i % page_tokens;
        let slots: Vec<u32> = tokens.map(slot).collect();
        let target = self.slot_ids.range(0, slots.len() as u64 * 4);
        device.write(&target, bytemuck::cast_slice(&slots))?;
        Ok(target)
    }

    /// From `slots` of a layer to the wire layout.
    pub(super) fn gather(
        &self,
        forward: &Forward,
        layer: usize,
        slots: Slice,
        (to, wire): (Slice, DType),
    ) -> Result<Cmd> {
        let Pages { page_tokens, kv_heads, head_dim, kv, .. } = *self;
        let tokens = (slots.bytes / 4) as u32;
        let (k, v) = forward.pools(layer);
        let sig = OpSig::KvGather { tokens, kv_heads, head_dim, page_tokens, kv, wire };
        Cmd::new(sig, &[slots, k.clone(), v.clone(), to])
    }

    /// From the wire layout to `slots` of a layer.
    pub(super) fn scatter(
        &self,
        forward: &Forward,
        layer: usize,
        slots: Slice,
        (from, wire): (Slice, DType),
    ) -> Result<Cmd> {
        let Pages { page_tokens, kv_heads, head_dim, kv, .. } = *self;
        let tokens = (slots.bytes / 4) as u32;
        let (k, v) = forward.pools(layer);
        let sig = OpSig::KvScatter { tokens, kv_heads, head_dim, page_tokens, kv, wire };
        Cmd::new(sig, &[from, slots, k.clone(), v.clone()])
    }
}

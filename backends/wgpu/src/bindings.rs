//! Bind groups, kept for the next dispatch that binds the same memory: a decode step binds what the one
//! before it did.

use crate::counts::{Counters, count};
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use wgpu::{
    BindGroup, BindGroupDescriptor, BindGroupEntry, BindGroupLayout, BindingResource, Buffer, BufferBinding,
    BufferSize, Device,
};

/// Bind groups of a generation; there are two. A dispatch of a layer takes one, so that these are enough for
/// the steps of a dozen sizes.
const GENERATION: usize = 8192;

/// Memory that a dispatch binds to a number.
pub(crate) struct Bound<'a> {
    pub(crate) number: u32,
    /// Number of the memory, which no other one of the device has had.
    pub(crate) memory: u64,
    pub(crate) buffer: &'a Buffer,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// What a bind group is of: a pipeline, whose number follows, and windows, in the order of its numbers.
#[derive(Debug, PartialEq, Eq, Hash)]
struct BindGroupKey {
    pipeline: u64,
    windows: Vec<(u64, u64, u64)>,
}

#[derive(Debug, Default)]
struct Generations {
    recent: HashMap<BindGroupKey, BindGroup>,
    older: HashMap<BindGroupKey, BindGroup>,
}

/// The bind groups of a device. A group keeps its buffers from being freed, so memory that is dropped takes
/// its groups along.
#[derive(Debug, Default)]
pub(crate) struct BindGroups {
    kept: Mutex<Generations>,
}

impl BindGroups {
    /// Returns the bind group of this memory.
    pub(crate) fn get(
        &self,
        device: &Device,
        counters: &Counters,
        pipeline: u64,
        layout: &BindGroupLayout,
        bound: &[Bound<'_>],
    ) -> BindGroup {
        let windows = bound.iter().map(|window| (window.memory, window.offset, window.bytes));
        let key = BindGroupKey { pipeline, windows: windows.collect() };
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(group) = kept.recent.get(&key) {
            return group.clone();
        }
        let group = kept.older.remove(&key).unwrap_or_else(|| {
            count(&counters.bind_groups, 1);
            let entries: Vec<_> = bound.iter().map(entry).collect();
            device.create_bind_group(&BindGroupDescriptor { label: None, layout, entries: &entries })
        });
        if kept.recent.len() >= GENERATION {
            kept.older = std::mem::take(&mut kept.recent);
        }
        kept.recent.insert(key, group.clone());
        group
    }

    /// Drops all bind groups.
    pub(crate) fn clear(&self) {
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = Generations::default();
    }

    /// Drops the bind groups of memory that is dropped.
    pub(crate) fn forget(&self, memory: u64) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let others = |key: &BindGroupKey, _: &mut BindGroup| key.windows.iter().all(|(of, ..)| *of != memory);
        kept.recent.retain(others);
        kept.older.retain(others);
    }
}

fn entry<'a>(bound: &'a Bound<'_>) -> BindGroupEntry<'a> {
    let Bound { number, buffer, offset, bytes, .. } = bound;
    let buffer = BufferBinding { buffer, offset: *offset, size: BufferSize::new(*bytes) };
    BindGroupEntry { binding: *number, resource: BindingResource::Buffer(buffer) }
}

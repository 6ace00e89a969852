//! Weights that a device reads directly from the checkpoint's mapped files.

use super::error::Result;
use super::load::Checkpoint;
use mixfleet_hal::{Device, DeviceLimits, ErrorKind, HostMemory, Slice};
use std::ops::Range;
use std::sync::Arc;

impl Checkpoint {
    /// Imports each shard, where the device can.
    pub(super) fn import(&self, device: &dyn Device, limits: &DeviceLimits) -> Result<Vec<Option<Slice>>> {
        let import = |shard: &Arc<dyn HostMemory>| -> Result<Option<Slice>> {
            let bytes = shard.as_bytes().len() as u64;
            if !limits.imports_host_memory || bytes > limits.allocation_bytes_max {
                return Ok(None);
            }
            match device.import(shard.clone()) {
                Ok(slice) => Ok(Some(slice)),
                Err(error) if error.kind == ErrorKind::Unsupported => Ok(None),
                Err(error) => Err(error.context("cannot import a mapped file").into()),
            }
        };
        self.shards.iter().map(import).collect()
    }

    /// The mapped range of a shard, of which the device will use every byte.
    pub(super) fn used(&self, import: &Slice, shard: usize, range: Range<usize>) -> Slice {
        self.shards[shard].needed(range.clone());
        import.range(range.start as u64, range.len() as u64)
    }

    /// Whether the device can use the tensor from that byte of the mapped file on. A header whose length is
    /// not a multiple of eight misaligns every tensor of its file.
    pub(super) fn is_addressable(
        &self,
        import: &Slice,
        (shard, element_bytes): (usize, u64),
        from: usize,
        limits: &DeviceLimits,
    ) -> bool {
        let offset = import.offset + from as u64;
        let address = self.shards[shard].as_bytes().as_ptr().addr() + from;
        offset.is_multiple_of(limits.alignment_bytes.max(element_bytes))
            && (address as u64).is_multiple_of(element_bytes)
    }
}

//! The device time of a batch, from timestamps at its beginning and end.

use crate::memory::DeviceQueue;
use mixfleet_hal::Result;
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::units::Seconds;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use wgpu::{Buffer, BufferUsages, CommandEncoder, MapMode, QuerySet, QuerySetDescriptor, QueryType};

/// Two timestamps, of 8 bytes each.
const BYTES: u64 = 16;

/// The timestamp queries of one batch.
pub(crate) struct Clock {
    set: QuerySet,
    resolved: Buffer,
    readable: Buffer,
    mapped: Arc<AtomicBool>,
}

impl Clock {
    fn new(link: &DeviceQueue) -> Result<Clock> {
        let descriptor = QuerySetDescriptor { label: None, ty: QueryType::Timestamp, count: 2 };
        let set = link.guard("timestamps", || link.device.create_query_set(&descriptor))?;
        let resolved =
            link.buffer("timestamps", BYTES, BufferUsages::QUERY_RESOLVE | BufferUsages::COPY_SRC)?;
        let readable = link.buffer("timestamps", BYTES, BufferUsages::MAP_READ | BufferUsages::COPY_DST)?;
        Ok(Clock { set, resolved, readable, mapped: Arc::default() })
    }

    pub(crate) fn start(&self, encoder: &mut CommandEncoder) {
        encoder.write_timestamp(&self.set, 0);
    }

    pub(crate) fn stop(&self, encoder: &mut CommandEncoder) {
        encoder.write_timestamp(&self.set, 1);
        encoder.resolve_query_set(&self.set, 0..2, &self.resolved, 0);
        encoder.copy_buffer_to_buffer(&self.resolved, 0, &self.readable, 0, BYTES);
    }

    /// Requests the timestamps, which arrive once the batch is done.
    pub(crate) fn fetch(&self) {
        let mapped = self.mapped.clone();
        self.readable
            .map_async(MapMode::Read, .., move |result| mapped.store(result.is_ok(), Ordering::Release));
    }
}

/// A pool of unused clocks.
pub(crate) struct Clocks {
    tick_ns: Option<f64>,
    free: Vec<Clock>,
}

impl Clocks {
    pub(crate) fn new(tick_ns: Option<f64>) -> Clocks {
        Clocks { tick_ns, free: Vec::new() }
    }

    /// Takes a clock, if the device has timestamps.
    pub(crate) fn take(&mut self, link: &DeviceQueue) -> Result<Option<Clock>> {
        match (self.tick_ns, self.free.pop()) {
            (None, _) => Ok(None),
            (Some(_), Some(clock)) => Ok(Some(clock)),
            (Some(_), None) => Clock::new(link).map(Some),
        }
    }

    /// Returns the time of a completed batch.
    pub(crate) fn read(&mut self, link: &DeviceQueue, clock: Clock) -> Result<Option<Seconds>> {
        let (Some(tick_ns), true) = (self.tick_ns, clock.mapped.swap(false, Ordering::AcqRel)) else {
            return Ok(None);
        };
        let ticks = link.guard("reading timestamps", || {
            let range = clock.readable.get_mapped_range(..).ok()?;
            let words: [u64; 2] = bytemuck::pod_read_unaligned(range.get(..to_usize(BYTES))?);
            drop(range);
            clock.readable.unmap();
            words[1].checked_sub(words[0])
        })?;
        self.free.push(clock);
        Ok(ticks.map(|ticks| Seconds(ticks as f64 * tick_ns * 1e-9)))
    }
}

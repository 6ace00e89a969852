//! Host-visible results of a batch, in persistently mapped memory: timestamps of its beginning and end, and
//! the slices read next.

use crate::counts::count;
use crate::memory::{DeviceQueue, HostCopy, WgpuMemory};
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Result, Slice};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use wgpu::{Buffer, BufferUsages, CommandEncoder, MapMode, QuerySet, QuerySetDescriptor, QueryType};

/// Two timestamps, of 8 bytes each.
const TIMES_BYTES: u64 = 16;
/// Maximum bytes of results; a step's are 16 for each row.
const RESULTS_BYTES_MAX: u64 = 16 << 10;

/// The timestamp queries of a batch.
struct TimestampQueries {
    set: QuerySet,
    resolved: Buffer,
}

/// A range of memory that comes along with the end of a batch.
struct BatchReadback {
    source: Buffer,
    memory: u64,
    offset: u64,
    bytes: u64,
}

/// Where what one batch leaves lands.
pub(crate) struct Readback {
    times: Option<TimestampQueries>,
    readable: Buffer,
    carried: Vec<BatchReadback>,
    /// Whether the map was requested, and whether it is there.
    asked: bool,
    mapped: Arc<AtomicBool>,
}

impl Readback {
    fn new(link: &DeviceQueue, timed: bool) -> Result<Readback> {
        let times = || {
            let descriptor = QuerySetDescriptor { label: None, ty: QueryType::Timestamp, count: 2 };
            let set = link.guard("timestamps", || link.device.create_query_set(&descriptor))?;
            let usage = BufferUsages::QUERY_RESOLVE | BufferUsages::COPY_SRC;
            Ok(TimestampQueries { set, resolved: link.buffer("timestamps", TIMES_BYTES, usage)? })
        };
        let usage = BufferUsages::MAP_READ | BufferUsages::COPY_DST;
        let readable = link.buffer("memory for results", TIMES_BYTES + RESULTS_BYTES_MAX, usage)?;
        let times = timed.then(times).transpose()?;
        Ok(Readback { times, readable, carried: Vec::new(), asked: false, mapped: Arc::default() })
    }

    fn bytes(&self) -> u64 {
        TIMES_BYTES + self.carried.iter().map(|carried| carried.bytes).sum::<u64>()
    }

    pub(crate) fn start(&self, encoder: &mut CommandEncoder) {
        if let Some(times) = &self.times {
            encoder.write_timestamp(&times.set, 0);
        }
    }

    pub(crate) fn stop(&self, encoder: &mut CommandEncoder) {
        if let Some(TimestampQueries { set, resolved }) = &self.times {
            encoder.write_timestamp(set, 1);
            encoder.resolve_query_set(set, 0..2, resolved, 0);
            encoder.copy_buffer_to_buffer(resolved, 0, &self.readable, 0, TIMES_BYTES);
        }
        let mut at = TIMES_BYTES;
        for BatchReadback { source, offset, bytes, .. } in &self.carried {
            encoder.copy_buffer_to_buffer(source, *offset, &self.readable, at, *bytes);
            at += bytes;
        }
    }

    /// Requests the mapping, which completes once the batch is done. Most batches are never waited for, so it
    /// is not requested before.
    pub(crate) fn fetch(&mut self, link: &DeviceQueue) {
        if std::mem::replace(&mut self.asked, true) {
            return;
        }
        count(&link.counters.maps, 1);
        count(&link.counters.bytes_read, self.bytes());
        let mapped = self.mapped.clone();
        self.readable.map_async(MapMode::Read, ..self.bytes(), move |result| {
            mapped.store(result.is_ok(), Ordering::Release);
        });
    }
}

/// A pool of unused readbacks.
pub(crate) struct Readbacks {
    tick_ns: Option<f64>,
    free: Vec<Readback>,
}

impl Readbacks {
    pub(crate) fn new(tick_ns: Option<f64>) -> Readbacks {
        Readbacks { tick_ns, free: Vec::new() }
    }

    /// Takes a readback, if the device has timestamps or there are results. Results that are not multiples of
    /// four bytes or too long are read on demand.
    pub(crate) fn take(&mut self, link: &DeviceQueue, results: &[Slice]) -> Result<Option<Readback>> {
        let whole = results.iter().all(|slice| slice.offset % 4 == 0 && slice.bytes % 4 == 0);
        let fit = results.iter().map(|slice| slice.bytes).sum::<u64>() <= RESULTS_BYTES_MAX;
        let results = if whole && fit { results } else { &[] };
        if self.tick_ns.is_none() && results.is_empty() {
            return Ok(None);
        }
        let carried = results.iter().filter(|slice| slice.bytes > 0).map(|slice| {
            let memory = WgpuMemory::of(slice)?;
            let (source, offset, bytes) = (memory.buffer().clone(), slice.offset, slice.bytes);
            Ok(BatchReadback { source, memory: memory.number(), offset, bytes })
        });
        let carried = carried.collect::<Result<Vec<_>>>()?;
        let readback = self.free.pop().map_or_else(|| Readback::new(link, self.tick_ns.is_some()), Ok)?;
        Ok(Some(Readback { carried, ..readback }))
    }

    /// Returns the time of a completed batch and its results.
    pub(crate) fn read(
        &mut self,
        link: &DeviceQueue,
        mut readback: Readback,
    ) -> Result<(Option<Seconds>, Vec<HostCopy>)> {
        let asked = std::mem::replace(&mut readback.asked, false);
        if !asked {
            self.free.push(readback);
            return Ok((None, Vec::new()));
        }
        // after a failure its state is unknown
        if !readback.mapped.swap(false, Ordering::AcqRel) {
            return Ok((None, Vec::new()));
        }
        let bytes = link.guard("reading results", || {
            let bytes =
                readback.readable.get_mapped_range(..readback.bytes()).ok().map(|range| range.to_vec());
            readback.readable.unmap();
            bytes
        })?;
        let Some(bytes) = bytes else { return Ok((None, Vec::new())) };
        let (times, mut rest) = bytes.split_at(to_usize(TIMES_BYTES));
        let [began, ended]: [u64; 2] = bytemuck::pod_read_unaligned(times);
        let ticks = self.tick_ns.and_then(|tick_ns| Some((ended.checked_sub(began)?, tick_ns)));
        let results = readback.carried.drain(..).map(|BatchReadback { memory, offset, bytes, .. }| {
            let (data, behind) = rest.split_at(to_usize(bytes));
            rest = behind;
            HostCopy { memory, offset, data: data.to_vec() }
        });
        let results = results.collect();
        self.free.push(readback);
        Ok((ticks.map(|(ticks, tick_ns)| Seconds(ticks as f64 * tick_ns * 1e-9)), results))
    }
}

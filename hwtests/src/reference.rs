//! A device that runs the oracle over plain host memory: slow, safe and correct.
//!
//! It tests the suite without hardware, and it is the smallest complete example of a [`Device`]. Its paged KV
//! is laid out as `[slots, kv_heads, head_dim]`, as on the wire; `submit` does all work before it returns.

use crate::oracle;
use crate::scaled::{decoded, encoded};
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::command::ClockKind;
use mixfleet_hal::memory::{Pinned, SharedMemory};
use mixfleet_hal::units::{Bytes, Seconds};
use mixfleet_hal::{
    Buffer, BufferUsage, Cmd, Device, DeviceInfo, DeviceKind, DeviceLimits, Elapsed, Error, Graph, Health,
    HostMemory, OpSig, OperandAccess, Queue, Result, Slice, Support, Ticket,
};
use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The bytes of a buffer, owned or borrowed from the host.
#[derive(Debug)]
enum ReferenceMemory {
    Owned(Mutex<Vec<u8>>),
    Imported(Arc<dyn HostMemory>),
}

impl Buffer for ReferenceMemory {
    fn size_bytes(&self) -> u64 {
        match self {
            ReferenceMemory::Owned(bytes) => lock(bytes).len() as u64,
            ReferenceMemory::Imported(memory) => memory.as_bytes().len() as u64,
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Plain bytes are valid even after a panic elsewhere.
fn lock(bytes: &Mutex<Vec<u8>>) -> MutexGuard<'_, Vec<u8>> {
    bytes.lock().unwrap_or_else(PoisonError::into_inner)
}

fn memory(slice: &Slice) -> Result<&ReferenceMemory> {
    let memory = slice.buffer.as_any().downcast_ref::<ReferenceMemory>();
    memory.ok_or_else(|| Error::invalid("the slice belongs to another device"))
}

fn range(slice: &Slice) -> std::ops::Range<usize> {
    to_usize(slice.offset)..to_usize(slice.offset + slice.bytes)
}

fn load(slice: &Slice) -> Result<Vec<u8>> {
    Ok(match memory(slice)? {
        ReferenceMemory::Owned(bytes) => lock(bytes)[range(slice)].to_vec(),
        ReferenceMemory::Imported(memory) => memory.as_bytes()[range(slice)].to_vec(),
    })
}

fn store(slice: &Slice, data: &[u8]) -> Result<()> {
    match memory(slice)? {
        ReferenceMemory::Owned(bytes) => {
            lock(bytes)[range(slice)].copy_from_slice(data);
            Ok(())
        }
        ReferenceMemory::Imported(_) => Err(Error::invalid("imported memory is read-only")),
    }
}

/// A device that computes with the oracle.
#[derive(Debug)]
pub struct ReferenceDevice {
    info: DeviceInfo,
}

impl Default for ReferenceDevice {
    fn default() -> Self {
        let info = DeviceInfo {
            id: "reference".to_owned(),
            backend: "reference".to_owned(),
            name: "float64 oracle on the host".to_owned(),
            kind: DeviceKind::Simulated,
            memory: Bytes(1e9),
            compute_units: 1,
            fingerprint: concat!("reference-", env!("CARGO_PKG_VERSION")).to_owned(),
            notes: Vec::new(),
        };
        ReferenceDevice { info }
    }
}

impl ReferenceDevice {
    /// Creates a reference device with another id, for fleets of several.
    pub fn named(id: &str) -> Self {
        let mut device = ReferenceDevice::default();
        device.info.id = id.to_owned();
        device
    }
}

impl Device for ReferenceDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn limits(&self) -> DeviceLimits {
        DeviceLimits {
            allocation_bytes_max: 1 << 30,
            alignment_bytes: 1,
            imports_host_memory: true,
            kv_page_tokens: 8,
            replay_pays: true,
            copies_beside: true,
        }
    }

    fn support(&self, _: &OpSig) -> Support {
        Support::Emulated
    }

    fn alloc(&self, bytes: u64, _: BufferUsage) -> Result<Slice> {
        Ok(Slice::whole(Arc::new(ReferenceMemory::Owned(Mutex::new(vec![0; to_usize(bytes)])))))
    }

    fn import(&self, memory: Arc<dyn HostMemory>) -> Result<Slice> {
        Ok(Slice::whole(Arc::new(ReferenceMemory::Imported(memory))))
    }

    fn reaches(&self, _: &Slice) -> bool {
        false
    }

    fn write(&self, to: &Slice, data: &[u8]) -> Result<()> {
        if data.len() as u64 != to.bytes {
            return Err(Error::invalid(format!("{} bytes do not fill a slice of {}", data.len(), to.bytes)));
        }
        store(to, data)
    }

    fn read(&self, from: &Slice, data: &mut [u8]) -> Result<()> {
        if data.len() as u64 != from.bytes {
            return Err(Error::invalid(format!(
                "{} bytes do not hold a slice of {}",
                data.len(),
                from.bytes
            )));
        }
        data.copy_from_slice(&load(from)?);
        Ok(())
    }

    fn pin(&self, _: Arc<dyn SharedMemory>) -> Result<Option<Pinned>> {
        Ok(None)
    }

    fn queue(&self) -> Result<Box<dyn Queue>> {
        Ok(Box::new(ReferenceQueue { times: Vec::new(), failed: None }))
    }

    fn memory_free(&self) -> Option<Bytes> {
        None
    }

    fn health(&self) -> Health {
        Health::default()
    }
}

struct ReferenceQueue {
    /// Times of the completed batches, indexed by ticket.
    times: Vec<Seconds>,
    failed: Option<Error>,
}

struct ReferenceRecording(Vec<Cmd>);

impl Graph for ReferenceRecording {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn memory_bytes(&self) -> u64 {
        0
    }
}

fn execute(cmd: &Cmd) -> Result<()> {
    let kinds = cmd.sig().operands();
    let mut operands = Vec::with_capacity(kinds.len());
    for (operand, arg) in kinds.iter().zip(cmd.args()) {
        operands.push(decoded(cmd.sig(), operand, &load(arg)?));
    }
    oracle::run(cmd.sig(), &mut operands)
        .map_err(|cause| Error::invalid(format!("{}: {cause}", cmd.sig().name())))?;
    for ((operand, arg), values) in kinds.iter().zip(cmd.args()).zip(&operands) {
        if operand.access != OperandAccess::Read {
            store(arg, &encoded(cmd.sig(), operand, values))?;
        }
    }
    Ok(())
}

impl Queue for ReferenceQueue {
    fn submit(&mut self, cmds: &[Cmd]) -> Result<Ticket> {
        let start = Instant::now();
        if self.failed.is_none() {
            self.failed = cmds.iter().find_map(|cmd| execute(cmd).err());
        }
        if self.failed.is_none() {
            self.times.push(Seconds(start.elapsed().as_secs_f64()));
            return Ok(Ticket(self.times.len() as u64 - 1));
        }
        // a ticket without a time, so that waiting for it reports the failure
        Ok(Ticket(self.times.len() as u64))
    }

    fn wait(&mut self, ticket: Ticket, _: Duration) -> Result<Elapsed> {
        match (self.times.get(to_usize(ticket.0)), &self.failed) {
            (Some(&time), _) => Ok(Elapsed { time, clock: ClockKind::Host }),
            (None, Some(error)) => Err(error.clone()),
            (None, None) => Err(Error::invalid(format!("{ticket:?} was not given out by this queue"))),
        }
    }

    fn record(&mut self, cmds: &[Cmd]) -> Result<Arc<dyn Graph>> {
        Ok(Arc::new(ReferenceRecording(cmds.to_vec())))
    }

    fn replay(&mut self, graph: &Arc<dyn Graph>) -> Result<Ticket> {
        let recorded = graph.as_any().downcast_ref::<ReferenceRecording>();
        let recorded = recorded.ok_or_else(|| Error::invalid("the graph belongs to another device"))?;
        self.submit(&recorded.0)
    }
}

//! A device of another process.

use crate::code::{Taker, put, put_sig, put_slice, usage_code};
use crate::fetched::BufferRange;
use crate::hello::DeviceAccess;
use crate::protocol::{CALL_TIMEOUT, DATA_BYTES_MAX, ask};
use crate::queue::RemoteQueue;
use crate::session::RemoteSession;
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::memory::{Pinned, SharedMemory};
use mixfleet_hal::units::Bytes;
use mixfleet_hal::{
    Buffer, BufferUsage, Device, DeviceInfo, DeviceLimits, Error, ErrorKind, Health, HostMemory, OpSig,
    Queue, Result, Slice, Support, forward_device,
};
use mixfleet_wire::LinkAddress;
use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Time in which a process that works opens a queue: its device may be in the middle of compiling.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(30);

/// Writes weights to a device again, as it did for the first time.
pub type WeightsRecipe = Box<dyn Fn(&dyn Device) -> Result<()> + Send + Sync>;

/// A device of another process.
///
/// When the connection has ended, every call fails until [`Device::queue`] makes a new one, allocates all
/// buffers anew and writes weights again. The content of other buffers is then undefined, as after any
/// failure of a device.
pub struct RemoteDevice(Arc<RemoteDeviceState>);

/// What buffers and queues need of their device.
pub(crate) struct RemoteDeviceState {
    address: LinkAddress,
    access: DeviceAccess,
    info: DeviceInfo,
    limits: DeviceLimits,
    session: Mutex<Arc<RemoteSession>>,
    /// One thread at a time makes a new connection, which is here until all is on it.
    renewing: Mutex<()>,
    next_session: Mutex<Option<Arc<RemoteSession>>>,
    buffers: Mutex<BTreeMap<u64, KeptBuffer>>,
    placements: Mutex<Vec<Placement>>,
    /// Numbers of buffers and queues.
    next: AtomicU64,
}

/// A buffer as it is made anew.
struct KeptBuffer {
    bytes: u64,
    usage: BufferUsage,
    /// Weights that no placement writes again: their content from the first byte on.
    content: Option<Vec<u8>>,
}

/// Weights and what writes them: their numbers and bytes in the order in which they are allocated.
struct Placement {
    buffers: Vec<(u64, u64)>,
    recipe: WeightsRecipe,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A buffer of the other process.
struct RemoteBuffer {
    shared: Arc<RemoteDeviceState>,
    number: u64,
    bytes: u64,
    /// Whether the buffer ends with this value.
    is_owner: bool,
    /// Whether a copy of written data is kept.
    is_kept: bool,
}

impl std::fmt::Debug for RemoteBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RemoteBuffer({}, {}, {} bytes)", self.shared.info.id, self.number, self.bytes)
    }
}

impl Buffer for RemoteBuffer {
    fn size_bytes(&self) -> u64 {
        self.bytes
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for RemoteBuffer {
    fn drop(&mut self) {
        if self.is_owner {
            lock(&self.shared.buffers).remove(&self.number);
            let next = lock(&self.shared.next_session).clone();
            let session = next.unwrap_or_else(|| self.shared.session());
            let _ = session.send(false, ask::FREE, |out| {
                put(out, self.number);
                Ok(())
            });
        }
    }
}

fn buffer_of<'a>(shared: &Arc<RemoteDeviceState>, slice: &'a Slice) -> Result<&'a RemoteBuffer> {
    let buffer = slice.buffer.as_any().downcast_ref::<RemoteBuffer>();
    let own = buffer.filter(|buffer| Arc::ptr_eq(&buffer.shared, shared));
    let own = own
        .ok_or_else(|| Error::invalid(format!("{:?} is not a buffer of {}", slice.buffer, shared.info.id)))?;
    if slice.offset.checked_add(slice.bytes).is_none_or(|end| end > own.bytes) {
        let (at, bytes) = (slice.offset, slice.bytes);
        return Err(Error::invalid(format!("slice {at}+{bytes} leaves its buffer of {} bytes", own.bytes)));
    }
    Ok(own)
}

/// The number of a slice's buffer, which must be of this device.
pub(crate) fn number_of(shared: &Arc<RemoteDeviceState>, slice: &Slice) -> Result<u64> {
    Ok(buffer_of(shared, slice)?.number)
}

impl RemoteDeviceState {
    fn session(&self) -> Arc<RemoteSession> {
        lock(&self.session).clone()
    }

    fn alloc(&self, session: &RemoteSession, number: u64, bytes: u64, usage: BufferUsage) -> Result<()> {
        let fill = |out: &mut Vec<u8>| {
            [number, bytes, usage_code(usage)].into_iter().for_each(|value| put(out, value));
            Ok(())
        };
        session.call(ask::ALLOC, CALL_TIMEOUT, fill).map(drop)
    }
}

impl RemoteDevice {
    /// Opens the device that the process at `address` lends, under the selector `id`.
    ///
    /// # Errors
    /// If no process answers there, or the process is not of this fleet or speaks another version.
    pub fn open(id: &str, address: LinkAddress, access: DeviceAccess) -> Result<Self> {
        let (session, theirs, limits) = RemoteSession::open(id, &address, &access)?;
        let mut notes = theirs.notes.clone();
        notes.push(("device".into(), theirs.id.clone()));
        let way = match address {
            LinkAddress::Tcp(_) => "a connection",
            LinkAddress::Rdma(_) => "RDMA",
            LinkAddress::Unix(_) => "shared memory",
        };
        let info = DeviceInfo {
            id: id.to_owned(),
            // what crosses takes time that the device alone does not take
            fingerprint: format!("{}; over {way}", theirs.fingerprint),
            notes,
            ..theirs
        };
        Ok(RemoteDevice(Arc::new(RemoteDeviceState {
            address,
            access,
            info,
            limits,
            session: Mutex::new(session),
            renewing: Mutex::default(),
            next_session: Mutex::default(),
            buffers: Mutex::default(),
            placements: Mutex::default(),
            next: AtomicU64::new(1),
        })))
    }

    /// Places weights by `recipe`, which is kept to place the same ones again after the process was lost.
    ///
    /// # Errors
    /// Those of the recipe.
    pub fn place<T, E: std::fmt::Display>(
        &self,
        recipe: impl Fn(&dyn Device) -> std::result::Result<T, E> + Send + Sync + 'static,
    ) -> std::result::Result<T, E> {
        let view = View { placing: WeightsAllocation::First(Mutex::default()), ..self.view() };
        let placed = recipe(&view)?;
        let WeightsAllocation::First(buffers) = view.placing else { return Ok(placed) };
        let buffers = buffers.into_inner().unwrap_or_else(PoisonError::into_inner);
        let again = move |device: &dyn Device| {
            recipe(device).map(drop).map_err(|error| Error::new(ErrorKind::Other, error.to_string()))
        };
        lock(&self.0.placements).push(Placement { buffers, recipe: Box::new(again) });
        Ok(placed)
    }

    fn view(&self) -> View<'_> {
        View { shared: &self.0, session: self.0.session(), placing: WeightsAllocation::Not }
    }

    /// A connection with all buffers, in place of one that has ended.
    fn renew(&self) -> Result<Arc<RemoteSession>> {
        let shared = &self.0;
        let _renewing = lock(&shared.renewing);
        let current = shared.session();
        if current.failure().is_none() {
            return Ok(current);
        }
        let (session, theirs, limits) =
            RemoteSession::open(&shared.info.id, &shared.address, &shared.access)?;
        *lock(&shared.next_session) = Some(session.clone());
        let restored = self.restore(&session, &theirs, limits);
        *lock(&shared.next_session) = None;
        restored?;
        *lock(&shared.session) = session.clone();
        Ok(session)
    }

    /// Allocates all buffers on a new connection, and writes weights there.
    fn restore(&self, session: &Arc<RemoteSession>, theirs: &DeviceInfo, limits: DeviceLimits) -> Result<()> {
        let shared = &self.0;
        let is_same = shared.info.fingerprint.strip_prefix(&theirs.fingerprint).is_some();
        if !is_same || limits != shared.limits {
            let detail = format!("{}: another device answers there now: {}", shared.info.id, theirs.name);
            return Err(Error::new(ErrorKind::DeviceLost, detail));
        }
        let kept: Vec<_> = {
            let buffers = lock(&shared.buffers);
            buffers.iter().map(|(&n, kept)| (n, kept.bytes, kept.usage, kept.content.clone())).collect()
        };
        for (number, bytes, usage, content) in kept {
            shared.alloc(session, number, bytes, usage)?;
            if let Some(content) = content {
                session.write(number, 0, &content)?;
            }
        }
        for Placement { buffers, recipe } in &*lock(&shared.placements) {
            let again = WeightsAllocation::Again(Mutex::new(buffers.iter().copied().collect()));
            recipe(&View { shared, session: session.clone(), placing: again })?;
        }
        Ok(())
    }
}

impl Device for RemoteDevice {
    forward_device!(self => self.view(); limits, support, alloc, import, reaches, write, read, pin, memory_free, health);

    fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    fn queue(&self) -> Result<Box<dyn Queue>> {
        let view = self.view();
        match view.queue() {
            Err(_) if view.session.failure().is_some() => {}
            opened => return opened,
        }
        View { session: self.renew()?, ..view }.queue()
    }
}

/// A device by one of its connections.
struct View<'a> {
    shared: &'a Arc<RemoteDeviceState>,
    session: Arc<RemoteSession>,
    placing: WeightsAllocation,
}

/// What an allocation of weights is for.
enum WeightsAllocation {
    /// Its owner writes it.
    Not,
    /// A recipe writes it, for the first time: numbers and bytes in their order.
    First(Mutex<Vec<(u64, u64)>>),
    /// A recipe restores it: the remaining ones.
    Again(Mutex<VecDeque<(u64, u64)>>),
}

impl View<'_> {
    fn number(&self) -> u64 {
        self.shared.next.fetch_add(1, Ordering::Relaxed)
    }

    fn slice(&self, number: u64, bytes: u64, is_owner: bool, is_kept: bool) -> Slice {
        let shared = self.shared.clone();
        Slice::whole(Arc::new(RemoteBuffer { shared, number, bytes, is_owner, is_kept }))
    }
}

impl Device for View<'_> {
    fn info(&self) -> &DeviceInfo {
        &self.shared.info
    }

    fn limits(&self) -> DeviceLimits {
        self.shared.limits
    }

    fn support(&self, sig: &OpSig) -> Support {
        let reply = self.session.call(ask::SUPPORT, CALL_TIMEOUT, |out| put_sig(out, sig));
        match reply.ok().and_then(|reply| reply.bytes().first().copied()) {
            Some(2) => Support::Native,
            Some(1) => Support::Emulated,
            _ => Support::No,
        }
    }

    fn alloc(&self, bytes: u64, usage: BufferUsage) -> Result<Slice> {
        if let WeightsAllocation::Again(left) = &self.placing {
            let next = lock(left).pop_front();
            if let Some((number, placed)) = next
                && lock(&self.shared.buffers).contains_key(&number)
            {
                if placed != bytes {
                    return Err(Error::invalid("the weights have other sizes than when they were placed"));
                }
                return Ok(self.slice(number, bytes, false, false));
            }
        }
        let number = self.number();
        self.shared.alloc(&self.session, number, bytes, usage)?;
        if let WeightsAllocation::First(buffers) = &self.placing {
            lock(buffers).push((number, bytes));
        }
        let is_kept = usage == BufferUsage::Weights && matches!(self.placing, WeightsAllocation::Not);
        let kept = KeptBuffer { bytes, usage, content: is_kept.then(Vec::new) };
        lock(&self.shared.buffers).insert(number, kept);
        Ok(self.slice(number, bytes, true, is_kept))
    }

    fn import(&self, _: Arc<dyn HostMemory>) -> Result<Slice> {
        Err(Error::unsupported("a device of another process uses no memory of this one"))
    }

    fn reaches(&self, _: &Slice) -> bool {
        false
    }

    fn write(&self, to: &Slice, data: &[u8]) -> Result<()> {
        let buffer = buffer_of(self.shared, to)?;
        check_length(to, data.len())?;
        let number = buffer.number;
        if buffer.is_kept
            && let Some(kept) = lock(&self.shared.buffers).get_mut(&number)
            && let Some(content) = &mut kept.content
        {
            let (start, end) = (to_usize(to.offset), to_usize(to.offset + to.bytes));
            content.resize(content.len().max(end), 0);
            content[start..end].copy_from_slice(data);
        }
        self.session.overwrite(BufferRange { buffer: number, offset: to.offset, bytes: to.bytes });
        self.session.write(number, to.offset, data)
    }

    fn read(&self, from: &Slice, data: &mut [u8]) -> Result<()> {
        let number = number_of(self.shared, from)?;
        check_length(from, data.len())?;
        let place = BufferRange { buffer: number, offset: from.offset, bytes: from.bytes };
        if self.session.take_fetched(&place, data) {
            return Ok(());
        }
        let mut at = 0;
        for part in data.chunks_mut(DATA_BYTES_MAX) {
            let asked = from.range(at, part.len() as u64);
            let reply = self.session.call(ask::READ, CALL_TIMEOUT, |out| {
                put_slice(out, number, &asked);
                Ok(())
            })?;
            if reply.bytes().len() != part.len() {
                return Err(Error::new(ErrorKind::Corrupt, "the bytes received differ from the request"));
            }
            part.copy_from_slice(reply.bytes());
            self.session.recycle_reply(reply);
            at += part.len() as u64;
        }
        Ok(())
    }

    fn pin(&self, _: Arc<dyn SharedMemory>) -> Result<Option<Pinned>> {
        Ok(None)
    }

    fn queue(&self) -> Result<Box<dyn Queue>> {
        let number = self.number();
        self.session.open_queue(number, QUEUE_TIMEOUT)?;
        Ok(Box::new(RemoteQueue::new(self.shared.clone(), self.session.clone(), number)))
    }

    fn memory_free(&self) -> Option<Bytes> {
        let reply = self.session.call(ask::MEMORY_FREE, CALL_TIMEOUT, |_| Ok(())).ok()?;
        let bytes = f64::from_le_bytes(Taker(reply.bytes()).array().ok()?);
        (bytes.is_finite() && bytes >= 0.0).then_some(Bytes(bytes))
    }

    fn health(&self) -> Health {
        let reply = self.session.call(ask::HEALTH, CALL_TIMEOUT, |_| Ok(())).ok();
        reply.and_then(|reply| serde_json::from_slice(reply.bytes()).ok()).unwrap_or_default()
    }
}

fn check_length(slice: &Slice, length: usize) -> Result<()> {
    if slice.bytes != length as u64 {
        return Err(Error::invalid(format!("{length} bytes of host memory for a slice of {}", slice.bytes)));
    }
    Ok(())
}

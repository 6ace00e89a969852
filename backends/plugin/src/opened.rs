//! An open device of a library, and its memory.

use crate::abi::{MixfleetBuffer, MixfleetDevice, MixfleetGraph, MixfleetHealth, MixfleetOp, MixfleetSlice};
use crate::library::{PluginLibrary, no_error, status};
use crate::operation;
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::{Buffer, Cmd, Error, ErrorKind, Health, OpSig, Result, Slice, Support};
use std::any::Any;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a copy waits for a batch that runs.
const BATCH_MAX: Duration = Duration::from_secs(60);

/// An open device.
pub(crate) struct OpenedDevice {
    library: Arc<PluginLibrary>,
    raw: *mut MixfleetDevice,
    id: String,
    /// Whether one of `run`, `write` and `read` is in progress.
    is_busy: Mutex<bool>,
    is_free: Condvar,
}

// SAFETY: the pointer is only handed to the library, whose functions any thread may call.
unsafe impl Send for OpenedDevice {}
// SAFETY: as above; `is_busy` excludes concurrent calls.
unsafe impl Sync for OpenedDevice {}

/// Holds a device for one call.
struct DeviceCall<'a>(&'a OpenedDevice);

impl Drop for DeviceCall<'_> {
    fn drop(&mut self) {
        *self.0.busy() = false;
        self.0.is_free.notify_one();
    }
}

/// The function of a table that `checked` has seen to be there.
macro_rules! function {
    ($device:expr, $name:ident) => {
        $device.library.table.0.$name.ok_or_else(|| Error::invalid(concat!("no '", stringify!($name), "'")))
    };
}

impl OpenedDevice {
    /// Opens a device, which is called `id`.
    pub(crate) fn open(library: Arc<PluginLibrary>, index: u32, id: &str) -> Result<Arc<Self>> {
        let (mut device, mut error) = (std::ptr::null_mut(), no_error());
        let open = library.table.0.open.ok_or_else(|| Error::invalid("no 'open'"))?;
        // SAFETY: both pointers are ours.
        let code = unsafe { open(index, &raw mut device, &raw mut error) };
        status(id, code, &error)?;
        if device.is_null() {
            return Err(Error::invalid(format!("{id}: the library opens it and gives nothing")));
        }
        let (is_busy, is_free) = (Mutex::new(false), Condvar::new());
        Ok(Arc::new(OpenedDevice { library, raw: device, id: id.to_owned(), is_busy, is_free }))
    }

    /// Whether it can run an operation.
    pub(crate) fn support(&self, sig: &OpSig) -> Support {
        let Some(support) = self.library.table.0.support else { return Support::No };
        let Some(op) = operation::of(sig) else { return Support::No };
        // SAFETY: the operation is ours and has the size that it names.
        match unsafe { support(self.raw, &raw const op) } {
            1 => Support::Native,
            2 => Support::Emulated,
            _ => Support::No,
        }
    }

    /// Allocates memory.
    pub(crate) fn alloc(self: &Arc<Self>, bytes: u64) -> Result<Slice> {
        let (mut buffer, mut error) = (std::ptr::null_mut(), no_error());
        let alloc = function!(self, alloc)?;
        // SAFETY: both pointers are ours.
        let code = unsafe { alloc(self.raw, bytes, &raw mut buffer, &raw mut error) };
        status(&self.id, code, &error)?;
        if buffer.is_null() {
            return Err(Error::invalid(format!("{}: the library allocates and gives nothing", self.id)));
        }
        Ok(Slice::whole(Arc::new(PluginBuffer { device: self.clone(), raw: buffer, bytes })))
    }

    /// Copies to a slice as many bytes as it has.
    pub(crate) fn write(self: &Arc<Self>, to: &Slice, data: &[u8]) -> Result<()> {
        self.check_length(to, data.len())?;
        let (slice, mut error) = (raw(self, to)?, no_error());
        let write = function!(self, write)?;
        let _turn = self.turn(Some(BATCH_MAX))?;
        // SAFETY: `data` has as many bytes as the slice, which is inside its buffer.
        let code = unsafe { write(self.raw, &raw const slice, data.as_ptr().cast(), &raw mut error) };
        status(&self.id, code, &error)
    }

    /// Copies from a slice as many bytes as it has.
    pub(crate) fn read(self: &Arc<Self>, from: &Slice, data: &mut [u8]) -> Result<()> {
        self.check_length(from, data.len())?;
        let (slice, mut error) = (raw(self, from)?, no_error());
        let read = function!(self, read)?;
        let _turn = self.turn(Some(BATCH_MAX))?;
        // SAFETY: `data` has as many bytes as the slice, which is inside its buffer.
        let code = unsafe { read(self.raw, &raw const slice, data.as_mut_ptr().cast(), &raw mut error) };
        status(&self.id, code, &error)
    }

    fn check_length(&self, slice: &Slice, bytes: usize) -> Result<()> {
        let inside =
            slice.offset.checked_add(slice.bytes).is_some_and(|end| end <= slice.buffer.size_bytes());
        if slice.bytes == bytes as u64 && inside {
            return Ok(());
        }
        let id = &self.id;
        Err(Error::invalid(format!("{id}: {bytes} bytes do not fill a slice of {}", slice.bytes)))
    }

    /// Bytes that could be allocated now, if it tells.
    pub(crate) fn memory_free(&self) -> Option<u64> {
        let free = self.library.table.0.memory_free?;
        // SAFETY: the library's function, called as the interface says.
        Some(unsafe { free(self.raw) })
    }

    /// Its health.
    pub(crate) fn health(&self) -> Health {
        let Some(read) = self.library.table.0.health else { return Health::default() };
        let mut health = MixfleetHealth {
            struct_bytes: to_u32(size_of::<MixfleetHealth>()),
            reserved: 0,
            temperature_c: f64::NAN,
            power_w: f64::NAN,
            clock_mhz: f64::NAN,
        };
        // SAFETY: the structure is ours and has the size that it names.
        unsafe { read(self.raw, &raw mut health) };
        let told = |value: f64| value.is_finite().then_some(value);
        Health {
            temperature_c: told(health.temperature_c),
            power_w: told(health.power_w),
            clock_mhz: told(health.clock_mhz),
            ..Health::default()
        }
    }

    fn busy(&self) -> MutexGuard<'_, bool> {
        self.is_busy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until nothing else runs; as long as it takes without `limit`.
    fn turn(&self, limit: Option<Duration>) -> Result<DeviceCall<'_>> {
        let began = Instant::now();
        let mut busy = self.busy();
        while *busy {
            let left = limit.map(|limit| limit.saturating_sub(began.elapsed()));
            if left.is_some_and(|left| left.is_zero()) {
                let message =
                    format!("{}: a batch runs for {} s and does not end", self.id, BATCH_MAX.as_secs());
                return Err(Error::new(ErrorKind::Timeout, message));
            }
            let wait = left.unwrap_or(BATCH_MAX);
            busy = self.is_free.wait_timeout(busy, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
        *busy = true;
        Ok(DeviceCall(self))
    }

    /// Runs a batch.
    pub(crate) fn run(self: &Arc<Self>, cmds: &[Cmd]) -> Result<()> {
        let run = function!(self, run)?;
        self.with_ops(cmds, |ops| {
            let (_turn, mut error) = (self.turn(None)?, no_error());
            // SAFETY: operations and operands live until the call returns, and were checked against each
            // other; the buffers are of this device and live as long as the commands.
            let code = unsafe { run(self.raw, ops.as_ptr(), to_u32(ops.len()), &raw mut error) };
            status(&self.id, code, &error)
        })
    }

    /// Prepares a batch for many runs; none if the library prepares nothing.
    pub(crate) fn record(self: &Arc<Self>, cmds: &[Cmd]) -> Result<Option<PluginGraph>> {
        let Some(record) = self.library.table.0.record else { return Ok(None) };
        self.with_ops(cmds, |ops| {
            let (mut graph, mut error) = (std::ptr::null_mut(), no_error());
            let count = to_u32(ops.len());
            // SAFETY: as in `run`, and the commands are kept as long as the graph.
            let code = unsafe { record(self.raw, ops.as_ptr(), count, &raw mut graph, &raw mut error) };
            status(&self.id, code, &error)?;
            if graph.is_null() {
                return Err(Error::invalid(format!("{}: the library records and gives nothing", self.id)));
            }
            Ok(Some(PluginGraph { device: self.clone(), raw: graph, _cmds: cmds.to_vec() }))
        })
    }

    /// Runs a batch that this device has prepared.
    pub(crate) fn replay(&self, graph: &PluginGraph) -> Result<()> {
        let replay = function!(self, replay)?;
        let (_turn, mut error) = (self.turn(None)?, no_error());
        // SAFETY: the library made the graph, whose commands keep their buffers.
        let code = unsafe { replay(self.raw, graph.raw, &raw mut error) };
        status(&self.id, code, &error)
    }

    /// Calls `with` with the commands as the library gets them.
    fn with_ops<T>(
        self: &Arc<Self>,
        cmds: &[Cmd],
        with: impl FnOnce(&[MixfleetOp]) -> Result<T>,
    ) -> Result<T> {
        let args = cmds.iter().map(|cmd| cmd.args().iter().map(|arg| raw(self, arg)).collect());
        let args = args.collect::<Result<Vec<Vec<MixfleetSlice>>>>()?;
        let op = |(cmd, args): (&Cmd, &Vec<MixfleetSlice>)| {
            let name = cmd.sig().name();
            let unknown = || Error::unsupported(format!("{}: plugins have no operation '{name}'", self.id));
            let op = operation::of(cmd.sig()).ok_or_else(unknown)?;
            Ok(MixfleetOp { args: args.as_ptr(), arg_count: to_u32(args.len()), ..op })
        };
        let ops = cmds.iter().zip(&args).map(op).collect::<Result<Vec<MixfleetOp>>>()?;
        with(&ops)
    }

    fn free(&self, buffer: *mut MixfleetBuffer) {
        if let Some(free) = self.library.table.0.free {
            // SAFETY: the library allocated it, and nothing refers to it any more.
            unsafe { free(self.raw, buffer) };
        }
    }
}

impl Drop for OpenedDevice {
    fn drop(&mut self) {
        if let Some(close) = self.library.table.0.close {
            // SAFETY: buffers and queues hold the device, so that none is left.
            unsafe { close(self.raw) };
        }
    }
}

/// A batch that the library has prepared, and its commands, which hold the buffers.
pub(crate) struct PluginGraph {
    device: Arc<OpenedDevice>,
    raw: *mut MixfleetGraph,
    _cmds: Vec<Cmd>,
}

// SAFETY: the pointer is only handed to the library, whose functions any thread may call.
unsafe impl Send for PluginGraph {}
// SAFETY: as above; the device excludes concurrent calls.
unsafe impl Sync for PluginGraph {}

impl PluginGraph {
    /// Whether that device has prepared it.
    pub(crate) fn is_of(&self, device: &Arc<OpenedDevice>) -> bool {
        Arc::ptr_eq(&self.device, device)
    }
}

impl Drop for PluginGraph {
    fn drop(&mut self) {
        if let Some(forget) = self.device.library.table.0.forget {
            // SAFETY: the library made it, and a running batch would hold it.
            unsafe { forget(self.device.raw, self.raw) };
        }
    }
}

/// A buffer, freed with its last slice.
struct PluginBuffer {
    device: Arc<OpenedDevice>,
    raw: *mut MixfleetBuffer,
    bytes: u64,
}

// SAFETY: the pointer is only handed to the library, whose functions any thread may call.
unsafe impl Send for PluginBuffer {}
// SAFETY: as above.
unsafe impl Sync for PluginBuffer {}

impl std::fmt::Debug for PluginBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PluginBuffer").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Buffer for PluginBuffer {
    fn size_bytes(&self) -> u64 {
        self.bytes
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for PluginBuffer {
    fn drop(&mut self) {
        self.device.free(self.raw);
    }
}

/// A slice as the library gets it.
///
/// # Errors
/// `Invalid` if it is of another device.
fn raw(device: &Arc<OpenedDevice>, slice: &Slice) -> Result<MixfleetSlice> {
    let buffer = slice.buffer.as_any().downcast_ref::<PluginBuffer>();
    let buffer = buffer.filter(|buffer| Arc::ptr_eq(&buffer.device, device));
    let buffer = buffer.ok_or_else(|| Error::invalid("the slice belongs to another device"))?;
    Ok(MixfleetSlice { buffer: buffer.raw, offset: slice.offset, bytes: slice.bytes })
}

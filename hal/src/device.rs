//! Devices, and the backends that enumerate and open them.

use crate::memory::{Pinned, SharedMemory};
use crate::units::Bytes;
use crate::{BufferUsage, HostMemory, OpSig, Queue, Result, Slice};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The reason why a backend has no device on this machine. It is reported, and is not an error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Absent {
    /// The reason, and how to make a device available.
    pub reason: String,
}

impl Absent {
    /// Creates an absence with the given reason.
    pub fn new(reason: impl Into<String>) -> Self {
        Absent { reason: reason.into() }
    }
}

/// What sort of part a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// Host cores.
    Cpu,
    /// A graphics processor.
    Gpu,
    /// Any other accelerator.
    Accelerator,
    /// A simulated device that follows a profile.
    Simulated,
}

/// Static facts about a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// The selector that opens it: `cpu`, `cpu@0-1`, `opencl:0`.
    pub id: String,
    /// Name of the backend.
    pub backend: String,
    /// Name of the part, for display.
    pub name: String,
    /// What sort of part it is.
    pub kind: DeviceKind,
    /// Memory available to all buffers together.
    pub memory: Bytes,
    /// Cores, compute units or multiprocessors; 0 if unknown.
    pub compute_units: u32,
    /// Identifies the setup that was measured: part, number of cores in use, driver and kernel version. Equal
    /// fingerprints mean that measurements of one device hold for the other.
    pub fingerprint: String,
    /// Further facts, for display.
    pub notes: Vec<(String, String)>,
}

impl DeviceInfo {
    /// Name of the note in which a simulated device says how it does its work.
    pub const WORK: &'static str = "work";
    /// Value of that note for a device that only takes time and computes no result.
    pub const TIME_ONLY: &'static str = "takes time only; answers are hashes of what it reads";

    /// Whether the device computes results.
    pub fn computes(&self) -> bool {
        !self.notes.iter().any(|(name, value)| name == Self::WORK && value == Self::TIME_ONLY)
    }
}

/// Limits that a caller must respect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// The largest single allocation, in bytes.
    pub allocation_bytes_max: u64,
    /// Every operand's offset must be a multiple of this.
    pub alignment_bytes: u64,
    /// Whether `import` works.
    pub imports_host_memory: bool,
    /// The KV page size, in tokens, that suits this device's attention kernels best.
    pub kv_page_tokens: u32,
    /// Whether replaying a recorded batch costs clearly less than submitting it (a CUDA graph), so that it is
    /// worth keeping the shapes of decode steps equal.
    pub replay_pays: bool,
    /// Whether KV can be copied by one queue while another one computes. If not, a batch waits for batches of
    /// other queues.
    pub copies_beside: bool,
}

/// Whether and how a device can run an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Support {
    /// At native speed.
    Native,
    /// Correctly, but slowly or by conversion.
    Emulated,
    /// Not at all.
    No,
}

/// A device's current health; every reading is optional.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Health {
    /// Temperature in degrees Celsius.
    pub temperature_c: Option<f64>,
    /// Power draw in watts.
    pub power_w: Option<f64>,
    /// Energy used so far in joules. The counter never decreases, and only differences are meaningful.
    #[serde(default)]
    pub energy_j: Option<f64>,
    /// Share of the time since the last reading in which it had work, 0 to 1.
    #[serde(default)]
    pub busy: Option<f64>,
    /// Clock in MHz.
    pub clock_mhz: Option<f64>,
    /// The highest clock that the device is built for, in MHz.
    #[serde(default)]
    pub clock_mhz_max: Option<f64>,
    /// The highest clock that its settings and its state allow now, in MHz.
    #[serde(default)]
    pub clock_mhz_allowed: Option<f64>,
    /// Memory errors corrected since start.
    pub errors_corrected: Option<u64>,
    /// Memory errors that could not be corrected, since start.
    pub errors_uncorrected: Option<u64>,
}

/// Enumerates and opens devices of one kind.
pub trait Backend: Send + Sync {
    /// Returns the backend's lower-case name, with which a selector begins.
    fn name(&self) -> &'static str;

    /// Lists the devices present without opening them; never panics, even if libraries or drivers are
    /// missing.
    fn probe(&self) -> std::result::Result<Vec<DeviceInfo>, Absent>;

    /// Opens the device that `selector` names (`cpu@0`, `opencl:1`). The bare name means the first device, or
    /// all cores of a CPU.
    fn open(&self, selector: &str) -> Result<Arc<dyn Device>>;
}

/// An open device.
///
/// It has no default methods, so that a device that wraps another one (see
/// [`forward_device`](crate::forward_device)) cannot lose a method unnoticed.
pub trait Device: Send + Sync {
    /// Returns static facts about the device.
    fn info(&self) -> &DeviceInfo;

    /// Returns the limits that callers must respect.
    fn limits(&self) -> DeviceLimits;

    /// Returns whether and how it can run `sig`.
    fn support(&self, sig: &OpSig) -> Support;

    /// Allocates `bytes` bytes of unspecified content, which never exposes data of another process.
    fn alloc(&self, bytes: u64, role: BufferUsage) -> Result<Slice>;

    /// Uses host memory in place, read-only; returns `Unsupported` unless the limits have
    /// [`imports_host_memory`](DeviceLimits::imports_host_memory).
    fn import(&self, memory: Arc<dyn HostMemory>) -> Result<Slice>;

    /// Whether this device's queues accept an [`OpSig::Copy`] into `memory` of another device of this
    /// process. The call may acquire the resources for such copies, and returns false if it cannot. If true,
    /// a queue of the one device can [follow](Queue::follow) a queue of the other. The caller must test that
    /// copied bytes arrive: some drivers report access that does not work.
    fn reaches(&self, memory: &Slice) -> bool;

    /// Copies `data` into `to` (same length). Waits for commands in flight that use the buffer.
    fn write(&self, to: &Slice, data: &[u8]) -> Result<()>;

    /// Copies `from` into `data` (same length) after waiting for commands that have begun to execute and use
    /// the buffer. To see a command's result, wait for its ticket first.
    fn read(&self, from: &Slice, data: &mut [u8]) -> Result<()>;

    /// Pins `memory` so that `write` and `read` can copy without an intermediate buffer until the guard is
    /// dropped; returns `None` if pinning gains nothing. Pinning changes timing only, never contents. While
    /// pinned, all of the memory is resident and must not be [renewed](SharedMemory::renew). The guard keeps
    /// it alive, and waits for copies in flight when dropped.
    ///
    /// # Errors
    /// The driver or the operating system refused, because of a limit on locked memory or because the memory
    /// is pinned already. Copies still work.
    fn pin(&self, memory: Arc<dyn SharedMemory>) -> Result<Option<Pinned>>;

    /// Creates a queue.
    fn queue(&self) -> Result<Box<dyn Queue>>;

    /// Returns the memory that new buffers could take, given the use by all processes; `None` if the device
    /// cannot tell.
    fn memory_free(&self) -> Option<Bytes>;

    /// Reads the device's current health.
    fn health(&self) -> Health;
}

/// Forwards methods of a [`Device`] to a device inside it, for use in an `impl Device`: `forward_device!(self
/// => self.inner; info, limits, pin)`. Each method must be forwarded or written; otherwise the `impl` does
/// not compile.
#[macro_export]
macro_rules! forward_device {
    ($this:ident => $inner:expr; $($method:ident),+) => {
        $($crate::forward_device!(@ $method $this $inner);)+
    };
    (@ info $this:ident $inner:expr) => {
        fn info(&$this) -> &$crate::DeviceInfo {
            $inner.info()
        }
    };
    (@ limits $this:ident $inner:expr) => {
        fn limits(&$this) -> $crate::DeviceLimits {
            $inner.limits()
        }
    };
    (@ support $this:ident $inner:expr) => {
        fn support(&$this, sig: &$crate::OpSig) -> $crate::Support {
            $inner.support(sig)
        }
    };
    (@ alloc $this:ident $inner:expr) => {
        fn alloc(&$this, bytes: u64, role: $crate::BufferUsage) -> $crate::Result<$crate::Slice> {
            $inner.alloc(bytes, role)
        }
    };
    (@ import $this:ident $inner:expr) => {
        fn import(&$this, memory: std::sync::Arc<dyn $crate::HostMemory>) -> $crate::Result<$crate::Slice> {
            $inner.import(memory)
        }
    };
    (@ reaches $this:ident $inner:expr) => {
        fn reaches(&$this, memory: &$crate::Slice) -> bool {
            $inner.reaches(memory)
        }
    };
    (@ write $this:ident $inner:expr) => {
        fn write(&$this, to: &$crate::Slice, data: &[u8]) -> $crate::Result<()> {
            $inner.write(to, data)
        }
    };
    (@ read $this:ident $inner:expr) => {
        fn read(&$this, from: &$crate::Slice, data: &mut [u8]) -> $crate::Result<()> {
            $inner.read(from, data)
        }
    };
    (@ pin $this:ident $inner:expr) => {
        fn pin(
            &$this,
            memory: std::sync::Arc<dyn $crate::memory::SharedMemory>,
        ) -> $crate::Result<Option<$crate::memory::Pinned>> {
            $inner.pin(memory)
        }
    };
    (@ queue $this:ident $inner:expr) => {
        fn queue(&$this) -> $crate::Result<Box<dyn $crate::Queue>> {
            $inner.queue()
        }
    };
    (@ memory_free $this:ident $inner:expr) => {
        fn memory_free(&$this) -> Option<$crate::units::Bytes> {
            $inner.memory_free()
        }
    };
    (@ health $this:ident $inner:expr) => {
        fn health(&$this) -> $crate::Health {
            $inner.health()
        }
    };
}

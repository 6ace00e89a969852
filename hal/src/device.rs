//! Devices and the backends that find them.

use crate::memory::{Pinned, SharedMemory};
use crate::units::Bytes;
use crate::{BufferUsage, Export, HostMemory, OpSig, Queue, Result, Slice};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Why a backend has no device here: a fact to show, not a failure.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Absent {
    /// In words, with what would make it present.
    pub reason: String,
}

impl Absent {
    /// Absent because of `reason`.
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
    /// Obeys a profile instead of being one.
    Simulated,
}

/// Static facts about a device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// The selector that opens it: `cpu`, `cpu@0-1`, `opencl:0`.
    pub id: String,
    /// The backend's name.
    pub backend: String,
    /// The part's name, for people.
    pub name: String,
    /// What sort of part it is.
    pub kind: DeviceKind,
    /// Memory that buffers may take, all together.
    pub memory: Bytes,
    /// Cores, compute units or multiprocessors; 0 where the backend cannot know.
    pub compute_units: u32,
    /// For correctness: equal only if measurements of one hold for the other (part, count of cores in
    /// use, driver, kernel version).
    pub fingerprint: String,
    /// Further facts, for people.
    pub notes: Vec<(String, String)>,
}

impl DeviceInfo {
    /// Name of the note in which a simulated device says who does its work.
    pub const WORK: &'static str = "work";
    /// That note's value where nobody does: such a device is for timing, and computes no result.
    pub const TIME_ONLY: &'static str = "takes time only; answers are hashes of what it reads";

    /// Whether the device computes results at all.
    pub fn computes(&self) -> bool {
        !self.notes.iter().any(|(name, value)| name == Self::WORK && value == Self::TIME_ONLY)
    }
}

/// What a caller must respect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceLimits {
    /// The largest single allocation, in bytes.
    pub allocation_bytes_max: u64,
    /// Every operand's offset must be a multiple of this.
    pub alignment_bytes: u64,
    /// `import` works.
    pub imports_host_memory: bool,
    /// The KV page size that this device's attention likes best, in tokens.
    pub kv_page_tokens: u32,
    /// Replaying a recorded batch costs clearly less than submitting it (a CUDA graph): worth keeping
    /// the shapes of decode steps equal for.
    pub replay_pays: bool,
}

/// Answer to "could you run this?".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Support {
    /// At the device's own speed.
    Native,
    /// Correctly but slowly, or by conversion.
    Emulated,
    /// Not at all.
    No,
}

/// What a device says of its state; everything is optional.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Health {
    /// Temperature in degrees Celsius.
    pub temperature_c: Option<f64>,
    /// Power draw in watts.
    pub power_w: Option<f64>,
    /// Energy used so far in joules: a counter that never falls; only differences mean anything.
    #[serde(default)]
    pub energy_j: Option<f64>,
    /// Clock in MHz.
    pub clock_mhz: Option<f64>,
    /// Memory errors that were corrected since start.
    pub errors_corrected: Option<u64>,
    /// Memory errors that were not.
    pub errors_uncorrected: Option<u64>,
}

/// A kind of device: finds and opens its parts.
pub trait Backend: Send + Sync {
    /// Lower-case name, the selector's first word.
    fn name(&self) -> &'static str;

    /// The devices present, without opening them. Never panics, whatever the machine lacks.
    fn probe(&self) -> std::result::Result<Vec<DeviceInfo>, Absent>;

    /// Opens the device that `selector` names (`cpu@0`, `opencl:1`; the bare name is the first, or
    /// all cores of a CPU).
    fn open(&self, selector: &str) -> Result<Arc<dyn Device>>;
}

/// An open device.
pub trait Device: Send + Sync {
    /// Static facts.
    fn info(&self) -> &DeviceInfo;

    /// What a caller must respect.
    fn limits(&self) -> DeviceLimits;

    /// Whether it can run `sig`.
    fn support(&self, sig: &OpSig) -> Support;

    /// Allocates `bytes` bytes; their content is unspecified, but never another process's.
    fn alloc(&self, bytes: u64, role: BufferUsage) -> Result<Slice>;

    /// Uses host memory in place, read-only. `Unsupported` where `limits` says so.
    fn import(&self, memory: Arc<dyn HostMemory>) -> Result<Slice>;

    /// How a third party may reach `slice` without a copy, if it can.
    fn export(&self, slice: &Slice) -> Option<Export>;

    /// Copies `data` into `to` (same length). Waits for commands in flight that use the buffer.
    fn write(&self, to: &Slice, data: &[u8]) -> Result<()>;

    /// Copies `from` into `data` (same length). Waits for commands in flight that use the buffer:
    /// those that began to execute. To see a command's result, wait for its ticket first.
    fn read(&self, from: &Slice, data: &mut [u8]) -> Result<()>;

    /// Lets `write` copy out of `memory`, and `read` into it, without a stop in between, until the guard is dropped; none
    /// where nothing is gained by that. It changes no bytes, only times. All of the memory is resident meanwhile and
    /// may not be renewed; the guard keeps it alive, and waits for copies under way when it is dropped.
    ///
    /// # Errors
    /// What the driver or the operating system refuses: a limit of locked memory, or memory that is pinned already.
    /// Copies work without it.
    fn pin(&self, memory: Arc<dyn SharedMemory>) -> Result<Option<Pinned>> {
        drop(memory);
        Ok(None)
    }

    /// A new queue.
    fn queue(&self) -> Result<Box<dyn Queue>>;

    /// The device's state.
    fn health(&self) -> Health;
}

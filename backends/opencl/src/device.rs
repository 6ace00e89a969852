//! Enumerates and opens OpenCL devices.

use crate::kernels::ProgramKey;
use crate::memory::OpenclMemory;
use crate::queue::OpenClQueue;
use mixfleet_hal::cast::{to_u32, to_usize};
use mixfleet_hal::memory::{Pinned, SharedMemory};
use mixfleet_hal::units::Bytes;
use mixfleet_hal::{
    Absent, BufferUsage, Device, DeviceInfo, DeviceKind, DeviceLimits, Error, ErrorKind, Health, HostMemory,
    KvShape, MatrixKind, OpSig, Queue, Result, Slice, Support,
};
use ocl::core::{
    self, CommandQueue, CommandQueueProperties, Context, ContextProperties, DeviceId, DeviceInfo as Ask,
    DeviceInfoResult as Told, DeviceType, OpenclVersion, PlatformId, Program, Status,
};
use std::collections::HashMap;
use std::ffi::CString;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Which kernels a device uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelTuning {
    /// Kernels without barriers, with a thread per row or block, because CPU drivers emulate barriers by
    /// loops (PoCL: 55 times slower in a tiled GEMM).
    Cpu,
    /// Kernels with groups of threads that share local memory.
    Gpu,
}

/// Converts an OpenCL error.
pub(crate) fn failure(place: &str, error: &core::Error) -> Error {
    let kind = match error.api_status() {
        Some(
            Status::CL_MEM_OBJECT_ALLOCATION_FAILURE
            | Status::CL_OUT_OF_RESOURCES
            | Status::CL_OUT_OF_HOST_MEMORY
            | Status::CL_INVALID_BUFFER_SIZE,
        ) => ErrorKind::OutOfMemory,
        Some(Status::CL_DEVICE_NOT_AVAILABLE) => ErrorKind::DeviceLost,
        _ => ErrorKind::Other,
    };
    Error::new(kind, format!("opencl: {place}: {error}"))
}

/// Parses the number after `opencl:`; the bare name means 0.
pub(crate) fn index_of(selector: &str) -> Result<usize> {
    let bad = || Error::invalid(format!("'{selector}' names no OpenCL device; use 'opencl' or 'opencl:N'"));
    match selector.strip_prefix("opencl").ok_or_else(bad)? {
        "" => Ok(0),
        rest => rest.strip_prefix(':').and_then(|n| n.parse().ok()).ok_or_else(bad),
    }
}

/// Serialises discovery: PoCL initialises its devices in the first call that lists them and exposes them
/// half-initialised to a second thread (a crash in `clGetDeviceInfo`, PoCL 3.1).
static DISCOVERY: Mutex<()> = Mutex::new(());

/// Lists every device of every platform, in the order of the loader.
pub(crate) fn devices() -> std::result::Result<Vec<(PlatformId, DeviceId)>, Absent> {
    let _alone = DISCOVERY.lock().unwrap_or_else(PoisonError::into_inner);
    let mut count = 0;
    // SAFETY: the call writes one number; no list is requested. Called first because `get_platform_ids`
    // sleeps for 10 s before it reports that there is no platform.
    let status = unsafe { ocl::ffi::clGetPlatformIDs(0, std::ptr::null_mut(), &mut count) };
    if status != Status::CL_SUCCESS as i32 || count == 0 {
        let reason = format!(
            "the OpenCL loader knows no driver (clGetPlatformIDs: {status}); install one, for example \
             pocl-opencl-icd for the CPU, or the GPU vendor's"
        );
        return Err(Absent::new(reason));
    }
    let platforms = core::get_platform_ids().map_err(|e| Absent::new(e.to_string()))?;
    let mut found = Vec::new();
    for platform in platforms {
        // a platform without devices returns an error
        let ids = core::get_device_ids(platform, Some(DeviceType::ALL), None).unwrap_or_default();
        found.extend(ids.into_iter().map(|id| (platform, id)));
    }
    if found.is_empty() {
        return Err(Absent::new(format!("{count} OpenCL platforms, but no device in them")));
    }
    Ok(found)
}

/// Queries a text; empty if the driver has none.
fn text(id: DeviceId, question: Ask) -> String {
    core::get_device_info(id, question).map(|told| told.to_string().trim().to_owned()).unwrap_or_default()
}

/// Queries a number; 0 if the driver has none.
fn number(id: DeviceId, question: Ask) -> u64 {
    match core::get_device_info(id, question) {
        Ok(Told::GlobalMemSize(n) | Told::MaxMemAllocSize(n)) => n,
        Ok(Told::MaxComputeUnits(n)) => n.into(),
        Ok(Told::HostUnifiedMemory(yes)) => yes.into(),
        Ok(Told::MaxWorkGroupSize(n)) => n as u64,
        _ => 0,
    }
}

fn kind(id: DeviceId) -> DeviceKind {
    match core::get_device_info(id, Ask::Type) {
        Ok(Told::Type(kind)) if kind.contains(DeviceType::CPU) => DeviceKind::Cpu,
        Ok(Told::Type(kind)) if kind.contains(DeviceType::GPU) => DeviceKind::Gpu,
        _ => DeviceKind::Accelerator,
    }
}

/// Queries `N` bytes by a number that `ocl` has no name for, if the driver knows it.
fn raw<const N: usize>(id: DeviceId, question: u32) -> Option<[u8; N]> {
    let (mut bytes, mut size) = ([0u8; N], 0);
    let into = bytes.as_mut_ptr().cast();
    // SAFETY: the driver writes at most N bytes to `bytes`, and the size of its answer to `size`.
    let status = unsafe { ocl::ffi::clGetDeviceInfo(id.as_raw(), question, N, into, &mut size) };
    (status == Status::CL_SUCCESS as i32 && size == N).then_some(bytes)
}

/// Returns the device's PCI address and unique id as notes, omitting what the driver has no extension for.
/// Query numbers are from `CL/cl_ext.h` and NVIDIA's `cl_nv_device_attribute_query`.
fn identity(id: DeviceId) -> Vec<(String, String)> {
    const PCI_BUS_INFO_KHR: u32 = 0x410f;
    const PCI_BUS_ID_NV: u32 = 0x4008;
    const PCI_SLOT_ID_NV: u32 = 0x4009;
    const PCI_DOMAIN_ID_NV: u32 = 0x400a;
    const UUID_KHR: u32 = 0x106a;
    let word = |question| raw(id, question).map(u32::from_ne_bytes);
    let khr = raw::<16>(id, PCI_BUS_INFO_KHR).map(|bytes| {
        let word = |i: usize| u32::from_ne_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
        [word(0), word(4), word(8), word(12)]
    });
    let nvidia = || {
        let (bus, slot) = word(PCI_BUS_ID_NV).zip(word(PCI_SLOT_ID_NV))?;
        Some([word(PCI_DOMAIN_ID_NV).unwrap_or(0), bus, slot >> 3, slot & 7])
    };
    let pci = khr.or_else(nvidia).map(|[domain, bus, device, function]| {
        ("pci".to_owned(), format!("{domain:04x}:{bus:02x}:{device:02x}.{function}"))
    });
    let uuid = raw::<16>(id, UUID_KHR)
        .map(|bytes| ("uuid".to_owned(), bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>()));
    pci.into_iter().chain(uuid).collect()
}

/// Describes device number `index`.
pub(crate) fn info(index: usize, platform: PlatformId, id: DeviceId) -> DeviceInfo {
    let name = text(id, Ask::Name);
    let driver = text(id, Ask::DriverVersion);
    let compute_units = to_u32(number(id, Ask::MaxComputeUnits));
    let platform = core::get_platform_info(platform, core::PlatformInfo::Name)
        .map(|told| told.to_string())
        .unwrap_or_default();
    let kernels = env!("CARGO_PKG_VERSION");
    DeviceInfo {
        id: format!("opencl:{index}"),
        backend: "opencl".to_owned(),
        fingerprint: format!("opencl/{platform}/{name}/{compute_units}cu/{driver}/kernels-{kernels}"),
        name,
        kind: kind(id),
        memory: Bytes(number(id, Ask::GlobalMemSize) as f64),
        compute_units,
        notes: [
            ("platform".to_owned(), platform),
            ("driver".to_owned(), driver),
            ("version".to_owned(), text(id, Ask::Version)),
        ]
        .into_iter()
        .chain(identity(id))
        .collect(),
    }
}

/// State shared by a device and its queues.
pub(crate) struct OpenclDeviceState {
    pub(crate) context: Context,
    pub(crate) id: DeviceId,
    pub(crate) version: OpenclVersion,
    pub(crate) tuning: KernelTuning,
    programs: Mutex<HashMap<ProgramKey, Program>>,
    imports: Mutex<Vec<Weak<dyn HostMemory>>>,
}

impl OpenclDeviceState {
    /// Checks that imported host memory is unchanged, since a batch may have computed with it.
    ///
    /// # Errors
    /// As for [`HostMemory::check`].
    pub(crate) fn check_imports(&self) -> Result<()> {
        let mut imports = self.imports.lock().unwrap_or_else(PoisonError::into_inner);
        imports.retain(|memory| memory.strong_count() > 0);
        imports.iter().filter_map(Weak::upgrade).try_for_each(|memory| memory.check())
    }

    /// Returns the built program of `key`, which is compiled on first use.
    pub(crate) fn program(&self, key: &ProgramKey) -> Result<Program> {
        let mut programs = self.programs.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(program) = programs.get(key) {
            return Ok(program.clone());
        }
        let text = |text: String| {
            CString::new(text).map_err(|e| Error::new(ErrorKind::Other, format!("opencl: kernel text: {e}")))
        };
        let place = || format!("building {} with {}", key.file, key.options);
        let program = core::create_program_with_source(&self.context, &[text(key.source())?])
            .map_err(|e| failure(&place(), &e))?;
        core::build_program(&program, Some(&[self.id]), &text(key.options.clone())?, None, None)
            .map_err(|e| failure(&place(), &e))?;
        programs.insert(key.clone(), program.clone());
        Ok(program)
    }
}

/// An open OpenCL device.
pub struct OpenClDevice {
    info: DeviceInfo,
    limits: DeviceLimits,
    shared: Arc<OpenclDeviceState>,
    /// Queue for `read` and `write`, which wait for other queues' commands by their events.
    transfers: Mutex<CommandQueue>,
    queues: AtomicU64,
}

impl OpenClDevice {
    /// Opens device number `index`; without a tuning it uses that of its kind.
    ///
    /// # Errors
    /// `Invalid` if there is no such device, `Unsupported` below OpenCL 1.2, or the driver's error.
    pub fn open(index: usize, tuning: Option<KernelTuning>) -> Result<OpenClDevice> {
        let found = devices().map_err(|absent| Error::invalid(format!("opencl: {absent}")))?;
        let count = found.len();
        let &(platform, id) = found
            .get(index)
            .ok_or_else(|| Error::invalid(format!("opencl:{index}: there are {count} devices, from 0")))?;
        let info = info(index, platform, id);
        let version = id.version().map_err(|e| failure("the device's version", &e))?;
        if version < OpenclVersion::new(1, 2) {
            return Err(Error::unsupported(format!("opencl:{index} has OpenCL {version}; 1.2 is needed")));
        }
        let properties = ContextProperties::new().platform(platform);
        let context = core::create_context(Some(&properties), &[id], None, None)
            .map_err(|e| failure("clCreateContext", &e))?;
        let transfers = core::create_command_queue(&context, id, Some(CommandQueueProperties::empty()))
            .map_err(|e| failure("clCreateCommandQueue", &e))?;
        let of_kind = if info.kind == DeviceKind::Cpu { KernelTuning::Cpu } else { KernelTuning::Gpu };
        let limits = DeviceLimits {
            allocation_bytes_max: number(id, Ask::MaxMemAllocSize),
            // kernels address by element and load vectors of elements, so the largest element's size suffices
            alignment_bytes: 4,
            // elsewhere USE_HOST_PTR is a hidden copy
            imports_host_memory: number(id, Ask::HostUnifiedMemory) != 0,
            kv_page_tokens: 16,
            replay_pays: false,
            // queues may not use one buffer concurrently, even different parts of it
            copies_beside: false,
        };
        let shared = OpenclDeviceState {
            context,
            id,
            version,
            tuning: tuning.unwrap_or(of_kind),
            programs: Mutex::default(),
            imports: Mutex::default(),
        };
        Ok(OpenClDevice {
            info,
            limits,
            shared: Arc::new(shared),
            transfers: Mutex::new(transfers),
            queues: AtomicU64::new(0),
        })
    }

    /// Runs a blocking transfer between a slice and `len` bytes of host memory.
    fn transfer(
        &self,
        slice: &Slice,
        len: usize,
        run: impl FnOnce(&CommandQueue, &OpenclMemory) -> core::Result<()>,
    ) -> Result<()> {
        let memory = OpenclMemory::of(slice)?;
        let inside =
            slice.offset.checked_add(slice.bytes).is_some_and(|end| end <= slice.buffer.size_bytes());
        if len as u64 != slice.bytes || !inside {
            let message = format!("opencl: {len} bytes for {} at {}", slice.bytes, slice.offset);
            return Err(Error::invalid(message));
        }
        memory.settle();
        if len == 0 {
            return Ok(());
        }
        let queue = self.transfers.lock().unwrap_or_else(PoisonError::into_inner);
        run(&queue, memory).map_err(|e| failure("a transfer", &e))
    }
}

impl Device for OpenClDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn limits(&self) -> DeviceLimits {
        self.limits
    }

    fn support(&self, sig: &OpSig) -> Support {
        // a head is kept in private memory
        const HEAD_DIM_MAX: u32 = 640;
        match *sig {
            OpSig::AttnPrefill { kv: KvShape { head_dim, .. }, .. }
            | OpSig::AttnDecode { kv: KvShape { head_dim, .. }, .. }
                if head_dim > HEAD_DIM_MAX =>
            {
                Support::No
            }
            // a thread per row would leave a GPU idle; the host draws faster
            OpSig::Sample { .. } if self.shared.tuning == KernelTuning::Gpu => Support::No,
            _ if sig.check().is_err() => Support::No,
            OpSig::QuantisedEmbed { .. } | OpSig::QuantisedGemm { .. } => Support::Native,
            // groups of rows end with matrices
            OpSig::GroupedGemm { n, weight: MatrixKind::Quantised(kind), .. } => {
                if n.is_multiple_of(kind.group_rows) { Support::Native } else { Support::No }
            }
            _ if sig
                .operands()
                .iter()
                .any(|operand| operand.dtype.is_scaled() && !sig.has_scales(operand)) =>
            {
                Support::No
            }
            _ => Support::Native,
        }
    }

    fn alloc(&self, bytes: u64, _: BufferUsage) -> Result<Slice> {
        if bytes > self.limits.allocation_bytes_max {
            let max = self.limits.allocation_bytes_max;
            let message = format!("opencl: {bytes} bytes in one buffer; this device allows {max}");
            return Err(Error::new(ErrorKind::OutOfMemory, message));
        }
        Ok(Slice::whole(Arc::new(OpenclMemory::new(&self.shared.context, bytes)?)))
    }

    fn import(&self, memory: Arc<dyn HostMemory>) -> Result<Slice> {
        if !self.limits.imports_host_memory {
            return Err(Error::unsupported("opencl: this device has its own memory; copy into it"));
        }
        let imported = OpenclMemory::imported(&self.shared.context, memory.clone())?;
        self.shared.imports.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(&memory));
        Ok(Slice::whole(Arc::new(imported)))
    }

    fn reaches(&self, _: &Slice) -> bool {
        false
    }

    fn write(&self, to: &Slice, data: &[u8]) -> Result<()> {
        OpenclMemory::of(to)?.writable()?;
        let offset = to_usize(to.offset);
        self.transfer(to, data.len(), |queue, memory| {
            // SAFETY: the call blocks until `data` is read, and the range is inside the buffer.
            unsafe {
                core::enqueue_write_buffer(queue, memory.mem(), true, offset, data, NO_EVENTS, NO_EVENT)
            }
        })
    }

    fn read(&self, from: &Slice, data: &mut [u8]) -> Result<()> {
        let offset = to_usize(from.offset);
        self.transfer(from, data.len(), |queue, memory| {
            // SAFETY: the call blocks until `data` is written, and the range is inside the buffer.
            unsafe { core::enqueue_read_buffer(queue, memory.mem(), true, offset, data, NO_EVENTS, NO_EVENT) }
        })
    }

    fn pin(&self, _: Arc<dyn SharedMemory>) -> Result<Option<Pinned>> {
        Ok(None)
    }

    fn queue(&self) -> Result<Box<dyn Queue>> {
        let number = self.queues.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(OpenClQueue::new(self.shared.clone(), number)?))
    }

    /// OpenCL does not report the memory in use.
    fn memory_free(&self) -> Option<Bytes> {
        None
    }

    /// OpenCL reports no sensor readings.
    fn health(&self) -> Health {
        Health::default()
    }
}

/// An empty wait list, in the types that `ocl` requires.
pub(crate) const NO_EVENTS: Option<&core::Event> = None;
/// No event requested, in the types that `ocl` requires.
pub(crate) const NO_EVENT: Option<&mut core::Event> = None;

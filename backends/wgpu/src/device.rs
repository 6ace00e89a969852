//! Enumerates and opens adapters.

use crate::counts::WgpuCounts;
use crate::kernels::MatrixUnit;
use crate::memory::{DeviceQueue, WgpuMemory};
use crate::pipelines::{DiskCache, IMMEDIATE_BYTES, Pipelines};
use crate::plan::{Demands, Planner};
use crate::queue::WgpuQueue;
use crate::{kernel_cache, kernels};
use mixfleet_hal::memory::{Pinned, SharedMemory};
use mixfleet_hal::units::Bytes;
use mixfleet_hal::{
    Absent, BufferUsage, DType, Device, DeviceInfo, DeviceKind, DeviceLimits, Error, ErrorKind, Health,
    HostMemory, KvShape, OpSig, Queue, Result, Slice, Support,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use wgpu::{
    Adapter, Backends, CooperativeScalarType, DeviceDescriptor, DeviceType, ExperimentalFeatures, Features,
    Instance, InstanceDescriptor, InstanceFlags, MemoryHints,
};

/// Limits imposed on a device in addition to its adapter's own, mostly for tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdapterOverrides {
    /// Whether to avoid subgroups even if the adapter has them.
    pub without_subgroups: bool,
    /// Whether to avoid products of matrices by subgroups even if the adapter has them.
    pub without_matrices: bool,
    /// Maximum bytes per binding, if lower than the adapter's limit.
    pub binding_bytes_max: Option<u64>,
}

/// Maximum number of storage buffers that a kernel binds: attention's six inputs, a view and two outputs.
const BINDINGS_MAX: u32 = 9;
/// Threads of the largest workgroup.
const GROUP_MAX: u32 = 256;
/// Shared memory of the largest workgroup: attention's 8 queries of 576 (18.1 KiB), 8 KiB of scores, 1 KiB of
/// addresses and a little more.
const SHARED_BYTES_MAX: u32 = 28 << 10;
/// Maximum head length, at which the queries fill shared memory: that of DeepSeek's latents.
const HEAD_DIM_MAX: u32 = 576;
/// Maximum bytes of a window: kernels count elements in 32 bits, and 2^31 bytes are at most 2^30 elements of
/// 16 bits.
const WINDOW_BYTES_MAX: u64 = 1 << 31;

/// Parses the number after `wgpu:`; the bare name means 0.
pub(crate) fn index_of(selector: &str) -> Result<usize> {
    let bad = || Error::invalid(format!("'{selector}' names no wgpu device; use 'wgpu' or 'wgpu:N'"));
    match selector.strip_prefix("wgpu").ok_or_else(bad)? {
        "" => Ok(0),
        rest => rest.strip_prefix(':').and_then(|n| n.parse().ok()).ok_or_else(bad),
    }
}

/// Lists every adapter of the first API that has any, since a part seen through both Vulkan and DX12 would
/// appear twice.
pub(crate) fn adapters() -> std::result::Result<Vec<Adapter>, Absent> {
    // drivers are loaded once per process
    static INSTANCE: OnceLock<Instance> = OnceLock::new();
    let find = || {
        let instance = INSTANCE.get_or_init(|| {
            let mut descriptor = InstanceDescriptor::new_without_display_handle();
            descriptor.backends = Backends::VULKAN | Backends::METAL | Backends::DX12;
            descriptor.flags = InstanceFlags::empty();
            Instance::new(descriptor)
        });
        let interfaces = [Backends::VULKAN, Backends::METAL, Backends::DX12].into_iter();
        let found = interfaces.map(|one| pollster::block_on(instance.enumerate_adapters(one)));
        found.into_iter().find(|adapters| !adapters.is_empty()).unwrap_or_default()
    };
    let found = catch_unwind(AssertUnwindSafe(find))
        .map_err(|_| Absent::new("wgpu: a driver failed while listing its adapters"))?;
    if found.is_empty() {
        return Err(Absent::new(
            "no Vulkan, Metal or DX12 adapter; on Linux install the Vulkan loader and a driver (Debian: libvulkan1 \
             and the GPU vendor's, or mesa-vulkan-drivers, which also runs Vulkan on the CPU)",
        ));
    }
    Ok(found)
}

/// Returns the bytes of the device's own memory, which Vulkan reports by heaps but wgpu does not.
#[cfg(any(target_os = "linux", target_os = "windows"))]
fn memory_bytes(adapter: &Adapter) -> Option<u64> {
    // SAFETY: the handles are used while `adapter` is held, and are not destroyed.
    let vulkan = unsafe { adapter.as_hal::<wgpu::hal::api::Vulkan>() }?;
    let instance = vulkan.shared_instance().raw_instance();
    // SAFETY: the physical device belongs to this instance, and the call only returns facts about it.
    let told = unsafe { instance.get_physical_device_memory_properties(vulkan.raw_physical_device()) };
    let heaps = told.memory_heaps.iter().take(told.memory_heap_count as usize);
    // VK_MEMORY_HEAP_DEVICE_LOCAL_BIT is 1
    heaps.filter(|heap| heap.flags.as_raw() & 1 != 0).map(|heap| heap.size).max()
}

#[cfg(not(any(target_os = "linux", target_os = "windows")))]
fn memory_bytes(_: &Adapter) -> Option<u64> {
    None
}

fn kind(adapter: DeviceType) -> DeviceKind {
    match adapter {
        DeviceType::Cpu => DeviceKind::Cpu,
        DeviceType::Other => DeviceKind::Accelerator,
        DeviceType::DiscreteGpu | DeviceType::IntegratedGpu | DeviceType::VirtualGpu => DeviceKind::Gpu,
    }
}

/// Features that are used if present.
const WANTED: Features =
    Features::SUBGROUP.union(Features::TIMESTAMP_QUERY).union(Features::TIMESTAMP_QUERY_INSIDE_ENCODERS);

/// Features of products of matrices by subgroups. wgpu calls them experimental.
const MATRICES: Features = Features::EXPERIMENTAL_COOPERATIVE_MATRIX.union(Features::SHADER_F16);

/// What the adapter multiplies matrices of f16 with and adds them in f32, if it does. DX12 lists none.
fn matrices(adapter: &Adapter, tuning: AdapterOverrides) -> Option<MatrixUnit> {
    let unwanted = tuning.without_matrices || tuning.without_subgroups;
    if unwanted || !adapter.features().contains(MATRICES | Features::SUBGROUP) {
        return None;
    }
    let listed = adapter.cooperative_matrix_properties();
    let edge = [16, 8].into_iter().find(|&edge| {
        listed.iter().any(|one| {
            [one.m_size, one.n_size, one.k_size] == [edge; 3]
                && (one.ab_type, one.cr_type) == (CooperativeScalarType::F16, CooperativeScalarType::F32)
                && !one.saturating_accumulation
        })
    })?;
    MatrixUnit::new(edge, adapter.get_info().subgroup_max_size)
}

/// Describes adapter number `index`.
pub(crate) fn info(index: usize, adapter: &Adapter, tuning: AdapterOverrides) -> DeviceInfo {
    let told = adapter.get_info();
    let limits = adapter.limits();
    let driver = format!("{} {}", told.driver, told.driver_info);
    let memory = memory_bytes(adapter);
    let features = adapter.features() & WANTED;
    let mut notes = vec![
        ("interface".to_owned(), told.backend.to_string()),
        ("driver".to_owned(), driver.clone()),
        ("subgroup".to_owned(), format!("{} to {}", told.subgroup_min_size, told.subgroup_max_size)),
        ("binding".to_owned(), format!("{} bytes at most", limits.max_storage_buffer_binding_size)),
    ];
    if !told.device_pci_bus_id.is_empty() {
        notes.push(("pci".to_owned(), told.device_pci_bus_id.clone()));
    }
    let matrices = matrices(adapter, tuning);
    if let Some(MatrixUnit { edge, .. }) = matrices {
        notes.push(("matrices".to_owned(), format!("{edge} x {edge} of f16, summed in f32")));
    }
    if memory.is_none() {
        notes.push(("memory".to_owned(), "unknown; assumed to be the largest allocation".to_owned()));
    }
    let bound = tuning.binding_bytes_max.unwrap_or(limits.max_storage_buffer_binding_size);
    let subgroups = features.contains(Features::SUBGROUP) && !tuning.without_subgroups;
    let fingerprint = format!(
        "wgpu/{}/{}/{driver}/kernels-{:016x}/bind-{bound}{}{}",
        told.backend,
        told.name,
        kernels::digest(),
        if subgroups { "/subgroups" } else { "" },
        matrices.map_or_else(String::new, |unit| format!("/matrices-{}", unit.edge)),
    );
    DeviceInfo {
        id: format!("wgpu:{index}"),
        backend: "wgpu".to_owned(),
        fingerprint,
        name: told.name,
        kind: kind(told.device_type),
        memory: Bytes(memory.unwrap_or(limits.max_buffer_size) as f64),
        // no API reports it
        compute_units: 0,
        notes,
    }
}

/// State shared by a device and its queues.
pub(crate) struct WgpuDeviceState {
    pub(crate) link: DeviceQueue,
    pub(crate) pipelines: Pipelines,
    pub(crate) demands: Demands,
    /// Nanoseconds per timestamp tick, if the device has timestamps.
    pub(crate) tick_ns: Option<f64>,
}

/// An open device.
pub struct WgpuDevice {
    info: DeviceInfo,
    limits: DeviceLimits,
    shared: Arc<WgpuDeviceState>,
}

impl WgpuDevice {
    /// Opens adapter number `index`.
    ///
    /// # Errors
    /// `Invalid` if there is no such adapter, `Unsupported` if it lacks what the kernels need, or the
    /// driver's error.
    pub fn open(index: usize, tuning: AdapterOverrides) -> Result<WgpuDevice> {
        Self::open_keeping(index, tuning, kernel_cache::directory())
    }

    /// Opens an adapter whose compiled kernels are kept in this directory in place of the user's cache, or
    /// nowhere.
    ///
    /// # Errors
    /// The errors of [`open`](Self::open).
    pub fn open_keeping(
        index: usize,
        tuning: AdapterOverrides,
        kernels: Option<PathBuf>,
    ) -> Result<WgpuDevice> {
        let found = adapters().map_err(|absent| Error::invalid(format!("wgpu: {absent}")))?;
        let count = found.len();
        let adapter = found
            .get(index)
            .ok_or_else(|| Error::invalid(format!("wgpu:{index}: there are {count} devices, from 0")))?;
        let info = info(index, adapter, tuning);
        let limits = adapter.limits();
        let lacks = |what: &str, has: u32, needs: u32| {
            let message = format!("wgpu:{index} ({}): {what}: {has}; {needs} are needed", info.name);
            if has < needs { Err(Error::unsupported(message)) } else { Ok(()) }
        };
        let immediates = adapter.features().contains(Features::IMMEDIATES);
        lacks("immediate bytes", u32::from(immediates) * limits.max_immediate_size, IMMEDIATE_BYTES)?;
        lacks("storage buffers of a kernel", limits.max_storage_buffers_per_shader_stage, BINDINGS_MAX)?;
        lacks("threads of a group", limits.max_compute_invocations_per_workgroup, GROUP_MAX)?;
        lacks("shared bytes of a group", limits.max_compute_workgroup_storage_size, SHARED_BYTES_MAX)?;
        let matrices = matrices(adapter, tuning);
        let (experimental_features, for_matrices) = match matrices {
            // SAFETY: the promise is to know that what wgpu makes of these features may have undefined
            // behaviour. One text alone uses them, `matrix_tiles.wgsl`: its indices are computed as those of
            // every kernel are (`pipelines::build`), its sizes are among those that the adapter lists, whole
            // subgroups reach each of its products, and conformance compares it with the oracle. naga does
            // not mark its accesses of shared memory as those of other threads, which Vulkan's memory model
            // asks for and drivers take from barriers.
            Some(_) => (unsafe { ExperimentalFeatures::enabled() }, MATRICES),
            None => (ExperimentalFeatures::disabled(), Features::empty()),
        };
        let required_features = (adapter.features() & WANTED.union(Features::PIPELINE_CACHE))
            | Features::IMMEDIATES
            | for_matrices;
        let descriptor = DeviceDescriptor {
            label: None,
            required_features,
            required_limits: limits.clone(),
            experimental_features,
            memory_hints: MemoryHints::Performance,
            ..Default::default()
        };
        let asked =
            catch_unwind(AssertUnwindSafe(|| pollster::block_on(adapter.request_device(&descriptor))));
        let failed = |why: String| Error::new(ErrorKind::Other, format!("wgpu:{index}: opening: {why}"));
        let (device, queue) = asked
            .map_err(|_| failed("wgpu panicked".to_owned()))?
            .map_err(|error| failed(error.to_string()))?;
        let timed = required_features.contains(WANTED & !Features::SUBGROUP);
        let tick_ns = timed.then(|| f64::from(queue.get_timestamp_period()));
        let subgroups = required_features.contains(Features::SUBGROUP) && !tuning.without_subgroups;
        let binding = limits.max_storage_buffer_binding_size.min(WINDOW_BYTES_MAX);
        let link = DeviceQueue::new(device, queue);
        let kernels = kernels.filter(|_| required_features.contains(Features::PIPELINE_CACHE));
        let disk =
            kernels.map(|directory| DiskCache::load(&link, directory, &info.fingerprint)).transpose()?;
        let shared = WgpuDeviceState {
            link,
            pipelines: Pipelines::new(subgroups, disk),
            demands: Demands {
                binding_bytes_max: tuning.binding_bytes_max.unwrap_or(binding).min(binding),
                binding_align: limits.min_storage_buffer_offset_alignment.into(),
                matrices,
            },
            tick_ns,
        };
        let limits = DeviceLimits {
            // a buffer is padded by up to 31 bytes
            allocation_bytes_max: limits.max_buffer_size.saturating_sub(32),
            // kernels count 32-bit elements from an aligned start of the binding, so callers need not respect
            // `min_storage_buffer_offset_alignment` (32 to 256) and may slice ids and rows freely
            alignment_bytes: 4,
            imports_host_memory: false,
            kv_page_tokens: 16,
            replay_pays: false,
            // all work goes through one queue of the driver
            copies_beside: false,
        };
        Ok(WgpuDevice { info, limits, shared: Arc::new(shared) })
    }

    /// Returns the work counted since the device was opened.
    pub fn counts(&self) -> WgpuCounts {
        self.shared.link.counters.read()
    }

    /// Simulates a driver reset, for tests.
    #[doc(hidden)]
    pub fn lose(&self) {
        self.shared.link.device.destroy();
        // a poll reports the loss
        let _ = self.shared.link.guard("losing", || self.shared.link.device.poll(wgpu::PollType::Poll));
    }
}

impl Device for WgpuDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn limits(&self) -> DeviceLimits {
        self.limits
    }

    fn support(&self, sig: &OpSig) -> Support {
        if sig.check().is_err() {
            return Support::No;
        }
        let narrow = |dtype: DType| dtype.size_bytes() < 4;
        let supported = match *sig {
            // rows of 16-bit heads begin at a word
            OpSig::AttnPrefill { x, kv, .. } | OpSig::AttnDecode { x, kv, .. } => {
                let fits = |length: u32, dtype| length.is_multiple_of(2) || !narrow(dtype);
                kv.head_dim <= HEAD_DIM_MAX && fits(kv.head_dim, kv.dtype) && fits(kv.value_dim(), x)
            }
            OpSig::KvWrite { kv: KvShape { head_dim, dtype: kv, .. }, .. }
            | OpSig::KvGather { kv: KvShape { head_dim, dtype: kv, .. }, .. }
            | OpSig::KvScatter { kv: KvShape { head_dim, dtype: kv, .. }, .. } => {
                head_dim % 2 == 0 || !narrow(kv)
            }
            _ => true,
        };
        let known = sig.operands().iter().all(|operand| {
            // scales of quantised weights are read byte by byte
            !operand.dtype.is_scaled()
                || sig.has_scales(operand)
                || matches!(operand.name, "scales" | "zeros")
        });
        if supported && known && Planner::supports(self.shared.demands, sig) {
            Support::Native
        } else {
            Support::No
        }
    }

    fn alloc(&self, bytes: u64, _: BufferUsage) -> Result<Slice> {
        self.shared.link.faults.alive()?;
        if bytes > self.limits.allocation_bytes_max {
            let max = self.limits.allocation_bytes_max;
            let message = format!("wgpu: {bytes} bytes in one buffer; this device allows {max}");
            return Err(Error::new(ErrorKind::OutOfMemory, message));
        }
        Ok(Slice::whole(Arc::new(WgpuMemory::new(&self.shared.link, bytes)?)))
    }

    fn import(&self, _: Arc<dyn HostMemory>) -> Result<Slice> {
        self.shared.link.faults.alive()?;
        Err(Error::unsupported("wgpu: host memory cannot be used in place; copy it in"))
    }

    fn reaches(&self, _: &Slice) -> bool {
        false
    }

    fn write(&self, to: &Slice, data: &[u8]) -> Result<()> {
        self.shared.link.write(to, data)
    }

    fn read(&self, from: &Slice, data: &mut [u8]) -> Result<()> {
        self.shared.link.read(from, data)
    }

    fn pin(&self, _: Arc<dyn SharedMemory>) -> Result<Option<Pinned>> {
        Ok(None)
    }

    fn queue(&self) -> Result<Box<dyn Queue>> {
        self.shared.link.faults.alive()?;
        Ok(Box::new(WgpuQueue::new(self.shared.clone())))
    }

    /// wgpu does not report the memory in use.
    fn memory_free(&self) -> Option<Bytes> {
        None
    }

    /// wgpu reports no sensor readings.
    fn health(&self) -> Health {
        Health::default()
    }
}

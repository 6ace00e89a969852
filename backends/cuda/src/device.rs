//! Enumerates and opens NVIDIA devices.

use crate::blas::Blas;
use crate::compile::{self, Architecture};
use crate::driver::{At, CudaContext, EventPool, Function, Module, can_reach};
use crate::health::Monitor;
use crate::kernels::{DEVICE, KernelProgram};
use crate::libraries::{Library, guarded};
use crate::memory::{CudaMemory, Transfers};
use crate::pinned;
use crate::plan::{self, DeviceRange, KernelLaunch, PlanTarget};
use crate::queue::CudaQueue;
use cudarc::driver::{result, sys};
use mixfleet_hal::cast::{to_i32, to_u64, to_usize};
use mixfleet_hal::memory::{Pinned, SharedMemory};
use mixfleet_hal::units::Bytes;
use mixfleet_hal::{
    Absent, BufferUsage, Device, DeviceInfo, DeviceKind, DeviceLimits, Error, ErrorKind, Health, HostMemory,
    OpSig, Queue, Result, Slice, Support,
};
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

/// Minimum capability; older tensor cores have no bf16 and no asynchronous copies.
const CAPABILITY_MIN: u32 = 80;

/// Names an older capability as which a device is planned and compiled for.
const AS_VARIABLE: &str = "MIXFLEET_CUDA_AS";
/// Turns early launches off where it is `0`.
const EARLY_VARIABLE: &str = "MIXFLEET_CUDA_EARLY";

/// Memory reserved for the context, kernels, cuBLASLt and the queues' scratch.
const RESERVED_BYTES: u64 = 1 << 30;

/// Parses the number after `cuda:`; the bare name means 0.
pub(crate) fn index_of(selector: &str) -> Result<usize> {
    let bad = || Error::invalid(format!("'{selector}' names no CUDA device; use 'cuda' or 'cuda:N'"));
    match selector.strip_prefix("cuda").ok_or_else(bad)? {
        "" => Ok(0),
        rest => rest.strip_prefix(':').and_then(|n| n.parse().ok()).ok_or_else(bad),
    }
}

/// Parses a capability such as `8.9` that a device of `own` can be used as.
fn older_capability(text: &str, own: u32) -> Result<u32> {
    let parsed = text.split_once('.').and_then(|(major, minor)| {
        let minor = minor.parse::<u32>().ok().filter(|minor| *minor < 10)?;
        Some(major.parse::<u32>().ok()?.checked_mul(10)? + minor)
    });
    parsed.filter(|capability| (CAPABILITY_MIN..=own).contains(capability)).ok_or_else(|| {
        Error::invalid(format!(
            "{AS_VARIABLE}='{text}' is no compute capability from 8.0 to this device's {}.{}",
            own / 10,
            own % 10
        ))
    })
}

/// Maximum shared memory of a block (CUDA Programming Guide, table of technical specifications).
fn shared_bytes_of(capability: u32) -> u32 {
    match capability {
        80 | 87 => 163 << 10,
        90..=109 => 227 << 10,
        _ => 99 << 10,
    }
}

/// Lists every device of the driver, in its order.
pub(crate) fn devices() -> std::result::Result<Vec<DeviceInfo>, Absent> {
    for library in [Library::Driver, Library::Nvrtc] {
        if !library.is_present() {
            return Err(Absent::new(library.remedy()));
        }
    }
    let found = guarded("looking for devices", || {
        result::init().at("cuInit")?;
        let count = result::device::get_count().at("cuDeviceGetCount")?;
        (0..to_usize(count.max(0)))
            .map(|index| Facts::of(index).map(|facts| facts.info(index, Library::CublasLt.is_present())))
            .collect::<Result<_>>()
    });
    match found {
        Ok(found) if Vec::is_empty(&found) => Err(Absent::new("the CUDA driver is here and shows no device")),
        Ok(found) => Ok(found),
        Err(error) => Err(Absent::new(error.to_string())),
    }
}

/// What the driver reports about a device without opening it.
struct Facts {
    device: sys::CUdevice,
    name: String,
    memory_bytes: u64,
    capability: u32,
    /// The capability as which it is used.
    used_as: u32,
    multiprocessors: u32,
    shared_bytes_max: u32,
    pci: String,
    uuid: String,
    driver: String,
    /// Note about direct copies to the other devices, if there are any.
    peers: Option<String>,
}

impl Facts {
    fn of(index: usize) -> Result<Facts> {
        use sys::CUdevice_attribute_enum::*;
        let device = result::device::get(to_i32(index)).at("cuDeviceGet")?;
        // SAFETY: the device came from the driver.
        let ask = |what| unsafe { result::device::get_attribute(device, what) }.at("cuDeviceGetAttribute");
        let number = |what| ask(what).map(|value| u32::try_from(value).unwrap_or(0));
        // SAFETY: as above.
        let memory_bytes = unsafe { result::device::total_mem(device) }.at("cuDeviceTotalMem")? as u64;
        let capability = number(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? * 10
            + number(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let used_as = match std::env::var(AS_VARIABLE) {
            Ok(text) => older_capability(&text, capability)?,
            Err(_) => capability,
        };
        let mut version = 0;
        // SAFETY: the call writes one number.
        unsafe { sys::cuDriverGetVersion(&mut version) }.result().at("cuDriverGetVersion")?;
        Ok(Facts {
            device,
            name: result::device::get_name(device).at("cuDeviceGetName")?,
            memory_bytes,
            capability,
            used_as,
            multiprocessors: number(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_bytes_max: number(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?
                .min(if used_as == capability { u32::MAX } else { shared_bytes_of(used_as) }),
            pci: pci(device)?,
            uuid: uuid(device)?,
            driver: format!("{}.{}", version / 1000, version % 1000 / 10),
            peers: peers(index, device)?,
        })
    }

    fn info(&self, index: usize, blas: bool) -> DeviceInfo {
        let text = |capability: u32| format!("{}.{}", capability / 10, capability % 10);
        let capability = match self.used_as == self.capability {
            true => text(self.capability),
            false => format!("{} as {}", text(self.capability), text(self.used_as)),
        };
        let (with_blas, blas) = match (blas, Library::CublasLt.is_present()) {
            (true, _) => ("blas", "present".to_owned()),
            (false, true) => ("noblas", "present, but cannot be opened".to_owned()),
            (false, false) => ("noblas", Library::CublasLt.remedy()),
        };
        let kernels = env!("CARGO_PKG_VERSION");
        let (name, driver, count) = (&self.name, &self.driver, self.multiprocessors);
        DeviceInfo {
            id: format!("cuda:{index}"),
            backend: "cuda".to_owned(),
            name: name.clone(),
            kind: DeviceKind::Gpu,
            memory: Bytes(self.memory_bytes.saturating_sub(RESERVED_BYTES) as f64),
            compute_units: count,
            fingerprint: format!("cuda/{name}/{count}sm/{capability}/{driver}/{with_blas}/kernels-{kernels}"),
            notes: [
                ("pci", Some(self.pci.clone())),
                ("uuid", Some(self.uuid.clone())),
                ("compute capability", Some(capability)),
                ("driver", Some(driver.clone())),
                ("cublaslt", Some(blas)),
                ("peers", self.peers.clone()),
            ]
            .into_iter()
            .filter_map(|(key, value)| Some((key.to_owned(), value?)))
            .collect(),
        }
    }
}

/// Names the other devices that the driver says a device can copy to.
fn peers(index: usize, device: sys::CUdevice) -> Result<Option<String>> {
    let count = to_usize(result::device::get_count().at("cuDeviceGetCount")?.max(0));
    let mut reached = Vec::new();
    for other in (0..count).filter(|other| *other != index) {
        let peer = result::device::get(to_i32(other)).at("cuDeviceGet")?;
        // a failed query of mere information must not hide a device
        reached.extend(can_reach(device, peer).unwrap_or(false).then(|| format!("cuda:{other}")));
    }
    let named = if reached.is_empty() { "none".to_owned() } else { reached.join(" ") };
    Ok(Some(named).filter(|_| count > 1))
}

/// Formats a PCI address as `0000:17:00.0`.
fn pci(device: sys::CUdevice) -> Result<String> {
    let mut text = [0u8; 32];
    // SAFETY: the call writes at most the given length, its final zero included.
    unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), to_i32(text.len()), device) }
        .result()
        .at("cuDeviceGetPCIBusId")?;
    let text: Vec<u8> = text.into_iter().take_while(|&byte| byte != 0).collect();
    Ok(String::from_utf8_lossy(&text).to_ascii_lowercase())
}

/// Formats a unique id as `nvidia-smi -L` does.
fn uuid(device: sys::CUdevice) -> Result<String> {
    let bytes = result::device::get_uuid(device).at("cuDeviceGetUuid")?.bytes;
    let hex: String = bytes.iter().map(|&byte| format!("{:02x}", byte.cast_unsigned())).collect();
    Ok(format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]))
}

/// Kernels that were used before.
#[derive(Default)]
struct Functions {
    modules: HashMap<KernelProgram, Arc<Module>>,
    by_kernel: HashMap<(KernelProgram, &'static str), Arc<Function>>,
}

/// State shared by a device and its queues.
pub(crate) struct CudaDeviceState {
    pub(crate) context: Arc<CudaContext>,
    pub(crate) blas: Option<Blas>,
    pub(crate) target: PlanTarget,
    pub(crate) events: Arc<EventPool>,
    pub(crate) architecture: Architecture,
    /// Whether a kernel is launched while the one before it ends.
    pub(crate) early: bool,
    functions: Mutex<Functions>,
    /// Kinds of products and attention whose slowness was logged.
    pub(crate) told_slow: Mutex<HashSet<String>>,
    /// Contexts of other devices whose memory streams here may write to.
    peers: Mutex<Vec<Weak<CudaContext>>>,
    /// The failure after which every call fails.
    lost: OnceLock<Error>,
}

impl CudaDeviceState {
    /// Returns the kernel of a launch, which is compiled, loaded and looked up on first use.
    pub(crate) fn function(&self, launch: &KernelLaunch) -> Result<Arc<Function>> {
        let KernelLaunch { program, kernel, shared_bytes, .. } = launch;
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        let function = match functions.by_kernel.get(&(*program, kernel)) {
            Some(function) => function.clone(),
            None => {
                let module = self.module(&mut functions.modules, program)?;
                let function = Arc::new(module.function(kernel)?);
                functions.by_kernel.insert((*program, kernel), function.clone());
                function
            }
        };
        drop(functions);
        function.allow(*shared_bytes)?;
        Ok(function)
    }

    fn module(
        &self,
        modules: &mut HashMap<KernelProgram, Arc<Module>>,
        program: &KernelProgram,
    ) -> Result<Arc<Module>> {
        if let Some(module) = modules.get(program) {
            return Ok(module.clone());
        }
        let code = compile::cached(program.body.name(), &program.source(DEVICE), &self.architecture)
            .map_err(|log| Error::new(ErrorKind::Other, format!("cuda: {log}")))?;
        let module = Arc::new(Module::load(&self.context, &code)?);
        modules.insert(*program, module.clone());
        Ok(module)
    }

    /// Whether streams here may write to memory of `peer`.
    pub(crate) fn has_peer(&self, peer: &Arc<CudaContext>) -> bool {
        let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers.iter().any(|known| std::ptr::eq(known.as_ptr(), Arc::as_ptr(peer)))
    }

    /// Lets streams here write to memory of `peer`; false where they cannot.
    fn reach(&self, peer: &Arc<CudaContext>) -> Result<bool> {
        self.enter()?;
        let reached = self.context.reach(peer)?;
        if reached && !self.has_peer(peer) {
            let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
            peers.retain(|known| known.strong_count() > 0);
            peers.push(Arc::downgrade(peer));
        }
        Ok(reached)
    }

    /// Binds the context, unless the device is lost.
    pub(crate) fn enter(&self) -> Result<()> {
        match self.lost.get() {
            Some(error) => Err(error.clone()),
            None => self.context.bind(),
        }
    }

    /// Records a failure that makes the device unusable.
    pub(crate) fn note<T>(&self, outcome: Result<T>) -> Result<T> {
        if let Err(error) = &outcome
            && error.kind == ErrorKind::DeviceLost
        {
            let _ = self.lost.set(error.clone());
        }
        outcome
    }
}

/// Opens cuBLASLt. Without it the device works, with large products by slower kernels.
fn open_blas(context: &Arc<CudaContext>) -> Option<Blas> {
    if !Library::CublasLt.is_present() {
        tracing::warn!("large products will be slow: {}", Library::CublasLt.remedy());
        return None;
    }
    guarded("opening cuBLASLt", || Blas::new(context))
        .inspect_err(|error| tracing::warn!(%error, "large products will be slow: update cuBLASLt"))
        .ok()
}

/// An open NVIDIA device.
pub(crate) struct CudaDevice {
    info: DeviceInfo,
    shared: Arc<CudaDeviceState>,
    transfers: Arc<Mutex<Transfers>>,
    monitor: Option<Monitor>,
}

impl CudaDevice {
    /// Opens device number `index`.
    ///
    /// # Errors
    /// `Invalid` if there is no such device, `Unsupported` below compute capability 8.0, or the driver's
    /// error.
    pub(crate) fn open(index: usize) -> Result<CudaDevice> {
        let count = devices().map_err(|absent| Error::invalid(format!("cuda: {absent}")))?.len();
        if index >= count {
            return Err(Error::invalid(format!("cuda:{index}: there are {count} devices, from 0")));
        }
        guarded("opening a device", || {
            let facts = Facts::of(index)?;
            if facts.capability < CAPABILITY_MIN {
                let message = format!(
                    "cuda:{index} has compute capability {}; {CAPABILITY_MIN} is needed (in tenths)",
                    facts.capability
                );
                return Err(Error::unsupported(message));
            }
            let context = CudaContext::retain(facts.device)?;
            let blas = open_blas(&context);
            let architecture = match facts.used_as == facts.capability {
                true => compile::architecture(facts.capability),
                false => compile::nearest_ptx(facts.used_as),
            };
            let early = architecture.follows() && std::env::var(EARLY_VARIABLE).as_deref() != Ok("0");
            let target = PlanTarget {
                capability: facts.used_as,
                wgmma: architecture.has_wgmma(),
                multiprocessors: facts.multiprocessors,
                shared_bytes_max: facts.shared_bytes_max,
                blas: blas.is_some(),
                scratch: DeviceRange { address: 0, bytes: 0 },
            };
            let events = EventPool::new(&context);
            let transfers = Arc::new(Mutex::new(Transfers::new(&context, &events)?));
            let info = facts.info(index, blas.is_some());
            let shared = CudaDeviceState {
                context,
                blas,
                target,
                events,
                architecture,
                early,
                functions: Mutex::default(),
                told_slow: Mutex::default(),
                peers: Mutex::default(),
                lost: OnceLock::new(),
            };
            Ok(CudaDevice { info, shared: Arc::new(shared), transfers, monitor: Monitor::new(&facts.pci) })
        })
    }

    /// Runs a transfer between a slice and `len` bytes of host memory.
    fn transfer(
        &self,
        slice: &Slice,
        len: usize,
        run: impl FnOnce(&Transfers, &CudaMemory) -> Result<()>,
    ) -> Result<()> {
        let memory = CudaMemory::of(slice)?;
        if len as u64 != slice.bytes || !memory.is_in(&self.shared.context) {
            return Err(Error::invalid(format!(
                "cuda: {len} bytes for a slice of {} of this device",
                slice.bytes
            )));
        }
        self.shared.enter()?;
        memory.settle();
        if len == 0 {
            return Ok(());
        }
        let transfers = self.transfers.lock().unwrap_or_else(PoisonError::into_inner);
        self.shared.note(run(&transfers, memory))
    }
}

impl Device for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn limits(&self) -> DeviceLimits {
        DeviceLimits {
            allocation_bytes_max: to_u64(self.info.memory.0),
            alignment_bytes: plan::ALIGNMENT_BYTES,
            imports_host_memory: false,
            kv_page_tokens: plan::KV_PAGE_TOKENS,
            replay_pays: true,
            copies_beside: true,
        }
    }

    fn support(&self, sig: &OpSig) -> Support {
        plan::support(sig, &self.shared.target)
    }

    fn alloc(&self, bytes: u64, role: BufferUsage) -> Result<Slice> {
        self.shared.enter()?;
        let memory = self.shared.note(CudaMemory::new(&self.shared.context, bytes, role))?;
        Ok(Slice::whole(Arc::new(memory)))
    }

    fn import(&self, _: Arc<dyn HostMemory>) -> Result<Slice> {
        Err(Error::unsupported("cuda: this device has its own memory; copy into it"))
    }

    fn reaches(&self, memory: &Slice) -> bool {
        let Some(memory) = CudaMemory::of(memory).ok().filter(|memory| memory.is_on_device()) else {
            return false;
        };
        let reached = self.shared.reach(memory.context());
        reached
            .inspect_err(|error| tracing::warn!(device = %self.info.id, %error, "no copies to a peer"))
            .unwrap_or(false)
    }

    fn write(&self, to: &Slice, data: &[u8]) -> Result<()> {
        self.transfer(to, data.len(), |transfers, memory| transfers.write(memory, to.offset, data))
    }

    fn read(&self, from: &Slice, data: &mut [u8]) -> Result<()> {
        self.transfer(from, data.len(), |transfers, memory| transfers.read(memory, from.offset, data))
    }

    fn pin(&self, memory: Arc<dyn SharedMemory>) -> Result<Option<Pinned>> {
        self.shared.enter()?;
        // not recorded, since a range that cannot be pinned does not make the device unusable
        pinned::pin(&self.shared.context, &self.transfers, memory)
    }

    fn queue(&self) -> Result<Box<dyn Queue>> {
        self.shared.enter()?;
        Ok(Box::new(self.shared.note(CudaQueue::new(self.shared.clone()))?))
    }

    fn memory_free(&self) -> Option<Bytes> {
        self.shared.enter().ok()?;
        let (free, _) = result::mem_get_info().ok()?;
        Some(Bytes(free as f64))
    }

    fn health(&self) -> Health {
        self.monitor.as_ref().map(Monitor::health).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_older_capability_is_taken() {
        for (text, capability) in [("8.0", 80), ("8.9", 89), ("9.0", 90)] {
            assert_eq!(older_capability(text, 90).unwrap(), capability);
        }
        for wrong in ["7.5", "9.1", "12.0", "89", "8.x", "8.10", ""] {
            let error = older_capability(wrong, 90).unwrap_err().to_string();
            assert!(error.contains("from 8.0 to this device's 9.0"), "{error}");
        }
    }
}

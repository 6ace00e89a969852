//! The backend and its devices.

use crate::health::HealthReader;
use crate::isa::Isa;
use crate::memory::{self, CpuBuffer, CpuMemoryBudget};
use crate::pool::ThreadPool;
use crate::program::check_sig;
use crate::queue::CpuQueue;
use crate::topology;
use mixfleet_hal::cast::{to_u32, to_u64};
use mixfleet_hal::memory::{Pinned, SharedMemory};
use mixfleet_hal::units::Bytes;
use mixfleet_hal::{
    Absent, Backend, BufferUsage, DType, Device, DeviceInfo, DeviceKind, DeviceLimits, Error, Health,
    HostMemory, OpSig, Queue, Result, Slice, Support,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Preferred KV page size in tokens: two AVX-512 vectors of keys, or 4 KiB per head of 64 in bf16.
const KV_PAGE_TOKENS: u32 = 32;

/// Enumerates and opens sets of cores.
///
/// Selectors: `cpu` (all cores that this process may run on), `cpu@0`, `cpu@1-3`, `cpu@0,2`. The environment
/// variable `MIXFLEET_CPU_ISA` lowers the instruction level.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuBackend;

impl CpuBackend {
    /// Opens `selector` at instruction level `isa`, ignoring the environment.
    ///
    /// # Errors
    /// `Invalid` for a selector without cores, or an unsupported level.
    pub fn open_at(&self, selector: &str, isa: Isa) -> Result<Arc<dyn Device>> {
        if !Isa::available().contains(&isa) {
            return Err(Error::invalid(format!("this processor has no {isa}")));
        }
        let allowed = topology::cores_allowed();
        let cores = topology::select(selector, &allowed)?;
        Ok(Arc::new(CpuDevice::new(&cores, cores == allowed, isa)?))
    }
}

impl CpuBackend {
    /// Opens host memory as the device `id`, whose last core copies.
    ///
    /// # Errors
    /// When it has no thread.
    pub fn open_memory(&self, id: &str) -> Result<Arc<dyn Device>> {
        let allowed = topology::cores_allowed();
        let last = &allowed[allowed.len().saturating_sub(1)..];
        let mut device = CpuDevice::new(last, false, Isa::chosen()?)?;
        device.info.id = id.to_owned();
        Ok(Arc::new(device))
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn probe(&self) -> std::result::Result<Vec<DeviceInfo>, Absent> {
        let isa = Isa::chosen().map_err(|e| Absent::new(e.detail))?;
        Ok(vec![describe(&topology::cores_allowed(), true, isa)])
    }

    fn open(&self, selector: &str) -> Result<Arc<dyn Device>> {
        self.open_at(selector, Isa::chosen()?)
    }
}

/// Describes a set of cores; `all` means every core there is.
fn describe(cores: &[usize], all: bool, isa: Isa) -> DeviceInfo {
    let (name, list, version) = (topology::model_name(), topology::ranges(cores), env!("CARGO_PKG_VERSION"));
    DeviceInfo {
        id: if all { "cpu".into() } else { format!("cpu@{list}") },
        backend: "cpu".into(),
        kind: DeviceKind::Cpu,
        memory: Bytes(topology::memory_bytes() as f64),
        compute_units: to_u32(cores.len()),
        fingerprint: format!("cpu {version}; {name}; {} cores; {isa}", cores.len()),
        name,
        notes: vec![("instructions".into(), isa.to_string()), ("cores".into(), list)],
    }
}

struct CpuDevice {
    info: DeviceInfo,
    health: HealthReader,
    budget: Arc<CpuMemoryBudget>,
    pool: Arc<ThreadPool>,
}

impl CpuDevice {
    fn new(cores: &[usize], all: bool, isa: Isa) -> Result<Self> {
        let info = describe(cores, all, isa);
        // if the memory size is unknown, the system itself will refuse
        let limit = if info.memory.0 > 0.0 { to_u64(info.memory.0) } else { u64::MAX };
        let budget = Arc::new(CpuMemoryBudget { used: AtomicU64::new(0), limit });
        let health = HealthReader::new("/", cores);
        Ok(CpuDevice { info, health, budget, pool: Arc::new(ThreadPool::new(cores, isa)?) })
    }
}

impl Device for CpuDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn limits(&self) -> DeviceLimits {
        DeviceLimits {
            allocation_bytes_max: self.budget.limit,
            alignment_bytes: 1,
            imports_host_memory: true,
            kv_page_tokens: KV_PAGE_TOKENS,
            replay_pays: false,
            // all cores work on one batch, which locks the pools that it uses
            copies_beside: false,
        }
    }

    fn support(&self, sig: &OpSig) -> Support {
        if check_sig(sig).is_err() {
            return Support::No;
        }
        let f16 = sig.operands().iter().any(|o| o.dtype == DType::F16);
        if f16 && self.pool.isa() == Isa::Portable { Support::Emulated } else { Support::Native }
    }

    fn alloc(&self, bytes: u64, _role: BufferUsage) -> Result<Slice> {
        Ok(Slice::whole(Arc::new(CpuBuffer::owned(bytes, &self.budget)?)))
    }

    fn import(&self, memory: Arc<dyn HostMemory>) -> Result<Slice> {
        self.pool.depend_on(&memory);
        Ok(Slice::whole(Arc::new(CpuBuffer::imported(memory))))
    }

    fn reaches(&self, _: &Slice) -> bool {
        false
    }

    fn write(&self, to: &Slice, data: &[u8]) -> Result<()> {
        memory::write(to, data)
    }

    fn read(&self, from: &Slice, data: &mut [u8]) -> Result<()> {
        memory::read(from, data)
    }

    fn pin(&self, _: Arc<dyn SharedMemory>) -> Result<Option<Pinned>> {
        Ok(None)
    }

    fn queue(&self) -> Result<Box<dyn Queue>> {
        Ok(Box::new(CpuQueue::new(self.pool.clone())))
    }

    fn memory_free(&self) -> Option<Bytes> {
        let budget = self.budget.limit.saturating_sub(self.budget.used.load(Ordering::Relaxed));
        Some(Bytes(topology::memory_free_bytes()?.min(budget) as f64))
    }

    fn health(&self) -> Health {
        self.health.read()
    }
}

//! A simulated device with correct results: the CPU backend or another device computes, and the profile
//! determines the time.

use crate::clock::{RealClock, SimulatedClock};
use crate::costs::CostCache;
use crate::device::SimulatedPart;
use crate::memory::Charge;
use crate::queue::{BatchRunner, SimQueue};
use mixfleet_cpu::CpuBackend;
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hal::units::{Bytes, Seconds};
use mixfleet_hal::{
    Backend, Buffer, BufferUsage, Cmd, DType, Device, DeviceInfo, DeviceLimits, Error, Health, HostMemory,
    OpSig, Queue, Result, Scalar, Slice, Support, Ticket,
};
use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

/// Safety margin on a measured dilation, for other work and other shapes.
const MARGIN: f64 = 1.5;
const PROBE_TIMEOUT: Duration = Duration::from_secs(60);

/// A device that computes on the host's cores and takes the time that its profile predicts.
pub struct ComputeDevice {
    part: SimulatedPart,
    inner: Arc<dyn Device>,
}

/// A buffer of the CPU backend that counts against the simulated memory.
#[derive(Debug)]
struct CountedBuffer {
    inner: Slice,
    role: BufferUsage,
    _charge: Charge,
}

impl Buffer for CountedBuffer {
    fn size_bytes(&self) -> u64 {
        self.inner.bytes
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Returns the same bytes as a slice of the CPU backend.
fn unwrapped(slice: &Slice) -> Result<Slice> {
    let inner = &counted(slice)?.inner;
    if slice.offset.checked_add(slice.bytes).is_none_or(|end| end > inner.bytes) {
        return Err(Error::invalid("a slice leaves its buffer"));
    }
    Ok(inner.range(slice.offset, slice.bytes))
}

fn counted(slice: &Slice) -> Result<&CountedBuffer> {
    let counted = slice.buffer.as_any().downcast_ref::<CountedBuffer>();
    counted.ok_or_else(|| Error::invalid("a slice belongs to another device"))
}

impl ComputeDevice {
    /// Creates a device called `id` that follows `profile` on `clock` and computes on all of the host's
    /// cores. The clock must be slow enough for the host to keep up; see [`measured_dilation`].
    ///
    /// # Errors
    /// `Invalid` for an implausible profile; errors of the CPU backend.
    pub fn new(id: &str, profile: DeviceProfile, clock: Arc<dyn SimulatedClock>) -> Result<Self> {
        let part = SimulatedPart::new(id, profile, clock, "computed by the host's cores")?;
        Ok(ComputeDevice { part, inner: CpuBackend.open("cpu")? })
    }

    /// Like [`ComputeDevice::new`], but `inner` computes.
    ///
    /// # Errors
    /// `Invalid` for an implausible profile.
    pub fn computed_by(
        inner: Arc<dyn Device>,
        id: &str,
        profile: DeviceProfile,
        clock: Arc<dyn SimulatedClock>,
    ) -> Result<Self> {
        let work = format!("computed by {}", inner.info().id);
        Ok(ComputeDevice { part: SimulatedPart::new(id, profile, clock, &work)?, inner })
    }

    /// Like [`ComputeDevice::new`], on a real clock that is as slow as measurements show this host needs.
    ///
    /// # Errors
    /// As for [`ComputeDevice::new`].
    pub fn on_measured_clock(id: &str, profile: DeviceProfile) -> Result<Self> {
        let dilation = measured_dilation(&profile)?;
        ComputeDevice::new(id, profile, Arc::new(RealClock::new(dilation)?))
    }

    fn wrap(&self, inner: Slice, role: BufferUsage, charge: Charge) -> Slice {
        Slice::whole(Arc::new(CountedBuffer { inner, role, _charge: charge }))
    }
}

/// Measures by what factor this host is slower than the profile, at most, over a few operations as in
/// serving: large and small `Gemm`, a norm, attention. Includes a margin of one half, and is at least 1.
///
/// # Errors
/// As for [`ComputeDevice::new`].
pub fn measured_dilation(profile: &DeviceProfile) -> Result<f64> {
    let costs = CostCache::new(profile.clone())?;
    let cpu = CpuBackend.open("cpu")?;
    let mut queue = cpu.queue()?;
    let mut most: f64 = 1.0;
    for sig in probes() {
        let operands = sig.operands();
        let slices = operands.iter().map(|operand| {
            let mixfleet_hal::op::Extent::Exactly(elements) = operand.extent else {
                return Err(Error::invalid("a probe has no pools"));
            };
            cpu.alloc(elements * operand.dtype.size_bytes(), BufferUsage::Activations)
        });
        let cmds = [Cmd::new(sig, &slices.collect::<Result<Vec<_>>>()?)?];
        let mut least = f64::INFINITY;
        for _ in 0..3 {
            let ticket = queue.submit(&cmds)?;
            least = least.min(queue.wait(ticket, PROBE_TIMEOUT)?.time.0);
        }
        most = most.max(least / costs.work(&cmds).0);
    }
    Ok((most * MARGIN).ceil())
}

/// Returns operations over buffers of zeros, which cost as much as any others.
fn probes() -> [OpSig; 4] {
    let gemm = |m| {
        let (n, k, bias, accumulate) = (1024, 1024, false, false);
        OpSig::Gemm { m, n, k, x: DType::Bf16, weight: DType::Bf16, out: DType::Bf16, bias, accumulate }
    };
    let (x, weight, out) = (DType::F32, DType::Bf16, DType::Bf16);
    let norm = OpSig::RmsNorm { rows: 64, cols: 1024, eps: Scalar(1e-5), x, weight, out };
    [gemm(1), gemm(256), norm, OpSig::SiluMul { elements: 64 * 4096, x: DType::Bf16 }]
}

impl Device for ComputeDevice {
    mixfleet_hal::forward_device!(self => self.inner; pin);

    fn info(&self) -> &DeviceInfo {
        &self.part.info
    }

    fn limits(&self) -> DeviceLimits {
        let inner = self.inner.limits();
        let allocation_bytes_max = inner.allocation_bytes_max.min(self.part.budget.limit());
        DeviceLimits { allocation_bytes_max, replay_pays: false, ..inner }
    }

    fn support(&self, sig: &OpSig) -> Support {
        match (self.inner.support(sig), self.part.support(sig)) {
            (Support::No, _) | (_, Support::No) => Support::No,
            (_, by_profile) => by_profile,
        }
    }

    fn alloc(&self, bytes: u64, role: BufferUsage) -> Result<Slice> {
        let charge = self.part.budget.charge(bytes)?;
        let inner = self.inner.alloc(bytes, role).map_err(|error| error.context(&self.part.info.id))?;
        Ok(self.wrap(inner, role, charge))
    }

    fn import(&self, memory: Arc<dyn HostMemory>) -> Result<Slice> {
        let charge = self.part.budget.charge(memory.as_bytes().len() as u64)?;
        Ok(self.wrap(self.inner.import(memory)?, BufferUsage::Weights, charge))
    }

    fn reaches(&self, _: &Slice) -> bool {
        false
    }

    fn write(&self, to: &Slice, data: &[u8]) -> Result<()> {
        let (role, to) = (counted(to)?.role, unwrapped(to)?);
        self.part.copying(data.len(), role, |profile| &profile.host_to_device, || self.inner.write(&to, data))
    }

    fn read(&self, from: &Slice, data: &mut [u8]) -> Result<()> {
        let (role, from) = (counted(from)?.role, unwrapped(from)?);
        self.part.copying(
            data.len(),
            role,
            |profile| &profile.device_to_host,
            || self.inner.read(&from, data),
        )
    }

    fn queue(&self) -> Result<Box<dyn Queue>> {
        let work = Cores { queue: self.inner.queue()?, first: None };
        Ok(Box::new(SimQueue::new(work, self.part.costs.clone(), self.part.schedule.clone())))
    }

    fn memory_free(&self) -> Option<Bytes> {
        let own = Bytes(self.part.budget.free() as f64);
        Some(self.inner.memory_free().map_or(own, |host| host.min(own)))
    }

    fn health(&self) -> Health {
        Health::default()
    }
}

/// Runs batches on a queue of the CPU backend.
struct Cores {
    queue: Box<dyn Queue>,
    /// Ticket of the first batch; the others follow without gaps.
    first: Option<Ticket>,
}

impl BatchRunner for Cores {
    fn start(&mut self, cmds: &[Cmd]) -> Result<()> {
        let translated = |cmd: &Cmd| {
            let args = cmd.args().iter().map(unwrapped).collect::<Result<Vec<_>>>()?;
            Cmd::new(*cmd.sig(), &args)
        };
        let ticket = self.queue.submit(&cmds.iter().map(translated).collect::<Result<Vec<_>>>()?)?;
        self.first.get_or_insert(ticket);
        Ok(())
    }

    fn finish(&mut self, ticket: Ticket, timeout: Duration) -> Result<Option<Seconds>> {
        let Some(first) = self.first else { return Ok(None) };
        let inner = Ticket(first.0 + ticket.0 - 1);
        Ok(Some(self.queue.wait(inner, timeout)?.time))
    }
}

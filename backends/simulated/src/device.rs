//! The common part of both kinds of simulated device, and the time-only device.

use crate::clock::SimulatedClock;
use crate::costs::{CostCache, GroupTimes};
use crate::memory::{BufferContents, SharedStore, SimulatedMemoryBudget, WriteEffect, lock};
use crate::queue::{Digests, SimQueue};
use crate::timeline::Schedule;
use mixfleet_hal::cast::to_u64;
use mixfleet_hal::catalog::SIMULATED;
use mixfleet_hal::memory::{Pinned, SharedMemory};
use mixfleet_hal::profile::{CopyCost, DeviceProfile};
use mixfleet_hal::units::{Bytes, FlopPerSecond, GB};
use mixfleet_hal::{
    BufferUsage, DType, Device, DeviceInfo, DeviceKind, DeviceLimits, Error, Health, HostMemory, MatrixKind,
    OpSig, Operand, Queue, Result, Slice, Support,
};
use std::sync::Arc;

/// Preferred KV page size in tokens, as in most attention kernels.
const KV_PAGE_TOKENS: u32 = 16;

/// A part described by a profile.
pub(crate) struct SimulatedPart {
    pub(crate) info: DeviceInfo,
    pub(crate) budget: Arc<SimulatedMemoryBudget>,
    pub(crate) costs: Arc<CostCache>,
    pub(crate) schedule: Arc<Schedule>,
}

impl SimulatedPart {
    /// Creates a part; `work` says how its work is done.
    ///
    /// # Errors
    /// `Invalid` for an implausible profile.
    pub(crate) fn new(
        id: &str,
        profile: DeviceProfile,
        clock: Arc<dyn SimulatedClock>,
        work: &str,
    ) -> Result<Self> {
        SimulatedPart::of(id, CostCache::new(profile)?, clock, work)
    }

    fn of(id: &str, costs: CostCache, clock: Arc<dyn SimulatedClock>, work: &str) -> Result<Self> {
        let profile = costs.profile();
        let (version, memory) = (env!("CARGO_PKG_VERSION"), to_u64(profile.memory.0));
        let rate = |(dtype, rate): &(DType, FlopPerSecond)| format!("{dtype} {:.1}", rate.0 / 1e12);
        let rates: Vec<String> = profile.compute.iter().map(rate).collect();
        let dilation = clock.dilation();
        let note = |what: &str, value: String| (what.to_owned(), value);
        let info = DeviceInfo {
            id: id.to_owned(),
            backend: "sim".to_owned(),
            name: format!(
                "{SIMULATED}{}",
                if profile.name.is_empty() { &profile.fingerprint } else { &profile.name }
            ),
            kind: DeviceKind::Simulated,
            memory: Bytes(memory as f64),
            compute_units: 1,
            fingerprint: format!("sim {version}; {work}; {:016x}", costs.digest()),
            notes: vec![
                note(DeviceInfo::WORK, work.to_owned()),
                note("clock", format!("1 simulated second = {dilation} real seconds")),
                note("bandwidth", format!("{:.0} GB/s", profile.bandwidth.0 / GB)),
                note("arithmetic", format!("{} TFLOP/s", rates.join(", "))),
                note("measured points", profile.points.len().to_string()),
            ],
        };
        tracing::info!(device = id, work, "1 simulated second = {dilation} real seconds");
        let schedule = Schedule::new(id, clock);
        Ok(SimulatedPart {
            info,
            budget: SimulatedMemoryBudget::new(id, memory),
            costs: Arc::new(costs),
            schedule,
        })
    }

    /// Copies between host and device, which take the predicted time. KV is large, and its copies run beside
    /// steps, whose memory bandwidth they use.
    pub(crate) fn copying(
        &self,
        bytes: usize,
        role: BufferUsage,
        cost: impl FnOnce(&DeviceProfile) -> &CopyCost,
        copy: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let (clock, profile) = (self.schedule.clock(), self.costs.profile());
        let time = CostCache::copy(cost(profile), bytes);
        let end = clock.now() + time;
        if role == BufferUsage::Kv {
            self.schedule.lend_memory(time.min(Bytes(bytes as f64) / profile.bandwidth));
        }
        copy()?;
        clock.wait_until(end);
        Ok(())
    }

    /// Returns what the profile says about the dtypes, for operations that could run at all.
    pub(crate) fn support(&self, sig: &OpSig) -> Support {
        let operands = sig.operands();
        let floats = operands.iter().all(|operand| {
            let steps = ["ids", "slots", "pages", "range", "query_start", "context", "from", "to"];
            let choices = ["chosen", "order", "starts"];
            let integers = match sig {
                OpSig::Sample { .. } => operand.name != "logits",
                OpSig::CopyColumns { .. } => false,
                // codes, and scales that are integers, are packed in words
                OpSig::QuantisedEmbed { .. }
                | OpSig::QuantisedGemm { .. }
                | OpSig::GroupedGemm { weight: MatrixKind::Quantised(_), .. } => operand.dtype == DType::U32,
                _ => steps.contains(&operand.name) || choices.contains(&operand.name),
            };
            (operand.dtype == DType::U32) == integers
        });
        let codes = |operand: &Operand| operand.dtype != DType::I8 || sig.has_scales(operand);
        if sig.check().is_err() || !floats || !operands.iter().all(codes) {
            return Support::No;
        }
        let rates = &self.costs.profile().compute;
        let has = |dtype: DType| rates.is_empty() || rates.iter().any(|(known, _)| *known == dtype);
        let x = match *sig {
            OpSig::Gemm { x, .. }
            | OpSig::GroupedGemm { x, .. }
            | OpSig::QuantisedGemm { x, .. }
            | OpSig::AttnPrefill { x, .. }
            | OpSig::AttnDecode { x, .. } => x,
            _ => return Support::Native,
        };
        match (has(x), x) {
            (true, _) => Support::Native,
            (false, DType::F8E4m3) => Support::No,
            (false, _) => Support::Emulated,
        }
    }
}

/// A device that takes the time that its profile predicts without computing. Results are hashes of everything
/// read; see the crate documentation.
pub struct TimeOnlyDevice {
    part: SimulatedPart,
    store: SharedStore,
}

impl TimeOnlyDevice {
    /// Creates a device called `id` that follows `profile` on `clock`.
    ///
    /// # Errors
    /// `Invalid` for an implausible profile.
    pub fn new(id: &str, profile: DeviceProfile, clock: Arc<dyn SimulatedClock>) -> Result<Self> {
        let part = SimulatedPart::new(id, profile, clock, DeviceInfo::TIME_ONLY)?;
        Ok(TimeOnlyDevice { part, store: SharedStore::default() })
    }

    /// Creates a device that stands for several which share a model: it has the memory of `profile`, copies
    /// as that says, and takes `times` for what a model's layers do.
    ///
    /// # Errors
    /// `Invalid` for an implausible profile.
    pub fn of_group(
        id: &str,
        profile: DeviceProfile,
        clock: Arc<dyn SimulatedClock>,
        times: Arc<dyn GroupTimes>,
    ) -> Result<Self> {
        let costs = CostCache::new(profile)?.of_group(times);
        let part = SimulatedPart::of(id, costs, clock, DeviceInfo::TIME_ONLY)?;
        Ok(TimeOnlyDevice { part, store: SharedStore::default() })
    }
}

impl Device for TimeOnlyDevice {
    fn info(&self) -> &DeviceInfo {
        &self.part.info
    }

    fn limits(&self) -> DeviceLimits {
        DeviceLimits {
            allocation_bytes_max: self.part.budget.limit(),
            alignment_bytes: 1,
            imports_host_memory: true,
            kv_page_tokens: KV_PAGE_TOKENS,
            // recorded steps are padded to larger ones, which would blur the predicted times
            replay_pays: false,
            copies_beside: true,
        }
    }

    fn support(&self, sig: &OpSig) -> Support {
        match *sig {
            // a sum and a query need an element each
            OpSig::AttnPrefill { kv, .. } | OpSig::AttnDecode { kv, .. } if kv.value_dim() < 2 => Support::No,
            _ => self.part.support(sig),
        }
    }

    fn alloc(&self, bytes: u64, role: BufferUsage) -> Result<Slice> {
        BufferContents::alloc(&self.store, bytes, role, self.part.budget.charge(bytes)?)
    }

    fn import(&self, memory: Arc<dyn HostMemory>) -> Result<Slice> {
        let charge = self.part.budget.charge(memory.as_bytes().len() as u64)?;
        Ok(BufferContents::import(&self.store, memory, charge))
    }

    fn reaches(&self, _: &Slice) -> bool {
        false
    }

    fn write(&self, to: &Slice, data: &[u8]) -> Result<()> {
        check_length(to, data.len())?;
        let role = lock(&self.store).content(to)?.0.role();
        self.part.copying(
            data.len(),
            role,
            |profile| &profile.host_to_device,
            || {
                lock(&self.store).edit(to, WriteEffect::Any)?.copy_from_slice(data);
                Ok(())
            },
        )
    }

    fn read(&self, from: &Slice, data: &mut [u8]) -> Result<()> {
        check_length(from, data.len())?;
        let role = lock(&self.store).content(from)?.0.role();
        self.part.copying(
            data.len(),
            role,
            |profile| &profile.device_to_host,
            || {
                data.copy_from_slice(lock(&self.store).bytes(from)?);
                Ok(())
            },
        )
    }

    fn pin(&self, _: Arc<dyn SharedMemory>) -> Result<Option<Pinned>> {
        Ok(None)
    }

    fn queue(&self) -> Result<Box<dyn Queue>> {
        let work = Digests(self.store.clone());
        Ok(Box::new(SimQueue::new(work, self.part.costs.clone(), self.part.schedule.clone())))
    }

    fn memory_free(&self) -> Option<Bytes> {
        Some(Bytes(self.part.budget.free() as f64))
    }

    fn health(&self) -> Health {
        Health::default()
    }
}

fn check_length(slice: &Slice, length: usize) -> Result<()> {
    if slice.bytes != length as u64 {
        return Err(Error::invalid(format!("{length} bytes of host memory for a slice of {}", slice.bytes)));
    }
    Ok(())
}

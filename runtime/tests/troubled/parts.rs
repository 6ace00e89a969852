//! Parts that are slower than claimed, or return wrong results.

use super::hosts::Host;
use super::{Kind, World};
use crate::fleet::wayward::Wayward;
use mixfleet_cpu::CpuBackend;
use mixfleet_hal::fault::{Fault, FaultPlan};
use mixfleet_hal::{Backend, Device, Error, ErrorKind};
use mixfleet_runtime::env::Env;
use mixfleet_simulated::{ComputeDevice, FaultyDevice, TimeOnlyDevice};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Maximum size of a step's result on the host, which is smaller than any KV. Wrong KV could not be detected.
const RESULT_BYTES_MAX: usize = 96;
/// Factor by which a part is slower than its maker claims.
const BOAST: f64 = 16.0;

/// Equal tokens that stop a part: no other prompt has two of them in a row, and no answer to one. Two equal
/// numbers can also be positions or pages of two sequences of a step.
pub(super) fn poison(vocabulary: u32) -> [u32; 4] {
    [vocabulary - 1; 4]
}

/// The device of a worker, and its maker's claim.
pub(super) struct Part {
    pub(super) device: Arc<dyn Device>,
    /// The device's commands that fail, and those that hang.
    pub(super) struck: [Arc<FaultyDevice>; 2],
    pub(super) said_flops: f64,
}

impl World {
    /// How fast a new part is.
    pub(super) fn flops(&self) -> f64 {
        [2e8, 4e8, 8e8][self.below(3) as usize]
    }

    /// A simulated part, which computes if those of this kind do.
    pub(super) fn simulated(&self, name: &str, flops: f64, host: &Host, kind: &Kind) -> Arc<dyn Device> {
        let (profile, clock) = (super::profile(flops), Arc::new(host.clone()));
        if !kind.computes {
            return Arc::new(TimeOnlyDevice::new(name, profile, clock).unwrap());
        }
        let inner = self.computer.get_or_init(|| {
            let cores = std::thread::available_parallelism().map_or(1, usize::from) as u64;
            CpuBackend.open(&format!("cpu@{}", self.seed % cores)).unwrap()
        });
        let inner = inner.clone();
        Arc::new(ComputeDevice::computed_by(inner, name, profile, clock).unwrap())
    }

    /// The part of a new worker.
    pub(super) fn part(&self, name: &str, host: &Host, kind: &Kind) -> Part {
        let flops = self.flops();
        let simulated = self.simulated(name, flops, host, kind);
        let plan = |fault, rate| FaultPlan::at_rate(fault, rate, self.env.random());
        let hangs = plan(Fault::Hang, self.workload.device_hang);
        let hangs = Arc::new(FaultyDevice::new(simulated, hangs));
        let fails = plan(Fault::Fail, self.workload.device_fail);
        let fails = Arc::new(FaultyDevice::new(hangs.clone(), fails));
        let said_flops = if self.strikes(self.workload.boasts) {
            self.count("parts that boast", 1);
            flops * BOAST
        } else {
            flops
        };
        Part { device: self.wayward(fails.clone()), struck: [fails, hangs], said_flops }
    }

    /// A device that fails on poisoned tokens, and sometimes returns wrong results.
    fn wayward(&self, inner: Arc<dyn Device>) -> Arc<dyn Device> {
        if self.workload.poison == 0 && self.workload.lies == 0.0 {
            return inner;
        }
        let poison: Vec<u8> =
            poison(self.kinds[0].checkpoint.config.vocab).iter().flat_map(|id| id.to_le_bytes()).collect();
        let world = self.clone();
        let writing = move |_: &_, data: &[u8]| {
            if data.windows(poison.len()).step_by(4).any(|words| words == poison) {
                world.count("devices poisoned", 1);
                return Err(Error::new(ErrorKind::DeviceLost, "it fell off the bus"));
            }
            Ok(())
        };
        let (world, reads) = (self.clone(), AtomicU64::new(0));
        let lies = FaultPlan::at_rate(Fault::BitFlip, self.workload.lies, self.env.random());
        let reading = move |_: &_, data: &mut [u8]| {
            let read = reads.fetch_add(1, Ordering::Relaxed);
            if data.len() <= RESULT_BYTES_MAX && lies.at(read).is_some() && !world.over() {
                world.count("results that are nonsense", 1);
                data.fill(0xFF);
            }
            Ok(())
        };
        Arc::new(Wayward::over(inner).writing(writing).reading(reading))
    }
}

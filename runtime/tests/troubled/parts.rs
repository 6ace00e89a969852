//! Parts that are slower than claimed, or return wrong results.

use super::World;
use super::hosts::Host;
use crate::fleet::wayward::Wayward;
use mixfleet_hal::fault::{Fault, FaultPlan};
use mixfleet_hal::{Device, Error, ErrorKind};
use mixfleet_runtime::env::Env;
use mixfleet_simulated::{FaultyDevice, TimeOnlyDevice};
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
    /// The part of a new worker.
    pub(super) fn part(&self, name: &str, host: &Host) -> Part {
        let flops = [2e8, 4e8, 8e8][self.below(3) as usize];
        let simulated = TimeOnlyDevice::new(name, super::profile(flops), Arc::new(host.clone())).unwrap();
        let plan = |fault, rate| FaultPlan::at_rate(fault, rate, self.env.random());
        let hangs = plan(Fault::Hang, self.workload.device_hang);
        let hangs = Arc::new(FaultyDevice::new(Arc::new(simulated), hangs));
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

//! The environment's time as the clock of simulated devices.

use mixfleet_hal::units::Seconds;
use mixfleet_runtime::env::{Env, SeededEnv};
use mixfleet_simulated::SimulatedClock;

/// A device clock with the environment's time.
pub(crate) struct WorldClock(pub(crate) SeededEnv);

impl SimulatedClock for WorldClock {
    fn now(&self) -> Seconds {
        self.0.now()
    }

    fn wait_until(&self, time: Seconds) {
        self.0.block_until(time);
    }

    fn dilation(&self) -> f64 {
        1.0
    }
}

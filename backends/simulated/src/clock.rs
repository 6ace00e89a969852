//! Clocks of simulated devices.

use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Error, Result};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Final part of a wait that is spun, because sleeping ends late by the kernel's timer slack (50 us on Linux)
/// and the wake-up.
const SPIN: Duration = Duration::from_micros(80);

/// Simulated time, which never goes back.
pub trait SimulatedClock: Send + Sync {
    /// Returns the simulated time since the clock began.
    fn now(&self) -> Seconds;

    /// Blocks until `time`.
    fn wait_until(&self, time: Seconds);

    /// Returns the number of real seconds per simulated second.
    fn dilation(&self) -> f64;
}

/// The host's clock, slowed down or sped up by a factor.
#[derive(Clone, Copy, Debug)]
pub struct RealClock {
    start: Instant,
    dilation: f64,
}

impl RealClock {
    /// Creates a clock on which one second takes `dilation` real seconds.
    ///
    /// # Errors
    /// `Invalid` unless `dilation` is a positive number.
    pub fn new(dilation: f64) -> Result<Self> {
        if !(dilation.is_finite() && dilation > 0.0) {
            return Err(Error::invalid(format!("a dilation of {dilation}: expected a positive number")));
        }
        Ok(RealClock { start: Instant::now(), dilation })
    }
}

impl SimulatedClock for RealClock {
    fn now(&self) -> Seconds {
        Seconds(self.start.elapsed().as_secs_f64() / self.dilation)
    }

    fn wait_until(&self, time: Seconds) {
        // a time that no Duration can hold is never reached
        let span = Duration::try_from_secs_f64(time.0.max(0.0) * self.dilation).unwrap_or(Duration::MAX);
        loop {
            let left = span.saturating_sub(self.start.elapsed());
            if left.is_zero() {
                return;
            }
            match left.checked_sub(SPIN) {
                Some(long) if !long.is_zero() => std::thread::sleep(long),
                _ => std::thread::yield_now(),
            }
        }
    }

    fn dilation(&self) -> f64 {
        self.dilation
    }
}

/// A clock that advances only while a thread waits for it, for tests in which an hour takes no time.
#[derive(Debug, Default)]
pub struct VirtualClock {
    now: Mutex<Seconds>,
}

impl SimulatedClock for VirtualClock {
    fn now(&self) -> Seconds {
        *self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_until(&self, time: Seconds) {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        *now = now.max(time);
    }

    fn dilation(&self) -> f64 {
        1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virtual_time_passes_by_waiting_and_never_goes_back() {
        let clock = VirtualClock::default();
        clock.wait_until(Seconds(3600.0));
        clock.wait_until(Seconds(1.0));
        assert_eq!(clock.now(), Seconds(3600.0));
    }

    #[test]
    fn a_real_clock_never_returns_early_and_wants_a_positive_factor() {
        let clock = RealClock::new(0.5).unwrap();
        let end = clock.now() + Seconds(2e-3);
        clock.wait_until(end);
        assert!(clock.now().0 >= end.0);
        clock.wait_until(Seconds(-1.0));
        for wrong in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(RealClock::new(wrong).is_err(), "{wrong}");
        }
    }
}

//! Devices for tests: one that fails as a [`mixfleet_hal::fault::FaultPlan`] says.

mod faulty;

pub use faulty::FaultyDevice;

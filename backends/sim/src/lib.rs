//! Devices for tests: one that fails as a [`mixfleet_hal::fault::FaultPlan`] says.

mod faulty;
mod shadow;

pub use faulty::FaultyDevice;

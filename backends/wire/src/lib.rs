//! Ways for KV between memories.
//!
//! [`Memory`] joins two ends in one process. [`Faulty`] puts the faults of a
//! [`FaultPlan`](mixfleet_hal::fault::FaultPlan) in front of any transport, so that whoever relies on
//! one can be tested against corruption, loss and silence.
//!
//! What is absent: any check of what arrived (the layer above hashes its blocks), any retry, any choice
//! of a way.

#![allow(unsafe_code)]

mod faulty;
mod memory;
mod region;

pub use faulty::Faulty;
pub use memory::Memory;
pub use region::HostRegion;

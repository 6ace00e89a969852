//! Devices that obey a profile or a plan of faults instead of being hardware.
//!
//! A [`TimeOnlyDevice`] takes the time that a [`mixfleet_hal::profile::DeviceProfile`] predicts and
//! computes no arithmetic. Its answers are hashes (`digest.rs`): each activation row carries one, which
//! follows from the row's inputs, the weights' first bytes, the position, and every byte of every KV
//! slot that attention reads. So the answers are the same however a prompt is cut into chunks, pages,
//! batches and devices, and another when KV is stale, missing or foreign. Whether logits mean anything
//! is nothing that such a device could tell.
//!
//! A [`ComputeDevice`] lets the CPU backend compute, on a clock that is slowed down as far as the
//! host is slower than the simulated part. A [`FaultyDevice`] makes any device fail by plan.
//!
//! Absent by design: files (the binary reads profiles and plans), real time in any result, and contention
//! between copies and commands (a copy does not wait for the queue, nor the queue for it).

#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![forbid(unsafe_code)]

mod backend;
mod clock;
mod compute;
mod costs;
mod device;
mod digest;
mod faulty;
mod kernels;
mod memory;

mod queue;
mod selector;
mod shadow;
mod slots;
mod timeline;

pub use backend::{SelectorFiles, SimBackend};
pub use clock::{RealClock, SimulatedClock, VirtualClock};
pub use compute::{ComputeDevice, measured_dilation};
pub use costs::GroupTimes;
pub use device::TimeOnlyDevice;
pub use faulty::FaultyDevice;

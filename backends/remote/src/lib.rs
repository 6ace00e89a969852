//! Devices of other processes, used over a connection.
//!
//! [`serve`] gives a device of this process to others, and [`RemoteDevice`] is such a device at the other
//! end. Commands, writes and the ends of batches follow each other on one connection without waiting for
//! answers: a batch whose results are known beforehand ([`Queue::submit_for`]) takes one way there and one
//! way back. `protocol.rs` has the messages.
//!
//! Absent by design: placement decisions, choice among connections, and retries. A connection that ended
//! fails every call, until [`Device::queue`] makes a new one and restores the buffers on it.
//!
//! [`Queue::submit_for`]: mixfleet_hal::Queue::submit_for
//! [`Device::queue`]: mixfleet_hal::Device::queue

#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![forbid(unsafe_code)]

mod code;
mod device;
mod fetched;
mod frame;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod fuzzed;
mod hello;
#[cfg(test)]
mod hostile;
mod protocol;
mod queue;
mod served;
mod server;
mod session;

pub use device::{RemoteDevice, WeightsRecipe};
pub use hello::{AnswerCheck, DeviceAccess, SharedSecret, Shown};
pub use server::{DeviceServer, serve};

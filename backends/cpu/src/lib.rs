//! The CPU backend: the device that everybody has.
//!
//! A device is a set of cores (`cpu`, `cpu@0`, `cpu@1-3`), each with a pinned worker thread. A batch of
//! commands becomes a list of steps ([`program`]); every worker walks the list and does its share, with
//! a barrier only between steps that depend on each other ([`pool`]). Weights are used where they lie,
//! in their stored dtype, so a mapped checkpoint is shared by all devices ([`copied`] puts it into huge pages
//! where it is); sums are in f32. Each kernel is written once over vectors of f32 and compiled for every
//! instruction level ([`isa`]).
//!
//! Absent by design: any decision about what to run, any clock but the one around a batch and the one between
//! two readings of energy, any other layout of a weight.

#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![allow(unsafe_code)]

#[cfg(target_os = "linux")]
mod copied;
mod device;
mod health;
pub mod host;
pub mod isa;
mod kernels;
#[cfg(target_os = "linux")]
mod lost;
mod memory;
mod pool;
mod program;
mod queue;
mod sync;
mod topology;

pub use device::CpuBackend;

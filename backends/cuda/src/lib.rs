//! NVIDIA devices.

pub mod kernels;
pub mod plan;

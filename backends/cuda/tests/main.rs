//! The CUDA backend from outside, without and with a device.

mod absence;
mod driver;
mod emulated;
mod emulator;
mod fused;
mod hip;
mod nvrtc;
mod sass;

//! NVIDIA devices from compute capability 8.0 on, by the driver, NVRTC and cuBLASLt, all loaded at run time:
//! the crate builds without a toolkit, and where a library is absent the backend says so.
//!
//! A command becomes launches in [`plan`], which is pure; [`kernels`] holds the texts, half of them shared
//! with the other GPUs; the queue only launches. A test runs plans and kernels on the CPU.
//!
//! Indices live on the device, so the host cannot check them. Kernels do: an id, slot or page outside its
//! table is never followed. The output is then NaN (`embed`, `kv_gather`), nothing (`kv_write`,
//! `kv_scatter`), or attention without the missing keys.
//!
//! KV pages are `[kv_heads, page_tokens, head_dim]` inside, preferably of 16 tokens.

#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
// the driver's calls are unsafe; each block says why it is sound
#![allow(unsafe_code)]

mod blas;
pub mod compile;
mod device;
mod driver;
mod health;
#[path = "../portable/kernel_cache.rs"]
mod kernel_cache;
pub mod kernels;
mod libraries;
mod memory;
mod pinned;
pub mod plan;
mod queue;

pub use libraries::Library;

use mixfleet_hal::{Absent, Backend, Device, DeviceInfo, Result};
use std::sync::Arc;

/// Enumerates and opens NVIDIA devices: `cuda` is the first, `cuda:1` the second.
#[derive(Clone, Copy, Debug, Default)]
pub struct CudaBackend;

impl Backend for CudaBackend {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn probe(&self) -> std::result::Result<Vec<DeviceInfo>, Absent> {
        device::devices()
    }

    fn open(&self, selector: &str) -> Result<Arc<dyn Device>> {
        Ok(Arc::new(device::CudaDevice::open(device::index_of(selector)?)?))
    }
}

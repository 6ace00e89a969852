//! Devices reached through wgpu: Vulkan, Metal and DX12 adapters, with every operation in f32, bf16 and f16,
//! computed in f32.
//!
//! Nothing is linked: drivers are loaded at run time, and without any the backend says what to install.
//!
//! **What wgpu cannot do.** It has no tensor cores but for f16 (cooperative matrices, where the adapter has
//! them), no copies between devices, no pinned or imported host memory, and no counters of health: weights
//! are copied in, KV crosses a link through the host, other arithmetic runs on the vector units. It serves
//! GPUs that have nothing better, and shows on one machine what a mixed fleet does. One queue carries all of
//! a device's commands and transfers, in the order of submission.
//!
//! **Limits.** A buffer holds at most what the adapter allows (often 2 to 4 GiB), and a kernel sees at most
//! `max_storage_buffer_binding_size` of it; `plan.rs` says how larger weights and pools are cut. Heads have
//! at most 576 elements, and an even number of them where they are stored in 16 bits. Eight-bit floats are
//! not supported. A selector counts the adapters of one interface: Vulkan, else Metal, else DX12.
//!
//! Indices live on the device, so the host cannot check them. Kernels do: an id, slot or page outside its
//! table is never followed. The output is then NaN (`embed`, `kv_gather`), nothing (`kv_write`,
//! `kv_scatter`), or attention without the missing keys; if `query_start` or `context` is inconsistent, those
//! queries are skipped and their rows of the output stay unchanged.
//!
//! KV pages are `[kv_heads, page_tokens, head_dim]` inside, preferably of 16 tokens.

#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
// trusted shaders and Vulkan's memory heaps need unsafe calls; each block says why it is sound
#![allow(unsafe_code)]

mod bindings;
mod counts;
mod device;
mod faults;
mod kernel_cache;
mod kernels;
mod memory;
mod pipelines;
mod plan;
mod queue;
mod readback;

pub use counts::WgpuCounts;
pub use device::{AdapterOverrides, WgpuDevice};

use mixfleet_hal::{Absent, Backend, Device, DeviceInfo, Result};
use std::sync::Arc;

/// Enumerates and opens adapters: `wgpu` is the first, `wgpu:1` the second.
#[derive(Clone, Copy, Debug, Default)]
pub struct WgpuBackend;

impl Backend for WgpuBackend {
    fn name(&self) -> &'static str {
        "wgpu"
    }

    fn probe(&self) -> std::result::Result<Vec<DeviceInfo>, Absent> {
        let found = device::adapters()?;
        Ok(found
            .iter()
            .enumerate()
            .map(|(i, adapter)| device::info(i, adapter, AdapterOverrides::default()))
            .collect())
    }

    fn open(&self, selector: &str) -> Result<Arc<dyn Device>> {
        Ok(Arc::new(WgpuDevice::open(device::index_of(selector)?, AdapterOverrides::default())?))
    }
}

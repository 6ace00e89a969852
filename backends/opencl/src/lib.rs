//! OpenCL 1.2 devices: CPUs (PoCL) and GPUs, with every operation in every dtype, computed in f32.
//!
//! Without the Cargo feature `opencl` the backend is there and says why it has no devices: the crate
//! `ocl` links libOpenCL hard, and the default binary must start on machines that lack it.
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

#[cfg(feature = "opencl")]
mod device;
#[cfg(feature = "opencl")]
mod kernels;
#[cfg(feature = "opencl")]
mod memory;
#[cfg(feature = "opencl")]
mod queue;

#[cfg(feature = "opencl")]
pub use device::{KernelTuning, OpenClDevice};

use mixfleet_hal::{Absent, Backend, Device, DeviceInfo, Result};
use std::sync::Arc;

/// Enumerates and opens OpenCL devices: `opencl` is the first, `opencl:1` the second.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenClBackend;

#[cfg(feature = "opencl")]
impl Backend for OpenClBackend {
    fn name(&self) -> &'static str {
        "opencl"
    }

    fn probe(&self) -> std::result::Result<Vec<DeviceInfo>, Absent> {
        let found = device::devices()?;
        let infos = found.into_iter().enumerate();
        Ok(infos.map(|(index, (platform, id))| device::info(index, platform, id)).collect())
    }

    fn open(&self, selector: &str) -> Result<Arc<dyn Device>> {
        Ok(Arc::new(OpenClDevice::open(device::index_of(selector)?, None)?))
    }
}

#[cfg(not(feature = "opencl"))]
const WITHOUT: &str = "built without the feature `opencl`: rebuild with `--features opencl`, which needs libOpenCL \
                       (Debian: ocl-icd-opencl-dev)";

#[cfg(not(feature = "opencl"))]
impl Backend for OpenClBackend {
    fn name(&self) -> &'static str {
        "opencl"
    }

    fn probe(&self) -> std::result::Result<Vec<DeviceInfo>, Absent> {
        Err(Absent::new(WITHOUT))
    }

    fn open(&self, selector: &str) -> Result<Arc<dyn Device>> {
        Err(mixfleet_hal::Error::unsupported(format!("{selector}: {WITHOUT}")))
    }
}

//! The only place that knows which backends there are.

use crate::args::DeviceRole;
use anyhow::{Context, Result, bail};
use mixfleet_hal::{Absent, Backend, Device, DeviceInfo, DeviceKind};
use std::sync::Arc;

/// Every backend of this build.
pub(crate) fn all() -> Vec<Box<dyn Backend>> {
    vec![Box::new(mixfleet_cpu::CpuBackend), Box::new(mixfleet_opencl::OpenClBackend)]
}

/// What every backend found, or why it found nothing.
pub(crate) fn probe() -> Vec<(&'static str, Result<Vec<DeviceInfo>, Absent>)> {
    all().iter().map(|backend| (backend.name(), backend.probe())).collect()
}

/// What this version cannot look for yet.
pub(crate) const NOT_LOOKED_FOR: [(&str, &str); 4] = [
    ("cuda", "this version has no CUDA backend yet"),
    ("wgpu", "this version has no wgpu (Vulkan, Metal, DX12) backend yet"),
    ("verbs", "this version moves KV within one process only; it does not look for RDMA devices"),
    ("hwloc", "this version reads the topology from the operating system; it does not use hwloc"),
];

/// Opens the device that `selector` names.
pub(crate) fn open(selector: &str) -> Result<Arc<dyn Device>> {
    let name = selector.split([':', '@']).next().unwrap_or(selector);
    let backends = all();
    let Some(backend) = backends.iter().find(|b| b.name() == name) else {
        let known: Vec<_> = backends.iter().map(|b| b.name()).collect();
        bail!("unknown device '{selector}': this build knows {}; see 'mixfleet devices'", known.join(", "));
    };
    backend.open(selector).with_context(|| format!("cannot open device '{selector}'"))
}

/// `auto` stands for every device that would serve by default.
pub(crate) fn expand(wanted: &DeviceRole) -> Vec<DeviceRole> {
    if wanted.device != "auto" {
        return vec![wanted.clone()];
    }
    default_selectors().into_iter().map(|device| DeviceRole { device, role: wanted.role }).collect()
}

/// The devices that serve when none is named: every GPU, and the cores. A CPU that another backend
/// shows is the same silicon again and is left out.
pub(crate) fn default_selectors() -> Vec<String> {
    let found = probe().into_iter().filter_map(|(_, devices)| devices.ok()).flatten();
    let wanted = found.filter(|d| d.kind != DeviceKind::Cpu || d.backend == "cpu");
    wanted.map(|d| d.id).collect()
}

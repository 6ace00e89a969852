//! Devices reached through wgpu.

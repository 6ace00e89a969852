//! Compiled kernels, cached after their first use, and on disk where the driver gives them away.

use crate::kernel_cache::{self, KernelKey};
use crate::kernels::Kernel;
use crate::memory::DeviceQueue;
use crate::plan::OUTPUTS;
use mixfleet_hal::Result;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use wgpu::{
    BindGroupLayout, BindGroupLayoutDescriptor, BindGroupLayoutEntry, BindingType, BufferBindingType,
    ComputePipeline, ComputePipelineDescriptor, PipelineCache, PipelineCacheDescriptor,
    PipelineLayoutDescriptor, ShaderModuleDescriptor, ShaderRuntimeChecks, ShaderSource, ShaderStages,
};

/// Bytes of immediates available to every kernel; Vulkan guarantees as many.
pub(crate) const IMMEDIATE_BYTES: u32 = 128;

/// A compiled kernel.
pub(crate) struct CompiledPipeline {
    pub(crate) pipeline: ComputePipeline,
    pub(crate) layout: BindGroupLayout,
    /// Its number among the pipelines of the device.
    pub(crate) number: u64,
}

/// Number of new pipelines after which they are stored, so that a process that is killed loses fewer.
const UNSTORED_MAX: usize = 16;

/// What the driver compiled, kept between processes.
pub(crate) struct DiskCache {
    cache: PipelineCache,
    directory: PathBuf,
    key: KernelKey,
    /// The cache's content when last loaded or stored.
    stored: Mutex<Vec<u8>>,
}

impl DiskCache {
    /// Loads the cache stored for `fingerprint`, which names the adapter, its driver and the sources. A
    /// damaged or foreign file counts as absent.
    pub(crate) fn load(link: &DeviceQueue, directory: PathBuf, fingerprint: &str) -> Result<DiskCache> {
        let key = KernelKey::new(&["wgpu", fingerprint]);
        let loaded = kernel_cache::load(&directory, &key);
        let descriptor = PipelineCacheDescriptor { label: None, data: loaded.as_deref(), fallback: true };
        // SAFETY: a file that only this user could write has what `get_data` gave for the same key: a hash
        // over both tells any other.
        let cache = link.guard("loading compiled kernels", || unsafe {
            link.device.create_pipeline_cache(&descriptor)
        })?;
        Ok(DiskCache { cache, directory, key, stored: Mutex::new(loaded.unwrap_or_default()) })
    }

    /// Stores the cache, unless it is already stored. Correctness does not depend on it, so failures are
    /// silent.
    fn store(&self) {
        let Some(data) = self.cache.get_data().filter(|data| !data.is_empty()) else { return };
        let mut stored = self.stored.lock().unwrap_or_else(PoisonError::into_inner);
        if *stored != data && kernel_cache::store(&self.directory, &self.key, &data).is_ok() {
            *stored = data;
        }
    }
}

/// The pipeline cache of a device.
pub(crate) struct Pipelines {
    subgroups: bool,
    disk: Option<DiskCache>,
    kept: Mutex<HashMap<Kernel, Arc<CompiledPipeline>>>,
}

impl Pipelines {
    /// Creates a cache of kernels with or without subgroups.
    pub(crate) fn new(subgroups: bool, disk: Option<DiskCache>) -> Pipelines {
        Pipelines { subgroups, disk, kept: Mutex::default() }
    }

    /// Returns the pipeline of `kernel` with these binding numbers, which follow from the kernel.
    pub(crate) fn get(
        &self,
        link: &DeviceQueue,
        kernel: &Kernel,
        numbers: &[u32],
    ) -> Result<Arc<CompiledPipeline>> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pipeline) = kept.get(kernel) {
            return Ok(pipeline.clone());
        }
        let place = format!("compiling {kernel:?}");
        let cache = self.disk.as_ref().map(|disk| &disk.cache);
        let source = kernel.source(self.subgroups);
        let built = link.guard(&place, || build(link, kernel, numbers, source, cache))?;
        let (pipeline, layout) = built;
        let built = CompiledPipeline { pipeline, layout, number: kept.len() as u64 };
        let built = kept.entry(kernel.clone()).or_insert(Arc::new(built)).clone();
        if let (Some(disk), true) = (&self.disk, kept.len().is_multiple_of(UNSTORED_MAX)) {
            disk.store();
        }
        Ok(built)
    }
}

impl Drop for Pipelines {
    fn drop(&mut self) {
        if let Some(disk) = &self.disk {
            disk.store();
        }
    }
}

fn build(
    link: &DeviceQueue,
    kernel: &Kernel,
    numbers: &[u32],
    source: String,
    cache: Option<&PipelineCache>,
) -> (ComputePipeline, BindGroupLayout) {
    let entries: Vec<_> = numbers
        .iter()
        .map(|&binding| BindGroupLayoutEntry {
            binding,
            visibility: ShaderStages::COMPUTE,
            ty: BindingType::Buffer {
                ty: BufferBindingType::Storage { read_only: binding < OUTPUTS },
                has_dynamic_offset: false,
                min_binding_size: None,
            },
            count: None,
        })
        .collect();
    let layout =
        link.device.create_bind_group_layout(&BindGroupLayoutDescriptor { label: None, entries: &entries });
    let pipeline_layout = link.device.create_pipeline_layout(&PipelineLayoutDescriptor {
        label: None,
        bind_group_layouts: &[Some(&layout)],
        immediate_size: IMMEDIATE_BYTES,
    });
    let text =
        ShaderModuleDescriptor { label: Some(kernel.entry), source: ShaderSource::Wgsl(source.into()) };
    // SAFETY: the shaders are this crate's own. Each index is either computed from a shape that the operands
    // were checked against (`Cmd::new`) and the windows were cut by (`Planner`), or is loaded and then
    // compared with the bounds of the binding before it is used; loops end at such bounds; divisors are
    // constants or dimensions of an operation that has elements, hence not 0.
    let module = unsafe { link.device.create_shader_module_trusted(text, ShaderRuntimeChecks::unchecked()) };
    let pipeline = link.device.create_compute_pipeline(&ComputePipelineDescriptor {
        label: Some(kernel.entry),
        layout: Some(&pipeline_layout),
        module: &module,
        entry_point: Some(kernel.entry),
        compilation_options: wgpu::PipelineCompilationOptions {
            // kernels write shared memory before they read it
            zero_initialize_workgroup_memory: false,
            ..Default::default()
        },
        cache,
    });
    (pipeline, layout)
}

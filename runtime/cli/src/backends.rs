//! The only module that names backends.

mod files;

use crate::args::DeviceRole;
use crate::failure::UsageError;
use crate::groups::SimGroup;
use crate::notation::{Sharing, Written, WrittenGroup};
use crate::remote::{self, OpenDevice, RemoteArgs};
use anyhow::{Context, Result, bail};
use mixfleet_discover::{Topology, Tree, same_part};
use mixfleet_hal::catalog::{Part, part_of_driver};
use mixfleet_hal::units::Bytes;
use mixfleet_hal::{Absent, Backend, Device, DeviceInfo, ErrorKind};
use mixfleet_plugin::PluginBackend;
use mixfleet_scheduler::cost::ExpertsBy;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// Third-party backends loaded by this process, and their files.
static LOADED: OnceLock<Vec<(PluginBackend, PathBuf)>> = OnceLock::new();

/// The end of the names of shared libraries.
const LIBRARY: &str = std::env::consts::DLL_EXTENSION;

/// Loads third-party backends from libraries and folders of libraries, once.
///
/// # Errors
/// When one cannot be loaded, or has the name of another one.
pub(crate) fn load(paths: &[PathBuf]) -> Result<()> {
    let mut files = Vec::new();
    for path in paths.iter().filter(|path| !path.as_os_str().is_empty()) {
        if !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        let listed = std::fs::read_dir(path).with_context(|| format!("cannot read {}", path.display()))?;
        let mut found: Vec<PathBuf> = listed.filter_map(|entry| Some(entry.ok()?.path())).collect();
        found.retain(|file| file.extension().is_some_and(|end| end == LIBRARY));
        if found.is_empty() {
            bail!(UsageError(format!("--backend {}: no file there ends with .{LIBRARY}", path.display())));
        }
        found.sort();
        files.extend(found);
    }
    let mut names: Vec<&str> = all().iter().map(|backend| backend.name()).collect();
    let mut loaded = Vec::new();
    for file in files {
        // a name without a folder would be searched for among the system's libraries
        let found = std::path::absolute(&file).unwrap_or_else(|_| file.clone());
        let backend = PluginBackend::load(&found)
            .map_err(|absent| UsageError(format!("--backend {}", absent.reason)))?;
        if names.contains(&backend.name()) || backend.name() == remote::PREFIX.trim_end_matches(':') {
            let name = backend.name();
            bail!(UsageError(format!(
                "--backend {}: there is another backend named '{name}'",
                file.display()
            )));
        }
        names.push(backend.name());
        loaded.push((backend, file));
    }
    // this is called once
    let _ = LOADED.set(loaded);
    Ok(())
}

/// The files of third-party backends that this process has loaded.
pub(crate) fn loaded() -> impl Iterator<Item = &'static Path> {
    LOADED.get().into_iter().flatten().map(|(_, file)| file.as_path())
}

/// Logs whose code runs in this process.
pub(crate) fn say_loaded() {
    for file in loaded() {
        tracing::info!(library = %file.display(), "third-party code runs in this process with its full rights");
    }
}

/// Every backend of this build, and the loaded plug-ins.
pub(crate) fn all() -> Vec<Box<dyn Backend>> {
    let mut all: Vec<Box<dyn Backend>> = vec![
        Box::new(mixfleet_cpu::CpuBackend),
        Box::new(mixfleet_cuda::CudaBackend),
        Box::new(mixfleet_opencl::OpenClBackend),
        Box::new(mixfleet_wgpu::WgpuBackend),
        Box::new(mixfleet_simulated::SimBackend::new(Box::new(files::FromDisk))),
    ];
    let loaded = LOADED.get().into_iter().flatten();
    all.extend(loaded.map(|(backend, _)| Box::new(backend.clone()) as Box<dyn Backend>));
    all
}

/// Whether this build can load no libraries, and so no drivers.
const IS_STATIC: bool = cfg!(target_feature = "crt-static");

/// The devices that each backend found, or why it found none.
pub(crate) fn probe() -> Vec<(&'static str, Result<Vec<DeviceInfo>, Absent>)> {
    let found = |backend: &dyn Backend| match backend.probe() {
        Err(_) if IS_STATIC && backend.name() != "sim" => {
            Err(Absent::new("this build is static and loads no drivers: it computes on processors alone"))
        }
        found => found,
    };
    all().iter().map(|backend| (backend.name(), found(backend.as_ref()))).collect()
}

/// Opens the device of `selector`.
pub(crate) fn open(selector: &str) -> Result<Arc<dyn Device>> {
    Ok(open_as(selector, &RemoteArgs::default())?.device)
}

/// The same, with what a device of another process wants to see.
pub(crate) fn open_as(selector: &str, access: &RemoteArgs) -> Result<OpenDevice> {
    match selector.strip_prefix(remote::PREFIX) {
        Some(address) => access.open(selector, address),
        None => open_here(selector).map(OpenDevice::here),
    }
}

/// Whether a selector begins with the name of a backend.
pub(crate) fn is_named(selector: &str) -> bool {
    all().iter().any(|backend| backend.name() == name_of(selector))
}

/// The memory of a device of this machine that is this part, as its driver has it.
pub(crate) fn memory_of(part: &Part) -> Option<Bytes> {
    let is_part = |info: &DeviceInfo| part_of_driver(&info.name).is_some_and(|of| of.id == part.id);
    let found: Vec<DeviceInfo> = all().iter().filter_map(|backend| backend.probe().ok()).flatten().collect();
    found.into_iter().find(is_part).map(|info| info.memory)
}

/// The name of a selector's backend.
fn name_of(selector: &str) -> &str {
    selector.split([':', '@']).next().unwrap_or(selector)
}

fn open_here(selector: &str) -> Result<Arc<dyn Device>> {
    let name = name_of(selector);
    let backends = all();
    let Some(backend) = backends.iter().find(|b| b.name() == name) else {
        let known: Vec<_> = backends.iter().map(|b| b.name()).collect();
        let known = known.join(", ");
        bail!(UsageError(format!(
            "unknown device '{selector}': this build knows {known}; see 'mixfleet devices'"
        )));
    };
    backend.open(selector).map_err(|error| {
        let is_usage = error.kind == ErrorKind::Invalid;
        let said = format!("cannot open device '{selector}'");
        match is_usage {
            true => UsageError(format!("{said}: {error}")).into(),
            false => anyhow::Error::from(error).context(said),
        }
    })
}

/// Opens host memory as a device that only keeps KV.
#[cfg(feature = "fleet")]
pub(crate) fn memory(id: &str) -> Result<Arc<dyn Device>> {
    mixfleet_cpu::CpuBackend.open_memory(id).context("cannot use host memory")
}

/// Whether all devices of an instance but the first one only attend.
pub(crate) fn attends_apart(selector: &str) -> bool {
    selector.starts_with(Sharing::Apart.word())
}

/// The selectors of an instance's devices, in their order.
///
/// # Errors
/// As of [`stages`].
pub(crate) fn members(selector: &str) -> Result<Vec<String>> {
    Ok(stages(selector)?.concat())
}

/// The selectors of an instance's devices by the stages of its layers. Most instances have one stage: a
/// single device, or those of `tp:A,B`, `ep:A,B`, `attn:A,B`; `pp:A,(tp:B,C)` has several. Simulated parts
/// that share a model are opened as one device.
///
/// # Errors
/// When fewer than two devices are to be one instance, or one is named twice.
pub(crate) fn stages(selector: &str) -> Result<Vec<Vec<String>>> {
    if SimGroup::of(selector)?.is_some() {
        return Ok(vec![vec![selector.to_owned()]]);
    }
    let Written::Group(group) = Written::read(selector) else {
        return Ok(vec![vec![selector.to_owned()]]);
    };
    several(&group)?;
    let mut all = Vec::new();
    for member in &group.members {
        let (word, divided) = match member {
            Written::Device(device) if !device.starts_with('(') => {
                all.push(vec![device.clone()]);
                continue;
            }
            Written::Device(device) => (device.clone(), None),
            Written::Group(stage) => {
                let single =
                    stage.members.iter().all(|of| matches!(of, Written::Device(of) if !of.starts_with('(')));
                let is_stage =
                    group.sharing == Sharing::Stages && stage.sharing.experts_by().is_some() && single;
                (format!("({})", stage.text), is_stage.then_some(stage))
            }
        };
        let Some(stage) = divided else {
            let message = format!(
                "{selector}: '{word}' is no stage; one of several devices is '(tp:DEV,DEV)' or '(ep:DEV,DEV)'"
            );
            bail!(UsageError(message));
        };
        several(stage)?;
        all.push(member.devices().into_iter().map(String::from).collect());
    }
    let names = all.concat();
    // the one with the weights may attend as well, beside others
    let first = usize::from(group.sharing == Sharing::Apart && names.len() > 2);
    let repeated = names.iter().enumerate().find(|(at, member)| names[first.min(*at)..*at].contains(member));
    if let Some((_, member)) = repeated {
        bail!(UsageError(format!("device '{member}' is named twice in '{selector}'")));
    }
    Ok(if group.sharing == Sharing::Stages { all } else { vec![names] })
}

/// What the devices of each of an instance's stages divide of experts.
pub(crate) fn experts_by(selector: &str) -> Vec<ExpertsBy> {
    let of_stage = |stage: &Written| match stage {
        Written::Group(group) => group.sharing.experts_by().unwrap_or_default(),
        Written::Device(_) => ExpertsBy::Columns,
    };
    match Written::read(selector) {
        Written::Group(group) if group.sharing == Sharing::Stages => {
            group.members.iter().map(of_stage).collect()
        }
        whole => vec![of_stage(&whole)],
    }
}

/// Refuses a group of fewer than two members.
fn several(group: &WrittenGroup) -> Result<(), UsageError> {
    let is_one = |member: &Written| match member {
        Written::Device(device) => !device.is_empty(),
        Written::Group(_) => true,
    };
    if group.members.len() >= 2 && group.members.iter().all(is_one) {
        return Ok(());
    }
    let (text, word) = (&group.text, group.sharing.word());
    Err(UsageError(format!("'{text}' must name two devices or more, as in '{word}cpu@0,cpu@1'")))
}

/// Refuses a device that computes nothing, for commands that use its results.
pub(crate) fn must_compute(info: &DeviceInfo) -> Result<()> {
    if info.computes() {
        return Ok(());
    }
    bail!(UsageError(format!(
        "{0} takes time only and computes nothing; add ',compute': {0},compute",
        info.id
    )))
}

/// Expands `auto` to every device that would serve by default.
pub(crate) fn expand(wanted: &DeviceRole) -> Vec<DeviceRole> {
    if wanted.device != "auto" {
        return vec![wanted.clone()];
    }
    default_selectors().into_iter().map(|device| DeviceRole { device, role: wanted.role }).collect()
}

/// Backends by preference: if several expose the same part, the first of them serves it. A backend made for
/// the part comes before a portable one.
const PREFERRED: [&str; 4] = ["cpu", "cuda", "wgpu", "opencl"];

/// The device that is examined when none is named: one of a loaded library, else the first that would serve.
pub(crate) fn first_selector() -> Result<String> {
    let mut libraries = LOADED.get().into_iter().flatten().filter_map(|(backend, _)| backend.probe().ok());
    let of_library = libraries.find_map(|devices| Some(devices.into_iter().next()?.id));
    of_library.or_else(|| default_selectors().into_iter().next()).context("no device was found")
}

/// The devices that serve when none is named: every part once, even if a CPU is shown by another backend or a
/// GPU by several.
pub(crate) fn default_selectors() -> Vec<String> {
    let found: Vec<DeviceInfo> =
        probe().into_iter().filter_map(|(_, devices)| devices.ok()).flatten().collect();
    let rank = |device: &DeviceInfo| PREFERRED.iter().position(|name| *name == device.backend);
    let mut left_out = vec![false; found.len()];
    for part in same_part(&found, &Topology::read(&Tree::at("/"))) {
        let best = part.devices.iter().copied().min_by_key(|&i| rank(&found[i]).unwrap_or(usize::MAX));
        part.devices.iter().filter(|&&i| Some(i) != best).for_each(|&i| left_out[i] = true);
    }
    let kept = found.into_iter().zip(left_out).filter(|(_, left_out)| !left_out);
    kept.map(|(device, _)| device.id).collect()
}

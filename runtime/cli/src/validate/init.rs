//! Implements `mixfleet validate --init-part`.

use super::{device_of, facts};
use crate::backends;
use crate::failure::UsageError;
use anyhow::{Context, Result, bail};
use mixfleet_hwtests::profile::ProfileDocument;
use mixfleet_hwtests::validate::{PartSketch, part_template};
use mixfleet_report::files::write_whole;
use std::path::Path;

/// Writes a template of a part file about a device, or about the part of a profile.
pub(super) fn run(file: &Path, device: Option<&str>, profile: Option<&Path>) -> Result<()> {
    if file.exists() {
        bail!(UsageError(format!("{} exists already: name another file", file.display())));
    }
    let profile = profile.map(read).transpose()?;
    // a profile needs no device, unless one is named
    let selector = match (&profile, device) {
        (Some(_), None) => None,
        (_, device) => Some(device_of(device)?),
    };
    let opened = selector.as_deref().map(backends::open).transpose()?;
    let info = opened.map(|device| device.info().clone());
    let name = match (&info, &profile) {
        (Some(info), Some(profile)) if info.name != profile.device.name => {
            let (device, profiled) = (&info.name, &profile.device.name);
            bail!(UsageError(format!("the profile is of '{profiled}', the device is '{device}'")));
        }
        (Some(info), _) => info.name.clone(),
        (None, profile) => profile.as_ref().map(|profile| profile.device.name.clone()).unwrap_or_default(),
    };
    let pci = info.as_ref().and_then(|info| facts::HostFacts::read().pci_id(info));
    let text = part_template(&PartSketch { name: &name, pci: pci.as_deref(), profile: profile.as_ref() });
    write_whole(file, text.as_bytes()).with_context(|| format!("cannot write {}", file.display()))?;
    let backends: String = backends::loaded().map(|from| format!(" --backend {}", from.display())).collect();
    let device = selector.as_deref().unwrap_or("DEV");
    eprintln!(
        "{} is about '{name}': edit it, then mixfleet{backends} validate --device {device} --part {0}",
        file.display()
    );
    Ok(())
}

fn read(file: &Path) -> Result<ProfileDocument> {
    let text =
        mixfleet_hal::files::read_text(file).with_context(|| format!("cannot read {}", file.display()))?;
    ProfileDocument::from_json(&text).map_err(|why| UsageError(format!("{}: {why}", file.display())).into())
}

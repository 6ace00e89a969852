//! Reads measured device profiles from files.

use anyhow::{Context, Result};
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hwtests::profile::measured;
use std::path::Path;

/// The measured profile in a file: the output of `mixfleet profile --json`, or a device profile alone.
pub(crate) fn read(path: &Path) -> Result<DeviceProfile> {
    let file = path.display();
    let text =
        mixfleet_hal::files::read_text(path).with_context(|| format!("cannot read the profile {file}"))?;
    measured(&text).map_err(anyhow::Error::msg).with_context(|| format!("{file} is not a device profile"))
}

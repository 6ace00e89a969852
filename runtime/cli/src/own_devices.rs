//! Fleet files that may name devices of this machine, with the calibrations saved by serving.

use crate::{backends, calibration, profiles};
use mixfleet_hal::catalog::part_of_driver;
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_scheduler::engines::KnownEngine;
use mixfleet_sim::fleet_file::{FleetFile, FleetFileError, FleetSources, OwnDevice};
use std::path::Path;

/// Reads a fleet file; `engine` replaces its `[engine] name`.
pub(crate) fn read_fleet(path: &Path, engine: Option<&KnownEngine>) -> Result<FleetFile, FleetFileError> {
    FleetFile::read(path, FleetSources { profile: &profile, device: &find }, engine)
}

/// Parses the text of a fleet file in `directory`.
pub(crate) fn parse_fleet(text: &str, directory: &Path) -> Result<FleetFile, FleetFileError> {
    FleetFile::parse_with(text, directory, FleetSources { profile: &profile, device: &find })
}

fn profile(path: &Path) -> Result<DeviceProfile, String> {
    profiles::read(path).map_err(|error| format!("{error:#}"))
}

/// The device of a selector; none if no backend has such a name.
pub(crate) fn find(selector: &str) -> Result<Option<OwnDevice>, String> {
    if !backends::is_named(selector) {
        return Ok(None);
    }
    let device = backends::open(selector).map_err(|error| format!("{error:#}"))?;
    let info = device.info();
    Ok(Some(OwnDevice {
        selector: selector.into(),
        part: part_of_driver(&info.name),
        memory: info.memory,
        calibrations: calibration::kept_of(&info.fingerprint),
    }))
}

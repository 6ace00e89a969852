//! Files that selectors of simulated devices name.

use crate::profiles;
use anyhow::Context;
use mixfleet_hal::fault::FaultPlan;
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hal::{Error, Result};
use std::path::Path;

/// Reads profiles and fault plans from disk.
pub(super) struct FromDisk;

impl mixfleet_simulated::SelectorFiles for FromDisk {
    fn profile(&self, path: &str) -> Result<DeviceProfile> {
        profiles::read(Path::new(path)).map_err(invalid)
    }

    fn faults(&self, path: &str) -> Result<FaultPlan> {
        let read = || -> anyhow::Result<FaultPlan> {
            let text = mixfleet_hal::files::read_text(std::path::Path::new(path))
                .with_context(|| format!("cannot read the faults {path}"))?;
            serde_json::from_str(&text).with_context(|| {
                format!(
                    "{path} is not a fault plan; expected {{\"seed\": 1, \"rules\": [{{\"fault\": \"drop\", \
                     \"probability\": 0.001}}]}}"
                )
            })
        };
        read().map_err(invalid)
    }
}

fn invalid(error: anyhow::Error) -> Error {
    Error::invalid(format!("{error:#}"))
}

//! Enumerates and opens simulated devices.

use crate::clock::RealClock;
use crate::compute::ComputeDevice;
use crate::device::TimeOnlyDevice;
use crate::faulty::FaultyDevice;
use crate::selector::{Selector, USAGE};
use mixfleet_hal::fault::FaultPlan;
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hal::{Absent, Backend, Device, DeviceInfo, Error, Result, catalog};
use std::sync::Arc;

/// Reads the files that selectors name, since this crate accesses no files and parses no documents.
pub trait SelectorFiles: Send + Sync {
    /// Reads the profile at `path`.
    ///
    /// # Errors
    /// `Invalid`, with the cause, if there is none.
    fn profile(&self, path: &str) -> Result<DeviceProfile>;

    /// Reads the fault plan at `path`.
    ///
    /// # Errors
    /// As for [`SelectorFiles::profile`].
    fn faults(&self, path: &str) -> Result<FaultPlan>;
}

/// Opens simulated devices: `sim:PART[#NAME][,compute][,dilation:FACTOR][,faults:FILE]`.
///
/// PART is a part of the catalog in any case, predicted by published kernel times or else its datasheet, or
/// the path of a profile. `#NAME` distinguishes several devices of one part. The device takes time only,
/// unless `compute` requests real results. `dilation` is the number of real seconds per simulated second: 1
/// by default, measured for `compute`; give all devices of a fleet the same. `faults` names a fault plan for
/// the device's commands.
pub struct SimBackend {
    files: Box<dyn SelectorFiles>,
}

impl SimBackend {
    /// Creates a backend that reads profiles and plans through `files`.
    pub fn new(files: Box<dyn SelectorFiles>) -> Self {
        SimBackend { files }
    }

    fn profile(&self, selector: &Selector) -> Result<DeviceProfile> {
        if selector.is_file() {
            return self.files.profile(&selector.part);
        }
        let part = catalog::named(&selector.part).map(catalog::Part::best_profile);
        part.map_err(|why| Error::invalid(format!("{why}. A path ends with '.json' or has a '/'")))
    }
}

impl Backend for SimBackend {
    fn name(&self) -> &'static str {
        "sim"
    }

    /// Lists nothing, since simulated devices exist only on request.
    fn probe(&self) -> std::result::Result<Vec<DeviceInfo>, Absent> {
        Err(Absent::new(format!(
            "simulated parts are there when asked for, as --device {USAGE}: any part of the catalog \
             (sim:rtx-4090), or a profile (sim:profile.json)"
        )))
    }

    fn open(&self, selector: &str) -> Result<Arc<dyn Device>> {
        let wanted = Selector::parse(selector)?;
        let profile = self.profile(&wanted)?;
        let faults = wanted.faults.as_deref().map(|path| self.files.faults(path)).transpose()?;
        let clock = |dilation: f64| RealClock::new(dilation).map(Arc::new);
        let device: Arc<dyn Device> = match (wanted.compute, wanted.dilation) {
            (false, dilation) => {
                Arc::new(TimeOnlyDevice::new(selector, profile, clock(dilation.unwrap_or(1.0))?)?)
            }
            (true, Some(dilation)) => Arc::new(ComputeDevice::new(selector, profile, clock(dilation)?)?),
            (true, None) => Arc::new(ComputeDevice::on_measured_clock(selector, profile)?),
        };
        Ok(match faults {
            Some(plan) => Arc::new(FaultyDevice::new(device, plan).in_real_time()),
            None => device,
        })
    }
}

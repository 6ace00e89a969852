//! The times of batches and copies according to the profile.

use mixfleet_hal::profile::{CopyCost, DeviceProfile, Predictor};
use mixfleet_hal::units::{Bytes, Seconds};
use mixfleet_hal::{Cmd, Error, OpSig, Result};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Maximum number of signatures whose times are cached; a decode step has one or two new ones.
const KEPT_MAX: usize = 1 << 16;

/// What batches take on devices that share a model, and that stand for one device here.
pub trait GroupTimes: std::fmt::Debug + Send + Sync {
    /// The time of a batch; `None` for one without a layer, which takes what one device needs for it.
    fn time(&self, batch: &[Cmd]) -> Option<Seconds>;
}

/// A profile with a cache, since a prediction looks at all points of its kind and layers repeat the same
/// queries.
#[derive(Debug)]
pub(crate) struct CostCache {
    profile: DeviceProfile,
    predictor: Predictor,
    kept: Mutex<HashMap<OpSig, Seconds>>,
    group: Option<Arc<dyn GroupTimes>>,
}

impl CostCache {
    /// # Errors
    /// `Invalid` for an implausible profile.
    pub(crate) fn new(profile: DeviceProfile) -> Result<Self> {
        let wrong = |what: &str, value: f64| {
            Err(Error::invalid(format!("the profile '{}' has a {what} of {value}", profile.fingerprint)))
        };
        let positive = |value: f64| value.is_finite() && value > 0.0;
        if !positive(profile.bandwidth.0) {
            return wrong("bandwidth", profile.bandwidth.0);
        }
        if !positive(profile.memory.0) {
            return wrong("memory", profile.memory.0);
        }
        for launch in [profile.launch.0, profile.launch_per_command.0] {
            if !(launch.is_finite() && launch >= 0.0) {
                return wrong("launch cost", launch);
            }
        }
        if let Some((dtype, rate)) = profile.compute.iter().find(|(_, rate)| !positive(rate.0)) {
            return wrong(&format!("{dtype} rate"), rate.0);
        }
        if let Some(point) = profile.points.iter().find(|point| !positive(point.time.0)) {
            return wrong(&format!("measured {} time", point.sig.name()), point.time.0);
        }
        for copy in [&profile.host_to_device, &profile.device_to_host] {
            let finite = |line: &mixfleet_hal::profile::LinearSegment| {
                line.from.0.is_finite() && line.fixed.0.is_finite() && line.seconds_per_byte.is_finite()
            };
            if let Some(line) = copy.0.iter().find(|line| !finite(line)) {
                return wrong("copy time", line.seconds_per_byte);
            }
        }
        let predictor = Predictor::new(&profile);
        Ok(CostCache { profile, predictor, kept: Mutex::default(), group: None })
    }

    /// The same for devices that share a model.
    pub(crate) fn of_group(self, group: Arc<dyn GroupTimes>) -> Self {
        CostCache { group: Some(group), ..self }
    }

    pub(crate) fn profile(&self) -> &DeviceProfile {
        &self.profile
    }

    /// Returns the cost of launching a batch on an idle queue; zero for an empty one.
    pub(crate) fn launch(&self, cmds: &[Cmd]) -> Seconds {
        if cmds.is_empty() || self.of_layers(cmds).is_some() { Seconds::ZERO } else { self.profile.launch }
    }

    /// What devices that share a model take for a batch with layers, launches included.
    fn of_layers(&self, cmds: &[Cmd]) -> Option<Seconds> {
        self.group.as_ref()?.time(cmds)
    }

    /// Returns the commands' own times plus n times `launch_per_command`.
    pub(crate) fn work(&self, cmds: &[Cmd]) -> Seconds {
        if let Some(time) = self.of_layers(cmds) {
            return time;
        }
        let own: Seconds = cmds.iter().map(|cmd| self.time(cmd.sig())).sum();
        self.profile.launch_per_command * cmds.len() as f64 + own
    }

    /// Returns how long commands that only move bytes use the memory.
    pub(crate) fn memory(&self, cmds: &[Cmd]) -> Seconds {
        cmds.iter().map(|cmd| self.time(cmd.sig()).min(self.profile.roofline(cmd.sig()))).sum()
    }

    fn time(&self, sig: &OpSig) -> Seconds {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&time) = kept.get(sig) {
            return time;
        }
        if kept.len() >= KEPT_MAX {
            kept.clear();
        }
        let time = self.predictor.time(sig);
        kept.insert(*sig, time);
        time
    }

    /// Returns the time of one copy between host and device; zero if the profile does not know it.
    pub(crate) fn copy(cost: &CopyCost, bytes: usize) -> Seconds {
        cost.time(Bytes(bytes as f64)).unwrap_or(Seconds::ZERO)
    }

    /// Returns a digest that is equal only for equal profiles, up to 64-bit collisions.
    pub(crate) fn digest(&self) -> u64 {
        // Debug prints every field, and floats so that they read back unchanged
        crate::digest::of_bytes(0, format!("{:?}", self.profile).as_bytes())
    }
}

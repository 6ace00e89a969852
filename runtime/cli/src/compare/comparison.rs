//! Devices beside each other, by the same kind of evidence.

use super::devices::Compared;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::classes::{Classified, Demand};

/// The kind of evidence that all times of a comparison use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Basis {
    Datasheet,
    Published,
    Measured,
    /// For each device the best evidence that exists.
    Mixed,
}

impl Basis {
    /// The strongest evidence that all of `devices` have, since unlike evidence would decide the comparison.
    pub(super) fn of(devices: &[Compared]) -> Self {
        let all = |has: &dyn Fn(&Compared) -> bool| devices.iter().all(has);
        if all(&Compared::is_measured) {
            Basis::Measured
        } else if devices.iter().any(Compared::has_own_steps) {
            Basis::Mixed
        } else if all(&Compared::is_published) {
            Basis::Published
        } else if all(&|device| device.part.is_some()) {
            Basis::Datasheet
        } else {
            Basis::Mixed
        }
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Basis::Datasheet => "datasheet",
            Basis::Published => "published",
            Basis::Measured => "measured",
            Basis::Mixed => "mixed",
        }
    }

    pub(super) const fn explained(self) -> &'static str {
        match self {
            Basis::Datasheet => "rooflines of the datasheets, which kernels reach to 40 to 95 %",
            Basis::Published => "published kernel times, of the part or of its nearest relatives",
            Basis::Measured => "measured profiles",
            Basis::Mixed => "MIXED: a measured profile beside claims, which flatter; profile the others too",
        }
    }
}

/// Everything that the command prints.
pub(super) struct PartsComparison {
    pub(super) model: String,
    pub(super) demand: Demand,
    pub(super) basis: Basis,
    pub(super) devices: Vec<Compared>,
    /// In the order of `devices`.
    pub(super) classified: Vec<Classified>,
    /// Likely relative error of each device's times, where it is known, in the order of `devices`.
    pub(super) likely_errors: Vec<Option<f64>>,
    /// Parts of the catalog that are not compared for want of an offer, if none were named.
    pub(super) without_offer: Vec<&'static str>,
    /// Input that has no effect, or looks wrong.
    pub(super) warnings: Vec<String>,
}

impl PartsComparison {
    /// The likely error of a device's times in a few characters.
    pub(super) fn likely(&self, device: usize) -> String {
        match self.likely_errors[device] {
            Some(error) => format!("{:.0} %", error * 100.0),
            None if self.devices[device].is_measured_for(self.basis) => "measured".into(),
            None => "?".into(),
        }
    }

    /// Whether nothing is known of how far a device's times are off, beyond what the basis says of all.
    pub(super) fn is_in_doubt(&self, device: usize) -> bool {
        is_in_doubt(&self.devices[device], self.basis, self.likely_errors[device])
    }

    /// The remark about those devices, if there are any.
    pub(super) fn doubts(&self) -> Option<String> {
        let names: Vec<&str> = (0..self.devices.len())
            .filter(|device| self.is_in_doubt(*device))
            .map(|device| self.devices[device].name.as_str())
            .collect();
        let (some, more) = names.split_at(names.len().min(DOUBTS_MAX));
        let more = if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
        (!names.is_empty()).then(|| {
            let some = some.join(", ");
            format!("unknown how far the times of {some}{more} are off: they come last, at any price")
        })
    }

    /// The objectives, if there are any.
    pub(super) fn objectives(&self) -> Option<String> {
        let Demand { ttft, tbt, .. } = self.demand;
        let one = |what: &str, most: Option<Seconds>| most.map(|most| format!("{what} within {} s", most.0));
        let all: Vec<String> = [one("prompts", ttft), one("steps", tbt)].into_iter().flatten().collect();
        (!all.is_empty()).then(|| all.join(", "))
    }
}

/// Parts in doubt that are named in a line.
const DOUBTS_MAX: usize = 4;

/// A part without measured kernels; if others are compared by more than datasheets, also one of unknown
/// error.
pub(super) fn is_in_doubt(device: &Compared, basis: Basis, likely: Option<f64>) -> bool {
    let unknown = likely.is_none() && basis != Basis::Datasheet;
    !device.is_measured_for(basis) && (unknown || !device.is_published())
}

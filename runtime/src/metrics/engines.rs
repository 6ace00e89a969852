//! What is counted of engines of others.

use super::{DeviceLabels, Metrics};
use mixfleet_hal::outside::EngineFaultKind;
use prometheus_client::encoding::EncodeLabelSet;

/// Labels of [`Metrics::engine_faults`].
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct EngineFaultLabels {
    /// The engine's name.
    pub device: String,
    /// `unreachable`, `busy`, `failed`, `malformed`, `cut`, `not_continued`, `not_taken` or `not_handed_off`.
    pub kind: &'static str,
}

/// Labels of [`Metrics::hand_offs`].
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct HandOffLabels {
    /// The engine that computed the prompt.
    pub from: String,
    /// The one that answered.
    pub to: String,
}

/// Label of [`Metrics::hand_off_failures`].
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct HandOffFailureLabels {
    /// `not_handed_over`, `not_taken_over` or `cut`.
    pub cause: &'static str,
}

impl Metrics {
    /// Counts a request that an engine did not answer.
    pub(crate) fn engine_failed(&self, engine: &str, kind: EngineFaultKind) {
        let labels = EngineFaultLabels { device: engine.into(), kind: kind.name() };
        self.engine_faults.get_or_create(&labels).inc();
    }

    /// Counts a rest of an engine.
    pub(crate) fn engine_rested(&self, engine: &str) {
        self.engine_rests.get_or_create(&DeviceLabels { device: engine.into() }).inc();
    }

    /// Records whether an engine rests.
    pub(crate) fn engine_rests_now(&self, engine: &str, rests: bool) {
        let labels = DeviceLabels { device: engine.into() };
        self.engine_resting.get_or_create(&labels).set(rests.into());
        drop(self.engine_rests.get_or_create(&labels));
    }

    /// Counts a prompt's KV that another engine took over.
    pub(crate) fn handed_off(&self, from: &str, to: &str) {
        self.hand_offs.get_or_create(&HandOffLabels { from: from.into(), to: to.into() }).inc();
    }

    /// Counts one that none did.
    pub(crate) fn not_handed_off(&self, cause: &'static str) {
        self.hand_off_failures.get_or_create(&HandOffFailureLabels { cause }).inc();
    }
}

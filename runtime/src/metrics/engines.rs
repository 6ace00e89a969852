//! Counters of external engines.

use super::{DeviceLabels, Metrics};
use mixfleet_hal::outside::EngineFaultKind;
use mixfleet_hal::units::Seconds;
use prometheus_client::encoding::EncodeLabelSet;

/// Labels of [`Metrics::engine_faults`].
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct EngineFaultLabels {
    /// The engine's name.
    pub device: String,
    /// `unreachable`, `busy`, `failed`, `malformed`, `cut`, `not_continued`, `not_taken` or `not_handed_off`.
    pub kind: &'static str,
}

/// Label of [`Metrics::picks`].
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct PickLabels {
    /// `placed`, `overloaded` (429), `unavailable` (503), `shed` (429, of a negative priority) or `refused`.
    pub outcome: &'static str,
}

/// Labels of [`Metrics::picks_served`].
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ServedLabels {
    /// The engine that answered.
    pub device: String,
    /// `first` for the one that was placed on, `fallback` for another one.
    pub choice: &'static str,
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

/// Labels of [`Metrics::canaries`].
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct CanaryLabels {
    /// The engine that computes prompts.
    pub from: String,
    /// The one that answers.
    pub to: String,
    /// `agrees`, `differs` or `inconclusive`.
    pub result: &'static str,
}

/// Labels of [`Metrics::canary_quarantines`].
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct CanaryQuarantineLabels {
    /// The engine that computes prompts.
    pub from: String,
    /// The one that answers.
    pub to: String,
    /// `corrupt` or `disagree`.
    pub cause: &'static str,
}

impl Metrics {
    /// Counts a canary of these two engines.
    pub(crate) fn canary_ended(&self, ends: [&str; 2], result: &'static str) {
        let [from, to] = ends.map(str::to_owned);
        self.canaries.get_or_create(&CanaryLabels { from, to, result }).inc();
    }

    /// Records whether two engines share requests, and their learned drift in nats.
    pub(crate) fn canary_state(&self, ends: [&str; 2], shares: bool, drift_nats: f64) {
        let [from, to] = ends.map(str::to_owned);
        let labels = HandOffLabels { from, to };
        self.canary_shares.get_or_create(&labels).set(shares.into());
        self.canary_drift.get_or_create(&labels).set(drift_nats);
    }

    /// Counts a quarantine of two engines.
    pub(crate) fn canary_quarantined(&self, ends: [&str; 2], cause: &'static str) {
        let [from, to] = ends.map(str::to_owned);
        self.canary_quarantines.get_or_create(&CanaryQuarantineLabels { from, to, cause }).inc();
    }

    /// Counts what a part of a canary took of an engine.
    pub(crate) fn canary_cost(&self, engine: &str, tokens: u64, time: Seconds) {
        let labels = DeviceLabels { device: engine.into() };
        self.canary_tokens.get_or_create(&labels).inc_by(tokens);
        self.canary_time_s.get_or_create(&labels).inc_by(time.0);
    }

    /// Counts a request that an engine did not answer.
    pub(crate) fn engine_failed(&self, engine: &str, kind: EngineFaultKind) {
        let labels = EngineFaultLabels { device: engine.into(), kind: kind.name() };
        self.engine_faults.get_or_create(&labels).inc();
    }

    /// Counts a rest of an engine.
    pub(crate) fn engine_rested(&self, engine: &str) {
        self.engine_rests.get_or_create(&DeviceLabels { device: engine.into() }).inc();
    }

    /// Records whether an engine is suspended.
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

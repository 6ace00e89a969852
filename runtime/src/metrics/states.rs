//! States of instances and external engines: metrics, the log, `/debug/states`, and the reason of a 503.

use super::{DeviceLabels, Metrics};
use mixfleet_hal::units::Seconds;
use prometheus_client::encoding::EncodeLabelSet;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{MutexGuard, PoisonError};

/// Time after which an instance that does not return is no longer listed: its process was taken away.
const LISTED_DOWN: Seconds = Seconds(3600.0);
/// Reason of a device whose steps take much more, or much less, time than predicted.
pub(crate) const NOT_AS_DECLARED: &str = "not the declared part";
/// Causes of a 503.
const NO_ENGINE: &str = "no engine answers";
const NO_INSTANCE: &str = "no instance takes requests";
const LOADING: &str = "loading";
/// Number of instances or engines that a 503 names.
const NAMED_MAX: usize = 4;

/// Whether an instance or external engine can do its work.
#[derive(Clone, Copy, Debug, Default, Hash, PartialEq, Eq)]
pub enum ServingState {
    /// `healthy`: it takes requests.
    Healthy,
    /// `degraded`: it is much slower than declared, or avoided after failures.
    Degraded,
    /// `draining`: it ends running requests and takes no new ones.
    Draining,
    /// `loading`: it will take requests once its model is loaded.
    Loading,
    /// `down`: it does not answer.
    #[default]
    Down,
}

impl ServingState {
    /// All states.
    pub const ALL: [ServingState; 5] = [
        ServingState::Healthy,
        ServingState::Degraded,
        ServingState::Draining,
        ServingState::Loading,
        ServingState::Down,
    ];

    /// The state's name in metrics, logs and on the page.
    pub const fn name(self) -> &'static str {
        match self {
            ServingState::Healthy => "healthy",
            ServingState::Degraded => "degraded",
            ServingState::Draining => "draining",
            ServingState::Loading => "loading",
            ServingState::Down => "down",
        }
    }

    /// Whether it answers at all.
    const fn is_up(self) -> bool {
        !matches!(self, ServingState::Loading | ServingState::Down)
    }
}

/// What a state is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StateHolder {
    Instance,
    Engine,
}

impl StateHolder {
    const fn name(self) -> &'static str {
        match self {
            StateHolder::Instance => "instance",
            StateHolder::Engine => "engine",
        }
    }
}

/// Labels of [`Metrics::device_state`].
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct StateLabels {
    /// The device's id, or the engine's name.
    pub device: String,
    /// `healthy`, `degraded`, `draining`, `loading` or `down`.
    pub state: &'static str,
}

/// The state of one instance or engine.
#[derive(Debug)]
pub(super) struct StateRecord {
    holder: StateHolder,
    state: ServingState,
    reason: String,
    since: Seconds,
}

/// States by device id or engine name.
pub(super) type StateRecords = BTreeMap<String, StateRecord>;

impl Metrics {
    /// Records a state with its reason (empty if healthy), and logs a change.
    pub(crate) fn enter_state(
        &self,
        now: Seconds,
        of: (StateHolder, &str),
        state: ServingState,
        reason: &str,
    ) {
        let (holder, device) = of;
        let mut records = self.state_records();
        let before = records.get(device).map(|record| (record.state, record.since));
        let since = before.filter(|(earlier, _)| *earlier == state).map_or(now, |(_, since)| since);
        records.insert(device.into(), StateRecord { holder, state, reason: reason.into(), since });
        drop(records);
        self.show_state(holder, device, Some(state));
        if before.is_some_and(|(earlier, _)| earlier == state) {
            return;
        }
        let (from, to) = (before.map(|(earlier, _)| earlier.name()), state.name());
        let after_s = before.map(|(_, earlier)| ((now - earlier).0 * 1e3).round() / 1e3);
        let reason = Some(reason).filter(|reason| !reason.is_empty());
        tracing::info!(kind = holder.name(), device, from, to, after_s, reason, "state changed");
    }

    /// Removes one that is not expected any more.
    pub(crate) fn leave_state(&self, device: &str) {
        if let Some(record) = self.state_records().remove(device) {
            self.show_state(record.holder, device, None);
        }
    }

    /// Records that this process ends: all that are up are draining.
    pub(crate) fn drain_states(&self, now: Seconds) {
        let records = self.state_records();
        let up = records.iter().filter(|(_, record)| record.state.is_up());
        let up: Vec<_> = up.map(|(device, record)| (record.holder, device.clone())).collect();
        drop(records);
        for (holder, device) in up {
            self.enter_state(now, (holder, &device), ServingState::Draining, "this server is shutting down");
        }
    }

    /// Removes instances that have been down for an hour.
    pub(super) fn prune_states(&self, now: Seconds) {
        let is_gone = |record: &StateRecord| {
            record.holder == StateHolder::Instance
                && record.state == ServingState::Down
                && (now - record.since).0 > LISTED_DOWN.0
        };
        let records = self.state_records();
        let gone: Vec<String> =
            records.iter().filter(|(_, record)| is_gone(record)).map(|(device, _)| device.clone()).collect();
        drop(records);
        gone.iter().for_each(|device| self.leave_state(device));
    }

    /// All states, for `/debug/states`.
    pub(crate) fn states(&self, now: Seconds) -> Vec<Value> {
        let shown = |(device, record): (&String, &StateRecord)| {
            json!({
                "device": device,
                "kind": record.holder.name(),
                "state": record.state.name(),
                "for_s": (now - record.since).0.max(0.0),
                "reason": record.reason,
            })
        };
        self.state_records().iter().map(shown).collect()
    }

    /// Why nothing takes requests: the states, for how long, and what to do. None if something does, or if
    /// nothing is known yet.
    pub(crate) fn why_none_serves(&self, now: Seconds) -> Option<String> {
        let records = self.state_records();
        let cause = summarised(&records)?;
        let name = |(device, record): (&String, &StateRecord)| {
            let (state, time) = (record.state.name(), (now - record.since).0.max(0.0));
            let reason =
                if record.reason.is_empty() { String::new() } else { format!(" ({})", record.reason) };
            format!("{device} is {state} for {time:.0} s{reason}")
        };
        let mut named: Vec<String> = records.iter().take(NAMED_MAX).map(name).collect();
        if records.len() > NAMED_MAX {
            named.push(format!("{} more", records.len() - NAMED_MAX));
        }
        let remedy = match cause {
            NO_ENGINE => "Start it, or correct --worker-engine; it is probed every second",
            LOADING => "Ask again in a few seconds",
            _ => "The log has the cause; it is used again once it is back",
        };
        let cause = if cause == LOADING { "the model is still loading" } else { cause };
        Some(format!("{cause}: {}. {remedy}", named.join("; ")))
    }

    /// The same in a few words, for `/health`.
    pub(crate) fn none_serves(&self) -> Option<&'static str> {
        summarised(&self.state_records())
    }

    /// Records that a model is being loaded on these devices, and that no others are expected to be.
    pub fn loading(&self, now: Seconds, devices: &[String]) {
        let records = self.state_records();
        let is_other = |(device, record): &(&String, &StateRecord)| {
            record.state == ServingState::Loading && !devices.contains(device)
        };
        let others: Vec<String> = records.iter().filter(is_other).map(|(device, _)| device.clone()).collect();
        drop(records);
        others.iter().for_each(|device| self.leave_state(device));
        for device in devices {
            self.enter_state(now, (StateHolder::Instance, device), ServingState::Loading, "");
        }
    }

    fn show_state(&self, holder: StateHolder, device: &str, state: Option<ServingState>) {
        let up = match holder {
            StateHolder::Instance => &self.instance_up,
            StateHolder::Engine => &self.engine_up,
        };
        let labels = DeviceLabels { device: device.into() };
        match state {
            // one that has not been up yet is not lost
            Some(ServingState::Loading) if holder == StateHolder::Instance => {}
            Some(state) => _ = up.get_or_create(&labels).set(state.is_up().into()),
            None => _ = up.remove(&labels),
        }
        for other in ServingState::ALL {
            let labels = StateLabels { device: device.into(), state: other.name() };
            match state {
                Some(state) => _ = self.device_state.get_or_create(&labels).set((state == other).into()),
                None => _ = self.device_state.remove(&labels),
            }
        }
    }

    fn state_records(&self) -> MutexGuard<'_, StateRecords> {
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why nothing takes requests, in a few words; none if something does.
fn summarised(records: &StateRecords) -> Option<&'static str> {
    let any = |is: fn(&StateRecord) -> bool| records.values().any(is);
    if records.is_empty() || any(|one| matches!(one.state, ServingState::Healthy | ServingState::Degraded)) {
        return None;
    }
    Some(match any(|one| one.state == ServingState::Down) {
        true if any(|one| one.holder == StateHolder::Engine) => NO_ENGINE,
        false if any(|one| one.state == ServingState::Loading) => LOADING,
        _ => NO_INSTANCE,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: (StateHolder, &str) = (StateHolder::Instance, "cuda:0");
    const ENGINE: (StateHolder, &str) = (StateHolder::Engine, "vllm:a:8000");

    fn has(metrics: &Metrics, line: &str) -> bool {
        metrics.encode().lines().any(|other| other == line)
    }

    #[test]
    fn one_state_is_1_at_a_time_and_only_answering_ones_are_up() {
        let metrics = Metrics::new();
        for (at, state) in ServingState::ALL.into_iter().enumerate() {
            metrics.enter_state(Seconds(at as f64), ENGINE, state, "why");
            for other in ServingState::ALL {
                let value = u8::from(state == other);
                let (device, name) = (ENGINE.1, other.name());
                let line = format!("mixfleet_device_state{{device=\"{device}\",state=\"{name}\"}} {value}");
                assert!(has(&metrics, &line), "{line}");
            }
            let up = u8::from(!["loading", "down"].contains(&state.name()));
            assert!(has(&metrics, &format!("mixfleet_engine_up{{device=\"{}\"}} {up}", ENGINE.1)));
        }
        metrics.leave_state(ENGINE.1);
        assert!(!metrics.encode().contains(ENGINE.1) && metrics.states(Seconds(9.0)).is_empty());
    }

    #[test]
    fn a_reason_may_change_within_a_state_and_its_time_continues() {
        let metrics = Metrics::new();
        metrics.enter_state(Seconds(1.0), ENGINE, ServingState::Down, "refused");
        metrics.enter_state(Seconds(4.0), ENGINE, ServingState::Down, "no route");
        let shown = &metrics.states(Seconds(6.0))[0];
        assert_eq!((shown["for_s"].as_f64(), shown["reason"].as_str()), (Some(5.0), Some("no route")));
    }

    #[test]
    fn a_503_names_who_is_down_since_when_and_what_to_do() {
        let metrics = Metrics::new();
        assert_eq!(metrics.why_none_serves(Seconds(1.0)), None, "nothing is known yet");
        metrics.enter_state(Seconds(1.0), ENGINE, ServingState::Down, "connection refused");
        let why = metrics.why_none_serves(Seconds(13.0)).unwrap();
        assert!(why.contains("vllm:a:8000 is down for 12 s (connection refused)"), "{why}");
        assert!(why.contains("--worker-engine"), "{why}");
        metrics.enter_state(Seconds(13.0), ENGINE, ServingState::Degraded, "it fails");
        assert_eq!(metrics.why_none_serves(Seconds(14.0)), None, "it still gets requests");
    }

    #[test]
    fn an_instance_that_stays_away_is_forgotten_and_an_engine_is_not() {
        let metrics = Metrics::new();
        metrics.enter_state(Seconds(0.0), GPU, ServingState::Down, "lost");
        metrics.enter_state(Seconds(0.0), ENGINE, ServingState::Down, "refused");
        metrics.settle(Seconds(LISTED_DOWN.0));
        assert_eq!(metrics.states(Seconds(0.0)).len(), 2);
        metrics.settle(Seconds(LISTED_DOWN.0 + 1.0));
        assert_eq!(metrics.states(Seconds(0.0)).len(), 1);
        assert!(!metrics.encode().contains("mixfleet_instance_up{"));
    }

    #[test]
    fn a_server_that_ends_drains_what_is_up() {
        let metrics = Metrics::new();
        metrics.enter_state(Seconds(0.0), GPU, ServingState::Healthy, "");
        metrics.enter_state(Seconds(0.0), ENGINE, ServingState::Down, "refused");
        metrics.drain_states(Seconds(1.0));
        let states: Vec<_> =
            metrics.states(Seconds(1.0)).iter().map(|shown| shown["state"].clone()).collect();
        assert_eq!(states, ["draining", "down"]);
    }
}

//! Metrics of a device's state while it serves: power, energy and temperature, beside its steps and tokens.

use crate::metrics::{DeviceLabels, Metrics};
use mixfleet_hal::Health;
use mixfleet_hal::units::Seconds;

/// Interval between readings: sensors are slow to read and to change.
const EVERY: Seconds = Seconds(1.0);

/// The health metrics of one device.
pub(super) struct HealthWatch {
    labels: DeviceLabels,
    metrics: Metrics,
    next: Seconds,
}

impl HealthWatch {
    pub(super) fn new(device: String, metrics: Metrics) -> Self {
        HealthWatch { labels: DeviceLabels { device }, metrics, next: Seconds::ZERO }
    }

    /// Counts a step of this many tokens that ended at `now`, and reads the sensors once a second at most.
    pub(super) fn stepped(&mut self, tokens: u64, now: Seconds, health: impl FnOnce() -> Health) {
        self.metrics.device_steps.get_or_create(&self.labels).inc();
        self.metrics.device_tokens.get_or_create(&self.labels).inc_by(tokens);
        if now < self.next {
            return;
        }
        self.next = now + EVERY;
        let Health { energy_j, power_w, temperature_c, .. } = health();
        let known = [
            (energy_j, &self.metrics.device_energy_j),
            (power_w, &self.metrics.device_power_w),
            (temperature_c, &self.metrics.device_temperature_c),
        ];
        for (value, gauge) in known {
            if let Some(value) = value {
                gauge.get_or_create(&self.labels).set(value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_count_always_and_sensors_are_read_once_a_second() {
        let metrics = Metrics::new();
        let mut watch = HealthWatch::new("gpu:0".into(), metrics.clone());
        let at = |joules| move || Health { energy_j: Some(joules), ..Health::default() };
        watch.stepped(100, Seconds(5.0), at(10.0));
        watch.stepped(20, Seconds(5.5), || panic!("too soon"));
        watch.stepped(3, Seconds(6.0), at(40.0));
        let text = metrics.encode();
        for line in [
            "mixfleet_device_tokens_total{device=\"gpu:0\"} 123",
            "mixfleet_device_energy_joules{device=\"gpu:0\"} 40.0",
        ] {
            assert!(text.lines().any(|other| other == line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("mixfleet_device_power_watts{"), "what a device does not tell is not there");
    }
}

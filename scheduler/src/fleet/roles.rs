//! Roles that follow the load: a side that is short of instances gets one from the other side, if that can
//! spare it.
//!
//! ```text
//! load of prefill = max(mean wait of a prompt / TTFT objective, share of instances with a prompt)
//! load of decode  = mean of max(step / TBT objective, KV tokens / KV capacity)
//! ```
//!
//! Both are means over a window of time, checked whenever a request arrives. At a window's end
//!
//! - prefill gets an instance if its load was above `high` and decode's would stay below `low` with one
//!   instance less, which gets the requests of one more prefill instance;
//! - decode gets one if its load was above `high`. Prefill may be short then too: it rejects requests on
//!   arrival, while full decoders break the objectives of accepted ones.
//!
//! Since decode gives up no instance that would bring it near `high`, it does not want it back at equal load;
//! that, and the window, is the hysteresis.

use super::load::{Batch, Load};
use super::{Action, Fleet, InstanceId, Role};
use mixfleet_hal::cast::{to_u32, to_u64};
use mixfleet_hal::units::Seconds;
use serde::{Deserialize, Serialize};

/// When instances change between prefill and decode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rebalance {
    /// A side whose load exceeds this gets an instance.
    pub high: f64,
    /// Prefill gets one only if decode's load would be below this without it. It must be less than `high`.
    pub low: f64,
    /// The window of the mean loads, at the end of which roles may change once.
    pub hold: Seconds,
    /// Pools whose instances may change, if they have one of the two roles.
    pub pools: Vec<u32>,
}

impl Rebalance {
    /// For instances of `pools`: a side above 0.9 gets one, prefill only if decode stays below 0.7 without
    /// it, at most every 30 s.
    pub fn new(pools: Vec<u32>) -> Self {
        Rebalance { high: 0.9, low: 0.7, hold: Seconds(30.0), pools }
    }
}

/// A side's load, as it is and with one instance less, infinite if that would leave none.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Strain {
    load: f64,
    with_one_less: f64,
}

impl Strain {
    fn plus(self, other: Strain, weight: f64) -> Strain {
        Strain {
            load: self.load + weight * other.load,
            with_one_less: self.with_one_less + weight * other.with_one_less,
        }
    }
}

/// The current window.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Window {
    began: Option<Seconds>,
    looked: Seconds,
    /// Integral of the load since the window began.
    prefill: f64,
    decode: Strain,
}

impl Fleet {
    /// Samples the loads, and changes a role if it is time to.
    pub(super) fn rebalance(&mut self, now: Seconds, actions: &mut Vec<Action>) {
        let Some(rule) = &self.config.rebalance else { return };
        let (high, low, hold) = (rule.high, rule.low, rule.hold);
        let Some(began) = self.window.began else {
            self.window = Window { began: Some(now), looked: now, ..Window::default() };
            return;
        };
        let passed_s = (now - self.window.looked).0.max(0.0);
        let (prefill, decode) = (self.prefill_load(now), self.decode_strain());
        let window = &mut self.window;
        window.looked = now;
        window.prefill += prefill * passed_s;
        window.decode = window.decode.plus(decode, passed_s);
        let length_s = (now - began).0;
        if length_s < hold.0 {
            return;
        }
        let Window { prefill, decode, .. } = *window;
        *window = Window { began: Some(now), looked: now, ..Window::default() };
        let (above, below) = (high * length_s, low * length_s);
        let to = if prefill > above && decode.with_one_less < below {
            Role::Prefill
        } else if decode.load > above && self.count(Role::prefills) > 1.0 {
            Role::Decode
        } else {
            return;
        };
        if let Some(instance) = self.least_busy(to, now) {
            self.set_role(instance, to);
            actions.push(Action::SetRole { instance, role: to });
        }
    }

    fn prefill_load(&self, now: Seconds) -> f64 {
        let (mut wait_s, mut busy) = (0.0, 0.0);
        for load in self.loads.iter().filter(|load| load.spec.role.prefills()) {
            wait_s += load.backlog(now, Seconds(f64::INFINITY), &self.works).0.time.0;
            busy += f64::from(u8::from(load.prompts() > 0));
        }
        let wait = self.config.ttft_slo.map_or(0.0, |slo| wait_s / slo.0);
        wait.max(busy) / self.count(Role::prefills).max(1.0)
    }

    /// Number of instances with such a role.
    fn count(&self, has: fn(Role) -> bool) -> f64 {
        self.loads.iter().filter(|load| has(load.spec.role)).count() as f64
    }

    fn decode_strain(&self) -> Strain {
        let decoders = || self.loads.iter().filter(|load| load.spec.role.decodes());
        let count = self.count(Role::decodes);
        let others = self.count(Role::prefills).max(1.0);
        let mean = |growth: f64| {
            let of = |load: &Load| {
                let Batch { sequences, kv_tokens } = load.batch();
                let sequences = to_u32((f64::from(sequences) * growth).round());
                let kv_tokens = to_u64((kv_tokens as f64 * growth).round());
                let decoding = load.seats().iter().filter(|seat| seat.decodes());
                let held: u64 = decoding.map(|seat| load.spec.tokens_held(seat.context())).sum();
                let step = load.step(Batch { sequences, kv_tokens });
                let fill = held as f64 * growth / load.spec.kv_capacity_tokens.max(1) as f64;
                self.config.tbt_slo.map_or(0.0, |slo| step / slo).max(fill)
            };
            decoders().map(of).sum::<f64>() / count.max(1.0)
        };
        Strain {
            load: mean(1.0),
            // The other side then has one more instance, and sends proportionally more.
            with_one_less: if count > 1.0 {
                mean(count / (count - 1.0) * (others + 1.0) / others)
            } else {
                f64::INFINITY
            },
        }
    }

    /// Among the other side's instances that may change to the role `to`, the one with the least work; the
    /// first of equals.
    fn least_busy(&self, to: Role, now: Seconds) -> Option<InstanceId> {
        let rule = self.config.rebalance.as_ref()?;
        let from = if to == Role::Prefill { Role::Decode } else { Role::Prefill };
        let work = |load: &Load| match from {
            Role::Decode => load.batch().kv_tokens as f64,
            _ => load.backlog(now, Seconds(f64::INFINITY), &self.works).0.time.0,
        };
        let may = self
            .loads
            .iter()
            .filter(|load| load.spec.role == from && rule.pools.contains(&load.spec.pool))
            .map(|load| (load.spec.id, work(load)));
        may.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(id, _)| id)
    }

    /// Changes an instance's role; its work stays.
    fn set_role(&mut self, instance: InstanceId, role: Role) {
        if let Some(at) = self.position(instance) {
            self.loads.set_role(at, role);
        }
    }
}

#[cfg(test)]
mod tests;

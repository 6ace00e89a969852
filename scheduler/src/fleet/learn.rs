//! The fleet's view of corrections ([`crate::cost::Corrections`]): what steps and transfers of which instance
//! are learnt from, and what follows for its queue.

use super::load::{Load, Works};
use super::{Fleet, InstanceId};
use crate::cost::{Corrections, FADES_AFTER, LinkCost, MeasuredSteps};
use mixfleet_hal::units::{Bytes, Seconds};

/// A KV transfer from the prefill instance over idle links.
#[derive(Clone, Copy, Debug)]
pub(super) struct OnItsWay {
    left_at: Seconds,
    /// Its total time, uncorrected.
    whole: Seconds,
    /// The predicted exposed part, after the prefill.
    shows: Seconds,
}

impl Fleet {
    /// The corrections of `instance` and the mean remaining errors; none if it is not up.
    pub fn learned(&self, instance: InstanceId) -> Option<(Corrections, Corrections)> {
        let learner = &self.loads[self.position(instance)?].learner;
        Some((learner.corrections(), learner.errors()))
    }

    /// Learns from measured steps of an instance.
    pub(super) fn measured(&mut self, now: Seconds, instance: InstanceId, steps: &MeasuredSteps) {
        self.learn(instance, |load| {
            let cost = load.spec.cost.clone();
            load.learner.observe_steps(now, &cost, steps);
        });
    }

    /// Begins a measured transfer of a prompt's KV beside a prefill that took `prefill`; none if other
    /// transfers precede it.
    pub(super) fn leaves(
        &self,
        now: Seconds,
        (from, to): (usize, usize),
        bytes: Bytes,
        prefill: Seconds,
    ) -> Option<OnItsWay> {
        let (from, to) = (&self.loads[from], &self.loads[to]);
        let link = self.uncorrected_link(from, to)?;
        let whole = link.time(bytes);
        let free = from.egress_until <= now && to.ingress_until <= now && whole.0 > 0.0;
        let shows = link.exposed(bytes, self.config.layers, prefill);
        free.then_some(OnItsWay { left_at: now, whole, shows })
    }

    /// Learns from a transfer that has arrived at `to`. The receiver checks between its steps, so one step is
    /// subtracted.
    pub(super) fn arrived_at(&mut self, now: Seconds, from: InstanceId, to: InstanceId, kv: OnItsWay) {
        let Some(receiver) = self.position(to).map(|at| &self.loads[at]) else { return };
        let took = now - kv.left_at;
        let looked_after = receiver.step(receiver.batch());
        let late = (took - kv.shows - looked_after).max((took - kv.shows).min(Seconds::ZERO));
        let measured = (kv.whole + late).max(Seconds::ZERO);
        self.learn(from, |load| load.learner.observe_transfer(now, kv.whole, measured));
    }

    /// Fades the corrections that were not measured for long.
    pub(super) fn fade_corrections(&mut self, now: Seconds) {
        if now.0 < self.fade_at.0 {
            return;
        }
        self.fade_at = now + FADES_AFTER * 0.25;
        let wrong = self.loads.iter().filter(|load| load.learner.corrections() != Corrections::default());
        for id in wrong.map(|load| load.spec.id).collect::<Vec<InstanceId>>() {
            self.learn(id, |load| load.learner.fade(now));
        }
    }

    fn learn(&mut self, instance: InstanceId, learn: impl FnOnce(&mut Load)) {
        let Some(at) = self.position(instance) else { return };
        self.loads.learn(at, learn, &mut self.works);
    }
}

impl Load {
    /// Corrected time to compute `new_tokens` of a prompt after `context_before` tokens.
    pub(super) fn prefill_s(&self, context_before: u32, new_tokens: u32) -> Seconds {
        self.spec.cost.prefill_s(context_before, new_tokens) * self.learner.prefill_factor()
    }

    /// The corrected cost of a link out of the instance.
    pub(super) fn corrected(&self, link: LinkCost) -> LinkCost {
        let factor = self.learner.transfer_factor();
        LinkCost {
            latency: link.latency * factor,
            seconds_per_byte: link.seconds_per_byte * factor,
            usd_per_byte: link.usd_per_byte,
        }
    }

    /// Multiplies the remaining time of queued prompts by `factor`.
    pub(super) fn stretch(&mut self, factor: f64, works: &mut Works) {
        for request in self.queued() {
            if let Some(work) = works.get_mut(request) {
                work.stretch(factor);
            }
        }
        self.stretch_backlog(factor);
    }
}

#[cfg(test)]
mod tests;

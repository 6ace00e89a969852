//! The fleet's use of corrections ([`crate::cost::Corrections`]): which steps and transfers they are learnt
//! from, and how they change an instance's queue.

use super::load::{Load, Phase, Work, Works};
use super::{Fleet, InstanceId};
use crate::cost::{FADES_AFTER, LinkCost, MeasuredSteps, SizedCorrections};
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
    /// The corrections of `instance`; none if it is not up.
    pub fn learned(&self, instance: InstanceId) -> Option<SizedCorrections> {
        Some(self.loads[self.position(instance)?].learner.corrections())
    }

    /// Whether the prompts and steps of `instance` take what its declared part would take, within
    /// [`DECLARED_WITHIN`](crate::cost::DECLARED_WITHIN); none if it is not up.
    pub fn is_as_declared(&self, instance: InstanceId) -> Option<bool> {
        Some(self.loads[self.position(instance)?].learner.is_as_declared())
    }

    /// Learns from measured steps of an instance.
    pub(super) fn measured(&mut self, now: Seconds, instance: InstanceId, steps: &MeasuredSteps) {
        let placed = self.trials.placed;
        self.learn(instance, |load| {
            load.measured_after = placed;
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

    /// Fades the corrections of transfers that were not measured for long.
    pub(super) fn fade_corrections(&mut self, now: Seconds) {
        if now.0 < self.fade_at.0 {
            return;
        }
        self.fade_at = now + FADES_AFTER * 0.25;
        let wrong = self.loads.iter().filter(|load| load.learner.transfer_factor() != 1.0);
        for id in wrong.map(|load| load.spec.id).collect::<Vec<InstanceId>>() {
            self.learn(id, |load| load.learner.fade_transfers(now));
        }
    }

    /// Learns what the first token of `work`, which is drawn at `now`, took beyond its prediction.
    pub(super) fn first_token(&mut self, now: Seconds, at: usize, work: &Work) {
        let Some((placed_at, cached)) = work.alone_since else { return };
        self.loads.change(at, |load| {
            let prefill = load.prefill_s(cached, work.prompt_tokens - cached);
            load.overhead.observe(now - placed_at - prefill);
        });
    }

    fn learn(&mut self, instance: InstanceId, learn: impl FnOnce(&mut Load)) {
        let Some(at) = self.position(instance) else { return };
        self.loads.learn(at, learn, &mut self.works);
    }
}

impl Load {
    /// Corrected time to compute `new_tokens` of a prompt after `context_before` tokens.
    pub(super) fn prefill_s(&self, context_before: u32, new_tokens: u32) -> Seconds {
        let factor = self.learner.prefill_factor(self.spec.piece(new_tokens));
        self.spec.cost.prefill_s(context_before, new_tokens) * factor
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

    /// Corrects the remaining time of queued prompts, which was predicted with the corrections `before`.
    pub(super) fn correct_queue(&mut self, before: &SizedCorrections, works: &mut Works) {
        let after = self.learner.corrections();
        let mut queued = Vec::with_capacity(self.prompts());
        for request in self.queued() {
            let Some(work) = works.get_mut(request) else { continue };
            let Phase::Prefill { done, remaining } = &mut work.phase else { continue };
            let piece = self.spec.piece(work.prompt_tokens - *done);
            let corrected = *remaining * (after.prefill_of(piece) / before.prefill_of(piece));
            queued.push((*remaining, corrected));
            *remaining = corrected;
        }
        self.correct_backlog(&queued);
    }
}

#[cfg(test)]
mod tests;

//! What prompts do to the TBT of answers beside which they run.
//!
//! If prompts are sized to the objectives of the answers beside them, no step is too long. If prompts fill
//! steps regardless of decodes, each makes a few gaps of all answers long, and the share of gaps by which TBT
//! is measured leaves room for only a few.

use super::load::Load;
use mixfleet_hal::units::Seconds;

/// The steps of prompts in which an answer took part, or will, and what they add to its gaps.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stalls {
    time: Seconds,
    steps: u64,
}

impl Stalls {
    fn with(self, other: Stalls) -> Stalls {
        Stalls { time: self.time + other.time, steps: self.steps + other.steps }
    }

    /// What they add to the mean of the longest `gaps` gaps.
    fn added(self, gaps: f64) -> Seconds {
        self.time * (1.0 / (self.steps.max(1) as f64).max(gaps))
    }
}

impl Load {
    /// The stalls of the answers here by a prompt of `tokens` tokens, which takes `time`.
    pub(super) fn stalls_of(&self, tokens: u32, time: Seconds) -> Option<Stalls> {
        self.spec.prefill_tokens_beside_decode_max?;
        Some(Stalls { time, steps: self.chunks(tokens) })
    }

    /// Adds a prompt that will run beside the answers here.
    pub(super) fn stall(&mut self, stalls: Stalls) {
        for seat in self.seats_mut() {
            seat.stalls = seat.stalls.with(stalls);
        }
    }

    /// By how much another prompt would make an answer here miss its TBT objective, if it is met without: the
    /// maximum over answers, if any. TBT is the mean of the longest `share` of an answer's gaps.
    pub(super) fn overruns(&self, stalls: Stalls, share: f64) -> Option<Seconds> {
        let step = self.step(self.everyone());
        let over = self.seats().iter().filter_map(|seat| {
            let (slo, gaps) = (seat.tbt_slo?, (share * f64::from(seat.output_tokens)).max(1.0));
            let over = |stalls: Stalls| step + stalls.added(gaps) - slo;
            let with = over(seat.stalls.with(stalls));
            (over(seat.stalls).0 <= 0.0 && with.0 > 0.0).then_some(with)
        });
        over.reduce(Seconds::max)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{arrival, arrive, close, config, fleet, instance, placed};
    use super::super::{Action, FleetConfig, Instance, RejectReason, Role};
    use crate::fleet::explain::Outcome;
    use mixfleet_hal::units::{Seconds, UsdPerHour};

    /// Answers of 50 tokens, whose 5 longest gaps may take 0.5 s together; prompts that take 0.1 s each.
    fn of(instances: Vec<Instance>) -> super::super::Fleet {
        fleet(FleetConfig { tbt_slo: Some(Seconds(0.1)), ..config() }, instances)
    }

    #[test]
    fn prompts_beside_an_answer_end_where_its_objective_would_be_missed() {
        let auto = |id| instance(id, Role::Auto, 1e-3, 1e-2);
        let mut f = of(vec![auto(1)]);
        // Each prompt adds 20 ms to steps of 10 ms: four are within the objective, a fifth is not.
        for request in 0..5 {
            placed(&arrive(&mut f, 0.0, arrival(request, 100, request)));
        }
        let action = arrive(&mut f, 0.0, arrival(5, 100, 5));
        let Action::Reject { reason: RejectReason::TbtSlo { tbt_s, slo_s }, explanation, .. } = action else {
            panic!("{action:?}")
        };
        close(tbt_s, 0.0105 + 5.0 * 0.02);
        close(slo_s, 0.1);
        let outcome = explanation.candidates[0].outcome;
        assert!(matches!(outcome, Outcome::OverrunsTbtSlo { .. }), "{outcome:?}");
        // A quarter of the prompt is a quarter of the gap.
        placed(&arrive(&mut f, 0.0, arrival(6, 25, 6)));

        // An instance whose steps are sized to the objective delays no answer.
        let sized = |id| Instance { prefill_tokens_beside_decode_max: None, ..auto(id) };
        let mut f = of(vec![sized(1)]);
        for request in 0..7 {
            placed(&arrive(&mut f, 0.0, arrival(request, 100, request)));
        }
    }

    #[test]
    fn another_instance_takes_what_would_overrun_the_first() {
        let cheap = Instance { price: Some(UsdPerHour(0.1)), ..instance(1, Role::Auto, 1e-3, 1e-2) };
        let dear = Instance { price: Some(UsdPerHour(50.0)), ..instance(2, Role::Auto, 1e-3, 1e-2) };
        let patient = FleetConfig { wait_usd_per_s: Some(0.0), tbt_slo: Some(Seconds(0.1)), ..config() };
        let mut f = fleet(patient, vec![cheap, dear]);
        let on: Vec<u32> = (0..7).map(|i| placed(&arrive(&mut f, 0.0, arrival(i, 100, i))).0).collect();
        assert_eq!(on, [1, 1, 1, 1, 1, 2, 2]);
    }

    #[test]
    fn what_idle_instances_cost_counts_little() {
        let priced = |id, price, prefill| Instance {
            price: Some(UsdPerHour(price)),
            ..instance(id, Role::Auto, prefill, 1e-2)
        };
        let first_of = |instances: u32| {
            let mut all = vec![priced(1, 1.0, 1.9e-3), priced(2, 4.0, 1e-3)];
            all.extend((3..=instances).map(|id| priced(id, 1.0, 9e-3)));
            let mut f = fleet(FleetConfig { wait_usd_per_s: Some(1.0 / 3600.0), ..config() }, all);
            placed(&arrive(&mut f, 0.0, arrival(1, 100, 1))).0
        };
        // One of two has work, or one of twelve.
        assert_eq!((first_of(2), first_of(12)), (1, 2));
    }
}

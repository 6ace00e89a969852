//! Runs of equal steps against single ones.

use super::rows_tests;
use super::tests::LIMITS;
use super::*;
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::Seconds;
use std::collections::BTreeMap;

/// Prompts without tokens: the machine needs none.
#[derive(Debug)]
pub(super) struct Counted {
    pub(super) request: RequestId,
    pub(super) length: u32,
}

impl Text for Counted {
    type Block = ();

    fn length(&self) -> u32 {
        self.length
    }

    fn hash(&mut self, block: u32) -> BlockHash {
        BlockHash(self.request << 32 | u64::from(block))
    }

    fn block(&self, _: u32) {}

    fn has(&self, _: u32, _: &()) -> bool {
        true
    }
}

/// Runs the current step and those that follow until a sequence ends or is preempted; one by one or in one
/// go. Returns how many, and the machine's actions.
fn run_until_somebody_ends(
    machine: &mut Instance<Counted>,
    left: &mut BTreeMap<RequestId, u32>,
    at_once: bool,
) -> (u32, Vec<super::Action<()>>) {
    let (mut actions, mut steps, news) = (Vec::new(), 0, machine.news);
    if at_once {
        let most = machine.in_step.iter().map(|part| left[&part.request] - 1).min().unwrap();
        steps = machine.steady_steps(most);
        machine.advance(steps, &mut actions);
        machine.in_step.iter().for_each(|part| *left.get_mut(&part.request).unwrap() -= steps);
    }
    loop {
        let parts = machine.in_step.clone();
        let sampled = parts.iter().filter(|part| part.sample).map(|&StepSequence { request, .. }| {
            let left = left.get_mut(&request).unwrap();
            *left -= 1;
            Sampled { request, finished: *left == 0 }
        });
        let sampled: Vec<Sampled> = sampled.collect();
        let ended = sampled.iter().any(|s| s.finished);
        machine.step(Event::StepDone { sampled }, &mut actions);
        machine.step(Event::Idle, &mut actions);
        steps += 1;
        if news || ended || machine.in_step.is_empty() || parts.iter().any(|part| part.tokens > 1) {
            return (steps, actions);
        }
    }
}

#[test]
fn steps_in_one_go_are_what_single_steps_are() {
    let (mut compared, mut evicted) = (0, 0);
    for seed in 0..100 {
        // for half of the seeds, steps are sized by the decoding requests
        let prefill_tokens_beside_decode_max = (seed % 2 == 0).then_some(6);
        let limits = BatchLimits {
            prefill_tokens_beside_decode_max,
            page_parts: tests::windows::windowed(seed),
            ..LIMITS
        };
        let machine = || Instance::new(limits.clone()).predicted_by(rows_tests::cost());
        let mut machines = [machine(), machine()];
        let mut left = [BTreeMap::new(), BTreeMap::new()];
        let mut rng = Stream::new(seed);
        for request in 0..20 {
            let (length, output) = (1 + rng.below(20) as u32, 1 + rng.below(30) as u32);
            let tbt_slo = (rng.below(2) == 0).then_some(Seconds(0.01));
            let urgency = Urgency {
                due: Seconds(rng.below(5) as f64),
                gives_way: rng.below(2) == 0,
                tbt_slo,
                party: PartyId::NONE,
            };
            let mut done = Vec::new();
            for (at, machine) in machines.iter_mut().enumerate() {
                left[at].insert(request, output);
                let (text, after) = (Counted { request, length }, After::Decode);
                machine.step(Event::Add { request, urgency, text, pulls: 0, after }, &mut Vec::new());
                if machine.in_step.is_empty() {
                    machine.step(Event::Idle, &mut Vec::new());
                }
            }
            for _ in 0..rng.below(4) {
                for (at, machine) in machines.iter_mut().enumerate() {
                    if !machine.in_step.is_empty() {
                        let (steps, actions) = run_until_somebody_ends(machine, &mut left[at], at == 1);
                        let gone = |action: &super::Action<()>| match action {
                            super::Action::Evicted(gone) => gone.clone(),
                            _ => Vec::new(),
                        };
                        let gone: Vec<Evicted<()>> = actions.iter().flat_map(gone).collect();
                        evicted += gone.len();
                        let stored = machine.stored();
                        done.push((steps, gone, stored, machine.in_step.clone(), machine.load()));
                    }
                }
                let [single, at_once] = &done[..] else { break };
                assert_eq!(single, at_once, "seed {seed}");
                compared += single.0;
                done.clear();
            }
        }
    }
    assert!(compared > 5000 && evicted > 1000, "{compared} steps, {evicted} blocks given up");
}

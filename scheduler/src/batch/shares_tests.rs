//! Shares in virtual time: a party with a high load beside one with a low load.

use super::steady_tests::Counted;
use super::tests::LIMITS;
use super::*;
use crate::cost::{Coefficients, DecodeCoefficients, Prefill, PrefillCoefficients};
use mixfleet_hal::units::Seconds;
use proptest::prelude::*;
use std::collections::BTreeMap;

const FLOOD: PartyId = PartyId(1);
const OTHER: PartyId = PartyId(2);

/// The load of a party: this many requests at a time, each followed by the next one.
#[derive(Clone, Copy, Debug)]
struct Load {
    party: PartyId,
    at_a_time: usize,
    requests: usize,
    prompt: u32,
    output: u32,
}

#[derive(Clone, Copy)]
struct InWork {
    load: usize,
    came: Seconds,
    length: u32,
    length_max: u32,
}

/// Plays an instance and its clients on a clock that steps move.
struct World {
    machine: Instance<Counted>,
    cost: Arc<CostModel>,
    loads: Vec<Load>,
    begun: Vec<usize>,
    in_work: BTreeMap<RequestId, InWork>,
    next: RequestId,
    now: Seconds,
    longest_step: Seconds,
    tokens: u64,
    /// Times of the answers of each load.
    took: Vec<Vec<f64>>,
}

impl World {
    fn new(limits: BatchLimits, cost: Coefficients, loads: &[Load]) -> Self {
        let cost = Arc::new(CostModel::Coefficients(cost));
        let mut world = World {
            machine: Instance::new(limits).predicted_by(cost.clone()),
            cost,
            loads: loads.to_vec(),
            begun: vec![0; loads.len()],
            in_work: BTreeMap::new(),
            next: 0,
            now: Seconds::ZERO,
            longest_step: Seconds::ZERO,
            tokens: 0,
            took: vec![Vec::new(); loads.len()],
        };
        for (load, of) in loads.iter().enumerate() {
            (0..of.at_a_time).for_each(|_| world.ask(load));
        }
        world
    }

    fn ask(&mut self, load: usize) {
        let Load { party, requests, prompt, output, .. } = self.loads[load];
        if self.begun[load] == requests {
            return;
        }
        self.begun[load] += 1;
        let request = self.next;
        self.next += 1;
        let in_work = InWork { load, came: self.now, length: prompt, length_max: prompt + output };
        self.in_work.insert(request, in_work);
        let urgency = Urgency { party, ..Urgency::due_at(self.now) };
        let text = Counted { request, length: prompt };
        let event = Event::Add { request, urgency, text, pulls: 0, after: After::Decode };
        self.machine.step(event, &mut Vec::new());
    }

    /// Runs a step. False if there was none.
    fn turn(&mut self) -> bool {
        let mut actions = Vec::new();
        self.machine.step(Event::Idle, &mut actions);
        let Some(super::Action::Run(step)) = actions.pop() else { return false };
        let is_decode = |part: &StepSequence| part.tokens == 1 && part.sample && part.start > 0;
        let (mut sequences, mut kv_tokens, mut pieces) = (0, 0, Vec::new());
        for part in &step.sequences {
            if is_decode(part) {
                sequences += 1;
                kv_tokens += u64::from(part.start + 1);
            } else {
                pieces.push(Prefill { context: part.start, tokens: part.tokens, last: part.sample });
            }
        }
        let time = self.cost.step_s(&pieces, sequences, kv_tokens);
        self.now += time;
        self.longest_step = self.longest_step.max(time);
        self.tokens += step.sequences.iter().map(|part| u64::from(part.tokens)).sum::<u64>();
        let (mut sampled, mut ended) = (Vec::new(), Vec::new());
        for part in step.sequences.iter().filter(|part| part.sample) {
            let in_work = self.in_work.get_mut(&part.request).expect("a running request is in work");
            in_work.length += 1;
            let finished = in_work.length == in_work.length_max;
            sampled.push(Sampled { request: part.request, finished });
            if finished {
                let InWork { load, came, .. } = *in_work;
                self.in_work.remove(&part.request);
                self.took[load].push((self.now - came).0);
                ended.push(load);
            }
        }
        self.machine.step(Event::StepDone { sampled }, &mut actions);
        ended.into_iter().for_each(|load| self.ask(load));
        true
    }

    fn run(mut self) -> Self {
        let mut turns = 0;
        while !self.in_work.is_empty() {
            assert!(self.turn(), "requests wait and nothing runs: {:?}", self.in_work.keys());
            turns += 1;
            assert!(turns < 400_000, "some request never ends");
        }
        self
    }
}

fn p99(times: &[f64]) -> f64 {
    let mut times = times.to_vec();
    times.sort_by(f64::total_cmp);
    times[(times.len() * 99).div_ceil(100) - 1]
}

fn limits(blocks_total: u32, sequences_max: usize) -> BatchLimits {
    BatchLimits {
        blocks_total,
        block_tokens: 16,
        step_tokens_max: 256,
        prefill_tokens_beside_decode_max: None,
        sequences_max,
        spare_blocks: 1,
        ..LIMITS
    }
}

fn cost(base: f64, per_sequence: f64) -> Coefficients {
    Coefficients {
        prefill_s: PrefillCoefficients {
            overhead: base,
            per_token: per_sequence / 2.0,
            per_token_squared: 0.0,
        },
        decode_s: DecodeCoefficients { base, per_sequence, per_kv_token: 1e-8 },
    }
}

const ASKS_LITTLE: Load = Load { party: OTHER, at_a_time: 1, requests: 100, prompt: 4, output: 4 };

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// For any size of the flood, and for steps that cost by their rows or by the weights that they read.
    #[test]
    fn a_flood_delays_another_party_by_its_share_and_a_step(
        blocks_total in 64_u32..2048,
        sequences_max in 4_usize..64,
        base in prop::sample::select(vec![1e-5, 1e-3, 2e-2]),
        at_a_time in 2_usize..400,
        prompt in 1_u32..400,
        output in 1_u32..200,
    ) {
        let (limits, cost) = (limits(blocks_total, sequences_max), cost(base, 1e-3));
        let alone = World::new(limits.clone(), cost, &[ASKS_LITTLE]).run();
        let flood = Load { party: FLOOD, at_a_time, requests: 400, prompt, output };
        let flooded = World::new(limits, cost, &[flood, ASKS_LITTLE]).run();
        let (p99, alone) = (p99(&flooded.took[1]), p99(&alone.took[0]));
        let bound = 3.0 * alone + flooded.longest_step.0;
        prop_assert!(p99 <= bound, "p99 {p99} beside {alone} alone and a step of {:?}", flooded.longest_step);
        prop_assert_eq!(flooded.took[0].len(), 400, "the flood is answered too");
    }

    /// Three parties with any loads: each request ends, and steps go on while there is work.
    #[test]
    fn every_request_of_every_party_ends(
        blocks_total in 30_u32..300,
        sequences_max in 1_usize..9,
        loads in prop::collection::vec((1_usize..20, 1_u32..400, 1_u32..80), 3),
    ) {
        let load = |(party, (at_a_time, prompt, output)): (u64, (usize, u32, u32))| Load {
            party: PartyId(party),
            at_a_time,
            requests: 30,
            prompt,
            output,
        };
        let loads: Vec<Load> = (0..).zip(loads).map(load).collect();
        let ended = World::new(limits(blocks_total, sequences_max), cost(1e-3, 1e-3), &loads).run();
        prop_assert!(ended.took.iter().all(|took| took.len() == 30));
    }
}

#[test]
fn a_party_alone_has_everything_in_the_same_order() {
    let flood = Load { party: FLOOD, at_a_time: 300, requests: 600, prompt: 100, output: 50 };
    let run = |party| World::new(limits(400, 16), cost(1e-3, 1e-3), &[Load { party, ..flood }]).run();
    let (known, unknown) = (run(FLOOD), run(PartyId::NONE));
    assert_eq!((known.now, known.tokens, &known.took), (unknown.now, unknown.tokens, &unknown.took));
}

#[test]
fn shares_cost_a_flood_what_the_others_use() {
    let flood = Load { party: FLOOD, at_a_time: 100, requests: 400, prompt: 100, output: 50 };
    let steady = Load { party: OTHER, at_a_time: 100, requests: 400, prompt: 100, output: 50 };
    // a step costs by its rows, so that smaller ones lose nothing
    let run = |loads: &[Load]| World::new(limits(2000, 16), cost(1e-9, 1e-3), loads).run();
    let (alone, both) = (run(&[flood]), run(&[flood, steady]));
    let slower = both.now.0 / alone.now.0;
    assert!((1.9..2.1).contains(&slower), "twice the work takes {slower} times as long");
    let [flood, steady] = [&both.took[0], &both.took[1]].map(|took| took.iter().sum::<f64>());
    assert!((0.9..1.1).contains(&(flood / steady)), "equal loads wait equally: {flood} and {steady}");
}

#[test]
fn many_equal_parties_lose_no_throughput() {
    let load = |party| Load { party: PartyId(party), at_a_time: 2, requests: 20, prompt: 64, output: 32 };
    let parties: Vec<Load> = (1..=32).map(load).collect();
    let nobodys: Vec<Load> = parties.iter().map(|load| Load { party: PartyId::NONE, ..*load }).collect();
    // reading the weights costs as much as 20 sequences
    let run = |loads: &[Load]| World::new(limits(4000, 64), cost(2e-2, 1e-3), loads).run();
    let slower = run(&parties).now.0 / run(&nobodys).now.0;
    assert!(slower < 1.05, "with parties it takes {slower} times as long");
}

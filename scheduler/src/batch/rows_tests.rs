//! Step sizes under the TBT objectives of decoding requests.

use super::steady_tests::Counted;
use super::tests::LIMITS;
use super::*;
use crate::cost::{
    Coefficients, DecodeCoefficients, EngineCost, MeasuredSteps, Prefill, PrefillCoefficients, ProfileCost,
};
use crate::models::find;
use mixfleet_hal::DType;
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::{Bytes, BytesPerSecond, FlopPerSecond, Seconds};

/// A row of a prompt takes 0.1 ms, a sequence that decodes 1 ms.
pub(super) fn cost() -> Arc<CostModel> {
    Arc::new(CostModel::Coefficients(Coefficients {
        prefill_s: PrefillCoefficients { per_token: 1e-4, ..PrefillCoefficients::default() },
        decode_s: DecodeCoefficients { per_sequence: 1e-3, ..DecodeCoefficients::default() },
    }))
}

/// A step of 512 rows, sized by objectives.
const SIZED: BatchLimits = BatchLimits {
    blocks_total: 4096,
    block_tokens: 16,
    step_tokens_max: 512,
    prefill_tokens_beside_decode_max: None,
    sequences_max: 64,
    spare_blocks: 0,
    ..LIMITS
};

fn add(machine: &mut Instance<Counted>, request: RequestId, length: u32, tbt_s: Option<f64>) {
    let urgency = Urgency { tbt_slo: tbt_s.map(Seconds), ..Urgency::due_at(Seconds(0.0)) };
    let (text, after) = (Counted { request, length }, After::Decode);
    machine.step(Event::Add { request, urgency, text, pulls: 0, after }, &mut Vec::new());
}

/// Runs a step, after which every sequence with a new token goes on.
fn step(machine: &mut Instance<Counted>) -> Vec<StepSequence> {
    let mut actions = Vec::new();
    machine.step(Event::Idle, &mut actions);
    let Some(super::Action::Run(step)) = actions.pop() else { return Vec::new() };
    let drew = step.sequences.iter().filter(|part| part.sample);
    let sampled = drew.map(|part| Sampled { request: part.request, finished: false }).collect();
    machine.step(Event::StepDone { sampled }, &mut actions);
    step.sequences
}

/// Rows of prompts beside decodes with these objectives, where a prompt of 4000 tokens comes.
fn rows(limits: BatchLimits, tbt_s: &[Option<f64>]) -> u32 {
    rows_of(Instance::new(limits).predicted_by(cost()), tbt_s)
}

fn rows_of(mut machine: Instance<Counted>, tbt_s: &[Option<f64>]) -> u32 {
    for (&tbt_s, request) in tbt_s.iter().zip(0..) {
        add(&mut machine, request, 2, tbt_s);
        step(&mut machine);
    }
    add(&mut machine, 99, 4000, None);
    step(&mut machine).iter().filter(|part| part.request == 99).map(|part| part.tokens).sum()
}

/// Prompts of the steps in which they are computed, where reading the weights takes 1 s, and a row 0.01 s.
fn steps_of(prompts: &[u32]) -> Vec<Vec<(RequestId, u32)>> {
    let shape = find("llama-3.1-8b").expect("it is known").shape(DType::Bf16);
    let weights = shape.weight_bytes(false).0;
    let rates = vec![(DType::Bf16, FlopPerSecond(100.0 * weights))];
    let profile = DeviceProfile::roof(rates, BytesPerSecond(weights), Bytes(80e9));
    let cost = ProfileCost { profile, shape, chunk_tokens: 512, all_reduce: None, engine: EngineCost::OURS };
    let cost = CostModel::Profile(Box::new(cost)).compiled();
    let mut machine = Instance::new(SIZED).predicted_by(Arc::new(cost));
    for (&length, request) in prompts.iter().zip(0..) {
        let (text, urgency) = (Counted { request, length }, Urgency::due_at(Seconds::ZERO));
        let add = Event::Add { request, urgency, text, pulls: 0, after: After::HandOff };
        machine.step(add, &mut Vec::new());
    }
    let mut steps = Vec::new();
    loop {
        let ran = step(&mut machine);
        if ran.is_empty() {
            return steps;
        }
        for part in ran.iter().filter(|part| part.sample) {
            machine.step(Event::Release { request: part.request }, &mut Vec::new());
        }
        steps.push(ran.iter().map(|part| (part.request, part.tokens)).collect());
    }
}

#[test]
fn a_prompt_joins_those_that_end_only_if_the_sum_of_ttfts_becomes_smaller() {
    // the weights are read once for both
    assert_eq!(steps_of(&[40, 40]), [vec![(0, 40), (1, 40)]]);
    // it would add 2 s to the first one's step, and save nothing
    assert_eq!(steps_of(&[200, 200]), [vec![(0, 200)], vec![(1, 200)]]);
    // it adds 0.3 s, and saves 0.7
    assert_eq!(steps_of(&[600, 40]), [vec![(0, 512)], vec![(0, 88), (1, 40)]]);
    // it adds 1.5 s and saves 0.5, which counts for all that wait
    assert_eq!(steps_of(&[50, 200])[0], [(0, 50)]);
    assert_eq!(steps_of(&[50, 200, 200, 200, 200, 200])[0], [(0, 50), (1, 200)]);
    // where they decode afterwards, the next step is not one of prompts alone
    let mut decoding = Instance::new(SIZED).predicted_by(cost());
    (0..2).for_each(|request| add(&mut decoding, request, 200, None));
    assert_eq!(step(&mut decoding).len(), 2);
    // an engine that fills its steps with prompts does so here too
    let limits = BatchLimits { prefill_tokens_beside_decode_max: Some(512), ..SIZED };
    let mut filled = Instance::new(limits).predicted_by(cost());
    (0..2).for_each(|request| add(&mut filled, request, 200, None));
    assert_eq!(step(&mut filled).len(), 2);
}

#[test]
fn the_tightest_objective_of_those_who_decode_sizes_the_prompt_rows_beside_them() {
    // nine tenths of 40 ms, less 1 ms for each decoding sequence, are 350 and 340 rows; they come in tiles of
    // 16
    assert_eq!(rows(SIZED, &[Some(0.04)]), 336);
    assert_eq!(rows(SIZED, &[Some(0.2), Some(0.04)]), 336);
    assert_eq!(rows(SIZED, &[Some(0.2), Some(0.02), None]), 144);
    assert_eq!(rows(SIZED, &[Some(0.2)]), 511, "all of the step, where that is quick enough");
    assert_eq!(rows(SIZED, &[Some(0.001)]), 16, "prompts get on where the objective cannot be met");
}

#[test]
fn without_an_objective_prompts_double_a_step_and_get_a_constant_in_any_case() {
    let constant = BatchLimits::PREFILL_TOKENS_BESIDE_DECODE_MAX;
    assert_eq!(rows(SIZED, &[None, None]), constant, "2 ms more would be 20 rows");
    assert_eq!(rows(SIZED, &[None; 12]), 112, "12 ms more are 120 rows; they come in tiles of 16");
    assert_eq!(rows(SIZED, &[]), 512, "no sequence decodes");
    let fixed = BatchLimits { prefill_tokens_beside_decode_max: Some(100), ..SIZED };
    assert_eq!(rows(fixed, &[Some(0.2)]), 100, "an explicit number is used");
}

#[test]
fn every_step_beside_decodes_is_predicted_to_keep_within_the_objective() {
    let (mut prompts, mut several) = (0, 0);
    for seed in 0..50 {
        let mut rng = Stream::new(seed);
        let mut machine = Instance::new(SIZED).predicted_by(cost());
        let mut tbt_s = std::collections::BTreeMap::new();
        for request in 0..12 {
            let tbt = [None, Some(0.03), Some(0.05)][rng.below(3) as usize];
            tbt_s.insert(request, tbt);
            add(&mut machine, request, 1 + rng.below(900) as u32, tbt);
            for _ in 0..rng.below(3) {
                let parts = step(&mut machine);
                let (decodes, pieces): (Vec<StepSequence>, Vec<StepSequence>) =
                    parts.into_iter().partition(|part| part.tokens == 1);
                let tightest = decodes.iter().filter_map(|part| tbt_s[&part.request]).reduce(f64::min);
                let Some(tightest) = tightest.filter(|_| !pieces.is_empty()) else { continue };
                let piece = |part: &StepSequence| Prefill {
                    context: part.start,
                    tokens: part.tokens,
                    last: part.sample,
                };
                let pieces: Vec<Prefill> = pieces.iter().map(piece).collect();
                let time = cost().step_s(&pieces, decodes.len() as u32, 0);
                let one_tile = pieces.len() == 1 && pieces[0].tokens <= 16;
                assert!(
                    time.0 <= tightest || one_tile,
                    "seed {seed}: {time:?} of {tightest}: {decodes:?} {pieces:?}"
                );
                prompts += pieces.len();
                several += usize::from(pieces.len() > 1);
            }
        }
    }
    assert!(prompts > 200 && several > 20, "{prompts} pieces of prompts, {several} steps with several");
}

#[test]
fn what_the_fleet_expects_of_rows_is_about_what_a_step_gets() {
    for tbt_s in [0.005, 0.02, 0.03, 0.04, 0.2] {
        for sequences in [1, 4, 12] {
            for slower in [1.0, 2.0] {
                let machine = measured(slower);
                let of = (&*cost(), machine.learner.corrections());
                let expected = rows_beside(of, (512, Seconds(1e-4)), (sequences, 0), Some(Seconds(tbt_s)));
                let got = rows_of(machine, &vec![Some(tbt_s); sequences as usize]);
                assert!(expected.abs_diff(got) <= 16, "{expected} for {got}: {sequences} at {tbt_s}");
            }
        }
    }
}

/// An instance whose steps were measured at this multiple of their prediction.
fn measured(slower: f64) -> Instance<Counted> {
    let mut machine = Instance::new(SIZED).predicted_by(cost());
    let prompt = vec![Prefill { context: 0, tokens: 500, last: true }];
    for (parts, sequences, predicted_s) in [(prompt, 0, 0.05), (Vec::new(), 10, 0.01)] {
        let time = Seconds(predicted_s * slower * 1000.0);
        let steps = MeasuredSteps { parts, sequences, kv_tokens: 0, steps: 1000, time };
        (0..3).for_each(|_| machine.learn(&steps));
    }
    machine
}

#[test]
fn a_device_slower_than_predicted_gets_fewer_rows_beside_decodes() {
    // of 36 ms a sequence that decodes takes nearly 2 ms, and a row nearly 0.2 ms
    assert_eq!(rows_of(measured(2.0), &[Some(0.04)]), 160);
    assert_eq!(rows_of(measured(1.0), &[Some(0.04)]), 336);
}

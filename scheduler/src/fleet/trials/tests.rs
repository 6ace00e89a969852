//! False declarations of devices: how soon placements are as good as with the true values.

#![allow(clippy::print_stdout)]

use super::super::tests::{act, arrival, arrive, config, instance, placed};
use super::super::{Event, Fleet, FleetConfig, Instance, InstanceId};
use super::*;
use crate::cost::{MeasuredSteps, Prefill};
use mixfleet_hal::units::{Seconds, UsdPerHour};

/// Prompt tokens of a step.
const CHUNK: u32 = 512;
/// Requests until the devices change, and from then on.
const REQUESTS: u32 = 600;
/// Requests after which regret is summed, until the next of these.
const AFTER: [u32; 3] = [50, 300, REQUESTS];

/// What a device takes of a prompt token, and of a decode step.
#[derive(Clone, Copy, Debug)]
struct Speed {
    token_s: f64,
    step_s: f64,
}

impl Speed {
    fn instance(self, id: u32) -> Instance {
        let price = Some(UsdPerHour(1.0));
        Instance { price, step_tokens_max: CHUNK, ..instance(id, Role::Auto, self.token_s, self.step_s) }
    }

    /// The time that a request takes.
    fn request_s(self, prompt_tokens: u32, output_tokens: u32) -> f64 {
        let step_s = self.step_s * 1.01;
        self.token_s * f64::from(prompt_tokens) + step_s * f64::from(output_tokens - 1)
    }

    fn times(self, [prefill, step]: [f64; 2]) -> Self {
        Speed { token_s: self.token_s * prefill, step_s: self.step_s * step }
    }
}

/// A number from `least` to `most`, whose logarithm is uniform.
fn spread(random: &mut Stream, least: f64, most: f64) -> f64 {
    let share = random.below(1 << 20) as f64 / (1 << 20) as f64;
    least * (most / least).powf(share)
}

/// Factors of prefill and decode by which a device differs from its declaration.
fn lie(random: &mut Stream) -> [f64; 2] {
    let mut factor = || spread(random, 1.0 / 16.0, 16.0);
    let (prefill, step) = (factor(), factor());
    match random.below(3) {
        0 => [prefill, 1.0],
        1 => [1.0, step],
        _ => [prefill, step],
    }
}

fn fleet_of(specs: [Instance; 2], trial_share: f64, seed: u64) -> Fleet {
    let mut fleet = Fleet::new(FleetConfig { trial_share, seed, ..config() });
    for spec in specs {
        act(&mut fleet, 0.0, Event::InstanceUp(spec));
    }
    fleet
}

/// A request on an instance of a speed.
struct PlacedRequest {
    request: u64,
    at: u32,
    speed: Speed,
    prompt_tokens: u32,
    output_tokens: u32,
}

/// Tells `fleet` what the instance measured of a request.
fn run(fleet: &mut Fleet, now_s: &mut f64, placed: &PlacedRequest) {
    let &PlacedRequest { request, at, speed, prompt_tokens, output_tokens } = placed;
    let id = InstanceId(at);
    let mut measured = |fleet: &mut Fleet, parts: Vec<Prefill>, sequences, steps, time_s: f64| {
        *now_s += time_s;
        let steps = MeasuredSteps { parts, sequences, kv_tokens: 0, steps, time: Seconds(time_s) };
        act(fleet, *now_s, Event::Measured { instance: id, steps });
        *now_s
    };
    let mut context = 0;
    while context < prompt_tokens {
        let tokens = CHUNK.min(prompt_tokens - context);
        let parts = vec![Prefill { context, tokens, last: context + tokens == prompt_tokens }];
        measured(fleet, parts, 0, 1, speed.token_s * f64::from(tokens));
        context += tokens;
    }
    let done_s = measured(fleet, Vec::new(), 0, 0, 0.0);
    act(fleet, done_s, Event::PrefillDone { request, instance: id });
    let mut left = output_tokens - 1;
    while left > 0 {
        let steps = left.min(32);
        measured(fleet, Vec::new(), 1, steps, speed.step_s * 1.01 * f64::from(steps));
        left -= steps;
    }
    act(fleet, *now_s, Event::Finished { request });
}

/// Seconds that requests took, over the last [`AFTER`]: placed by declared and measured speeds, and by the
/// true ones.
fn play(seed: u64, trial_share: f64) -> [[f64; 2]; 3] {
    let mut random = Stream::new(seed);
    let declared = [(); 2].map(|()| Speed {
        token_s: spread(&mut random, 1e-4, 1e-3),
        step_s: spread(&mut random, 5e-3, 5e-2),
    });
    let mut ours = fleet_of([0, 1].map(|at| declared[at as usize].instance(at)), trial_share, seed);
    let (mut now_s, mut sums) = (0.0, [[0.0; 2]; 3]);
    for phase in 0..2 {
        let truth = declared.map(|speed| speed.times(lie(&mut random)));
        let mut knows = fleet_of([0, 1].map(|at| truth[at as usize].instance(at)), 0.0, seed);
        for n in 0..REQUESTS {
            let request = u64::from(phase * REQUESTS + n);
            let sizes = (spread(&mut random, 20.0, 4000.0) as u32, spread(&mut random, 5.0, 100.0) as u32);
            let asks = |fleet: &mut Fleet| {
                let mut asked = arrival(request, sizes.0, request);
                asked.output_tokens_hint = Some(sizes.1);
                let action = arrive(fleet, now_s, asked);
                placed(&action).0
            };
            let (by_ours, by_truth) = (asks(&mut ours), asks(&mut knows));
            act(&mut knows, now_s, Event::Cancelled { request });
            let took = [by_ours, by_truth].map(|at| truth[at as usize].request_s(sizes.0, sizes.1));
            if let Some(window) = AFTER.iter().rposition(|after| *after <= n) {
                (0..2).for_each(|who| sums[window][who] += took[who]);
            }
            let (prompt_tokens, output_tokens) = sizes;
            let speed = truth[by_ours as usize];
            run(
                &mut ours,
                &mut now_s,
                &PlacedRequest { request, at: by_ours, speed, prompt_tokens, output_tokens },
            );
        }
    }
    sums
}

/// Mean over 100 pairs of devices, by the first two of [`AFTER`], of what requests take beyond what they take
/// with the truth; and how many pairs lose more than 10 %.
fn regret(trial_share: f64) -> ([f64; 2], [usize; 2]) {
    let (mut means, mut above) = ([0.0; 2], [0; 2]);
    for seed in 0..100 {
        let sums = play(seed, trial_share);
        for (window, [ours, by_truth]) in sums.into_iter().take(2).enumerate() {
            let regret = ours / by_truth - 1.0;
            means[window] += regret / 100.0;
            above[window] += usize::from(regret > 0.1);
        }
    }
    println!("trial share {trial_share}: regret {means:.4?}, above 10 %: {above:?}");
    (means, above)
}

#[test]
fn after_lies_about_devices_placements_soon_are_as_good_as_with_the_truth() {
    let ([soon, later], [_, above]) = regret(0.01);
    assert!(soon < 0.1 && later < 0.03 && above <= 3, "{soon} {later} {above}");
    let ([_, without], _) = regret(0.0);
    assert!(without > 2.0 * later, "trials are worth what they cost: {without} {later}");
}

#[test]
fn a_trial_is_explained_and_meets_the_objectives_and_without_a_share_there_is_none() {
    let slow = Speed { token_s: 1e-4, step_s: 0.1 };
    let tried = |trial_share: f64, ttft_slo: Option<f64>| {
        let quick = Speed { token_s: 1e-5, ..slow };
        let mut fleet = fleet_of([quick.instance(0), slow.instance(1)], trial_share, 7);
        fleet.config.ttft_slo = ttft_slo.map(Seconds);
        let mut tried = 0;
        for request in 0..200 {
            let action = arrive(&mut fleet, request as f64, arrival(request, 1000, request));
            let (at, _, explanation) = placed(&action);
            let best = &explanation.candidates[0];
            assert_eq!((best.outcome == Outcome::TrialElsewhere { instance: InstanceId(1) }), at == 1);
            tried += u32::from(at == 1);
            act(&mut fleet, request as f64, Event::Cancelled { request });
        }
        tried
    };
    let often = tried(0.05, None);
    assert!((2..=200 / 16).contains(&often), "{often}");
    assert_eq!([tried(0.05, Some(0.05)), tried(0.0, None)], [0, 0]);
}

//! More load than the decode instances sustain: what admission is worth in `serve`, whose engine runs on
//! simulated devices in virtual time (Mooncake v3, section 7).

use super::served::served;
use super::{CHEAP, Part, Scene, Step, scene};
use mixfleet_scheduler::fleet::{Action, Admission, Event, Policy, Role};
use std::collections::BTreeMap;

/// The objectives of the served scenes.
const TTFT_SLO_S: f64 = 1.5;
const TBT_SLO_S: f64 = 0.03;
/// Time between two samples of the loads.
const SAMPLE_S: f64 = 0.5;

/// A request in the log.
#[derive(Clone, Copy, Default)]
struct Life {
    arrived_s: f64,
    /// Predicted time of its prompt on the instance that computed it.
    prefill_s: f64,
    first_s: Option<f64>,
    tokens: u32,
    ended_s: Option<f64>,
    dropped: bool,
}

impl Life {
    fn is_within_objectives(&self) -> bool {
        let (Some(first_s), Some(ended_s)) = (self.first_s, self.ended_s) else { return false };
        let gaps = self.tokens.saturating_sub(1).max(1);
        first_s - self.arrived_s <= TTFT_SLO_S && (ended_s - first_s) / f64::from(gaps) <= TBT_SLO_S
    }
}

/// Outcomes of the requests of a run.
#[derive(Debug)]
struct Overload {
    /// Share of all requests that met both objectives.
    attained: f64,
    /// Seconds of prefill instances for requests that were dropped afterwards.
    wasted_s: f64,
    /// Standard deviations of the requests in prefill and in decode over time, and their correlation.
    swing: [f64; 3],
}

fn lives(steps: &[Step]) -> BTreeMap<u64, Life> {
    let mut lives: BTreeMap<u64, Life> = BTreeMap::new();
    for Step { now, event, actions } in steps {
        match event {
            Event::Arrived(arrival) => {
                let life = Life { arrived_s: now.0, ..Life::default() };
                lives.entry(arrival.request).or_insert(life);
            }
            Event::PrefillDone { request, .. } => {
                let life = lives.entry(*request).or_default();
                life.first_s.get_or_insert(now.0);
                life.tokens = life.tokens.max(1);
            }
            Event::DecodeStep { requests, tokens, .. } => {
                requests.iter().for_each(|request| lives.entry(*request).or_default().tokens += tokens);
            }
            Event::Finished { request } => lives.entry(*request).or_default().ended_s = Some(now.0),
            _ => {}
        }
        for action in actions {
            match action {
                Action::Place { request, explanation, .. } => {
                    let terms = explanation.chosen().and_then(|chosen| chosen.terms);
                    lives.entry(*request).or_default().prefill_s = terms.map_or(0.0, |terms| terms.prefill_s);
                }
                Action::Drop { request, .. } => lives.entry(*request).or_default().dropped = true,
                _ => {}
            }
        }
    }
    lives
}

/// Requests in prefill and in decode, at equal distances, without the beginning and the end.
fn loads(lives: &BTreeMap<u64, Life>) -> [Vec<f64>; 2] {
    let end_s = lives.values().map(|life| life.arrived_s).fold(0.0, f64::max);
    let count = (end_s / SAMPLE_S) as usize;
    let at = |sample: usize| {
        let now_s = sample as f64 * SAMPLE_S;
        let within = |from: Option<f64>, to: Option<f64>| {
            from.is_some_and(|from| from <= now_s) && to.is_some_and(|to| now_s < to)
        };
        let prefills = lives.values().filter(|life| within(Some(life.arrived_s), life.first_s)).count();
        let decodes = lives.values().filter(|life| within(life.first_s, life.ended_s)).count();
        [prefills as f64, decodes as f64]
    };
    let samples: Vec<[f64; 2]> = (count / 10..count).map(at).collect();
    [0, 1].map(|which| samples.iter().map(|sample| sample[which]).collect())
}

fn swing([a, b]: [Vec<f64>; 2]) -> [f64; 3] {
    let mean = |v: &[f64]| v.iter().sum::<f64>() / v.len() as f64;
    let (mean_a, mean_b) = (mean(&a), mean(&b));
    let product = |v: &[f64], at: f64, w: &[f64], with: f64| {
        v.iter().zip(w).map(|(x, y)| (x - at) * (y - with)).sum::<f64>() / v.len() as f64
    };
    let sd = [product(&a, mean_a, &a, mean_a).sqrt(), product(&b, mean_b, &b, mean_b).sqrt()];
    [sd[0], sd[1], product(&a, mean_a, &b, mean_b) / (sd[0] * sd[1])]
}

/// A fleet under more load than it sustains.
#[derive(Clone, Copy, Debug)]
enum Overloaded {
    /// Two decode instances limit it.
    Decode,
    /// Slower prefill instances do as well: a prompt takes a large part of its objective.
    Prefill,
}

fn play(overloaded: Overloaded, admission: Admission, seed: u64) -> Overload {
    let [prefill, decode] = [Role::Prefill, Role::Decode].map(|role| Part { role, ..CHEAP });
    let (prefills, requests, requests_per_s) = match overloaded {
        Overloaded::Decode => (vec![prefill; 10], 500, 70.0),
        Overloaded::Prefill => (vec![Part { flops: 4e7, ..prefill }; 24], 800, 60.0),
    };
    let parts = [prefills, vec![decode; 2]].concat();
    let usual = scene("overload", parts, true, Policy::PerDollar, (seed, requests_per_s));
    let scene = Scene { admission, drops_late: true, beside_decode_max: None, requests, ..usual };
    let (_, steps, _) = served(&scene);
    let lives = lives(&steps);
    let good = lives.values().filter(|life| life.is_within_objectives()).count();
    let dropped = lives.values().filter(|life| life.dropped);
    let overload = Overload {
        attained: good as f64 / lives.len() as f64,
        wasted_s: dropped.map(|life| life.prefill_s).sum(),
        swing: swing(loads(&lives)),
    };
    let Overload { attained, wasted_s, swing: [prefill, decode, together] } = &overload;
    println!(
        "seed {seed}, {overloaded:?}, {admission:?}: {:.1} % within objectives, {wasted_s:.1} prefill seconds wasted, \
         {prefill:.1} and {decode:.1} requests swing, together {together:.2}",
        100.0 * attained
    );
    overload
}

/// `MIXFLEET_OVERLOAD_SEEDS`: as many seeds.
#[test]
fn prediction_answers_more_than_early_rejection_and_wastes_less() {
    let seeds = std::env::var("MIXFLEET_OVERLOAD_SEEDS").map_or(1, |seeds| seeds.parse().expect("a number"));
    for seed in 1..=seeds {
        for (overloaded, more, waste_share) in
            [(Overloaded::Decode, 0.03, 0.5), (Overloaded::Prefill, -0.05, 0.7)]
        {
            let [early, predicted] = [Admission::EarlyRejection, Admission::Prediction]
                .map(|admission| play(overloaded, admission, seed));
            assert!(predicted.attained > early.attained + more, "{predicted:?} {early:?}");
            assert!(predicted.wasted_s < waste_share * early.wasted_s, "{predicted:?} {early:?}");
        }
    }
}

//! The load that fleets sustain: its search, and the division of a fleet between prefill and decode.

#![allow(clippy::print_stdout)]

use crate::common::{fleet_from, mooncake, shared};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::fleet::{Admission, Policy};
use mixfleet_sim::capacity::{Capacity, Goal, PRECISION, Probe, SHARE, search};
use mixfleet_sim::fleet_file::FleetFile;
use mixfleet_sim::simulate::{AnswerTimes, Choices, Observer, Results, Setup, run};
use mixfleet_sim::trace::generate::{Arrivals, GenerateOptions, Generator, Preset};
use mixfleet_sim::trace::{ReadOptions, Requests, Trace, TraceError};

const CHOICES: Choices = Choices { policy: Policy::PerDollar, admission: Admission::None, seed: 1 };

fn split(prefill: u32, decode: u32) -> FleetFile {
    mooncake((prefill, decode), 80.0, "")
}

#[test]
fn a_fleet_collapses_when_either_side_is_starved_and_is_flat_between() {
    const REQUESTS: usize = 2500;
    let Some(path) = shared("traces/mooncake-conversation.jsonl.zst") else { return };
    let play = |prefill| {
        let trace = Trace::open(&path, ReadOptions::default()).unwrap_or_else(|error| panic!("{error}"));
        let requests = trace.take(REQUESTS).jitter(Seconds(3.0), 1).speedup(1.5);
        let results = run(&Setup::new(&split(prefill, 16 - prefill), CHOICES), requests, &mut ());
        results.unwrap_or_else(|error| panic!("{error}"))
    };
    let results: Vec<Results> = [1, 3, 8, 13, 15].into_iter().map(play).collect();
    for r in &results {
        let (p, d) = (r.pools[0].instances, r.pools[1].instances);
        println!(
            "{p}P {d}D: {:.4}, TTFT {:.2} s, TBT {:.4} s",
            r.slo_attainment, r.ttft_s.mean, r.tbt_s.mean
        );
    }
    let effective: Vec<f64> = results.iter().map(|r| r.slo_attainment).collect();
    assert!(effective[0] < effective[1] && effective[1] < 0.2, "no prefill: {effective:?}");
    assert!(effective[2].min(effective[3]) > 0.99, "between: {effective:?}");
    assert!(effective[4] < 0.5, "no decode: {effective:?}");
    let tbt_s: Vec<f64> = results[2..].iter().map(|r| r.tbt_s.mean).collect();
    assert!(tbt_s[0] < tbt_s[1] && 1.5 * tbt_s[1] < tbt_s[2], "{tbt_s:?}");
}

/// Ends a probe as soon as its goal is out of reach, and counts what the probes answered.
struct Hurried {
    goal: Option<Goal>,
    answers: u64,
}

impl Observer for Hurried {
    fn finished(&mut self, _: f64, _: &AnswerTimes) {
        self.answers += 1;
    }

    fn is_decided(&self, missed: u64) -> bool {
        self.goal.is_some_and(|goal| goal.is_out_of_reach(missed))
    }
}

/// Searches with probes that end as soon as they are sure to fail, or with whole ones, and counts answers.
fn searched(instances: u32, requests: u64, admission: Admission, early: bool) -> (Capacity, u64) {
    let goal = Goal { requests, share: SHARE };
    let file = fleet_from(&format!(
        "version = 1\n[model]\nname = \"llama-3.1-8b\"\n[slo]\nttft_s = 30.0\ntbt_s = 0.1\n\
         [[pool]]\nname = \"cards\"\ndevice = \"L40S\"\ncount = {instances}\n"
    ));
    let setup = Setup::new(&file, Choices { admission, ..CHOICES });
    let mut hurried = Hurried { goal: early.then_some(goal), answers: 0 };
    let found = search(|speedup| {
        let options =
            GenerateOptions { requests: goal.requests, rate: 1.0, seed: 7, arrivals: Arrivals::Poisson };
        let made = || Generator::new(Preset::Conversation.model(), options).unwrap_or_else(|e| panic!("{e}"));
        let last_at_s = made().map(|request| request.at.0).fold(0.0, f64::max) / speedup;
        let results = run(&setup, made().map(Ok).speedup(speedup), &mut hurried)?;
        assert!(early || results.requests == goal.requests, "{results:?}");
        let attainment = goal.attainable(results.missed);
        Ok::<_, TraceError>(Probe::new(speedup, goal.share, goal.requests, last_at_s, attainment))
    });
    (found.unwrap_or_else(|error| panic!("{error}")), hurried.answers)
}

#[test]
fn a_probe_that_ends_once_it_must_fail_finds_the_same_capacity_with_less_work() {
    for admission in [Admission::None, Admission::Prediction] {
        let ((whole, answers), (early, fewer)) =
            (searched(1, 300, admission, false), searched(1, 300, admission, true));
        println!("{admission:?}: {} probes, {answers} answers, {fewer} with early ends", whole.probes.len());
        assert_eq!((early.best, early.bounded), (whole.best, whole.bounded));
        for (early, whole) in early.probes.iter().zip(&whole.probes) {
            assert_eq!((early.speedup, early.passed), (whole.speedup, whole.passed));
            assert_eq!(early.requests_per_s, whole.requests_per_s);
            let differs = early.slo_attainment - whole.slo_attainment;
            assert!(differs == 0.0 || (differs > 0.0 && !early.passed), "{early:?} {whole:?}");
        }
        assert_eq!(early.probes.len(), whole.probes.len());
        assert!(fewer < answers, "{fewer} of {answers}");
    }
}

fn capacity_of(instances: u32) -> Probe {
    let (found, _) = searched(instances, 1000, Admission::None, true);
    let best = found.best.expect("slow enough, all are served in time");
    let failed = found.probes.iter().filter(|probe| !probe.passed).map(|probe| probe.speedup);
    assert!(found.bounded && failed.fold(f64::INFINITY, f64::min) <= PRECISION * best.speedup);
    best
}

#[test]
fn four_times_the_cards_carry_four_times_the_load_or_more() {
    let (two, eight) = (capacity_of(2), capacity_of(8));
    println!("2 cards {:.3}, 8 cards {:.3} requests/s", two.requests_per_s, eight.requests_per_s);
    assert!(two.slo_attainment >= SHARE && eight.slo_attainment >= SHARE);
    // It is more where the few long prompts meet on two devices more often than the SLO allows.
    assert!(eight.requests_per_s > 3.9 * two.requests_per_s);
}

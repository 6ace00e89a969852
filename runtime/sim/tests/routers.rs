//! Several routers of the same instances: with knowledge of each other's work they attain as much as one.

#![allow(clippy::print_stdout)]

use crate::common::{at_random, fleet_from};
use mixfleet_scheduler::fleet::{Admission, Policy};
use mixfleet_sim::simulate::{Choices, Results, Setup, run};
use mixfleet_sim::trace::Request;

/// Delay from one router to the others.
const WORD_S: f64 = 1e-3;

/// Six different instances.
fn fleet(routers: u32, delay_s: f64, admission: Admission) -> Setup {
    let pool = |name: &str, count: u32, usd: f64, slower: f64| {
        format!(
            r#"
[[pool]]
name = "{name}"
count = {count}
usd_per_hour = {usd}
cache_tokens = 60_000
calibration = {{ prefill_s = {{ overhead = 0.0, per_token = {}, per_token_squared = 0.0 }}, decode_s = {{ base = {}, per_sequence = {}, per_kv_token = 1e-7 }} }}
"#,
            1e-4 * slower,
            0.01 * slower,
            3e-4 * slower
        )
    };
    let text = format!(
        "version = 1\n[model]\nlayers = 32\nkv_bytes_per_token = 131072\n[slo]\nttft_s = 1.0\ntbt_s = 0.05\n[routers]\ncount = {routers}\ndelay_s = {delay_s:?}\n{}{}",
        pool("quick", 4, 4.0, 1.0),
        pool("slow", 2, 1.5, 2.0)
    );
    Setup::new(&fleet_from(&text), Choices { policy: Policy::PerDollar, admission, seed: 1 })
}

/// Slightly beyond the capacity of the six.
const CAPACITY_RPS: f64 = 18.0;

fn requests(seed: u64, rate_rps: f64) -> Vec<Request> {
    at_random(seed, 120.0, rate_rps, |random| (200 + random.below(2400), 20 + random.below(300)))
}

fn play(routers: u32, delay_s: f64, admission: Admission, seed: u64) -> Results {
    play_at(CAPACITY_RPS, routers, delay_s, admission, seed)
}

fn play_at(rate_rps: f64, routers: u32, delay_s: f64, admission: Admission, seed: u64) -> Results {
    let requests = requests(seed, rate_rps);
    run(&fleet(routers, delay_s, admission), requests.into_iter().map(Ok), &mut ())
        .unwrap_or_else(|error| panic!("{error}"))
}

/// This sums over three seeds: of one alone, four routers attained 2.15 points more than two.
#[test]
fn the_same_arrivals_through_one_router_two_and_four_keep_as_many_promises() {
    const SEEDS: std::ops::RangeInclusive<u64> = 1..=3;
    for admission in [Admission::None, Admission::Prediction] {
        let mean = |count: u32, delay_s: f64| {
            let kept: Vec<f64> =
                SEEDS.map(|seed| play(count, delay_s, admission, seed).slo_attainment).collect();
            println!("{admission:?}: {count} routers that hear after {delay_s} s keep {kept:.4?}");
            kept.iter().sum::<f64>() / kept.len() as f64
        };
        let kept = [1, 2, 4].map(|count| mean(count, WORD_S));
        let blind = mean(4, 1e6);
        let (least, most) = kept.iter().fold((1.0f64, 0.0f64), |(a, b), &x| (a.min(x), b.max(x)));
        assert!(most - least <= 0.02, "{admission:?}: {kept:?}");
        assert!(blind < least - 0.05, "{admission:?}: {kept:?} {blind}");
    }
}

/// At twice the capacity each place that is left is worth a rejection: routers must not give it away twice.
#[test]
fn routers_that_know_of_each_other_admit_hardly_more_than_one() {
    const WANTED: f64 = 1.05;
    let admitted = |routers: u32, delay_s: f64| -> f64 {
        let of = |seed| {
            let results = play_at(2.0 * CAPACITY_RPS, routers, delay_s, Admission::Prediction, seed);
            (results.requests - results.rejected.values().sum::<u64>()) as f64
        };
        (1..=3).map(of).sum()
    };
    let one = admitted(1, WORD_S);
    for (routers, delay_s) in [(2, WORD_S), (2, 10.0 * WORD_S), (4, WORD_S)] {
        let more = admitted(routers, delay_s) / one;
        println!("{routers} routers that hear after {delay_s} s admit {more:.4} of what one does");
        assert!(more < WANTED, "{routers} routers: {more}");
    }
    println!("two isolated routers admit {:.4} of it", admitted(2, 1e6) / one);
}

#[test]
fn equal_runs_of_several_routers_are_equal() {
    let [a, b] = [(); 2].map(|()| serde_json::to_string(&play(3, WORD_S, Admission::Prediction, 5)).unwrap());
    assert_eq!(a, b);
}

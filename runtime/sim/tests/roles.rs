//! Instances change between prefill and decode when the load moves from one to the other.

use crate::common::fleet_from;
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::fleet::{Action, Role};
use mixfleet_sim::simulate::{Choices, Observer, Results, Setup, run};
use mixfleet_sim::trace::Request;

/// Four equal instances: 0.5 ms per prompt token, 20 ms per step and 1 ms more per sequence in it.
fn fleet(prefill: u32, flexible: bool) -> Setup {
    let pool = |role: &str, count: u32| {
        format!(
            r#"
[[pool]]
name = "{role}"
role = "{role}"
flexible = {flexible}
count = {count}
usd_per_hour = 1.0
cache_tokens = 400_000
calibration = {{ prefill_s = {{ overhead = 0.0, per_token = 5e-4, per_token_squared = 0.0 }}, decode_s = {{ base = 0.02, per_sequence = 1e-3, per_kv_token = 0.0 }} }}
"#
        )
    };
    let text = format!(
        "version = 1\n[model]\nlayers = 32\nkv_bytes_per_token = 131072\n[slo]\nttft_s = 10.0\ntbt_s = 0.08\n{}{}",
        pool("prefill", prefill),
        pool("decode", 4 - prefill)
    );
    Setup::new(&fleet_from(&text), Choices::default())
}

/// Changes of roles, with their times.
#[derive(Default)]
struct Changes(Vec<(f64, Role)>);

impl Observer for Changes {
    fn decided(&mut self, now_s: f64, action: &Action) {
        if let Action::SetRole { role, .. } = action {
            self.0.push((now_s, *role));
        }
    }
}

/// A period of equal requests that arrive at random.
#[derive(Clone, Copy)]
struct Phase {
    seconds: f64,
    per_s: f64,
    prompt_tokens: u32,
    output_tokens: u32,
}

/// Prompts for 2.6 instances, answers for one.
const PROMPTS: Phase = Phase { seconds: 900.0, per_s: 1.3, prompt_tokens: 4000, output_tokens: 300 };
/// Answers for 2.5 instances, prompts for less than one.
const ANSWERS: Phase = Phase { seconds: 900.0, per_s: 1.9, prompt_tokens: 400, output_tokens: 1000 };

fn play(setup: &Setup, phases: &[Phase]) -> (Results, Vec<(f64, Role)>) {
    let mut random = Stream::new(5);
    let (mut at_s, mut ends_s, mut requests) = (0.0f64, 0.0, Vec::new());
    for phase in phases {
        ends_s += phase.seconds;
        while at_s < ends_s {
            requests.push(Request {
                id: requests.len() as u64,
                at: Seconds(at_s),
                prompt_tokens: phase.prompt_tokens,
                output_tokens: phase.output_tokens,
                chain: Vec::new(),
                session: None,
                class: None,
            });
            at_s -= (1.0 - random.next_unit()).ln() / phase.per_s;
        }
    }
    let mut changes = Changes::default();
    let results = run(setup, requests.into_iter().map(Ok), &mut changes).unwrap();
    (results, changes.0)
}

#[test]
fn a_load_that_swings_is_served_better_than_by_any_fixed_split() {
    let swings = [PROMPTS, ANSWERS, PROMPTS, ANSWERS];
    let (flexible, changes) = play(&fleet(2, true), &swings);
    for prefill in 1..=3 {
        let (fixed, none) = play(&fleet(prefill, false), &swings);
        assert!(none.is_empty());
        assert!(
            flexible.slo_attainment > fixed.slo_attainment + 0.1,
            "{prefill} for prefill: {flexible:?} {fixed:?}"
        );
    }
    // They change from two of each to three and one, and then by two each time, soon after the load has
    // moved.
    let expected =
        [Role::Prefill, Role::Decode, Role::Decode, Role::Prefill, Role::Prefill, Role::Decode, Role::Decode];
    assert!(changes.iter().map(|&(_, role)| role).eq(expected), "{changes:?}");
    assert!(changes.iter().all(|&(at_s, _)| at_s % PROMPTS.seconds < 240.0), "{changes:?}");
}

#[test]
fn a_steady_load_settles_and_stays() {
    for (phase, role) in [(PROMPTS, Role::Prefill), (ANSWERS, Role::Decode)] {
        let (_, changes) = play(&fleet(2, true), &[Phase { seconds: 3600.0, ..phase }]);
        assert!(matches!(&changes[..], [(at_s, to)] if *to == role && *at_s < 120.0), "{changes:?}");
    }
}

//! What KV memory costs in the score of a placement, as the simulator's decisions explain it.

use crate::common::{at_random, fleet_from};
use mixfleet_scheduler::fleet::{Action, Admission, Policy};
use mixfleet_sim::simulate::{Choices, Observer, Setup, run};

/// Of each placement: its memory term, and whether it is on the instance with little memory.
#[derive(Default)]
struct Placements(Vec<(f64, bool)>);

impl Observer for Placements {
    fn decided(&mut self, _: f64, action: &Action) {
        let Action::Place { decode, explanation, .. } = action else { return };
        let terms = explanation.chosen().and_then(|chosen| chosen.terms).expect("per-dollar predicts");
        self.0.push((terms.memory, decode.0 == 0));
    }
}

fn placements(kv_weight: f64) -> Vec<(f64, bool)> {
    let file = fleet_from(
        "version = 1\n[model]\nname = \"llama-3.1-8b\"\n\
         [[pool]]\nname = \"tight\"\ndevice = \"L40S\"\ncache_tokens = 10_000\nusd_per_hour = 0.6\n\
         [[pool]]\nname = \"roomy\"\ndevice = \"L40S\"\n",
    );
    let choices = Choices { policy: Policy::PerDollar, admission: Admission::None, seed: 1 };
    let mut setup = Setup::new(&file, choices);
    setup.fleet.kv_weight = kv_weight;
    let requests = at_random(5, 60.0, 2.0, |random| (2000 + random.below(2000), 100 + random.below(200)));
    let mut seen = Placements::default();
    run(&setup, requests.into_iter().map(Ok), &mut seen).unwrap_or_else(|error| panic!("{error}"));
    seen.0
}

#[test]
fn the_explanations_of_the_simulator_have_the_memory_term_and_it_moves_requests_to_free_memory() {
    let (without, with) = (placements(0.0), placements(10.0));
    assert!(without.iter().all(|&(memory, _)| memory == 0.0), "{without:?}");
    assert!(with.iter().any(|&(memory, _)| memory > 0.0), "{with:?}");
    let on_tight = |placements: &[(f64, bool)]| placements.iter().filter(|&&(_, is_tight)| is_tight).count();
    assert!(2 * on_tight(&with) < on_tight(&without), "{} {}", on_tight(&with), on_tight(&without));
}

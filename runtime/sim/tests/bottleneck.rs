//! The binding resource is named: each fleet here lacks one resource alone.

use crate::common::{at_random, fleet_from};
use mixfleet_sim::bottleneck::{Bottleneck, Resource};
use mixfleet_sim::simulate::{Choices, Results, Setup, run};

/// Two pools, or one alone whose instance does both, with what they are to have too little of.
struct Scarce<'a> {
    per_token: f64,
    per_sequence: f64,
    cache_tokens: u32,
    max_sequences: u32,
    nic_gb_per_s: f64,
    role: &'a str,
}

/// More than 600 requests need: a thousand tokens to a hundred, four a second.
const PLENTY: Scarce<'_> = Scarce {
    per_token: 1e-6,
    per_sequence: 1e-5,
    cache_tokens: 10_000_000,
    max_sequences: 1000,
    nic_gb_per_s: 1000.0,
    role: "decode",
};

fn play(scarce: &Scarce<'_>) -> Results {
    let Scarce { per_token, per_sequence, cache_tokens, max_sequences, nic_gb_per_s, role } = scarce;
    let calibration = format!(
        "calibration = {{ prefill_s = {{ overhead = 0.0, per_token = {per_token:?}, per_token_squared = 0.0 }}, decode_s = {{ base = 0.005, \
         per_sequence = {per_sequence:?}, per_kv_token = 0.0 }} }}\nnic_gb_per_s = {nic_gb_per_s:?}\n"
    );
    let first =
        format!("[[pool]]\nname = 'first'\nrole = 'prefill'\ncache_tokens = 10_000_000\n{calibration}");
    let first = if *role == "auto" { String::new() } else { first };
    let text = format!(
        "version = 1\n[model]\nlayers = 32\nkv_bytes_per_token = 131072\n[slo]\nttft_s = 5.0\ntbt_s = 0.1\n{first}\
         [[pool]]\nname = 'second'\nrole = '{role}'\ncache_tokens = {cache_tokens}\nmax_sequences = {max_sequences}\n{calibration}"
    );
    let requests = at_random(3, 150.0, 4.0, |_| (1000, 100));
    let choices = Choices { admission: mixfleet_scheduler::fleet::Admission::None, ..Choices::default() };
    run(&Setup::new(&fleet_from(&text), choices), requests.into_iter().map(Ok), &mut ())
        .unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn the_resource_that_is_scarce_binds() {
    for (scarce, pool, resource) in [
        (Scarce { per_token: 3e-4, ..PLENTY }, "first", Resource::Prompts),
        // Ten sequences at a time, with steps of 85 ms.
        (Scarce { per_sequence: 8e-3, ..PLENTY }, "second", Resource::DecodeSteps),
        (Scarce { cache_tokens: 6000, per_sequence: 5e-3, ..PLENTY }, "second", Resource::KvMemory),
        (Scarce { max_sequences: 3, ..PLENTY }, "second", Resource::Sequences),
        (Scarce { nic_gb_per_s: 0.5, ..PLENTY }, "first", Resource::Network),
    ] {
        let results = play(&scarce);
        let found = Bottleneck::of(&results).unwrap();
        let used: Vec<_> = results.pools.iter().map(|pool| pool.used).collect();
        assert_eq!((found.pool.as_str(), found.resource), (pool, resource), "{found:?} {used:?}");
        assert!(found.binds && found.used > 0.8, "{found:?} {used:?}");
    }
}

#[test]
fn nothing_binds_a_fleet_with_plenty_of_all() {
    let results = play(&PLENTY);
    assert_eq!(results.completed, results.requests);
    let found = Bottleneck::of(&results).unwrap();
    assert!(!found.binds && found.text().starts_with("nothing binds; most used: "), "{found:?}");
}

/// Prompts of 6 s each that come four a second, then a fleet that nothing binds.
#[test]
fn a_missed_objective_is_named_where_nothing_binds() {
    let slow = play(&Scarce { per_token: 6e-3, ..PLENTY });
    let found = Bottleneck::of(&slow).unwrap();
    let missed = found.missed.as_ref().expect("an objective was missed");
    assert_eq!((missed.objective, missed.pool.as_str(), missed.of), ("TTFT", "first", slow.requests));
    assert_eq!(missed.count, slow.missed_by.ttft);
    assert!(missed.waits && missed.text().contains("add instances"), "{missed:?}");
    let mut idle = play(&PLENTY);
    assert_eq!(Bottleneck::of(&idle).unwrap().missed, None);
    idle.missed_by.tbt = 7;
    let found = Bottleneck::of(&idle).unwrap();
    assert!(!found.binds && found.text().starts_with("most used: "), "{found:?}");
    let text = found.missed.unwrap().text();
    assert!(
        text.starts_with("TBT missed by 7 of ") && text.contains("steps of second are too long"),
        "{text}"
    );
}

/// One instance that does both has its time alone: what prompts take, and decode steps within the objective.
#[test]
fn an_instance_that_does_both_shares_its_time() {
    let both = Scarce { per_token: 2e-4, per_sequence: 1e-3, role: "auto", ..PLENTY };
    let results = play(&both);
    let (found, used) = (Bottleneck::of(&results).unwrap(), results.pools[0].used);
    assert_eq!((found.pool.as_str(), found.resource), ("second", Resource::Prompts), "{used:?}");
    assert!(used.prompts > 0.5 && used.decode_steps > 0.05, "{used:?}");
    // A step of one sequence is 6 ms of the 100, which prompts cannot have.
    assert!((used.decode_least - 0.06).abs() < 0.01, "{used:?}");
    let time = used.prompts / (1.0 - used.decode_least) + used.decode_steps;
    assert!((found.used - time).abs() < 1e-9, "{found:?} {used:?}");
}

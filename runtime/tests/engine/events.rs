//! The log of the fleet machine, which gives the same answers when it is replayed.

use crate::fleet::{TestFleet, pressure};
use mixfleet_runtime::env::SeededEnv;
use mixfleet_runtime::events::{Replay, SCHEMA};
use mixfleet_runtime::model::variants::tiny_variants;
use mixfleet_scheduler::fleet::{Policy, Role};

const REQUESTS: usize = 10;

/// The log of a few requests on two devices that do both and one that only decodes.
fn logged(seed: u64, policy: Policy) -> String {
    let checkpoint = tiny_variants().remove(0).1.load().unwrap();
    let fleet =
        TestFleet::new(checkpoint.clone()).with(Role::Auto).with_blocks(Role::Auto, 16).with(Role::Decode);
    let (fleet, log) = fleet.policy(policy).blocks(24).logged();
    fleet.run_many(&SeededEnv::new(seed), pressure(&checkpoint, seed, REQUESTS));
    log.text()
}

fn replay(log: &str) -> Replay {
    Replay::of(log.as_bytes(), Some(3)).unwrap()
}

#[test]
fn a_logged_engine_replays_byte_by_byte_and_explains_its_decisions() {
    for (seed, policy) in (50..).zip([Policy::PerDollar, Policy::Random, Policy::CacheAware]) {
        let log = logged(seed, policy);
        let found = replay(&log);
        assert_eq!((found.ended, found.first, found.differing), (None, None, 0), "seed {seed}");
        assert_eq!(found.steps as usize, log.lines().count() - 1, "the head is no step");
        for (what, name) in [("\"objective\":\"deadline\"", "flex"), ("\"objective\":\"fleet\"", "default")] {
            assert!(log.contains(what), "no {name} request in the log");
        }
        assert!(
            found.arrivals >= REQUESTS as u64 && found.actions >= found.arrivals,
            "{} arrivals",
            found.arrivals
        );
        let (why, rejected) = &found.decisions[0];
        assert!(rejected.is_none() && why.to_string().contains("chosen"), "{why}");
    }
}

#[test]
fn a_changed_log_is_told_with_its_line() {
    let log = logged(60, Policy::PerDollar);
    let at = log.lines().position(|line| line.contains("\"place\"")).unwrap();
    let changed: Vec<String> =
        log.lines()
            .enumerate()
            .map(|(i, line)| {
                if i == at { line.replacen("\"queue_s\":0.0", "\"queue_s\":1e-300", 1) } else { line.into() }
            })
            .collect();
    let found = replay(&(changed.join("\n") + "\n"));
    let first = found.first.unwrap();
    assert_eq!((found.differing, first.line as usize), (1, at + 1));
    assert!(first.logged.contains("1e-300") && !first.replayed.contains("1e-300"), "{first:?}");

    // Another history gives other decisions: without instances nothing can be placed.
    let without: Vec<&str> = log.lines().filter(|line| !line.contains("instance_up")).collect();
    assert!(replay(&(without.join("\n") + "\n")).differing >= REQUESTS as u64);
}

#[test]
fn a_cut_line_is_left_out_and_a_malformed_one_is_an_error() {
    let log = logged(61, Policy::PerDollar);
    let steps = replay(&log).steps;
    let cut = &log[..log.len() - 5];
    let found = replay(cut);
    assert!(found.cut && !found.whole);
    assert_eq!((found.steps, found.differing), (steps - 1, 0));
    let ended = format!("{log}{{\"end\":null}}\n");
    assert!(replay(&ended).whole);

    let error = |log: &str| Replay::of(log.as_bytes(), None).unwrap_err().to_string();
    assert!(error("").contains("line 1: the log is empty"));
    assert!(error("{}\n").contains("line 1: missing field"), "{}", error("{}\n"));
    let mut lines: Vec<&str> = log.lines().collect();
    lines[2] = "{\"now\":null}";
    let message = error(&(lines.join("\n") + "\n"));
    assert!(message.contains("line 3:"), "{message}");
    let other = log.replacen(SCHEMA, "mixfleet.events/9", 1);
    assert!(error(&other).contains("mixfleet.events/9"), "{}", error(&other));
    assert!(error(&format!("{ended}{{}}\n")).contains("behind its end"));
}

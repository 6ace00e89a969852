//! Requests with objectives of their own: deadlines, workflows, and the absence of starvation.

use crate::common::fleet_from;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::fleet::{Admission, Policy, Role};
use mixfleet_sim::fleet_file::{FleetFile, InstancePool, Slo};
use mixfleet_sim::simulate::{Choices, ClassResult, Misses, Results, Setup, run};
use mixfleet_sim::trace::{ConversationTurn, Request, TraceError};
use std::path::Path;

/// One instance that computes 1000 tokens per second, and these classes.
fn fleet(classes: &str) -> FleetFile {
    let text = format!(
        r#"
version = 1
[model]
layers = 10
kv_bytes_per_token = 1000
[slo]
ttft_s = 4.0
tbt_s = 1.0
[kv]
block_tokens = 100
[engine]
max_batched_tokens = 550
max_prefill_tokens_beside_decode = 550
max_sequences = 256
[[pool]]
name = "one"
cache_tokens = 10_000_000
calibration.prefill_s = {{ overhead = 0.0, per_token = 1e-3, per_token_squared = 0.0 }}
calibration.decode_s = {{ base = 1e-3, per_sequence = 0.0, per_kv_token = 0.0 }}
{classes}"#
    );
    fleet_from(&text)
}

fn request(id: u64, at_s: f64, label: &str, session: Option<ConversationTurn>) -> Request {
    Request {
        id,
        at: Seconds(at_s),
        prompt_tokens: 500,
        output_tokens: 2,
        chain: Vec::new(),
        session,
        class: Some(label.into()),
    }
}

fn play(file: &FleetFile, admission: Admission, requests: Vec<Request>) -> Results {
    let setup = Setup::new(file, Choices { policy: Policy::PerDollar, admission, seed: 1 });
    let requests = requests.into_iter().map(Ok::<_, TraceError>);
    run(&setup, requests, &mut ()).unwrap_or_else(|error| panic!("{error}"))
}

fn class<'a>(results: &'a Results, name: &str) -> &'a ClassResult {
    results.classes.iter().find(|class| class.name == name).expect("a class of the file")
}

const BATCH: &str = r#"
[[class]]
name = "night"
label = "batch"
deadline_s = 100.0
"#;

/// The instance can compute two prompts per second: one is interactive, and 80 of a batch arrive at once.
fn day_and_night(interactive: u64) -> Vec<Request> {
    let mut requests: Vec<Request> = (0..80).map(|id| request(id, 0.0, "batch", None)).collect();
    requests.extend((0..interactive).map(|i| request(80 + i, i as f64, "chat", None)));
    requests.sort_by(|a, b| a.at.0.total_cmp(&b.at.0));
    requests.into_iter().zip(0..).map(|(request, id)| Request { id, ..request }).collect()
}

#[test]
fn people_go_first_and_a_batch_is_done_by_its_deadline() {
    let results = play(&fleet(BATCH), Admission::None, day_and_night(120));
    let (people, night) = (class(&results, "default"), class(&results, "night"));
    assert_eq!((people.requests, night.requests), (120, 80));
    assert!(night.slo_attainment > 0.99, "{night:?}");
    // Interactive requests wait at most for the prompt that runs, except for the few that arrive when the
    // rest of the batch is due.
    assert!(people.slo_attainment > 0.95, "{people:?}");
    assert!(people.ttft_s.p50 < 1.5, "{people:?}");
    let without = play(&fleet(""), Admission::None, day_and_night(120));
    assert!(without.ttft_s.p50 > 10.0, "all in order of arrival: {:?}", without.ttft_s);
}

#[test]
fn a_long_prompt_stops_after_the_step_in_progress_for_who_is_due_earlier() {
    let mut file = fleet(BATCH);
    let decode = file.pools[0].clone();
    file.pools[0].role = Role::Prefill;
    file.pools.push(InstancePool { name: "two".into(), role: Role::Decode, ..decode });
    // A prompt takes 50 s of steps while interactive ones arrive: each waits for a step of 0.55 s at most,
    // and has one as long.
    let long = Request { prompt_tokens: 50_000, ..request(0, 0.0, "batch", None) };
    let people = (1..20).map(|id| request(id, id as f64 * 2.03, "chat", None));
    let results = play(&file, Admission::None, std::iter::once(long).chain(people).collect());
    let (people, night) = (class(&results, "default"), class(&results, "night"));
    assert!(people.ttft_s.p99 <= 0.55 + 0.55 + 1e-9, "{people:?}");
    // The long prompt loses nothing by it.
    let all_s = 50.0 + 19.0 * 0.5;
    assert!((night.ttft_s.mean - all_s).abs() < 1e-6, "{night:?}");
}

#[test]
fn nobody_starves_under_any_load() {
    // Three times the instance's capacity arrives for ten minutes, and every later arrival is more urgent
    // than the batch job.
    let mut requests = vec![request(0, 0.0, "batch", None)];
    requests.extend((1..3600).map(|id| request(id, id as f64 / 6.0, "chat", None)));
    let results = play(&fleet(BATCH), Admission::None, requests);
    assert_eq!(results.completed, 3600);
    let night = class(&results, "night");
    // It is due after three quarters of its time; by then earlier requests, in order of their objectives,
    // have been computed as far as the instance can.
    let overtaken_until_s = 75.0;
    let bound_s = 3.0 * overtaken_until_s + 1.0;
    assert!(night.e2e_s.mean <= bound_s, "{} s, after {bound_s} s", night.e2e_s.mean);
    let turned = play(&fleet(BATCH), Admission::Prediction, {
        let mut requests = vec![request(0, 0.0, "batch", None)];
        requests.extend((1..3600).map(|id| request(id, id as f64 / 6.0, "chat", None)));
        requests
    });
    assert_eq!(class(&turned, "night").slo_attainment, 1.0, "late requests are rejected instead");
}

/// Ten prompts of half a second at once: seven meet a TTFT of 4 s, and all steps with prompts miss a TBT of
/// 0.3 s; the last two may be due in 0.4 s, less than any answer takes.
#[test]
fn misses_are_counted_by_what_was_missed() {
    let late = "[[class]]\nname = \"late\"\nlabel = \"late\"\ndeadline_s = 0.4\n";
    let tight = |tbt_s| FleetFile { slo: Slo { tbt_s, ..fleet(late).slo }, ..fleet(late) };
    let requests = |late: u64| -> Vec<Request> {
        (0..10).map(|id| request(id, 0.0, if id + late >= 10 { "late" } else { "chat" }, None)).collect()
    };
    let of = |tbt_s, late| play(&tight(tbt_s), Admission::None, requests(late));
    let results = of(10.0, 0);
    let Misses { ttft, tbt, deadline } = results.missed_by;
    assert_eq!((results.missed, ttft, tbt, deadline), (3, 3, 0, 0));
    // All but the last two wait for most of another prompt between their two tokens.
    let results = of(0.3, 0);
    assert_eq!((results.missed_by.ttft, results.missed_by.tbt), (3, 8), "{:?}", results.missed_by);
    assert_eq!(results.missed, 10);
    let results = of(10.0, 2);
    assert_eq!((results.missed_by.deadline, results.missed_by.tbt), (2, 0), "{:?}", results.missed_by);
    assert_eq!(results.missed, 2 + results.missed_by.ttft);
}

#[test]
fn a_hopeless_deadline_is_refused_at_once() {
    let late = "[[class]]\nname = \"late\"\nshare = 1.0\ndeadline_s = 0.4\n";
    let results = play(&fleet(late), Admission::Prediction, vec![request(0, 0.0, "x", None)]);
    assert_eq!(results.rejected.get("deadline"), Some(&1), "{:?}", results.rejected);
    assert_eq!(play(&fleet(late), Admission::None, vec![request(0, 0.0, "x", None)]).completed, 1);
}

#[test]
fn a_conversation_waits_for_its_answers_and_shares_one_deadline() {
    let classes = "[[class]]\nname = \"agent\"\nlabel = \"ag*\"\ndeadline_s = 3.6\nworkflow = true\n";
    let session = |after: Option<u64>, left| {
        Some(ConversationTurn { id: 7, after, think: Seconds(0.5), left: Some(left) })
    };
    // In the trace the second came 0.1 s after the first, the third 10 s later.
    let requests = vec![
        request(0, 0.0, "agent", session(None, 2)),
        request(1, 0.1, "agent", session(Some(0), 1)),
        request(2, 2.6, "agent", session(Some(1), 0)),
    ];
    let results = play(&fleet(classes), Admission::Prediction, requests.clone());
    // Answers take 0.501 s: they end at 0.501, 1.502 and 3.101.
    assert!((results.simulated_s - 3.101).abs() < 1e-6, "{}", results.simulated_s);
    assert_eq!(class(&results, "agent").slo_attainment, 1.0);
    // The same three have less time in total: the last ones must miss it.
    let hurried = classes.replace("3.6", "1.8");
    let results = play(&fleet(&hurried), Admission::Prediction, requests);
    assert_eq!(
        (results.completed, results.rejected.get("deadline")),
        (2, Some(&1)),
        "{:?}",
        results.rejected
    );
}

#[test]
fn classes_that_make_no_sense_are_errors() {
    let no_profiles = |path: &Path| Err(format!("{} is not asked for", path.display()));
    for (class, says) in [
        ("name = \"a\"\nshare = 0.5", "what it is promised"),
        ("name = \"a\"\ndeadline_s = 5", "either share or label"),
        ("name = \"a\"\nshare = 1.5\ndeadline_s = 5", "at most 1"),
        ("name = \"a\"\nshare = 0.5\ndeadline_s = 5\nttft_s = 1", "one kind of promise"),
        ("name = \"a\"\nshare = 0.5\nttft_s = 1\nworkflow = true", "needs deadline_s"),
        ("name = \"default\"\nshare = 0.5\nttft_s = 1", "classes have names"),
        ("name = \"a\"\nshare = 0.5\ndeadline_s = -1", "deadline_s"),
        ("name = \"a\"\nshare = 0.5\ndeadlines = 1", "deadline_s"),
    ] {
        let text = format!(
            "version = 1\n[model]\nname = \"llama-3.1-8b\"\n[[pool]]\nname = \"p\"\ndevice = \"L40S\"\n[[class]]\n{class}\n"
        );
        let error = FleetFile::parse(&text, Path::new("."), &no_profiles).unwrap_err().to_string();
        assert!(error.contains(says), "{class}: {error}");
    }
}

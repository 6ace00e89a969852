//! Impossible requests from outside are refused, and all other work goes on.

use super::*;
use crate::kv::{Namespace, PrefixHasher};
use mixfleet_hal::DType;
use mixfleet_hal::units::Seconds;

const LIMITS: BatchLimits = BatchLimits {
    blocks_total: 8,
    block_tokens: 4,
    step_tokens_max: 12,
    prefill_tokens_beside_decode_max: Some(6),
    sequences_max: 6,
    spare_blocks: 0,
    lower_tiers: false,
    cache_policy: CachePolicy::Lru,
    page_devices: PageDevices::ONE,
    page_parts: PageParts::ONE,
};

type Event = super::Event<TokenIds>;
type Action = super::Action<Box<[u32]>>;

fn text(tokens: usize) -> TokenIds {
    let namespace = Namespace {
        model_digest: "m".into(),
        tokenizer_digest: "t".into(),
        kv_dtype: DType::F32,
        cache_salt: None,
    };
    TokenIds::new(vec![1; tokens], PrefixHasher::new(b"secret", &namespace), LIMITS.block_tokens)
}

fn add(request: RequestId, tokens: usize, due: f64) -> Event {
    let (urgency, text, after) = (Urgency::due_at(Seconds(due)), text(tokens), After::Decode);
    Event::Add { request, urgency, text, pulls: 0, after }
}

fn reserve(request: RequestId, tokens: usize, due: f64) -> Event {
    Event::Reserve { request, urgency: Urgency::due_at(Seconds(due)), text: text(tokens) }
}

fn answer(machine: &mut Instance<TokenIds>, event: Event) -> Vec<Action> {
    let mut actions = Vec::new();
    machine.step(event, &mut actions);
    actions
}

/// Adds a refused request beside a running sequence, which then draws its token.
fn refused(
    event: fn(RequestId, usize, f64) -> Event,
    (request, tokens, due): (RequestId, usize, f64),
) -> Refusal {
    let mut machine = Instance::new(LIMITS);
    assert_eq!(answer(&mut machine, add(1, 5, 0.0)), []);
    let answered = answer(&mut machine, event(request, tokens, due));
    let [Action::Refused { request: named, reason }] = answered[..] else { panic!("{answered:?}") };
    assert_eq!((named, machine.load().waiting), (request, 1));
    let ran = answer(&mut machine, Event::Idle);
    assert!(matches!(&ran[..], [Action::Admitted { request: 1, .. }, Action::Run(_)]), "{ran:?}");
    answer(&mut machine, Event::StepDone { sampled: vec![Sampled { request: 1, finished: true }] });
    assert_eq!(machine.load().blocks.used, 0);
    reason
}

#[test]
fn a_sequence_without_tokens_is_refused() {
    assert_eq!(refused(add, (2, 0, 0.0)), Refusal::Empty);
    assert_eq!(refused(reserve, (2, 0, 0.0)), Refusal::Empty);
}

#[test]
fn an_id_that_is_here_is_refused_and_the_first_one_goes_on() {
    assert_eq!(refused(add, (1, 3, 0.0)), Refusal::Known);
    assert_eq!(refused(reserve, (1, 3, 0.0)), Refusal::Known);
}

#[test]
fn a_sequence_that_no_memory_holds_is_refused_and_keeps_nobody_waiting() {
    assert_eq!(refused(add, (2, 33, -1.0)), Refusal::TooLong);
    assert_eq!(refused(reserve, (2, 33, -1.0)), Refusal::TooLong);
}

#[test]
fn a_due_time_that_is_no_number_is_refused() {
    for due in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        assert_eq!(refused(add, (2, 3, due)), Refusal::NoTime);
    }
}

#[test]
fn kv_that_lands_for_who_does_not_wait_for_it_changes_nothing() {
    let mut machine = Instance::new(LIMITS);
    answer(&mut machine, add(1, 5, 0.0));
    let landed = |request, tokens_valid| Event::Landed { request, tokens_valid, next: true };
    // Waiting, running, unknown.
    assert_eq!(answer(&mut machine, landed(1, 5)), []);
    answer(&mut machine, Event::Idle);
    assert_eq!(answer(&mut machine, landed(1, 5)), []);
    assert_eq!(answer(&mut machine, landed(7, 5)), []);
    answer(&mut machine, Event::StepDone { sampled: vec![Sampled { request: 1, finished: true }] });
    // More than the sequence is long.
    answer(&mut machine, reserve(2, 6, 0.0));
    answer(&mut machine, Event::Idle);
    assert_eq!(answer(&mut machine, landed(2, 7)), []);
    answer(&mut machine, landed(2, 6));
    let ran = answer(&mut machine, Event::Idle);
    assert!(matches!(&ran[..], [Action::Run(step)] if step.sequences[0].start == 6), "{ran:?}");
}

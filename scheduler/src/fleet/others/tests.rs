use super::super::tests::{act, arrival, arrive, config, fleet, instance};
use super::super::{Action, Event, FleetConfig, Role, Terms};
use super::*;

const THEIRS: RequestId = 1 << 48;
const ONE: InstanceId = InstanceId(1);

fn told(fleet: &mut Fleet, now_s: f64, work: OthersWork) {
    let actions = act(fleet, now_s, Event::Others { instance: ONE, works: vec![work] });
    assert!(actions.is_empty(), "{actions:?}");
}

fn prompt(request: RequestId, prompt_tokens: u32, done: u32) -> OthersWork {
    OthersWork::Prompt { request, prefill: ONE, due_in: Seconds::ZERO, prompt_tokens, done, decode: ONE }
}

fn answer(request: RequestId, prompt_tokens: u32, generated: u32) -> OthersWork {
    OthersWork::Answer {
        request,
        prompt_tokens,
        max_tokens: 50,
        ready_in: Seconds::ZERO,
        class: 0,
        output_tokens_hint: None,
        generated,
    }
}

fn alone() -> Fleet {
    fleet(config(), vec![instance(1, Role::Auto, 1e-3, 0.1)])
}

fn terms(fleet: &mut Fleet, now_s: f64, request: RequestId) -> Terms {
    match arrive(fleet, now_s, arrival(request, 100, 1)) {
        Action::Place { explanation, .. } => explanation.chosen().unwrap().terms.unwrap(),
        other => panic!("not placed: {other:?}"),
    }
}

#[test]
fn a_prompt_of_others_is_waited_for_as_ones_own_and_no_longer_than_it_is_there() {
    let mut f = alone();
    told(&mut f, 0.0, prompt(THEIRS, 400, 100));
    let queue_s = terms(&mut f, 0.0, 1).queue_s;
    assert!((queue_s - 0.3).abs() < 1e-9, "{queue_s}");
    act(&mut f, 0.0, Event::Cancelled { request: 1 });
    told(&mut f, 0.0, prompt(THEIRS, 400, 300));
    let queue_s = terms(&mut f, 0.0, 2).queue_s;
    assert!((queue_s - 0.1).abs() < 1e-9, "{queue_s}");
    act(&mut f, 0.0, Event::Cancelled { request: 2 });
    told(&mut f, 0.0, OthersWork::PromptGone { request: THEIRS, done: true });
    assert_eq!(terms(&mut f, 0.0, 3).queue_s, 0.0);
}

#[test]
fn answers_of_others_take_time_of_steps_and_room() {
    let mut f = alone();
    let without = terms(&mut f, 0.0, 1);
    act(&mut f, 0.0, Event::Cancelled { request: 1 });
    for n in 0..10 {
        told(&mut f, 0.0, answer(THEIRS + n, 960, 1));
    }
    let with = terms(&mut f, 0.0, 2);
    assert!(with.tbt_now_s > without.tbt_now_s && with.kv_wait_s > 0.0, "{with:?}");
    act(&mut f, 0.0, Event::Cancelled { request: 2 });
    for n in 0..10 {
        told(&mut f, 0.0, answer(THEIRS + n, 960, 40));
        told(&mut f, 0.0, OthersWork::AnswerGone { request: THEIRS + n, length: None });
    }
    assert_eq!(terms(&mut f, 0.0, 3), without);
}

#[test]
fn work_of_others_is_neither_counted_as_ones_own_nor_placed_anew() {
    let mut f = fleet(FleetConfig { requests_max: 1, ..config() }, vec![instance(1, Role::Auto, 1e-3, 0.1)]);
    told(&mut f, 0.0, prompt(THEIRS, 400, 0));
    told(&mut f, 0.0, answer(THEIRS, 400, 0));
    assert_eq!(f.requests(), 0);
    arrive(&mut f, 0.0, arrival(1, 100, 1));
    let lost = act(&mut f, 1.0, Event::InstanceDown { instance: ONE });
    assert!(matches!(lost[..], [Action::Replay { request: 1, .. }]), "{lost:?}");
    act(&mut f, 1.0, Event::InstanceUp(instance(1, Role::Auto, 1e-3, 0.1)));
    let queue_s = terms(&mut f, 1.0, 2).queue_s;
    assert_eq!((f.requests(), queue_s), (1, 0.0));
}

#[test]
fn word_of_what_is_not_there_changes_nothing() {
    let mut f = alone();
    let usual = terms(&mut f, 0.0, 1);
    act(&mut f, 0.0, Event::Cancelled { request: 1 });
    let nowhere = Event::Others { instance: InstanceId(9), works: vec![prompt(THEIRS, 10, 0)] };
    act(&mut f, 0.0, nowhere);
    told(&mut f, 0.0, OthersWork::PromptGone { request: THEIRS, done: true });
    told(&mut f, 0.0, OthersWork::AnswerGone { request: THEIRS, length: None });
    let odd = OthersWork::Prompt {
        request: THEIRS,
        prefill: ONE,
        due_in: Seconds(f64::NAN),
        prompt_tokens: 10,
        done: 99,
        decode: InstanceId(9),
    };
    told(&mut f, 0.0, odd);
    assert_eq!(terms(&mut f, 0.0, 2), usual);
}

use super::super::tests::{act, arrival, arrive, config, fleet, instance};
use super::super::{Action, Event, Role};
use super::*;
use crate::cost::Prefill;

fn decode(time_s: f64, steps: u32) -> MeasuredSteps {
    MeasuredSteps { parts: Vec::new(), sequences: 10, kv_tokens: 1000, steps, time: Seconds(time_s) }
}

fn prompt(tokens: u32, time_s: f64) -> MeasuredSteps {
    let parts = vec![Prefill { context: 0, tokens, last: true }];
    MeasuredSteps { parts, sequences: 0, kv_tokens: 0, steps: 1, time: Seconds(time_s) }
}

fn told(fleet: &mut Fleet, now_s: f64, id: u32, steps: MeasuredSteps) {
    act(fleet, now_s, Event::Measured { instance: InstanceId(id), steps });
}

fn corrections(fleet: &Fleet, id: u32) -> Corrections {
    fleet.learned(InstanceId(id)).unwrap().0
}

/// A step takes 0.11 s, a token of prompt 1 ms.
fn two() -> Fleet {
    fleet(config(), vec![instance(1, Role::Auto, 1e-3, 0.1), instance(2, Role::Auto, 1e-3, 0.1)])
}

#[test]
fn a_device_as_quick_as_predicted_within_a_few_percent_is_not_corrected_at_all() {
    let mut f = two();
    for n in 0..1000 {
        let off = 1.0 + 0.04 * f64::from(n % 3 - 1);
        told(&mut f, f64::from(n), 1, decode(0.11 * off, 1));
        told(&mut f, f64::from(n), 1, prompt(500, 0.5 * off));
    }
    assert_eq!(corrections(&f, 1), Corrections::default());
}

#[test]
fn steps_and_prompts_that_take_twice_as_long_are_learnt_apart_within_ten_seconds() {
    let mut f = two();
    let mut now_s = 0.0;
    while now_s < 10.0 {
        now_s += 0.22;
        told(&mut f, now_s, 1, decode(0.22, 1));
    }
    let Corrections { prefill, step, transfer } = corrections(&f, 1);
    assert!((1.8..2.1).contains(&step) && (prefill, transfer) == (1.0, 1.0), "{prefill} {step} {transfer}");
    for n in 0..10 {
        told(&mut f, 20.0 + f64::from(n), 2, prompt(500, 1.0));
    }
    let Corrections { prefill, step, .. } = corrections(&f, 2);
    assert!((1.8..2.1).contains(&prefill) && step == 1.0, "{prefill} {step}");
}

#[test]
fn corrections_stay_within_a_quarter_and_four_and_hiccups_count_little() {
    let mut f = two();
    told(&mut f, 1.0, 1, decode(60.0, 1));
    assert!(corrections(&f, 1).step < 1.25, "{:?}", corrections(&f, 1));
    for n in 0..1000 {
        told(&mut f, 2.0 + f64::from(n) * 0.01, 1, decode(60.0, 1));
        told(&mut f, 2.0 + f64::from(n) * 0.01, 2, decode(1e-6, 1));
    }
    assert!((3.8..=4.0).contains(&corrections(&f, 1).step), "{:?}", corrections(&f, 1));
    assert!((0.25..0.27).contains(&corrections(&f, 2).step), "{:?}", corrections(&f, 2));
}

#[test]
fn times_that_are_none_teach_nothing() {
    let mut f = two();
    for time_s in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        told(&mut f, 1.0, 1, decode(time_s, 1));
    }
    told(&mut f, 1.0, 1, MeasuredSteps { sequences: 0, ..decode(1.0, 1) });
    told(&mut f, 1.0, 9, decode(1.0, 1));
    assert_eq!(corrections(&f, 1), Corrections::default());
}

#[test]
fn what_is_corrected_shows_in_the_terms_and_sends_work_elsewhere() {
    let mut f = two();
    for _ in 0..100 {
        told(&mut f, 1.0, 1, prompt(500, 1.0));
    }
    let Action::Place { prefill, explanation, .. } = arrive(&mut f, 2.0, arrival(1, 100, 1)) else {
        panic!("not placed")
    };
    assert_eq!(prefill, InstanceId(2));
    let slow = explanation.candidates[0].terms.unwrap();
    assert!(slow.corrections.prefill > 1.9, "{slow:?}");
    assert!((slow.prefill_s - 0.1 * slow.corrections.prefill).abs() < 1e-9, "{slow:?}");
}

#[test]
fn prompts_that_are_queued_already_take_as_much_longer() {
    let mut f = fleet(config(), vec![instance(1, Role::Auto, 1e-3, 0.1)]);
    arrive(&mut f, 0.0, arrival(1, 400, 1));
    arrive(&mut f, 0.0, arrival(2, 600, 2));
    for _ in 0..200 {
        told(&mut f, 0.0, 1, prompt(500, 1.0));
    }
    let factor = corrections(&f, 1).prefill;
    let queued = f.queued_prefill(InstanceId(1), Seconds(0.0)).0;
    assert!((queued - factor).abs() < 1e-9 && factor > 1.9, "{queued} {factor}");
}

#[test]
fn what_is_not_measured_any_more_fades_and_is_tried_again() {
    let mut f = two();
    for _ in 0..200 {
        told(&mut f, 0.0, 1, decode(0.44, 1));
    }
    assert!(corrections(&f, 1).step > 3.5);
    for n in 1..60 {
        arrive(&mut f, f64::from(n) * 10.0, arrival(u64::try_from(n).unwrap(), 10, 1));
    }
    assert_eq!(corrections(&f, 1), Corrections::default());
}

#[test]
fn kv_that_takes_longer_on_free_ways_than_predicted_is_learnt_of_its_sender() {
    let of = |id, role| instance(id, role, 1e-3, 0.01);
    let mut f = fleet(config(), vec![of(1, Role::Prefill), of(2, Role::Decode)]);
    for n in 0..40 {
        let now_s = f64::from(n) * 10.0;
        let request = u64::try_from(n).unwrap();
        // 200 tokens take 0.2 s of each, of which a layer shows: twice as long shows all that is more
        arrive(&mut f, now_s, arrival(request, 200, 1));
        act(&mut f, now_s + 0.2, Event::PrefillDone { request, instance: InstanceId(1) });
        act(&mut f, now_s + 0.42, Event::TransferDone { request, instance: InstanceId(2) });
        act(&mut f, now_s + 5.0, Event::Finished { request });
    }
    let Corrections { transfer, prefill, step } = corrections(&f, 1);
    assert!((1.5..2.1).contains(&transfer) && (prefill, step) == (1.0, 1.0), "{transfer} {prefill} {step}");
    assert_eq!(corrections(&f, 2), Corrections::default());
}

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

fn corrections(fleet: &Fleet, id: u32) -> SizedCorrections {
    fleet.learned(InstanceId(id)).unwrap()
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
    assert_eq!(corrections(&f, 1), SizedCorrections::default());
}

#[test]
fn three_steps_or_prompts_that_take_twice_as_long_are_learnt_apart() {
    let mut f = two();
    for n in 0..3 {
        told(&mut f, 1.0 + 0.22 * f64::from(n), 1, decode(0.22, 1));
        told(&mut f, 1.0 + f64::from(n), 2, prompt(500, 1.0));
    }
    let twice = |factors: [f64; 3]| factors.iter().all(|factor| (1.95..2.05).contains(factor));
    let SizedCorrections { prefill, step, transfer } = corrections(&f, 1);
    assert!(twice(step) && (prefill, transfer) == ([1.0; 3], 1.0), "{prefill:?} {step:?} {transfer}");
    let SizedCorrections { prefill, step, .. } = corrections(&f, 2);
    assert!(twice(prefill) && step == [1.0; 3], "{prefill:?} {step:?}");
}

#[test]
fn sizes_that_are_off_by_other_factors_are_learnt_apart() {
    let mut f = two();
    for n in 0..40 {
        let now_s = f64::from(n);
        told(&mut f, now_s, 1, prompt(100, 0.4));
        told(&mut f, now_s, 1, prompt(4000, 2.0));
    }
    let [small, middle, large] = corrections(&f, 1).prefill;
    assert!((3.8..4.2).contains(&small) && (0.48..0.52).contains(&large), "{small} {large}");
    assert!(large < middle && middle < small, "a size without measurements is between them: {middle}");
}

#[test]
fn a_mixed_step_corrects_what_has_most_of_its_time() {
    let mut f = two();
    let mixed = |time_s| MeasuredSteps { sequences: 10, ..prompt(500, time_s) };
    for n in 0..9 {
        told(&mut f, f64::from(n), 1, decode(0.055, 1));
        told(&mut f, f64::from(n), 1, mixed(1.5 + 0.055));
    }
    let learned = corrections(&f, 1);
    let MeasuredSteps { parts, sequences, kv_tokens, time, .. } = mixed(1.555);
    let predicted = learned.step_s(&f.loads[0].spec.cost, &parts, (sequences, kv_tokens));
    assert!((predicted / time - 1.0).abs() < 0.05 && (0.48..0.52).contains(&learned.step[1]), "{learned:?}");
}

#[test]
fn a_hiccup_counts_nothing_and_an_error_of_any_size_is_corrected_and_reported() {
    let mut f = two();
    let declared = |f: &Fleet| [1, 2].map(|id| f.is_as_declared(InstanceId(id)).unwrap());
    for n in 0..20 {
        told(&mut f, f64::from(n) * 0.1, 1, decode(if n % 5 == 4 { 60.0 } else { 0.11 }, 1));
    }
    assert_eq!((corrections(&f, 1), declared(&f)), (SizedCorrections::default(), [true, true]));
    for n in 0..9 {
        told(&mut f, 3.0 + f64::from(n) * 0.01, 1, decode(60.0, 1));
        told(&mut f, 3.0 + f64::from(n) * 0.01, 2, decode(1e-6, 1));
    }
    let [slow, quick] = [1, 2].map(|id| corrections(&f, id).step[1]);
    assert!((slow / (60.0 / 0.11) - 1.0).abs() < 0.05 && (quick / (1e-6 / 0.11) - 1.0).abs() < 0.05);
    assert_eq!(declared(&f), [false, false]);
    for n in 0..9 {
        told(&mut f, 4.0 + f64::from(n) * 0.01, 1, decode(0.11, 1));
    }
    assert_eq!(declared(&f), [true, false], "it is as declared again");
}

#[test]
fn times_that_are_none_teach_nothing() {
    let mut f = two();
    for time_s in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        told(&mut f, 1.0, 1, decode(time_s, 1));
    }
    told(&mut f, 1.0, 1, MeasuredSteps { sequences: 0, ..decode(1.0, 1) });
    told(&mut f, 1.0, 9, decode(1.0, 1));
    assert_eq!(corrections(&f, 1), SizedCorrections::default());
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
    let factor = corrections(&f, 1).prefill[1];
    let queued = f.queued_prefill(InstanceId(1), Seconds(0.0)).0;
    assert!((queued - factor).abs() < 1e-9 && factor > 1.9, "{queued} {factor}");
}

#[test]
fn what_first_tokens_take_beyond_their_step_is_learnt_where_nothing_waits() {
    let mut spec = instance(1, Role::Auto, 1e-3, 0.1);
    spec.step_tokens_max = 512;
    let mut f = fleet(config(), vec![spec]);
    for n in 0..6 {
        let (request, now_s) = (n, 10.0 * n as f64);
        let Action::Place { explanation, .. } = arrive(&mut f, now_s, arrival(request, 100, request)) else {
            panic!("not placed")
        };
        let terms = explanation.chosen().unwrap().terms.unwrap();
        assert!((terms.ttft_s - terms.prefill_s - terms.overhead_s).abs() < 1e-12, "{terms:?}");
        if n >= 4 {
            assert!((terms.overhead_s - 0.02).abs() < 1e-9, "{terms:?}");
        }
        let instance = InstanceId(1);
        act(&mut f, now_s + 0.12, Event::PrefillDone { request, instance });
        act(&mut f, now_s + 1.0, Event::Finished { request });
    }
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
    let SizedCorrections { transfer, prefill, step } = corrections(&f, 1);
    assert!(
        (1.5..2.1).contains(&transfer) && (prefill, step) == ([1.0; 3], [1.0; 3]),
        "{transfer} {prefill:?}"
    );
    assert_eq!(corrections(&f, 2), SizedCorrections::default());
    for n in 0..60 {
        let (request, now_s) = (1000 + u64::try_from(n).unwrap(), 400.0 + f64::from(n) * 10.0);
        arrive(&mut f, now_s, arrival(request, 10, 1));
        act(&mut f, now_s, Event::Cancelled { request });
    }
    assert_eq!(corrections(&f, 1).transfer, 1.0, "unmeasured corrections fade");
}

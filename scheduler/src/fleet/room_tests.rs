//! Decoders without room: who reserves it waits before the prompt, who streams leaves a gap between its tokens.

use super::tests::{act, arrival, arrive, config, fleet, instance};
use super::*;

/// A prefill instance, a cheap decoder with room for 400 tokens, and one ten times as dear with room for all; `slo` on the time between
/// tokens. The cheap one has taken on a prompt of 300 tokens.
fn crowded(hand_off: HandOff, slo: Option<f64>) -> Fleet {
    let with_price = |spec: Instance, price| Instance { price: Some(UsdPerHour(price)), ..spec };
    let mut cheap = with_price(instance(2, Role::Decode, 1e-3, 1e-2), 1.0);
    cheap.kv_capacity_tokens = 400;
    let dear = with_price(instance(3, Role::Decode, 1e-3, 1e-2), 10.0);
    let prefill = with_price(instance(1, Role::Prefill, 1e-3, 1e-2), 1.0);
    let config = FleetConfig {
        hand_off,
        tbt_slo: slo.map(Seconds),
        // dollars decide
        wait_usd_per_s: Some(1e-9),
        ..config()
    };
    let mut fleet = fleet(config, vec![prefill, cheap, dear]);
    let first = arrive(&mut fleet, 0.0, arrival(1, 300, 1));
    assert!(matches!(first, Action::Place { decode: InstanceId(2), .. }), "{first:?}");
    act(&mut fleet, 0.3, Event::PrefillDone { request: 1, instance: InstanceId(1) });
    act(&mut fleet, 0.4, Event::TransferDone { request: 1, instance: InstanceId(2) });
    fleet
}

fn on_cheap(action: &Action) -> Terms {
    let Action::Place { explanation, .. } = action else { panic!("not placed: {action:?}") };
    let of = |c: &&Candidate| c.decode == InstanceId(2);
    explanation.candidates.iter().find(of).and_then(|c| c.terms).expect("possible")
}

#[test]
fn a_wait_for_reserved_room_comes_before_the_first_token() {
    let mut fleet = crowded(HandOff::Reserved, None);
    let terms = on_cheap(&arrive(&mut fleet, 0.4, arrival(2, 200, 2)));
    // 49 tokens more of 10.1 ms
    assert!((terms.kv_wait_s - 49.0 * 1.01e-2).abs() < 0.02, "{terms:?}");
    assert_eq!(terms.gap_s, 0.0);
}

#[test]
fn a_wait_for_room_that_is_not_reserved_is_a_gap_between_tokens() {
    let mut fleet = crowded(HandOff::Streamed, None);
    let terms = on_cheap(&arrive(&mut fleet, 0.4, arrival(2, 200, 2)));
    assert_eq!(terms.kv_wait_s, 0.0);
    let landed = terms.ttft_s + terms.transfer_s;
    assert!((terms.gap_s - (49.0 * 1.01e-2 - landed)).abs() < 0.02, "{terms:?}");
    // one of the five longest of its 50 gaps
    assert!((terms.tbt_peak_s - (terms.tbt_s + terms.gap_s / 5.0)).abs() < 1e-9, "{terms:?}");
}

#[test]
fn a_gap_that_breaks_the_objective_is_worth_a_dearer_decoder() {
    for (slo, decode) in [(None, 2), (Some(0.2), 2), (Some(0.03), 3)] {
        let mut fleet = crowded(HandOff::Streamed, slo);
        let action = arrive(&mut fleet, 0.4, arrival(2, 200, 2));
        let Action::Place { decode: chosen, .. } = action else { panic!("not placed: {action:?}") };
        assert_eq!(chosen, InstanceId(decode), "objective {slo:?} s");
    }
}

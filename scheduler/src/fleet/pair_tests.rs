use super::tests::{act, arrival, arrive, close, config, fleet, instance, placed};
use super::*;
use crate::cost::{KvCopyCost, PieceCost};

#[test]
fn a_fleet_serves_while_one_instance_can_do_both_or_a_link_joins_two_that_can() {
    let (prefill, decode) = (instance(1, Role::Prefill, 1e-3, 1e-2), instance(2, Role::Decode, 1e-3, 1e-2));
    let serves = |instances: &[&Instance]| {
        let instances = instances.iter().map(|&instance| instance.clone()).collect();
        fleet(config(), instances).can_serve()
    };
    let both = instance(3, Role::Auto, 1e-3, 1e-2);
    assert!(serves(&[&both]) && serves(&[&prefill, &decode]) && serves(&[&prefill, &both]));
    assert!(!serves(&[]) && !serves(&[&prefill]) && !serves(&[&decode]));
    let mut fleet = fleet(config(), vec![prefill, decode]);
    act(&mut fleet, 1.0, Event::LinkDown { from: InstanceId(1), to: InstanceId(2) });
    assert!(!fleet.can_serve());
}

#[test]
fn an_instance_that_decodes_hands_over_only_to_one_that_decodes_for_less_and_has_room() {
    let priced =
        |id, base, usd| Instance { price: Some(UsdPerHour(usd)), ..instance(id, Role::Auto, 1e-3, base) };
    // A token costs half as much on 2 as on 1 and 3.
    let all = || vec![priced(1, 1e-2, 1.0), priced(2, 2e-2, 0.25), priced(3, 1e-2, 1.0)];
    let pairs = |action: &Action| -> Vec<(u32, u32)> {
        placed(action).2.candidates.iter().map(|c| (c.prefill.0, c.decode.0)).collect()
    };
    let mut f = fleet(config(), all());
    assert_eq!(pairs(&arrive(&mut f, 0.0, arrival(1, 100, 1))), [(1, 1), (1, 2), (2, 2), (3, 2), (3, 3)]);
    // Nearly as much: no gain for the gap and the room in both.
    let mut f = fleet(config(), vec![priced(1, 1e-2, 1.0), priced(2, 1e-2, 0.96)]);
    assert_eq!(pairs(&arrive(&mut f, 0.0, arrival(1, 100, 1))), [(1, 1), (2, 2)]);
    // 2 holds 200 tokens: a request that it may not hold beside the first one stays where it is computed.
    let mut small = all();
    small[1].kv_capacity_tokens = 200;
    let mut f = fleet(config(), small);
    arrive(&mut f, 0.0, arrival(1, 100, 1));
    let second = pairs(&arrive(&mut f, 0.0, arrival(2, 100, 2)));
    assert!(!second.contains(&(1, 2)) && second.contains(&(1, 1)), "{second:?}");
    // 1 and 3 can never hold it: it may go where it fits.
    let mut large = all();
    large.iter_mut().filter(|i| i.id.0 != 2).for_each(|i| i.kv_capacity_tokens = 120);
    let action = arrive(&mut fleet(config(), large), 0.0, arrival(1, 100, 1));
    assert_eq!(placed(&action).1, 2);
    assert!(pairs(&action).contains(&(1, 2)));
}

#[test]
fn kv_that_lands_while_an_answer_decodes_makes_its_steps_longer() {
    let second = |seconds_per_byte| {
        let scatter = PieceCost { seconds_per_byte, ..PieceCost::default() };
        let kv_copies = KvCopyCost { scatter, ..KvCopyCost::default() };
        let of = |id, role| Instance { kv_copies, ..instance(id, role, 1e-3, 1e-2) };
        let instances = vec![of(1, Role::Prefill), of(2, Role::Prefill), of(3, Role::Decode)];
        let mut f = fleet(config(), instances);
        // Its KV lands at 3 from 0.1 to 1.1 s.
        assert_eq!(placed(&arrive(&mut f, 0.0, arrival(1, 1000, 1))).0, 1);
        let action = arrive(&mut f, 0.0, arrival(2, 100, 2));
        assert_eq!((placed(&action).0, placed(&action).1), (2, 3));
        placed(&action).2.chosen().unwrap().terms.unwrap()
    };
    let (without, with) = (second(0.0), second(2e-7));
    close(without.tbt_s, 1.01e-2);
    // From 0.11 s on, 50 steps of 10.1 ms lose a fifth of their time.
    close(with.tbt_s, 1.01e-2 + 0.2 * 1.01e-2);
    close(with.ends_s - without.ends_s, 50.0 * 0.2 * 1.01e-2);
    // The longest five steps of these have all that they can lose.
    close(with.tbt_peak_s - without.tbt_peak_s, 0.25 * 1.01e-2);
    // KV that lands for it takes 20 ms of the first one's steps.
    close(with.delay_s - without.delay_s, 0.02);
}

#[test]
fn a_first_token_that_is_drawn_where_kv_lands_waits_for_it() {
    let terms = |first_token_at_decode, slo_s: f64| {
        let instances = vec![instance(1, Role::Prefill, 1e-3, 1e-2), instance(2, Role::Decode, 1e-3, 1e-2)];
        let slos = (Some(Seconds(slo_s)), Some(Seconds(0.2)));
        let config = FleetConfig { first_token_at_decode, ttft_slo: slos.0, tbt_slo: slos.1, ..config() };
        let mut f = fleet(config, instances);
        // a token takes 1 ms to compute and 4 ms to send
        let seconds_per_byte = 4e-3 / f.config.kv_bytes_per_token as f64;
        let cost = LinkCost { latency: Seconds(0.0), seconds_per_byte, usd_per_byte: 0.0 };
        act(&mut f, 0.0, Event::LinkUp(Link { from: InstanceId(1), to: InstanceId(2), cost }));
        match arrive(&mut f, 0.0, arrival(1, 100, 1)) {
            Action::Place { explanation, .. } => Ok(explanation.chosen().unwrap().terms.unwrap()),
            Action::Reject { reason, .. } => Err(reason),
            other => panic!("{other:?}"),
        }
    };
    let there = terms(false, 0.2).unwrap();
    assert!(there.ttft_s < 0.2 && there.ttft_s + there.transfer_s > 0.4, "{there:?}");
    match terms(true, 0.2).unwrap_err() {
        RejectReason::TtftSlo { ttft_s, .. } => close(ttft_s, there.ttft_s + there.transfer_s),
        other => panic!("{other:?}"),
    }
    // and then it is no gap between tokens
    let here = terms(true, 1.0).unwrap();
    assert!(here.tbt_peak_s < there.tbt_peak_s, "{here:?} {there:?}");
}

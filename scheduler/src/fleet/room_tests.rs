//! Decoders without room: a request waits for room there before its prompt is computed.

use super::tests::{act, arrival, arrive, config, fleet, instance};
use super::*;
use crate::kv::Tier;
use crate::kv::parts::LayerPages;
use proptest::prelude::*;

/// A prefill instance, a cheap decoder with room for 400 tokens, and one ten times as dear with room for all.
/// The cheap one has taken on a prompt of 300 tokens.
fn crowded() -> Fleet {
    let with_price = |spec: Instance, price| Instance { price: Some(UsdPerHour(price)), ..spec };
    let mut cheap = with_price(instance(2, Role::Decode, 1e-3, 1e-2), 1.0);
    cheap.kv_capacity_tokens = 400;
    let dear = with_price(instance(3, Role::Decode, 1e-3, 1e-2), 10.0);
    let prefill = with_price(instance(1, Role::Prefill, 1e-3, 1e-2), 1.0);
    let config = FleetConfig {
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
    let mut fleet = crowded();
    let terms = on_cheap(&arrive(&mut fleet, 0.4, arrival(2, 200, 2)));
    // 49 tokens more of 10.1 ms
    assert!((terms.kv_wait_s - 49.0 * 1.01e-2).abs() < 0.02, "{terms:?}");
}

#[test]
fn a_hand_off_sends_what_the_decoder_does_not_hold() {
    let instances = vec![instance(1, Role::Prefill, 1e-3, 1e-2), instance(2, Role::Decode, 1e-3, 1e-2)];
    let mut fleet = fleet(config(), instances);
    let arrival = arrival(1, 200, 1);
    let hashes = arrival.chains[0].hashes[..5].to_vec();
    act(&mut fleet, 0.0, Event::KvStored { instance: InstanceId(2), hashes, tier: Tier::Device });
    assert_eq!(on_cheap(&arrive(&mut fleet, 0.0, arrival)).transfer_tokens, 150);
}

#[test]
fn a_hand_off_waits_for_what_its_ways_have_to_move() {
    // two of each; a token takes 1 ms to compute and 4 ms to send
    let computes = |id| instance(id, Role::Prefill, 1e-3, 1e-2);
    let decodes = |id| instance(id, Role::Decode, 1e-3, 1e-2);
    let slo = Some(Seconds(0.3));
    let mut fleet = fleet(
        FleetConfig { tbt_slo: slo, ..config() },
        vec![computes(1), computes(2), decodes(3), decodes(4)],
    );
    let seconds_per_byte = 4e-3 / fleet.config.kv_bytes_per_token as f64;
    let cost = LinkCost { latency: Seconds(0.0), seconds_per_byte, usd_per_byte: 0.0 };
    for (from, to) in [(1, 3), (1, 4), (2, 3), (2, 4)] {
        act(&mut fleet, 0.0, Event::LinkUp(Link { from: InstanceId(from), to: InstanceId(to), cost }));
    }
    let first = arrive(&mut fleet, 0.0, arrival(1, 300, 1));
    let Action::Place { prefill: InstanceId(1), decode: InstanceId(3), .. } = first else {
        panic!("{first:?}")
    };
    act(&mut fleet, 0.3, Event::PrefillDone { request: 1, instance: InstanceId(1) });
    let second = arrive(&mut fleet, 0.3, arrival(2, 100, 2));
    let Action::Place { prefill, decode, explanation, .. } = &second else { panic!("{second:?}") };
    assert_eq!((*prefill, *decode), (InstanceId(2), InstanceId(4)), "both ways are free");
    for candidate in &explanation.candidates {
        let terms = candidate.terms.expect("possible");
        let free = candidate.prefill.0 == 2 && candidate.decode.0 == 4;
        // the first one's 300 tokens, then its own 100, all after its prompt; or only the last layers of its
        // own
        let ends_s = if free {
            0.1 + cost.exposed(fleet.kv_bytes(100), fleet.config.layers, Seconds(0.1)).0
        } else {
            1.2 + 0.4
        };
        assert!((terms.ttft_s + terms.transfer_s - ends_s).abs() < 1e-9, "{candidate:?}");
        // a gap among its five longest, at the time of the check
        if free {
            assert!((terms.tbt_peak_s - terms.tbt_s - terms.transfer_s / 5.0).abs() < 1e-3, "{terms:?}");
        }
    }
    // later the ways have moved a part
    let third = arrive(&mut fleet, 1.3, arrival(3, 100, 3));
    let Action::Place { explanation, .. } = &third else { panic!("{third:?}") };
    let same = |c: &&Candidate| c.prefill.0 == 1 && c.decode.0 == 3;
    let terms = explanation.candidates.iter().find(same).and_then(|c| c.terms).expect("possible");
    assert!((terms.ttft_s + terms.transfer_s - 0.6).abs() < 1e-9, "{terms:?}");
}

proptest! {
    #[test]
    fn a_decoder_that_certainly_has_room_makes_nobody_wait(
        prompts in prop::collection::vec(1u32..3000, 1..40),
        newcomer in 1u64..4000,
        capacity in 10_000u64..400_000,
        output_tokens_expected in 1u32..2000,
        windows in prop::collection::vec(prop::option::of(1u32..2000), 1..4),
        seed: u64,
    ) {
        let mut decoder = instance(1, Role::Auto, 1e-3, 1e-2);
        decoder.kv_capacity_tokens = capacity;
        decoder.kv_parts = LayerPages::of(&windows, u32::MAX).parts;
        let mut fleet = fleet(FleetConfig { output_tokens_expected, ..config() }, vec![decoder]);
        let mut random = Stream::new(seed);
        for (request, prompt) in (0..).zip(prompts) {
            let arrival = Arrival { max_tokens: 4096, ..arrival(request, prompt, request) };
            act(&mut fleet, 0.0, Event::Arrived(arrival));
            act(&mut fleet, 0.0, Event::PrefillDone { request, instance: InstanceId(1) });
            if random.below(4) == 0 {
                act(&mut fleet, 0.0, Event::Finished { request });
            }
        }
        let load = &fleet.loads[0];
        let wait = load.forecast(&fleet.lengths, Seconds::ZERO).kv_wait(newcomer);
        prop_assert!(!load.has_room(newcomer) || wait == Seconds::ZERO, "{wait:?}");
    }
}

/// Two decoders of one speed, one with a tenth of the memory, and each with the same requests; what newcomers
/// hold of a small memory counts while it binds.
#[test]
fn memory_that_binds_costs_its_share_of_the_rent_for_as_long_as_it_is_held() {
    let decoders = |kv_weight| {
        let price = Some(UsdPerHour(3.6));
        let roomy = Instance { price, kv_capacity_tokens: 100_000, ..instance(2, Role::Auto, 1e-3, 1e-2) };
        let tight = Instance { price, kv_capacity_tokens: 2_000, ..instance(1, Role::Auto, 1e-3, 1e-2) };
        fleet(FleetConfig { kv_weight, ..config() }, vec![tight, roomy])
    };
    let candidates = |kv_weight| {
        let action = arrive(&mut decoders(kv_weight), 0.0, arrival(1, 1_450, 1));
        let Action::Place { decode, explanation, .. } = action else { panic!("not placed: {action:?}") };
        let on = |id| {
            let both = |c: &&Candidate| (c.prefill.0, c.decode.0) == (id, id);
            explanation.candidates.iter().find(both).and_then(|c| c.terms).unwrap()
        };
        (decode.0, on(1), on(2))
    };
    let (first, tight, roomy) = candidates(0.0);
    assert_eq!((first, tight.memory, roomy.memory), (1, 0.0, 0.0), "off: the first of equals");
    let (chosen, tight, roomy) = candidates(1.0);
    // 1450 and half of 50 tokens of 2000, of which 1500 bind half, through the prefill and 50 steps, at 0.001
    // $ a second
    let held_s = 1.45 + 50.0 * 0.0101;
    assert!((tight.memory - 1e-3 * held_s * (1_475.0 / 2_000.0) * 0.5).abs() < 1e-9, "{tight:?}");
    assert_eq!((chosen, roomy.memory), (2, 0.0), "where memory does not bind it is free");
    assert!((tight.score - roomy.score - tight.memory).abs() < 1e-9);
    assert!((candidates(2.0).1.memory / tight.memory - 2.0).abs() < 1e-9);
}

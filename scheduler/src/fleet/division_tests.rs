use super::tests::{act, arrival, arrive, config, hashes, instance};
use super::*;
use crate::kv::Tier;
use proptest::prelude::*;

/// A policy and a seed of the events in a fleet of this many instances.
fn worlds() -> impl Strategy<Value = (Policy, u64, u32)> {
    let policies = proptest::sample::select(vec![
        Policy::Random,
        Policy::RoundRobin,
        Policy::LeastLoaded,
        Policy::CacheAware,
        Policy::KvcacheCentric { threshold: 2.0 },
        Policy::PerDollar,
    ]);
    // pair by pair, and by a shortlist
    (policies, any::<u64>(), prop_oneof![3u32..8, 90u32..100])
}

/// Instances of all roles and several speeds, all of them joined by their network interfaces.
fn instances(seed: u64, count: u32) -> Vec<Instance> {
    let mut random = Stream::new(seed);
    let nic = LinkCost { latency: Seconds(0.0), seconds_per_byte: 1e-6, usd_per_byte: 0.0 };
    let one = |id| {
        let role = [Role::Auto, Role::Prefill, Role::Decode, Role::Kv][random.below(4) as usize];
        let (per_token, base) = ((1 + random.below(4)) as f64 * 1e-3, (1 + random.below(4)) as f64 * 1e-2);
        Instance { nic: Some(nic), ..instance(id, role, per_token, base) }
    };
    (0..count).map(one).collect()
}

/// Places 30 requests of a few documents, some of which end in between; returns the placements.
fn placements(
    (policy, seed, pull): (Policy, u64, bool),
    instances: Vec<Instance>,
    limit: impl Fn(Arrival) -> Arrival,
) -> Vec<Option<(InstanceId, InstanceId, Option<Pull>)>> {
    let mut random = Stream::new(seed);
    let mut fleet = Fleet::new(FleetConfig { policy, pull, seed, ..config() });
    instances.into_iter().for_each(|spec| drop(act(&mut fleet, 0.0, Event::InstanceUp(spec))));
    let mut placed = Vec::new();
    for request in 0..30 {
        let now = request as f64 * 0.05;
        let document = random.below(4);
        let tokens = 100 + random.below(300) as u32;
        let place = match arrive(&mut fleet, now, limit(arrival(request, tokens, document))) {
            Action::Place { prefill, decode, pull, .. } => Some((prefill, decode, pull)),
            _ => None,
        };
        placed.push(place);
        let ends = random.below(3) == 0;
        if let Some((prefill, decode, _)) = place
            && ends
        {
            act(&mut fleet, now, Event::PrefillDone { request, instance: prefill });
            act(&mut fleet, now, Event::TransferDone { request, instance: decode });
            act(&mut fleet, now, Event::Finished { request });
            let hashes = hashes(document, tokens);
            act(&mut fleet, now, Event::KvStored { instance: prefill, hashes, tier: Tier::Device });
        }
    }
    placed
}

/// Some of the instances.
fn some(seed: u64, count: u32) -> Vec<InstanceId> {
    let mut random = Stream::new(seed ^ 1);
    (0..count).filter(|_| random.below(3) == 0).map(InstanceId).collect()
}

proptest! {
    #[test]
    fn excluding_instances_decides_as_if_they_were_not_there(world in worlds(), pull: bool) {
        let (policy, seed, count) = world;
        let all = instances(seed, count);
        let exclude = some(seed, count.min(10));
        let left = all.iter().filter(|spec| !exclude.contains(&spec.id)).cloned().collect();
        let excluding = |arrival| Arrival { exclude: exclude.clone(), ..arrival };
        prop_assert_eq!(
            placements((policy, seed, pull), all, excluding),
            placements((policy, seed, pull), left, |arrival| arrival)
        );
    }

    #[test]
    fn an_undivided_request_is_placed_as_if_every_instance_did_everything_alone(world in worlds()) {
        let (policy, seed, count) = world;
        let all = instances(seed, count);
        let alone = |spec: &Instance| {
            let role = if spec.role.computes() { Role::Auto } else { spec.role };
            Instance { role, nic: None, ..spec.clone() }
        };
        let left = all.iter().map(alone).collect();
        let undivided = |arrival| Arrival { division: RequestDivision::Undivided, ..arrival };
        let places = placements((policy, seed, false), all, undivided);
        prop_assert!(places.iter().flatten().all(|place| place.0 == place.1));
        prop_assert_eq!(places, placements((policy, seed, false), left, |arrival| arrival));
    }

    #[test]
    fn instances_that_share_nothing_are_placed_as_if_no_link_led_to_them(world in worlds()) {
        let (policy, seed, count) = world;
        let all = instances(seed, count);
        let apart = some(seed, count);
        let alone = |spec: &Instance| Instance {
            nic: spec.nic.filter(|_| !apart.contains(&spec.id)),
            ..spec.clone()
        };
        let left = all.iter().map(alone).collect();
        let divided = |arrival| Arrival { division: RequestDivision::NotAmong(apart.clone()), ..arrival };
        prop_assert_eq!(
            placements((policy, seed, false), all, divided),
            placements((policy, seed, false), left, |arrival| arrival)
        );
    }
}

#[test]
fn limits_of_a_request_are_logged_only_where_it_has_some() {
    let plain = serde_json::to_value(arrival(1, 100, 1)).unwrap();
    assert!(plain.get("exclude").is_none() && plain.get("division").is_none());
    let limited = Arrival {
        exclude: vec![InstanceId(3)],
        division: RequestDivision::NotAmong(vec![InstanceId(4)]),
        ..arrival(1, 100, 1)
    };
    let text = serde_json::to_string(&limited).unwrap();
    assert_eq!(serde_json::from_str::<Arrival>(&text).unwrap(), limited);
}

use super::super::tests::{act, arrival, config, fleet, instance};
use super::super::{Arrival, FleetConfig, Instance, Link, PromptChain, RequestId, Role};
use super::*;
use crate::cost::LinkCost;
use crate::kv::Tier;
use mixfleet_hal::DType;
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::UsdPerHour;
use proptest::prelude::*;

const BLOCK: u32 = 10;
const SYSTEM_TOKENS: u32 = 500;

/// A token of KV takes 0.1 ms on the way, a tenth of its computing.
fn replicating(policy: Policy) -> FleetConfig {
    let replicate = Some(Replicate::new(1e6));
    FleetConfig { policy, replicate, kv_bytes_per_token: 100, requests_max: usize::MAX, ..config() }
}

fn autos(count: u32) -> Vec<crate::fleet::Instance> {
    (1..=count).map(|id| instance(id, Role::Auto, 1e-3, 1e-4)).collect()
}

fn keys(document: u64, tokens: u32) -> Vec<BlockHash> {
    (0..u64::from(tokens / BLOCK)).map(|block| BlockHash(document << 32 | block)).collect()
}

/// A prompt of a system prompt and 60 other tokens.
fn short(request: RequestId, system: u64) -> Arrival {
    let hashes = [keys(system, SYSTEM_TOKENS), keys(1_000_000 + request, 60)].concat();
    let chains = vec![PromptChain { block_tokens: BLOCK, kv_dtype: DType::F32, hashes }];
    Arrival { chains, ..arrival(request, SYSTEM_TOKENS + 65, 0) }
}

fn stored(instance: u32, hashes: Vec<BlockHash>) -> Event {
    Event::KvStored { instance: InstanceId(instance), hashes, tier: Tier::Device }
}

/// Sender, receiver and tokens of each copy.
fn copies(actions: &[Action]) -> Vec<(u32, u32, u32)> {
    let copy = |action: &Action| match action {
        Action::Replicate { from, to, tokens, .. } => Some((from.0, to.0, *tokens)),
        _ => None,
    };
    actions.iter().filter_map(copy).collect()
}

/// Requests `ids` with a system prompt in common come at `now`.
fn crowd(fleet: &mut Fleet, now: f64, ids: std::ops::Range<RequestId>) -> Vec<Action> {
    ids.flat_map(|id| act(fleet, now, Event::Arrived(short(id, 1)))).collect()
}

#[test]
fn what_a_crowd_queues_for_is_copied_once_to_an_idle_instance_and_then_found_there() {
    let mut f = fleet(replicating(Policy::CacheAware), autos(3));
    act(&mut f, 0.0, stored(1, keys(1, SYSTEM_TOKENS)));
    let actions = crowd(&mut f, 0.0, 0..6);
    assert_eq!(copies(&actions), [(1, 2, SYSTEM_TOKENS)]);
    let at = actions.iter().position(|action| matches!(action, Action::Replicate { .. })).unwrap();
    assert!(matches!(&actions[at], Action::Replicate { hashes, .. } if *hashes == keys(1, SYSTEM_TOKENS)));
    assert!(matches!(actions[at + 1], Action::Place { .. }), "the answer to an arrival comes last");
    // in flight for 50 ms; from then on requests go there
    act(&mut f, 0.05, stored(2, keys(1, SYSTEM_TOKENS)));
    let next = crowd(&mut f, 0.05, 6..7);
    let Action::Place { prefill, explanation, .. } = next.last().unwrap() else { panic!("{next:?}") };
    assert_eq!(*prefill, InstanceId(2));
    assert_eq!(explanation.chosen().unwrap().terms.unwrap().cached_tokens, SYSTEM_TOKENS);
}

#[test]
fn a_copy_that_costs_more_dollars_than_it_saves_is_not_made() {
    // 50 kB on the way; what the crowd waits is worth about a second of the average instance, a thousandth of
    // a dollar
    for (usd_per_byte, made) in [(0.0, 1), (1e-12, 1), (1e-6, 0)] {
        let priced = autos(3).into_iter().map(|spec| Instance { price: Some(UsdPerHour(3.6)), ..spec });
        let mut f = fleet(replicating(Policy::CacheAware), priced.collect());
        for (from, to) in [(1, 2), (1, 3)] {
            let cost = LinkCost { latency: Seconds(0.0), seconds_per_byte: 1e-6, usd_per_byte };
            let (from, to) = (InstanceId(from), InstanceId(to));
            act(&mut f, 0.0, Event::LinkUp(Link { from, to, cost }));
        }
        act(&mut f, 0.0, stored(1, keys(1, SYSTEM_TOKENS)));
        assert_eq!(copies(&crowd(&mut f, 0.0, 0..6)).len(), made, "{usd_per_byte} $ per byte");
    }
}

#[test]
fn a_copy_is_forgotten_when_what_either_end_holds_is_cleared() {
    let mut f = fleet(replicating(Policy::CacheAware), autos(3));
    act(&mut f, 0.0, stored(1, keys(1, SYSTEM_TOKENS)));
    assert_eq!(copies(&crowd(&mut f, 0.0, 0..6)).len(), 1);
    act(&mut f, 0.0, Event::KvCleared { instance: InstanceId(2) });
    assert!(f.replicas.as_ref().is_some_and(|replicas| replicas.under_way.is_empty()));
}

#[test]
fn nothing_is_copied_unless_asked_for() {
    let config = FleetConfig { replicate: None, ..replicating(Policy::CacheAware) };
    let mut f = fleet(config, autos(3));
    act(&mut f, 0.0, stored(1, keys(1, SYSTEM_TOKENS)));
    assert_eq!(copies(&crowd(&mut f, 0.0, 0..50)), []);
}

#[test]
fn only_the_missing_part_is_copied_and_only_to_those_who_prefill() {
    let mut instances = autos(2);
    instances[1].role = Role::Decode;
    instances.push(instance(3, Role::Auto, 1e-3, 1e-4));
    let mut f = fleet(replicating(Policy::CacheAware), instances);
    act(&mut f, 0.0, stored(1, keys(1, SYSTEM_TOKENS)));
    act(&mut f, 0.0, stored(3, keys(1, 100)));
    assert_eq!(copies(&crowd(&mut f, 0.0, 0..10)), [(1, 3, SYSTEM_TOKENS - 100)]);
}

#[test]
fn a_conversations_own_prefixes_stay_where_they_are() {
    // placed at random, so that nearly every turn misses what an earlier one left
    let mut f = fleet(replicating(Policy::Random), autos(8));
    for turn in 1..60u32 {
        let tokens = turn * 100;
        let now = f64::from(turn) * 10.0;
        let actions = act(&mut f, now, Event::Arrived(arrival(u64::from(turn), tokens, 7)));
        assert_eq!(copies(&actions), [], "turn {turn}");
        let Some(Action::Place { prefill, .. }) = actions.last() else { panic!("{actions:?}") };
        act(&mut f, now, stored(prefill.0, keys(7, tokens)));
        act(&mut f, now, Event::Finished { request: u64::from(turn) });
    }
}

#[test]
fn misses_of_several_requests_are_answered_by_a_copy_where_none_is_computed() {
    // one after the other, at random: no request waits, but each computes the system prompt anew
    let mut f = fleet(replicating(Policy::Random), autos(4));
    act(&mut f, 0.0, stored(1, keys(1, SYSTEM_TOKENS)));
    let mut seen = Vec::new();
    for id in 0..10u64 {
        let now = id as f64;
        let actions = act(&mut f, now, Event::Arrived(short(id, 1)));
        let Some(Action::Place { prefill, .. }) = actions.last() else { panic!("{actions:?}") };
        for (from, to, tokens) in copies(&actions) {
            assert_eq!((from, tokens), (1, SYSTEM_TOKENS));
            assert_ne!(to, prefill.0, "it brings the prefix there itself");
            seen.push((id, to));
        }
        act(&mut f, now + 0.9, Event::Finished { request: id });
    }
    assert!(!seen.is_empty() && seen[0].0 >= 1, "two requests make a prefix hot: {seen:?}");
}

#[test]
fn a_copy_whose_end_is_lost_is_asked_for_again_elsewhere() {
    let begin = || {
        let mut f = fleet(replicating(Policy::CacheAware), autos(4));
        act(&mut f, 0.0, stored(1, keys(1, SYSTEM_TOKENS)));
        act(&mut f, 0.0, stored(4, keys(1, SYSTEM_TOKENS)));
        let first = copies(&crowd(&mut f, 0.0, 0..12));
        assert_eq!(first.len(), 1);
        (f, first[0])
    };
    let (mut f, (from, to, _)) = begin();
    assert_eq!(copies(&crowd(&mut f, 0.01, 12..24)), [], "in flight");
    for lost in [from, to] {
        let (mut f, _) = begin();
        act(&mut f, 0.01, Event::InstanceDown { instance: InstanceId(lost) });
        let again = copies(&crowd(&mut f, 0.01, 12..24));
        assert_eq!(again.len(), 1, "{lost} of {from} and {to} was lost");
        assert!(again[0].0 != lost && again[0].1 != lost);
    }
    // it found no room: a long delay reveals that, and losses before it no longer count
    assert_eq!(copies(&crowd(&mut f, 1.0, 24..36)), [], "may still come");
    assert_eq!(copies(&crowd(&mut f, 3.0, 36..48)).len(), 1);
}

/// Random requests with some of 20 system prompts; times and bytes of the copies, and all actions.
fn random_run(seed: u64, rate: f64, policy: Policy) -> (Vec<(f64, f64)>, Vec<Action>) {
    let mut random = Stream::new(seed);
    let mut draw = |most: f64| random.next_unit() * most;
    let config = FleetConfig { replicate: Some(Replicate::new(rate)), ..replicating(policy) };
    let mut f = fleet(config, autos(20));
    let (mut now, mut sent, mut all) = (0.0, Vec::new(), Vec::new());
    for id in 0..300u64 {
        now += draw(0.2);
        let system = 1 + draw(20.0) as u64;
        let mut actions = act(&mut f, now, Event::Arrived(short(id, system)));
        for action in &actions {
            match action {
                Action::Replicate { to, hashes, tokens, .. } => {
                    sent.push((now, f64::from(*tokens) * 100.0));
                    // some find no room
                    if draw(1.0) < 0.7 {
                        act(&mut f, now, stored(to.0, hashes.clone()));
                    }
                }
                Action::Place { prefill, .. } => {
                    act(&mut f, now, stored(prefill.0, keys(system, SYSTEM_TOKENS)));
                }
                other => panic!("{other:?}"),
            }
        }
        if draw(1.0) < 0.3 {
            let instance = InstanceId(1 + draw(20.0) as u32);
            act(&mut f, now, Event::KvCleared { instance });
        }
        all.append(&mut actions);
    }
    (sent, all)
}

fn policies() -> impl Strategy<Value = Policy> {
    let centric = Policy::KvcacheCentric { threshold: 1.0 };
    prop::sample::select(vec![Policy::Random, Policy::CacheAware, centric, Policy::PerDollar])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn no_window_of_time_has_more_bytes_than_the_budget_allows(
        seed in 0u64..1000, rate in 1e3f64..1e5, policy in policies()
    ) {
        let (sent, actions) = random_run(seed, rate, policy);
        for (first, &(from_s, _)) in sent.iter().enumerate() {
            let mut bytes = 0.0;
            for &(to_s, more) in &sent[first..] {
                bytes += more;
                let allowed = rate * (to_s - from_s + Replicate::BURST.0);
                prop_assert!(bytes <= allowed + 1e-3, "{bytes} bytes in {} s", to_s - from_s);
            }
        }
        // equal events, equal actions
        prop_assert_eq!(actions, random_run(seed, rate, policy).1);
    }
}

#[test]
fn the_budget_is_what_stops_copies_where_it_is_small() {
    let total = |rate| random_run(5, rate, Policy::Random).0.iter().map(|(_, bytes)| bytes).sum::<f64>();
    let (none, some, much) = (total(1.0), total(5e3), total(1e6));
    assert_eq!(none, 0.0);
    assert!(some >= 1e5 && much > 2.0 * some, "{some} and {much} bytes");
}

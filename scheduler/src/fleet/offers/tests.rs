use super::super::tests::{BLOCK, act, arrival, arrive, config, fleet, hashes, instance};
use super::super::{Event, FleetConfig, Instance, Link};
use super::*;
use crate::cost::LinkCost;
use crate::kv::Tier;
use mixfleet_hal::DType;
use mixfleet_hal::units::UsdPerHour;

const PROMPT: u32 = 200;

/// A token of KV takes 0.1 ms on the way.
fn cheap_links() -> FleetConfig {
    FleetConfig { pull: true, kv_bytes_per_token: 100, ..config() }
}

/// An instance that takes 1 ms per prompt token, and `nodes` KV nodes that hold `capacity` tokens.
fn with_nodes(nodes: u32, capacity: u64) -> Fleet {
    let node = |id| Instance { kv_capacity_tokens: capacity, ..instance(id, Role::Kv, 0.0, 0.0) };
    let all = std::iter::once(instance(0, Role::Auto, 1e-3, 1e-4)).chain((1..=nodes).map(node));
    fleet(cheap_links(), all.collect())
}

fn offer(document: u64, tokens: u32) -> Event {
    let chain = PromptChain { block_tokens: BLOCK, kv_dtype: DType::F32, hashes: hashes(document, tokens) };
    Event::Offered { request: document, instance: InstanceId(0), chains: vec![chain] }
}

fn stored(node: u32, hashes: Vec<BlockHash>) -> Event {
    Event::KvStored { instance: InstanceId(node), hashes, tier: Tier::Device }
}

/// Target and tokens of each copy.
fn taken(actions: &[Action]) -> Vec<(u32, u32)> {
    let copy = |action: &Action| match action {
        Action::Replicate { from, to, tokens, .. } => {
            assert_eq!(*from, InstanceId(0));
            (to.0, *tokens)
        }
        other => panic!("{other:?}"),
    };
    actions.iter().map(copy).collect()
}

#[test]
fn a_node_takes_what_it_lacks_and_lends_it_when_the_instance_has_given_it_up() {
    let mut f = with_nodes(1, 10_000);
    assert!(f.has_kv_node() && f.can_serve());
    assert_eq!(taken(&act(&mut f, 0.0, offer(7, PROMPT))), [(1, PROMPT)]);
    // it is in flight
    assert_eq!(act(&mut f, 0.0, offer(7, PROMPT + 50)), []);
    act(&mut f, 0.1, stored(1, hashes(7, PROMPT)));
    assert_eq!(taken(&act(&mut f, 0.1, offer(7, PROMPT + 50))), [(1, 50)]);
    assert_eq!(act(&mut f, 0.2, offer(7, PROMPT)), [], "it has all of that");

    let Action::Place { prefill, decode, pull, .. } = arrive(&mut f, 10.0, arrival(1, PROMPT + 5, 7)) else {
        panic!("not placed")
    };
    assert_eq!((prefill, decode), (InstanceId(0), InstanceId(0)), "a node computes nothing");
    let pull = pull.expect("the node has it");
    assert_eq!((pull.from, pull.tokens), (InstanceId(1), PROMPT));
    act(&mut f, 11.0, Event::InstanceDown { instance: InstanceId(1) });
    assert!(!f.has_kv_node());
    let Action::Place { pull, .. } = arrive(&mut f, 20.0, arrival(2, PROMPT + 5, 7)) else {
        panic!("not placed")
    };
    assert_eq!(pull, None);
}

#[test]
fn nothing_is_taken_that_is_quicker_computed_or_larger_than_the_node_or_held_up_by_other_transfers() {
    let mut f = with_nodes(1, 10_000);
    // 2 ms per token there and back, twice the time of computing
    let cost = LinkCost { latency: Seconds::ZERO, seconds_per_byte: 2e-5, usd_per_byte: 0.0 };
    act(&mut f, 0.0, Event::LinkUp(Link { from: InstanceId(1), to: InstanceId(0), cost }));
    assert_eq!(act(&mut f, 0.0, offer(7, PROMPT)), []);

    let mut f = with_nodes(1, u64::from(PROMPT) - 1);
    assert_eq!(act(&mut f, 0.0, offer(7, PROMPT)), []);

    // 0.5 s on the way each: the third finds two ahead, the fourth more than a second of work
    let mut f = with_nodes(1, 1_000_000);
    let many = |f: &mut Fleet, document| act(f, 0.0, offer(document, 5000)).len();
    assert_eq!([1, 2, 3, 4, 5].map(|document| many(&mut f, document)), [1, 1, 1, 0, 0]);
    assert_eq!(act(&mut f, 1.0, offer(6, 5000)).len(), 1);
}

#[test]
fn a_node_that_holds_half_takes_the_rest_and_new_prefixes_go_to_all_nodes() {
    let mut f = with_nodes(3, 10_000);
    for node in 1..=3 {
        act(&mut f, 0.0, stored(node, hashes(7, 100 * node)));
    }
    assert_eq!(taken(&act(&mut f, 0.0, offer(7, 400))), [(3, 100)]);
    let to = |document: u64| {
        let mut f = with_nodes(3, 10_000);
        taken(&act(&mut f, 0.0, offer(document, PROMPT + document as u32 * BLOCK)))[0].0
    };
    let mut nodes: Vec<u32> = (1..=6).map(to).collect();
    nodes.sort_unstable();
    assert_eq!(nodes, [1, 1, 2, 2, 3, 3]);
}

#[test]
fn a_node_with_other_blocks_takes_whole_ones_of_its_own_but_no_other_dtype() {
    let of = |dtype| {
        let node = Instance { kv_block_tokens: 4, kv_dtype: dtype, ..instance(1, Role::Kv, 0.0, 0.0) };
        let mut f = fleet(cheap_links(), vec![instance(0, Role::Auto, 1e-3, 1e-4), node]);
        let Event::Offered { mut chains, .. } = offer(7, PROMPT) else { unreachable!("it is one") };
        let hashes = (0..50).map(BlockHash).collect();
        chains.push(PromptChain { block_tokens: 4, kv_dtype: dtype, hashes });
        taken(&act(&mut f, 0.0, Event::Offered { request: 7, instance: InstanceId(0), chains }))
    };
    assert_eq!((of(DType::F32), of(DType::Bf16)), (vec![(1, 200)], vec![]));
}

#[test]
fn a_nodes_rent_changes_no_decision_but_the_price_of_its_traffic_does() {
    let fleet_of = |usd_per_byte: f64| {
        let priced = |spec: Instance, usd| Instance { price: usd, ..spec };
        // w is a thousandth of a dollar per second, at any cost of the node
        let computes = priced(instance(0, Role::Auto, 1e-3, 1e-4), Some(UsdPerHour(3.6)));
        let node = priced(instance(1, Role::Kv, 0.0, 0.0), None);
        let mut f = fleet(cheap_links(), vec![computes, node]);
        for (from, to) in [(0, 1), (1, 0)] {
            let cost = LinkCost { latency: Seconds::ZERO, seconds_per_byte: 1e-6, usd_per_byte };
            act(&mut f, 0.0, Event::LinkUp(Link { from: InstanceId(from), to: InstanceId(to), cost }));
        }
        f
    };
    // 0.18 s saved, worth 1.8e-4 dollars; 20 kB there and as much back
    assert_eq!(fleet_of(0.0).weights(), (ScoreUnit::Usd, 1e-3));
    for (usd_per_byte, is_taken) in [(0.0, true), (4e-9, true), (5e-9, false)] {
        let taken = act(&mut fleet_of(usd_per_byte), 0.0, offer(7, PROMPT)).len() == 1;
        assert_eq!(taken, is_taken, "{usd_per_byte} $ per byte");
    }
}

//! Requests that are dropped, repeated and explained, and prefixes in lower tiers.

use super::tests::*;
use super::*;

#[test]
fn decode_steps_interrupt_a_prefill_and_are_counted_down() {
    let mut f = fleet(config(), vec![instance(1, Role::Auto, 1e-3, 1e-2)]);
    let one = InstanceId(1);
    arrive(&mut f, 0.0, arrival(1, 100, 1));
    act(&mut f, 0.1, Event::PrefillDone { request: 1, instance: one });
    let terms = |f: &mut Fleet| {
        let action = arrive(f, 0.1, arrival(2, 250, 2));
        act(f, 0.1, Event::Cancelled { request: 2 });
        placed(&action).2.chosen().unwrap().terms.unwrap()
    };
    let before = terms(&mut f);
    // Three chunks of at most 100 tokens, each followed by a step of one sequence.
    close(before.interleave_s, 3.0 * 0.0101);
    // Request 1 stands still for the prefill, and shares 49 steps of 0.1 ms more.
    close(before.delay_s, 0.25 + 49.0 * 1e-4);
    act(&mut f, 0.1, Event::DecodeStep { instance: one, requests: vec![1, 1, 1, 77], tokens: 1 });
    act(&mut f, 0.1, Event::DecodeStep { instance: InstanceId(2), requests: vec![1; 9], tokens: 1 });
    close(terms(&mut f).delay_s, 0.25 + 46.0 * 1e-4);
    // Having outlived its 50 tokens, it is taken to be half-way: 1 + 3 + 48, as many again, but 100 at most.
    act(&mut f, 0.1, Event::DecodeStep { instance: one, requests: vec![1], tokens: 48 });
    close(terms(&mut f).delay_s, 0.25 + 48.0 * 1e-4);
}

#[test]
fn a_prompt_whose_rows_are_sized_to_the_tbt_objective_delays_no_answer() {
    let sized = |tbt_slo| {
        let auto = Instance {
            prefill_tokens_beside_decode_max: None,
            step_tokens_max: 100,
            ..instance(1, Role::Auto, 1e-3, 1e-2)
        };
        let mut f = fleet(FleetConfig { tbt_slo, ..config() }, vec![auto]);
        arrive(&mut f, 0.0, arrival(1, 100, 1));
        act(&mut f, 0.1, Event::PrefillDone { request: 1, instance: InstanceId(1) });
        let action = arrive(&mut f, 0.1, arrival(2, 250, 2));
        placed(&action).2.candidates[0].terms.unwrap().delay_s
    };
    close(sized(None), 0.25 + 49.0 * 1e-4);
    close(sized(Some(Seconds(0.05))), 49.0 * 1e-4);
}

#[test]
fn a_split_request_is_dropped_where_it_survives_and_spared_once_its_kv_has_left() {
    let split = || {
        let specs = vec![instance(1, Role::Prefill, 1e-3, 1e-2), instance(2, Role::Decode, 1e-3, 1e-2)];
        let mut f = fleet(config(), specs);
        placed(&arrive(&mut f, 0.0, arrival(1, 100, 1)));
        f
    };
    let down = |f: &mut Fleet, instance| act(f, 1.0, Event::InstanceDown { instance: InstanceId(instance) });
    let replay = |drop_on: u32| vec![Action::Replay { request: 1, drop_on: Some(InstanceId(drop_on)) }];
    assert_eq!(down(&mut split(), 2), replay(1));
    assert_eq!(down(&mut split(), 1), replay(2));
    let mut f = split();
    act(&mut f, 0.1, Event::PrefillDone { request: 1, instance: InstanceId(1) });
    act(&mut f, 0.2, Event::TransferDone { request: 1, instance: InstanceId(2) });
    assert_eq!(down(&mut f, 1), []);
    assert_eq!(down(&mut f, 2), [Action::Replay { request: 1, drop_on: None }]);
}

#[test]
fn an_id_in_work_is_refused_and_the_first_one_goes_on() {
    let mut f = fleet(config(), vec![instance(1, Role::Auto, 1e-3, 1e-2)]);
    placed(&arrive(&mut f, 0.0, arrival(1, 100, 1)));
    let action = arrive(&mut f, 0.0, arrival(1, 100, 1));
    assert_eq!(rejected(&action).0, &RejectReason::Duplicate { request: 1 });
    assert_eq!(f.requests(), 1);
}

#[test]
fn an_explanation_survives_json_and_names_every_candidate() {
    let mut f = fleet(config(), (1..3).map(|id| instance(id, Role::Auto, 1e-3, 1e-2)).collect());
    let action = arrive(&mut f, 0.0, arrival(1, 100, 1));
    let text = serde_json::to_string(&action).unwrap();
    assert_eq!(serde_json::from_str::<Action>(&text).unwrap(), action);
    let lines = placed(&action).2.to_string();
    assert_eq!(lines.lines().count(), 1 + 2, "{lines}");
    assert!(lines.contains("prefill part1, decode part1") && lines.contains("chosen"), "{lines}");
}

#[test]
fn a_prefix_in_a_lower_tier_counts_and_has_to_be_loaded_first() {
    let mut f = fleet(config(), (1..3).map(|id| instance(id, Role::Auto, 1e-3, 1e-2)).collect());
    let per_byte = |seconds_per_byte| LinkCost { seconds_per_byte, ..LinkCost::default() };
    let stored = |tier, tokens: std::ops::Range<u32>| Event::KvStored {
        instance: InstanceId(2),
        hashes: hashes(7, 400)[(tokens.start / BLOCK) as usize..(tokens.end / BLOCK) as usize].to_vec(),
        tier,
    };
    act(&mut f, 0.0, Event::TierUp { instance: InstanceId(2), tier: Tier::Dram, cost: per_byte(1e-7) });
    act(&mut f, 0.0, Event::TierUp { instance: InstanceId(2), tier: Tier::Ssd, cost: per_byte(5e-7) });
    act(&mut f, 0.0, stored(Tier::Device, 0..100));
    act(&mut f, 0.0, stored(Tier::Dram, 50..200));
    act(&mut f, 0.0, stored(Tier::Ssd, 200..400));
    let action = arrive(&mut f, 0.0, arrival(1, 500, 7));
    let (prefill, _, explanation) = placed(&action);
    let terms = explanation.chosen().unwrap().terms.unwrap();
    assert_eq!((prefill, terms.cached_tokens), (2, 400));
    // 1 kB a token: 100 tokens from DRAM take 10 ms, 200 from the disk at the same time 100 ms
    close(terms.pull_s, 0.1);
    close(terms.prefill_s, 0.1);
    close(terms.ttft_s, 0.2);
    // the queue hides none of it: a load begins when its sequence gets its blocks; blocks that have left the
    // disk must be recomputed
    let gone =
        Event::KvEvicted { instance: InstanceId(2), hashes: hashes(7, 400)[20..].to_vec(), tier: Tier::Ssd };
    act(&mut f, 0.0, gone);
    let action = arrive(&mut f, 0.0, arrival(2, 500, 7));
    let on_two = |c: &&Candidate| c.prefill == InstanceId(2);
    let terms = placed(&action).2.candidates.iter().find(on_two).and_then(|c| c.terms).unwrap();
    assert_eq!(terms.cached_tokens, 200);
    close(terms.queue_s, 0.2);
    close(terms.pull_s, 0.01);
}

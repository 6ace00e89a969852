use super::*;
use crate::cost::{Coefficients, CostModel, DecodeCoefficients, KvCopyCost, PrefillCoefficients};
use crate::kv::parts::PageParts;
use crate::kv::{BlockHash, Tier};
use mixfleet_hal::DType;
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::UsdPerHour;

pub(super) const BLOCK: u32 = 10;

/// `per_token` seconds per prompt token; `base` seconds per decode step and a hundredth of it per
/// sequence.
pub(super) fn instance(id: u32, role: Role, per_token: f64, base: f64) -> Instance {
    let prefill_s = PrefillCoefficients { per_token, ..Default::default() };
    let decode_s = DecodeCoefficients { base, per_sequence: base / 100.0, per_kv_token: 0.0 };
    Instance {
        id: InstanceId(id),
        device: format!("part{id}").into(),
        role,
        pool: 0,
        cost: CostModel::Coefficients(Coefficients { prefill_s, decode_s }).into(),
        price: None,
        nic: None,
        kv_capacity_tokens: 10_000,
        kv_block_tokens: BLOCK,
        kv_dtype: DType::F32,
        prefill_tokens_beside_decode_max: Some(100),
        step_tokens_max: 0,
        kv_copies: KvCopyCost::default(),
        kv_parts: PageParts::ONE,
    }
}

pub(super) fn config() -> FleetConfig {
    FleetConfig { requests_max: 100, output_tokens_expected: 50, ..FleetConfig::new(1000, 10) }
}

/// All instances up and joined by links of 1 MB/s: a token takes 1 ms.
pub(super) fn fleet(config: FleetConfig, instances: Vec<Instance>) -> Fleet {
    let mut fleet = Fleet::new(config);
    let ids: Vec<InstanceId> = instances.iter().map(|i| i.id).collect();
    let cost = LinkCost { latency: Seconds(0.0), seconds_per_byte: 1e-6, usd_per_byte: 0.0 };
    for spec in instances {
        act(&mut fleet, 0.0, Event::InstanceUp(spec));
    }
    for &from in &ids {
        for &to in ids.iter().filter(|&&to| to != from) {
            act(&mut fleet, 0.0, Event::LinkUp(Link { from, to, cost }));
        }
    }
    fleet
}

pub(super) fn act(fleet: &mut Fleet, now: f64, event: Event) -> Vec<Action> {
    let mut actions = Vec::new();
    fleet.step(Seconds(now), event, &mut actions);
    actions
}

/// Keys of a prompt whose first `tokens` tokens belong to `document`.
pub(super) fn hashes(document: u64, tokens: u32) -> Vec<BlockHash> {
    (0..u64::from(tokens / BLOCK)).map(|i| BlockHash(document << 32 | i)).collect()
}

pub(super) fn arrival(request: RequestId, prompt_tokens: u32, document: u64) -> Arrival {
    let chain =
        PromptChain { block_tokens: BLOCK, kv_dtype: DType::F32, hashes: hashes(document, prompt_tokens) };
    let (max_tokens, chains) = (100, vec![chain]);
    Arrival { request, prompt_tokens, max_tokens, chains, ..Arrival::default() }
}

pub(super) fn arrive(fleet: &mut Fleet, now: f64, arrival: Arrival) -> Action {
    let mut actions = act(fleet, now, Event::Arrived(arrival));
    assert_eq!(actions.len(), 1, "an arrival is answered once");
    actions.remove(0)
}

pub(super) fn placed(action: &Action) -> (u32, u32, &Explanation) {
    match action {
        Action::Place { prefill, decode, explanation, .. } => (prefill.0, decode.0, explanation),
        other => panic!("not placed: {other:?}"),
    }
}

pub(super) fn rejected(action: &Action) -> (&RejectReason, Option<f64>) {
    match action {
        Action::Reject { reason, retry_after, .. } => (reason, retry_after.map(|s| s.0)),
        other => panic!("not rejected: {other:?}"),
    }
}

pub(super) fn close(a: f64, b: f64) {
    assert!((a - b).abs() < 1e-9, "{a} is not {b}");
}

#[test]
fn equal_idle_instances_tie_and_the_lowest_id_wins_without_a_transfer() {
    let mut f = fleet(config(), (1..4).map(|id| instance(id, Role::Auto, 1e-3, 1e-2)).collect());
    let action = arrive(&mut f, 0.0, arrival(1, 100, 1));
    let (prefill, decode, explanation) = placed(&action);
    assert_eq!((prefill, decode), (1, 1));
    assert_eq!(explanation.candidates.len(), 3);
    assert_eq!(explanation.score_unit, ScoreUnit::Seconds);
    assert_eq!(explanation.candidates[1].outcome, Outcome::TieLostById);
}

#[test]
fn terms_are_the_formulas() {
    let decode = instance(2, Role::Decode, 1e-3, 1e-2);
    let mut f = fleet(config(), vec![instance(1, Role::Prefill, 1e-3, 1e-2), decode]);
    arrive(&mut f, 0.0, arrival(1, 300, 1));
    let stored = Event::KvStored { instance: InstanceId(1), hashes: hashes(2, 50), tier: Tier::Device };
    act(&mut f, 0.1, stored);
    let action = arrive(&mut f, 0.1, arrival(2, 200, 2));
    let terms = placed(&action).2.chosen().unwrap().terms.unwrap();
    assert_eq!((terms.cached_tokens, terms.transfer_tokens), (50, 200));
    close(terms.queue_s, 0.2); // 300 tokens; 0.1 s of them have passed
    close(terms.prefill_s, 0.15);
    // 200 kB over 1 MB/s take 0.2 s in 10 layers: the link is slower than prefill.
    close(terms.transfer_s, 0.015 + 0.2 - 0.15);
    // Behind a prefill of all 200 tokens only the last layer would show.
    close(terms.hand_off_s, 0.02);
    close(terms.ttft_s, terms.queue_s + terms.prefill_s);
    // Request 1 decodes by then: ready at 0.3 + 0.03, 50 tokens of 10.1 ms.
    close(terms.tbt_s, 1e-2 + 2e-4);
    close(terms.delay_s, 1e-4 * 50.0);
    close(terms.score, terms.ttft_s + terms.hand_off_s + terms.delay_s);
}

#[test]
fn a_cached_prefix_wins_when_queues_are_equal_and_loses_to_a_long_queue() {
    let pool = || {
        let mut f = fleet(config(), (1..4).map(|id| instance(id, Role::Auto, 1e-3, 1e-2)).collect());
        act(
            &mut f,
            0.0,
            Event::KvStored { instance: InstanceId(3), hashes: hashes(7, 400), tier: Tier::Device },
        );
        f
    };
    let action = arrive(&mut pool(), 0.0, arrival(1, 500, 7));
    let (prefill, decode, explanation) = placed(&action);
    assert_eq!((prefill, decode), (3, 3));
    assert_eq!(explanation.chosen().unwrap().terms.unwrap().cached_tokens, 400);

    let mut f = pool();
    assert_eq!(placed(&arrive(&mut f, 0.0, arrival(1, 900, 7))).0, 3);
    // 0.5 s of queue there save 0.4 s of prefill.
    assert_eq!(placed(&arrive(&mut f, 0.0, arrival(2, 500, 7))).0, 1);
}

#[test]
fn an_entirely_cached_prompt_still_computes_its_last_block() {
    let mut f = fleet(config(), vec![instance(1, Role::Auto, 1e-3, 1e-2)]);
    act(&mut f, 0.0, Event::KvStored { instance: InstanceId(1), hashes: hashes(1, 100), tier: Tier::Device });
    let action = arrive(&mut f, 0.0, arrival(1, 100, 1));
    assert_eq!(placed(&action).2.chosen().unwrap().terms.unwrap().cached_tokens, 90);
}

#[test]
fn a_prefix_counts_only_for_the_block_size_it_was_stored_in() {
    let other = Instance { kv_block_tokens: 20, ..instance(2, Role::Auto, 1e-3, 1e-2) };
    let mut f = fleet(config(), vec![instance(1, Role::Auto, 1e-3, 1e-2), other]);
    act(&mut f, 0.0, Event::KvStored { instance: InstanceId(2), hashes: hashes(1, 100), tier: Tier::Device });
    let action = arrive(&mut f, 0.0, arrival(1, 100, 1));
    assert!(placed(&action).2.candidates.iter().all(|c| c.terms.unwrap().cached_tokens == 0));
}

#[test]
fn roles_follow_comparative_advantage() {
    // One computes five times faster, the other decodes five times faster.
    let mut f =
        fleet(config(), vec![instance(1, Role::Auto, 1e-3, 5e-2), instance(2, Role::Auto, 5e-3, 1e-2)]);
    assert_eq!(placed(&arrive(&mut f, 0.0, arrival(1, 500, 1))).0, 1);
    act(&mut f, 0.5, Event::PrefillDone { request: 1, instance: InstanceId(1) });
    // Its first request decodes on 1. The next one would slow it there and goes over the link.
    assert_eq!(placed(&arrive(&mut f, 0.5, arrival(2, 50, 2))).1, 2);
}

#[test]
fn the_cheap_device_is_taken_if_prices_say_so_and_waiting_is_cheap() {
    let priced = |wait_usd_per_s| {
        let slow = Instance { price: Some(UsdPerHour(0.36)), ..instance(1, Role::Auto, 2e-3, 2e-2) };
        let fast = Instance { price: Some(UsdPerHour(3.6)), ..instance(2, Role::Auto, 1e-3, 1e-2) };
        fleet(FleetConfig { wait_usd_per_s, ..config() }, vec![slow, fast])
    };
    let mut patient = priced(Some(0.0));
    let action = arrive(&mut patient, 0.0, arrival(1, 500, 1));
    let (prefill, decode, explanation) = placed(&action);
    assert_eq!((prefill, decode), (1, 1));
    let terms = explanation.chosen().unwrap().terms.unwrap();
    // 0.0001 $/s for 1 s of prefill and 50 steps of 20.2 ms, on two instances one of which has work.
    close(explanation.busy_share, 0.5);
    close(terms.busy_usd, 0.5 * 1e-4 * (1.0 + 50.0 * 0.0202));
    close(terms.score, terms.busy_usd);
    // Moving the 500 kB to the slow device costs traffic, too: 1 $/MB.
    let cost = LinkCost { latency: Seconds(0.0), seconds_per_byte: 1e-6, usd_per_byte: 1e-6 };
    act(&mut patient, 9.0, Event::Cancelled { request: 1 });
    act(&mut patient, 9.0, Event::LinkUp(Link { from: InstanceId(2), to: InstanceId(1), cost }));
    let action = arrive(&mut patient, 9.0, arrival(2, 500, 2));
    let moved = placed(&action).2.candidates[1].terms.unwrap();
    close(moved.busy_usd, 0.5 * (5e-4 + 1e-4 * 50.0 * 0.0202) + 0.5);
    let mut hurried = priced(Some(1.0));
    assert_eq!(placed(&arrive(&mut hurried, 0.0, arrival(1, 500, 1))).0, 2);
    // The default weight is the mean instance: 0.00055 $/s.
    let action = arrive(&mut priced(None), 0.0, arrival(1, 500, 1));
    close(placed(&action).2.wait_weight, 0.00055);
}

#[test]
fn one_missing_price_makes_the_score_plain_seconds() {
    let slow = Instance { price: Some(UsdPerHour(0.1)), ..instance(1, Role::Auto, 2e-3, 2e-2) };
    let mut f = fleet(config(), vec![slow, instance(2, Role::Auto, 1e-3, 1e-2)]);
    let action = arrive(&mut f, 0.0, arrival(1, 500, 1));
    let (prefill, _, explanation) = placed(&action);
    assert_eq!((prefill, explanation.score_unit), (2, ScoreUnit::Seconds));
    assert!(explanation.candidates.iter().all(|c| c.terms.unwrap().busy_usd == 0.0));
}

#[test]
fn with_equal_speeds_and_no_prices_it_is_a_router_for_the_least_ttft() {
    // The plain router: queued uncached tokens plus own uncached tokens, fewest first.
    let (pool, per_token) = (4, 1.0 / 1024.0); // a power of two: equal sums are equal floats
    let mut instances: Vec<Instance> =
        (0..pool).map(|id| instance(id, Role::Prefill, per_token, 1e-2)).collect();
    instances.push(Instance { kv_capacity_tokens: 1 << 40, ..instance(9, Role::Decode, 1e-3, 1e-2) });
    let mut f = fleet(FleetConfig { kv_bytes_per_token: 0, requests_max: 1000, ..config() }, instances);
    let mut queued = vec![0u32; pool as usize];
    let mut stored = vec![std::collections::BTreeMap::<u64, u32>::new(); pool as usize];
    let mut random = Stream::new(11);
    for request in 0..300 {
        let (document, prompt) = (random.below(6), 10 + BLOCK * random.below(60) as u32);
        let cached = |i: usize| stored[i].get(&document).map_or(0, |&t| t.min((prompt - 1) / BLOCK * BLOCK));
        let naive = (0..pool as usize).min_by_key(|&i| queued[i] + prompt - cached(i)).unwrap();
        let action = arrive(&mut f, 0.0, arrival(request, prompt, document));
        let (prefill, _, explanation) = placed(&action);
        let terms = explanation.chosen().unwrap().terms.unwrap();
        let expected = f64::from(queued[naive] + prompt - cached(naive)) * per_token;
        let chosen = prefill as usize;
        assert_eq!((terms.ttft_s, chosen), (expected, naive));
        queued[chosen] += prompt - cached(chosen);
        let length = stored[chosen].entry(document).or_default();
        *length = prompt.max(*length);
        act(
            &mut f,
            0.0,
            Event::KvStored {
                instance: InstanceId(prefill),
                hashes: hashes(document, prompt),
                tier: Tier::Device,
            },
        );
    }
}

#[test]
fn fixed_roles_and_missing_links_restrict_the_candidates() {
    let mut f = fleet(
        config(),
        vec![
            instance(1, Role::Prefill, 1e-3, 1e-2),
            instance(2, Role::Decode, 1e-4, 1e-2),
            instance(3, Role::Decode, 1e-4, 1e-2),
        ],
    );
    let action = arrive(&mut f, 0.0, arrival(1, 100, 1));
    let pairs: Vec<_> = placed(&action).2.candidates.iter().map(|c| (c.prefill.0, c.decode.0)).collect();
    assert_eq!(pairs, [(1, 2), (1, 3)]);

    let mut alone = Fleet::new(config());
    assert_eq!(rejected(&arrive(&mut alone, 0.0, arrival(1, 100, 1))).0, &RejectReason::NoInstance);
    act(&mut alone, 0.0, Event::InstanceUp(instance(1, Role::Prefill, 1e-3, 1e-2)));
    act(&mut alone, 0.0, Event::InstanceUp(instance(2, Role::Decode, 1e-3, 1e-2)));
    let action = arrive(&mut alone, 0.0, arrival(1, 100, 1));
    assert_eq!(rejected(&action), (&RejectReason::NoInstance, None));
}

#[test]
fn a_request_that_never_fits_is_too_large_and_one_that_fits_later_waits() {
    let mut f = fleet(config(), vec![instance(1, Role::Auto, 1e-3, 1e-2)]);
    let action = arrive(&mut f, 0.0, arrival(1, 9_901, 1));
    let reason = RejectReason::TooLarge { tokens: 10_001, capacity_tokens: 10_000 };
    assert_eq!(rejected(&action), (&reason, None));
    assert!(reason.to_string().contains("10001 tokens"), "{reason}");
    placed(&arrive(&mut f, 0.0, arrival(2, 9_900, 1)));
    act(&mut f, 9.9, Event::PrefillDone { request: 2, instance: InstanceId(1) });
    let action = arrive(&mut f, 9.9, arrival(3, 100, 2));
    let terms = placed(&action).2.chosen().unwrap().terms.unwrap();
    // Request 2 has drawn its first of 50 expected tokens: 49 steps of 10.1 ms are left.
    close(terms.kv_wait_s, 49.0 * 0.0101);
}

#[test]
fn the_bound_on_requests_rejects_with_the_time_until_one_ends() {
    let mut f = fleet(FleetConfig { requests_max: 1, ..config() }, vec![instance(1, Role::Auto, 1e-3, 1e-2)]);
    placed(&arrive(&mut f, 0.0, arrival(1, 100, 1)));
    let action = arrive(&mut f, 0.0, arrival(2, 100, 1));
    let (reason, retry) = rejected(&action);
    assert_eq!(reason, &RejectReason::QueueFull { requests: 1, requests_max: 1 });
    close(retry.unwrap(), 0.1 + 50.0 * 0.0101);
    act(&mut f, 1.0, Event::Finished { request: 1 });
    placed(&arrive(&mut f, 1.0, arrival(2, 100, 1)));
}

#[test]
fn a_late_first_token_is_rejected_and_a_retry_at_the_promised_time_is_not() {
    let slo = FleetConfig { ttft_slo: Some(Seconds(5.0)), ..config() };
    let mut f = fleet(slo, vec![instance(1, Role::Prefill, 1e-3, 1e-2), instance(2, Role::Decode, 1.0, 0.0)]);
    act(
        &mut f,
        0.0,
        Event::LinkUp(Link { from: InstanceId(1), to: InstanceId(2), cost: LinkCost::default() }),
    );
    placed(&arrive(&mut f, 0.0, arrival(1, 4_500, 1)));
    let action = arrive(&mut f, 0.0, arrival(2, 1_000, 2));
    let (reason, retry) = rejected(&action);
    assert_eq!(reason, &RejectReason::TtftSlo { ttft_s: 5.5, slo_s: 5.0 });
    assert!(reason.to_string().contains("5.500 s"), "{reason}");
    let retry = retry.unwrap();
    close(retry, 0.5);
    rejected(&arrive(&mut f, retry - 1e-3, arrival(2, 1_000, 2)));
    placed(&arrive(&mut f, retry + 1e-9, arrival(2, 1_000, 2)));
    // An accepted request is not rejected later.
    let replay = Arrival { replay: Some(Seconds(retry)), ..arrival(3, 1_000, 3) };
    placed(&arrive(&mut f, retry, replay));
}

#[test]
fn tbt_is_predicted_for_the_end_of_prefill() {
    let tight = FleetConfig { tbt_slo: Some(Seconds(0.01015)), ..config() };
    let spec = instance(1, Role::Auto, 1e-3, 1e-2);
    let spec = Instance { prefill_tokens_beside_decode_max: None, step_tokens_max: 1000, ..spec };
    let mut f = fleet(tight, vec![spec]);
    placed(&arrive(&mut f, 0.0, arrival(1, 100, 1)));
    act(&mut f, 0.1, Event::PrefillDone { request: 1, instance: InstanceId(1) });
    // Two together miss the objective; request 1 ends in about 0.5 s.
    let action = arrive(&mut f, 0.1, arrival(2, 100, 2));
    assert!(matches!(rejected(&action).0, RejectReason::TbtSlo { .. }), "{action:?}");
    placed(&arrive(&mut f, 0.1, arrival(2, 1_000, 2)));
}

#[test]
fn a_prompt_that_ends_later_is_not_in_the_batch_yet() {
    let computes = |id| instance(id, Role::Prefill, 1e-3, 1e-2);
    let mut f = fleet(config(), vec![computes(1), computes(2), instance(3, Role::Decode, 1e-3, 1e-2)]);
    placed(&arrive(&mut f, 0.0, arrival(1, 5_000, 1)));
    let action = arrive(&mut f, 0.0, arrival(2, 600, 2));
    let (prefill, _, explanation) = placed(&action);
    assert_eq!(prefill, 2);
    close(explanation.chosen().unwrap().terms.unwrap().tbt_s, 0.0101);
    // Behind the long prompt it meets it: 5.66 s is after 5.5 s, when that one is ready.
    let mut f = fleet(config(), vec![computes(1), instance(3, Role::Decode, 1e-3, 1e-2)]);
    placed(&arrive(&mut f, 0.0, arrival(1, 5_000, 1)));
    let action = arrive(&mut f, 0.0, arrival(2, 600, 2));
    close(placed(&action).2.chosen().unwrap().terms.unwrap().tbt_s, 0.0102);
}

#[test]
fn a_lost_instance_sends_its_requests_back_and_gets_no_more() {
    let three = || {
        let mut f = fleet(config(), (1..4).map(|id| instance(id, Role::Auto, 1e-3, 1e-2)).collect());
        act(
            &mut f,
            0.0,
            Event::KvStored { instance: InstanceId(1), hashes: hashes(1, 100), tier: Tier::Device },
        );
        f
    };
    let mut f = three();
    assert_eq!(placed(&arrive(&mut f, 0.0, arrival(1, 100, 1))).0, 1);
    let actions = act(&mut f, 0.1, Event::InstanceDown { instance: InstanceId(1) });
    assert_eq!(actions, [Action::Replay { request: 1, drop_on: None }]);
    assert_eq!(f.requests(), 0);
    assert_eq!(act(&mut f, 0.1, Event::InstanceDown { instance: InstanceId(1) }), []);

    let again = Arrival { replay: Some(Seconds::ZERO), ..arrival(1, 100, 1) };
    let action = arrive(&mut f, 0.1, again);
    assert_eq!(placed(&action).0, 2);
    assert!(placed(&action).2.candidates.iter().all(|c| c.prefill.0 != 1 && c.decode.0 != 1));
    // News of the lost placement comes too late to matter.
    act(&mut f, 0.1, Event::PrefillDone { request: 1, instance: InstanceId(1) });
    let action = arrive(&mut f, 0.1, arrival(2, 100, 2));
    let on_two = placed(&action).2.candidates.iter().find(|c| c.prefill.0 == 2 && c.decode.0 == 2);
    close(on_two.unwrap().terms.unwrap().queue_s, 0.1);

    // It comes back without what it held.
    act(&mut f, 0.2, Event::InstanceUp(instance(1, Role::Auto, 1e-3, 1e-2)));
    let action = arrive(&mut f, 0.2, arrival(3, 100, 1));
    assert_eq!(placed(&action).0, 1);
    assert_eq!(placed(&action).2.chosen().unwrap().terms.unwrap().cached_tokens, 0);
}

#[test]
fn who_comes_back_is_reached_when_it_tells_of_its_ways_again() {
    let mut f =
        fleet(config(), vec![instance(1, Role::Prefill, 1e-3, 1e-2), instance(2, Role::Decode, 1e-3, 1e-2)]);
    placed(&arrive(&mut f, 0.0, arrival(1, 100, 1)));
    act(&mut f, 0.1, Event::InstanceDown { instance: InstanceId(1) });
    act(&mut f, 0.2, Event::InstanceUp(instance(1, Role::Prefill, 1e-3, 1e-2)));
    assert_eq!(rejected(&arrive(&mut f, 0.2, arrival(2, 100, 1))).0, &RejectReason::NoInstance);
    let cost = LinkCost { latency: Seconds(0.0), seconds_per_byte: 1e-6, usd_per_byte: 0.0 };
    act(&mut f, 0.3, Event::LinkUp(Link { from: InstanceId(1), to: InstanceId(2), cost }));
    placed(&arrive(&mut f, 0.3, arrival(3, 100, 1)));
}

#[test]
fn a_replayed_request_keeps_its_place_in_the_order() {
    let slo = FleetConfig { ttft_slo: Some(Seconds(100.0)), ..config() };
    let mut f = fleet(slo, vec![instance(1, Role::Auto, 1e-3, 1e-2)]);
    let due = |action: &Action| match action {
        Action::Place { urgency, .. } => urgency.due.0,
        other => panic!("not placed: {other:?}"),
    };
    close(due(&arrive(&mut f, 0.0, arrival(1, 1_000, 1))), 100.0);
    close(due(&arrive(&mut f, 1.0, arrival(2, 1_000, 2))), 101.0);
    let lost = act(&mut f, 2.0, Event::InstanceDown { instance: InstanceId(1) });
    assert_eq!(lost.len(), 2);
    act(&mut f, 2.0, Event::InstanceUp(instance(1, Role::Auto, 1e-3, 1e-2)));
    // two later ones are there already; the first of them runs
    arrive(&mut f, 2.0, arrival(3, 1_000, 3));
    arrive(&mut f, 2.0, arrival(4, 1_000, 4));
    // the running one gives way after its step of 100 tokens
    for (request, was_due, ahead) in [(1, 100.0, 0.1), (2, 101.0, 1.1)] {
        let again = Arrival { replay: Some(Seconds(was_due)), ..arrival(request, 1_000, request) };
        let action = arrive(&mut f, 2.0, again);
        close(due(&action), was_due);
        close(placed(&action).2.chosen().unwrap().terms.unwrap().queue_s, ahead);
    }
    close(queue_s(&mut f, 2.0), 4.1);
}

#[test]
fn prefixes_are_known_by_block_size_and_dtype_and_pulled_across_kinds() {
    let link = LinkCost { latency: Seconds(0.0), seconds_per_byte: 1e-9, usd_per_byte: 0.0 };
    let bf16 = Instance { kv_dtype: DType::Bf16, ..instance(2, Role::Decode, 1e-3, 1e-2) };
    let coarse = Instance { kv_block_tokens: 15, ..instance(3, Role::Prefill, 1e-3, 1e-2) };
    let fine = instance(1, Role::Prefill, 1e-3, 1e-2);
    let mut f = fleet(FleetConfig { pull: true, ..config() }, vec![fine, bf16, coarse]);
    for (from, to) in [(2, 1), (2, 3), (1, 2), (3, 2)] {
        act(&mut f, 0.0, Event::LinkUp(Link { from: InstanceId(from), to: InstanceId(to), cost: link }));
    }
    // two kinds of one block size have keys of their own
    let of = |document: u64, block_tokens: u32, kv_dtype| PromptChain {
        block_tokens,
        kv_dtype,
        hashes: (0..100 / block_tokens).map(|i| BlockHash(document << 32 | u64::from(i))).collect(),
    };
    let chains = vec![of(1, 10, DType::F32), of(2, 10, DType::Bf16), of(3, 15, DType::F32)];
    let held = of(2, 10, DType::Bf16).hashes[..8].to_vec();
    act(&mut f, 0.0, Event::KvStored { instance: InstanceId(2), hashes: held, tier: Tier::Device });
    let action = arrive(&mut f, 0.0, Arrival { chains, ..arrival(1, 101, 1) });
    for candidate in &placed(&action).2.candidates {
        let pull = candidate.pull.unwrap();
        let whole_blocks = if candidate.prefill.0 == 3 { 75 } else { 80 };
        assert_eq!((pull.from.0, pull.tokens), (2, whole_blocks), "{candidate:?}");
        assert_eq!(candidate.terms.unwrap().transfer_tokens, 101 - 80, "what the decoder holds stays there");
    }
}

#[test]
fn a_head_start_moves_a_request_in_the_order_and_no_further_than_its_bound() {
    let slo = FleetConfig { ttft_slo: Some(Seconds(100.0)), ..config() };
    let mut f = fleet(slo, vec![instance(1, Role::Auto, 1e-3, 1e-2)]);
    let mut due = |request: RequestId, head_start: f64| {
        let arrival = Arrival { head_start: Seconds(head_start), ..arrival(request, 1_000, request) };
        let action = arrive(&mut f, 0.0, arrival);
        let queue_s = placed(&action).2.candidates[0].terms.unwrap().queue_s;
        match action {
            Action::Place { urgency, .. } => (urgency.due.0, queue_s),
            other => panic!("not placed: {other:?}"),
        }
    };
    assert_eq!([due(1, 0.0), due(2, 0.0)], [(100.0, 0.0), (100.0, 1.0)]);
    // ahead of both, once the step ends that runs: 100 tokens of the first prompt
    let (first, queue_s) = due(3, 60.0);
    close(first, 40.0);
    close(queue_s, 0.1);
    let (last, queue_s) = due(4, -5.0);
    close(last, 105.0);
    // three prompts, once that step has ended
    close(queue_s, 3.1);
    close(due(5, 1e9).0, 100.0 - HEAD_START_MAX.0);
    close(due(6, -1e9).0, 100.0 + HEAD_START_MAX.0);
}

#[test]
fn prompt_rows_beside_decodes_are_expected_to_be_what_the_tightest_objective_leaves() {
    let sized = Instance {
        prefill_tokens_beside_decode_max: None,
        step_tokens_max: 512,
        ..instance(1, Role::Auto, 1e-4, 1e-2)
    };
    // 512 rows take 51.2 ms; nine tenths of the objective have room for this many tiles of 16
    for (tbt_s, rows) in [(0.2, 511.0), (0.04, 352.0), (0.005, 16.0)] {
        let config = FleetConfig { tbt_slo: Some(Seconds(tbt_s)), admission: Admission::None, ..config() };
        let mut f = fleet(config, vec![sized.clone()]);
        arrive(&mut f, 0.0, arrival(1, 10, 1));
        act(&mut f, 0.1, Event::PrefillDone { request: 1, instance: InstanceId(1) });
        let action = arrive(&mut f, 0.1, arrival(2, 4_000, 2));
        let terms = placed(&action).2.candidates[0].terms.unwrap();
        close(terms.interleave_s, 0.0101 * (4_000.0f64 / rows).ceil());
    }
}

#[test]
fn an_expected_length_replaces_the_mean_of_the_class_where_it_is_predicted() {
    let f = || fleet(config(), vec![instance(1, Role::Auto, 1e-3, 1e-2)]);
    let assumed = |hint| {
        let action = arrive(&mut f(), 0.0, Arrival { output_tokens_hint: hint, ..arrival(1, 1_000, 1) });
        let (.., explanation) = placed(&action);
        (explanation.output_tokens, explanation.candidates[0].terms.unwrap().ends_s)
    };
    let (tokens, ends_s) = assumed(Some(7));
    assert_eq!(tokens, 7);
    close(assumed(Some(47)).1 - ends_s, 40.0 * 0.0101);
    assert_eq!(assumed(Some(1_000_000)).0, 100, "max_tokens bounds it");
}

/// The queue that a newcomer would meet on instance 1.
fn queue_s(f: &mut Fleet, now: f64) -> f64 {
    let action = arrive(f, now, arrival(999, 10, 999));
    let queue_s = placed(&action).2.candidates[0].terms.unwrap().queue_s;
    act(f, now, Event::Cancelled { request: 999 });
    queue_s
}

#[test]
fn of_a_prompt_that_gives_way_only_the_step_in_progress_is_ahead() {
    let mut f = fleet(config(), vec![instance(1, Role::Auto, 1e-3, 1e-2)]);
    let objective = Objective::Deadline { at: Seconds(600.0), requests_left: 1 };
    // ten steps of 0.1 s
    arrive(&mut f, 0.0, Arrival { objective, ..arrival(1, 1000, 1) });
    let after = arrive(&mut f, 0.03, arrival(2, 200, 2));
    let terms = placed(&after).2.candidates[0].terms.unwrap();
    close(terms.queue_s, 0.07);
    close(terms.ttft_s, 0.07 + 0.2);
    // and then earlier arrivals; the prompt itself goes on when they are done
    close(queue_s(&mut f, 0.05), 0.05 + 0.2);
    act(&mut f, 0.1, Event::PrefillProgress { request: 1, instance: InstanceId(1), tokens: 100 });
    close(queue_s(&mut f, 0.15), 0.15);
    act(&mut f, 0.3, Event::PrefillDone { request: 2, instance: InstanceId(1) });
    let objective = Objective::Deadline { at: Seconds(700.0), requests_left: 1 };
    let late = arrive(&mut f, 0.35, Arrival { objective, ..arrival(3, 10, 3) });
    close(placed(&late).2.candidates[0].terms.unwrap().queue_s, 0.9 - 0.05);
}

#[test]
fn the_queue_shrinks_with_time_progress_and_departures() {
    let mut f = fleet(config(), vec![instance(1, Role::Auto, 1e-3, 1e-2)]);
    let one = InstanceId(1);
    arrive(&mut f, 0.0, arrival(1, 400, 1));
    arrive(&mut f, 0.0, arrival(2, 300, 2));
    close(queue_s(&mut f, 0.0), 0.7);
    close(queue_s(&mut f, 0.1), 0.6);
    // Overdue work is assumed to end at any moment; the wait behind it is not shortened.
    close(queue_s(&mut f, 5.0), 0.3);
    act(&mut f, 5.0, Event::PrefillProgress { request: 1, instance: one, tokens: 300 });
    close(queue_s(&mut f, 5.0), 0.4);
    act(&mut f, 5.0, Event::PrefillProgress { request: 1, instance: InstanceId(7), tokens: 399 });
    close(queue_s(&mut f, 5.05), 0.35);
    act(&mut f, 5.1, Event::PrefillDone { request: 1, instance: one });
    close(queue_s(&mut f, 5.1), 0.3);
    // A new price keeps the work.
    let dear = Instance { price: Some(UsdPerHour(1.0)), ..instance(1, Role::Auto, 1e-3, 1e-2) };
    act(&mut f, 5.1, Event::InstanceUp(dear));
    close(queue_s(&mut f, 5.2), 0.2);
    act(&mut f, 5.2, Event::Cancelled { request: 2 });
    close(queue_s(&mut f, 5.2), 0.0);
}

#[test]
fn new_bounds_count_the_queue_anew() {
    let mut f = fleet(config(), vec![instance(1, Role::Auto, 1e-3, 1e-2)]);
    arrive(&mut f, 0.0, arrival(1, 100, 1));
    act(&mut f, 0.1, Event::PrefillDone { request: 1, instance: InstanceId(1) });
    arrive(&mut f, 0.1, arrival(2, 400, 2));
    let smaller =
        Instance { prefill_tokens_beside_decode_max: Some(10), ..instance(1, Role::Auto, 1e-3, 1e-2) };
    act(&mut f, 0.1, Event::InstanceUp(smaller));
    let action = arrive(&mut f, 0.1, arrival(3, 100, 3));
    // 40 chunks are queued, 10 are its own; each is followed by a step of one sequence
    close(placed(&action).2.chosen().unwrap().terms.unwrap().interleave_s, 50.0 * 0.0101);
    act(&mut f, 0.2, Event::Cancelled { request: 2 });
    act(&mut f, 0.2, Event::Cancelled { request: 3 });
    close(queue_s(&mut f, 0.2), 0.0);
}

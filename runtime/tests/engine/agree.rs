//! `serve` and `simulate` agree: the real engine on simulated devices in virtual time, and the simulator's
//! driver of the same machine, place and reject the same requests.

mod overload;
mod served;
mod simulated;

use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::fleet::{Action, Admission, Event, Policy, Role};
use mixfleet_sim::simulate::Observer;
use serde::Deserialize;
use served::{SceneCounts, served};
use simulated::simulated;
use std::collections::BTreeMap;

const BLOCK_TOKENS: u32 = 16;
/// Maximum difference of equal times, a twentieth of the shortest step: the cost model interpolates the time
/// of attention.
const SAME_S: f64 = 5e-5;
const STEP_TOKENS_MAX: u32 = 192;

/// `MIXFLEET_AGREE_SEEDS`: as many seeds of the largest scene under all policies, and longer traces in all.
fn seeds() -> Option<u64> {
    std::env::var("MIXFLEET_AGREE_SEEDS").ok().map(|seeds| seeds.parse().expect("a number"))
}

/// A simulated part: FLOP/s, bytes/s, $/h.
#[derive(Clone, Copy)]
struct Part {
    role: Role,
    flops: f64,
    bandwidth: f64,
    usd_per_hour: f64,
}

/// A fast and expensive part. On both parts attention is bound by arithmetic: the cost model gives all
/// sequences of a step the mean length, and otherwise the width of the block table, which is that of the
/// longest, would show in the time of attention.
const DEAR: Part = Part { role: Role::Auto, flops: 4e8, bandwidth: 2e8, usd_per_hour: 4.0 };
/// A slow and cheap part.
const CHEAP: Part = Part { role: Role::Auto, flops: 1.6e8, bandwidth: 7e7, usd_per_hour: 1.0 };

struct Scene {
    name: &'static str,
    parts: Vec<Part>,
    joined: bool,
    /// Whether copies of KV take memory time, which slows steps.
    copies_take: bool,
    /// Whether two of three requests are flex.
    flex: bool,
    /// Whether the third is of the tier `priority`.
    priority: bool,
    /// Maximum sequences of an instance.
    sequences_max: u32,
    /// Maximum prompt tokens in a step that also decodes; as many as the TBT objective allows if none.
    beside_decode_max: Option<u32>,
    /// Whether prefixes are pulled.
    pull: bool,
    /// Tokens of KV that a part holds, and tokens that a KV node beside the parts holds.
    kv_tokens: u64,
    node_tokens: Option<u64>,
    /// Whether the requests are turns of conversations, each with all prompts before it in front.
    talks: bool,
    /// Number of routers, which get the requests in turn.
    routers: u16,
    policy: Policy,
    admission: Admission,
    /// Whether a request is dropped whose decode instance is too busy once its prompt is computed.
    drops_late: bool,
    requests: usize,
    requests_per_s: f64,
    seed: u64,
}

/// A decision of the machine: the placement, or the reason of rejection.
type Decision = (u64, std::result::Result<(u32, u32), String>);

fn decision(action: &Action) -> Option<Decision> {
    match action {
        Action::Place { request, prefill, decode, .. } => Some((*request, Ok((prefill.0, decode.0)))),
        Action::Reject { request, reason, .. } => {
            Some((*request, Err(serde_json::to_value(reason).unwrap()["reason"].to_string())))
        }
        _ => None,
    }
}

/// A logged step of a fleet machine.
#[derive(Deserialize)]
struct Step {
    now: Seconds,
    event: Event,
    actions: Vec<Action>,
}

/// Decisions, and the times of each request's first and last token.
#[derive(Default)]
struct Seen {
    decisions: Vec<(f64, Decision)>,
    firsts: BTreeMap<u64, f64>,
    ends: BTreeMap<u64, f64>,
    /// Share of prompt tokens that were reused, where it is known.
    hit: f64,
}

impl Seen {
    fn saw(&mut self, now_s: f64, event: &Event) {
        match event {
            Event::PrefillDone { request, .. } => _ = self.firsts.entry(*request).or_insert(now_s),
            Event::Finished { request } => _ = self.ends.insert(*request, now_s),
            _ => {}
        }
        if std::env::var_os("MIXFLEET_AGREE_EVENTS").is_some() {
            println!("    {now_s:.9} {event:?}");
        }
    }

    /// Number of times of `self` that `other` does not have, within [`SAME_S`].
    fn unlike(&self, other: &Seen) -> usize {
        let off = |a: &BTreeMap<u64, f64>, b: &BTreeMap<u64, f64>| {
            let is = |request, at_s: f64| b.get(request).is_some_and(|other| (at_s - other).abs() < SAME_S);
            a.iter().filter(|&(request, &at_s)| !is(request, at_s)).count()
        };
        off(&self.firsts, &other.firsts) + off(&self.ends, &other.ends)
    }
}

impl Observer for Seen {
    fn decided(&mut self, now_s: f64, action: &Action) {
        if std::env::var_os("MIXFLEET_AGREE_EVENTS").is_some() {
            println!("    {now_s:.9} {}", serde_json::to_string(action).unwrap());
        }
        self.decisions.extend(decision(action).map(|decision| (now_s, decision)));
    }

    fn told(&mut self, now_s: f64, event: &Event) {
        self.saw(now_s, event);
    }
}

fn seen(steps: &[Step]) -> Seen {
    let mut seen = Seen::default();
    for Step { now, event, actions } in steps {
        seen.saw(now.0, event);
        if matches!(event, Event::Arrived(_)) {
            actions.iter().for_each(|action| seen.decided(now.0, action));
        }
    }
    seen
}

/// Number of placements and times that differ, of rejected requests, and of preemptions.
fn compare(scene: &Scene) -> (usize, usize, u64) {
    let (fleet, steps, SceneCounts { preemptions, .. }) = served(scene);
    if std::env::var_os("MIXFLEET_AGREE_EVENTS").is_some() {
        println!("  served:");
    }
    let served = seen(&steps);
    if std::env::var_os("MIXFLEET_AGREE_EVENTS").is_some() {
        println!("  simulated:");
    }
    let simulated = simulated(scene, fleet, &steps);
    assert!(served.decisions.len() >= scene.requests && !served.ends.is_empty());
    let same = |a: &(f64, Decision), b: &(f64, Decision)| (a.0 - b.0).abs() < SAME_S && a.1 == b.1;
    let mut unlike = served.decisions.iter().zip(&simulated.decisions).filter(|(a, b)| !same(a, b));
    let first = unlike.next();
    let longer = served.decisions.len().abs_diff(simulated.decisions.len());
    let places = first.iter().count() + unlike.count() + longer;
    let times = served.unlike(&simulated).max(simulated.unlike(&served));
    let rejected = served.decisions.iter().filter(|(_, (_, what))| what.is_err()).count();
    let Scene { name, policy, requests, requests_per_s, .. } = scene;
    println!(
        "{name}, {policy:?}, {requests_per_s} requests/s: {places} places and {times} times of {requests} requests differ, \
         {rejected} turned away, {preemptions} preempted"
    );
    if let Some((served, simulated)) = first {
        println!("  the first: served {served:?}, simulated {simulated:?}");
    }
    (places + times, rejected, preemptions)
}

const POLICIES: [Policy; 6] = [
    Policy::PerDollar,
    Policy::CacheAware,
    Policy::Random,
    Policy::LeastLoaded,
    Policy::RoundRobin,
    Policy::KvcacheCentric { threshold: 1.2 },
];

/// A load that leaves the instances idle half of the time, one with queues, and one beyond their capacity.
const LOADS: [(u64, f64); 3] = [(1, 2.0), (2, 12.0), (3, 18.0)];

fn scene(name: &'static str, parts: Vec<Part>, joined: bool, policy: Policy, load: (u64, f64)) -> Scene {
    let (seed, requests_per_s) = load;
    Scene {
        name,
        parts,
        joined,
        copies_take: false,
        flex: false,
        priority: false,
        sequences_max: 32,
        beside_decode_max: Some(64),
        pull: false,
        kv_tokens: 24_000,
        node_tokens: None,
        talks: false,
        routers: 1,
        policy,
        admission: Admission::Prediction,
        drops_late: false,
        requests: if seeds().is_some() { 200 } else { 120 },
        requests_per_s,
        seed,
    }
}

#[test]
fn two_unlike_instances_agree_on_every_placement() {
    let mut rejected = 0;
    for policy in POLICIES {
        for load in LOADS {
            let scene = scene("two instances", vec![DEAR, CHEAP], false, policy, load);
            let (unlike, away, _) = compare(&scene);
            assert_eq!(unlike, 0, "{policy:?} at {} requests/s", load.1);
            rejected += away;
        }
    }
    assert!(rejected > 0, "nothing was turned away: admission was not compared");
}

#[test]
fn prefill_and_decode_pairs_agree_on_every_placement() {
    let mut rejected = 0;
    for policy in POLICIES {
        for load in LOADS {
            let of = |role| [DEAR, CHEAP].map(|part| Part { role, ..part });
            let parts = [of(Role::Prefill), of(Role::Decode)].concat();
            let (unlike, away, _) = compare(&scene("two pairs", parts, true, policy, load));
            assert_eq!(unlike, 0, "{policy:?} at {} requests/s", load.1);
            rejected += away;
        }
    }
    assert!(rejected > 0, "nothing was turned away: admission was not compared");
}

/// Mean time from the first to the last token, served and simulated.
fn decoding_s(scene: &Scene) -> [f64; 2] {
    let (fleet, steps, _) = served(scene);
    let both = [seen(&steps), simulated(scene, fleet, &steps)];
    both.map(|seen| {
        let each = seen.ends.iter().map(|(request, end_s)| end_s - seen.firsts[request]);
        each.sum::<f64>() / seen.ends.len() as f64
    })
}

/// On memory that is slow enough for it to show, both count the same time for KV that lands, spread over
/// steps in much the same way.
#[test]
fn kv_that_lands_takes_the_same_of_steps_in_both() {
    let parts = [Role::Prefill, Role::Decode].map(|role| Part { role, bandwidth: 2e7, ..DEAR });
    let decoding = |copies_take| {
        let scene = scene("copies", parts.to_vec(), true, Policy::PerDollar, (1, 4.0));
        decoding_s(&Scene { copies_take, ..scene })
    };
    let ([served, simulated], [served_with, simulated_with]) = (decoding(false), decoding(true));
    let (served, simulated) = (served_with - served, simulated_with - simulated);
    println!("decoding an answer takes {served} s more, simulated {simulated} s");
    assert!(served > 3e-3, "copies hardly show");
    assert!((simulated / served - 1.0).abs() < 0.1);
}

#[test]
fn joined_instances_that_do_both_agree_on_every_placement() {
    for policy in POLICIES {
        // In the last one sequences wait for slots of others whose KV waits to be received.
        for load in LOADS.into_iter().chain([(4, 26.0)]) {
            let (unlike, ..) = compare(&scene("two joined instances", vec![DEAR, CHEAP], true, policy, load));
            assert_eq!(unlike, 0, "{policy:?} at {} requests/s", load.1);
        }
    }
}

/// At 26 requests/s, where many are preempted and both instances hand over at the same time, the two differ.
#[test]
fn requests_of_three_tiers_agree_on_every_placement() {
    for (flex, load) in [(false, (2, 12.0)), (true, (3, 18.0))] {
        let scene = scene("tiers", vec![DEAR, CHEAP], true, Policy::PerDollar, load);
        let (unlike, ..) = compare(&Scene { flex, priority: true, sequences_max: 8, ..scene });
        assert_eq!(unlike, 0, "at {} requests/s, flex: {flex}", load.1);
    }
}

/// Both size the prompt rows beside decodes by the TBT objective; flex requests have none.
#[test]
fn steps_sized_by_the_tbt_objective_agree_on_every_placement() {
    for policy in [Policy::PerDollar, Policy::CacheAware] {
        for load in LOADS {
            for flex in [false, true] {
                let scene = scene("sized steps", vec![DEAR, CHEAP], true, policy, load);
                let (unlike, ..) = compare(&Scene { flex, beside_decode_max: None, ..scene });
                assert_eq!(unlike, 0, "{policy:?} at {} requests/s, flex: {flex}", load.1);
            }
        }
    }
}

#[test]
fn pulled_prefixes_agree_on_every_placement() {
    for policy in [Policy::PerDollar, Policy::KvcacheCentric { threshold: 1.2 }] {
        for load in LOADS {
            let scene = scene("pulls", vec![DEAR, CHEAP, CHEAP], true, policy, load);
            let (unlike, ..) = compare(&Scene { pull: true, ..scene });
            assert_eq!(unlike, 0, "{policy:?} at {} requests/s", load.1);
        }
    }
}

/// Share of prompt tokens that were reused, and mean time to the first token: served, and simulated. Hardly
/// any time may differ.
fn reuse(scene: &Scene) -> [(f64, f64); 2] {
    let (fleet, steps, counts) = served(scene);
    let mut arrived = BTreeMap::new();
    for step in &steps {
        if let Event::Arrived(arrival) = &step.event {
            arrived.entry(arrival.request).or_insert((step.now.0, arrival.prompt_tokens));
        }
    }
    let (was, will) = (seen(&steps), simulated(scene, fleet, &steps));
    let prompts: f64 = was.firsts.keys().map(|request| f64::from(arrived[request].1)).sum();
    let ttft_s = |seen: &Seen| {
        let each = seen.firsts.iter().map(|(request, first_s)| first_s - arrived[request].0);
        each.sum::<f64>() / seen.firsts.len() as f64
    };
    let unlike = was.unlike(&will).max(will.unlike(&was));
    println!("{unlike} times of {} requests differ", scene.requests);
    assert!(unlike * 20 <= scene.requests, "{unlike} times differ");
    [(counts.cached_tokens as f64 / prompts, ttft_s(&was)), (will.hit, ttft_s(&will))]
}

/// A KV node takes the instances' KV, and lends it in the next turn, when they have evicted it: the gain is
/// as predicted.
#[test]
fn conversations_gain_from_a_kv_node_what_is_predicted() {
    for (seed, requests_per_s) in [(1, 1.0), (3, 3.0)] {
        let of = |node_tokens| {
            let scene =
                scene("a KV node", vec![DEAR, CHEAP], true, Policy::PerDollar, (seed, requests_per_s));
            let (requests, pull) = (320, true);
            reuse(&Scene { requests, pull, kv_tokens: 5_000, node_tokens, talks: true, ..scene })
        };
        let (without, with) = (of(None), of(Some(100_000)));
        for (name, [served, simulated]) in [("without a node", without), ("with one", with)] {
            println!(
                "{requests_per_s} requests/s {name}: {:.1} % reused, {:.1} simulated; TTFT {:.4} s, {:.4} simulated",
                100.0 * served.0,
                100.0 * simulated.0,
                served.1,
                simulated.1
            );
        }
        assert!(with[0].0 > without[0].0 + 0.2, "the node brings little");
        assert!(with[0].0 > with[1].0 - 0.02, "fewer hits than predicted");
        let gain = |at: usize| with[at].1 / without[at].1;
        assert!(gain(0) < 0.8 && (gain(0) / gain(1) - 1.0).abs() < 0.15, "{} {}", gain(0), gain(1));
    }
}

/// Covers split and joint roles, and requests with deadlines beside others: the first policy and one seed, or
/// all policies and as many seeds as `MIXFLEET_AGREE_SEEDS` says.
#[test]
fn sixteen_instances_agree_on_every_placement() {
    let of = |role| [DEAR, CHEAP, CHEAP, CHEAP].map(|part| Part { role, ..part });
    let parts = [of(Role::Prefill), of(Role::Decode), of(Role::Auto), of(Role::Auto)].concat();
    let policies = if seeds().is_some() { &POLICIES[..] } else { &POLICIES[..1] };
    for &policy in policies {
        for seed in 1..=seeds().unwrap_or(1) {
            let scene = scene("sixteen instances", parts.clone(), true, policy, (seed, 80.0));
            let (unlike, ..) = compare(&Scene { flex: true, sequences_max: 8, requests: 600, ..scene });
            assert_eq!(unlike, 0, "{policy:?} with seed {seed}");
        }
    }
}

#[test]
fn flexible_requests_that_give_way_agree_on_every_placement() {
    let mut preempted = 0;
    for policy in [Policy::PerDollar, Policy::CacheAware] {
        for load in [(4, 18.0), (6, 26.0), (5, 70.0)] {
            for joined in [false, true] {
                let scene = scene("flex and not", vec![DEAR, CHEAP], joined, policy, load);
                let (unlike, _, preemptions) = compare(&Scene { flex: true, sequences_max: 8, ..scene });
                assert_eq!(unlike, 0, "{policy:?} at {} requests/s, joined: {joined}", load.1);
                preempted += preemptions;
            }
        }
    }
    assert!(preempted > 50, "few preemptions: {preempted}");
}

/// Each router learns of the other routers' placements, immediately and periodically.
#[test]
fn several_routers_agree_on_every_placement() {
    for (at, policy) in POLICIES.into_iter().enumerate() {
        let scene = scene("joined instances of routers", vec![DEAR, CHEAP], true, policy, LOADS[at % 3]);
        let (routers, flex, pull) = (2 + at as u16 % 2, at % 2 == 1, at >= 3);
        let (unlike, ..) = compare(&Scene { routers, flex, pull, ..scene });
        assert_eq!(unlike, 0, "{policy:?} with {routers} routers, flex: {flex}, pulls: {pull}");
    }
    let of = |role| [DEAR, CHEAP].map(|part| Part { role, ..part });
    let parts = [of(Role::Prefill), of(Role::Decode)].concat();
    for (parts, joined) in [(parts, true), (vec![DEAR, CHEAP], false)] {
        let scene = scene("instances of routers", parts, joined, Policy::PerDollar, LOADS[1]);
        let (unlike, ..) = compare(&Scene { routers: 2, ..scene });
        assert_eq!(unlike, 0, "joined: {joined}");
    }
}

//! KV between instances of one device and of several, under every partition, and in the tiers below them: the
//! answers are those of the float64 forward pass, and no page stays in use.

use super::divided::core;
use super::pulls::{conversations, converse};
use crate::fleet::{Case, TestFleet, ask, greedy, prompt};
use mixfleet_hal::fault::{Fault, FaultPlan, Rule};
use mixfleet_hal::{DType, Device};
use mixfleet_hwtests::reference::ReferenceDevice;
use mixfleet_runtime::env::{Env, SeededEnv};
use mixfleet_runtime::model::Checkpoint;
use mixfleet_runtime::model::variants::tiny_variants;
use mixfleet_runtime::pool::disk::SimDisk;
use mixfleet_scheduler::cost::AttnSplit;
use mixfleet_scheduler::fleet::Role;
use mixfleet_simulated::FaultyDevice;
use std::sync::Arc;
use std::time::Duration;

/// How the devices of an instance have a model.
#[derive(Clone, Copy, Debug)]
enum Has {
    /// Stages of this many devices.
    Stages(&'static [usize]),
    /// One device has the weights, and this many run attention.
    Attention(AttnSplit, usize),
}

const ONE: Has = Has::Stages(&[1]);
const TP2: Has = Has::Stages(&[2]);
/// More than most models here have KV heads: two devices keep the same one.
const TP3: Has = Has::Stages(&[3]);
const PP2: Has = Has::Stages(&[1, 1]);
const PP_OF_TP: Has = Has::Stages(&[2, 1]);
const BY_HEAD: Has = Has::Attention(AttnSplit::Head, 2);
const BY_REQUEST: Has = Has::Attention(AttnSplit::Request, 2);
const BY_RANGE: Has = Has::Attention(AttnSplit::Range, 2);

/// Prefill and decode instances.
const PAIRS: [[Has; 2]; 12] = [
    [ONE, TP2],
    [TP2, ONE],
    [TP2, TP3],
    [TP3, TP2],
    [PP2, TP2],
    [TP3, PP_OF_TP],
    [ONE, BY_HEAD],
    [ONE, BY_REQUEST],
    [ONE, BY_RANGE],
    [BY_RANGE, PP2],
    [PP_OF_TP, BY_REQUEST],
    [BY_HEAD, ONE],
];

fn checkpoint() -> Checkpoint {
    tiny_variants().remove(0).1.load().unwrap()
}

/// This many devices with different names; the last is unlike the others.
fn devices(count: usize, instance: usize) -> Vec<Arc<dyn Device>> {
    let named = || Arc::new(ReferenceDevice::named(&format!("device{instance}"))) as Arc<dyn Device>;
    (1..count).map(|_| core()).chain([named()]).collect()
}

/// Adds an instance.
fn with(fleet: TestFleet, checkpoint: &Checkpoint, has: Has, kind: (Role, u32, DType)) -> TestFleet {
    let instance = if kind.0 == Role::Decode { 1 } else { 0 };
    let (count, partition) = match has {
        Has::Stages(stages) => {
            let weights: Vec<_> = stages.iter().map(|count| vec![1.0; *count]).collect();
            (stages.iter().sum(), checkpoint.config.in_stages(&weights))
        }
        Has::Attention(split, workers) => (1 + workers, checkpoint.config.with_attention(workers, split)),
    };
    fleet.with_partition(kind, devices(count, instance), partition.unwrap())
}

fn pair(checkpoint: &Checkpoint, [prefill, decode]: [Has; 2]) -> TestFleet {
    let fleet = with(TestFleet::new(checkpoint.clone()), checkpoint, prefill, (Role::Prefill, 8, DType::F32));
    with(fleet, checkpoint, decode, (Role::Decode, 8, DType::F32))
}

/// Prompts of several chunks; two begin alike.
fn cases(checkpoint: &Checkpoint, seed: u64) -> Vec<Case> {
    let shared = prompt(20, seed, &checkpoint.config);
    let case = |(length, begins): (u32, usize)| {
        let own = prompt(length, seed + u64::from(length), &checkpoint.config);
        let prompt = [&shared[..begins], &own[..]].concat();
        let expected = greedy(checkpoint, &prompt, 5);
        Case { prompt, expected }
    };
    [(17, 20), (4, 20), (9, 0), (1, 0)].map(case).into()
}

fn unused(fleet: &TestFleet) -> [f64; 2] {
    [fleet.usage_of(0), fleet.usage_of(1)]
}

#[test]
fn every_family_decodes_on_any_devices_what_any_others_prefilled() {
    for (at, (name, checkpoint)) in tiny_variants().into_iter().enumerate() {
        let checkpoint = checkpoint.load().unwrap();
        // latents are given no devices of their own
        let has_latents = checkpoint.config.latent.is_some();
        let divides = |has: &Has| !has_latents || matches!(has, Has::Stages(_));
        let pairs: Vec<[Has; 2]> = PAIRS.into_iter().filter(|pair| pair.iter().all(divides)).collect();
        // each family meets a pair, and the first one all
        let turn = at % pairs.len();
        let own = pairs.into_iter().enumerate().filter(|(which, _)| at == 0 || *which == turn);
        let cases = cases(&checkpoint, 100);
        for (which, [prefill, decode]) in own {
            let what = format!("{name}: {prefill:?} -> {decode:?}");
            let fleet = pair(&checkpoint, [prefill, decode]);
            let usage = fleet.run_many(&SeededEnv::new(which as u64), cases.clone());
            assert_eq!((usage, fleet.panics()), (0.0, 0), "{what}: blocks are still in use");
            // all prompts, less the receiver's part of the second one and keys before windows
            let shape = checkpoint.config.cost_shape(DType::F32, DType::F32, 8);
            let least: u64 = [37, 4, 9].map(|tokens| shape.sent_bytes(tokens)).iter().sum();
            assert!(fleet.sent_bytes() >= least, "{what}: {} of {least} bytes sent", fleet.sent_bytes());
            assert_eq!(fleet.transfer_troubles(), (0, 0), "{what}");
        }
    }
}

#[test]
fn pages_and_dtypes_of_several_devices_may_be_unlike() {
    let checkpoint = checkpoint();
    for [prefill, decode] in [[TP2, BY_RANGE], [BY_REQUEST, PP2], [TP3, TP2]] {
        for (a, b) in [((8, DType::F32), (12, DType::F32)), ((12, DType::Bf16), (8, DType::F32))] {
            let fleet = TestFleet::new(checkpoint.clone());
            let fleet = with(fleet, &checkpoint, prefill, (Role::Prefill, a.0, a.1));
            let fleet = with(fleet, &checkpoint, decode, (Role::Decode, b.0, b.1));
            let question = prompt(30, 5, &checkpoint.config);
            let expected = greedy(&checkpoint, &question, 6);
            let answer = fleet.run_one(&SeededEnv::new(5), question, 6);
            // in bf16 tokens may differ
            let exact = a.1 == DType::F32 && b.1 == DType::F32;
            assert!(!exact || answer.tokens == expected, "{prefill:?} {a:?} -> {decode:?} {b:?}");
            assert_eq!((answer.tokens.len(), answer.failure), (6, None));
            assert!(fleet.sent_bytes() > 0);
        }
    }
}

#[test]
fn pieces_of_several_devices_that_break_are_sent_again_or_computed() {
    let checkpoint = checkpoint();
    let (mut retries, mut recomputes) = (0, 0);
    for (seed, pair_of) in (0..).zip([[TP2, PP2], [BY_RANGE, TP3], [PP_OF_TP, BY_REQUEST]]) {
        for (fault, probability) in [(Fault::BitFlip, 0.2), (Fault::BitFlip, 0.7), (Fault::Drop, 0.5)] {
            // the first writes measure the links
            let rules = vec![Rule { fault, probability, from: 20, until: None }];
            let fleet = pair(&checkpoint, pair_of).faults(FaultPlan { seed, rules });
            let fleet = fleet.hand_off_timeout(Duration::from_millis(50));
            let usage = fleet.run_many(&SeededEnv::new(seed), cases(&checkpoint, 200 + seed));
            assert_eq!(usage, 0.0, "{pair_of:?}, {fault:?}: blocks are still in use");
            let troubles = fleet.transfer_troubles();
            (retries, recomputes) = (retries + troubles.0, recomputes + troubles.1);
        }
    }
    assert!(retries > 0 && recomputes > 0, "{retries} retries, {recomputes} recomputes");
}

#[test]
fn a_prefix_is_pulled_between_instances_of_unlike_numbers_of_devices() {
    let checkpoint = checkpoint();
    let talks = conversations(&checkpoint, 1..2);
    for pair_of in [[ONE, TP2], [TP2, ONE], [TP3, BY_RANGE]] {
        let fleet = pair(&checkpoint, pair_of);
        let cached = converse(&fleet, &SeededEnv::new(1), &talks);
        // as between single devices
        assert_eq!(cached, [[0, 40, 64]], "{pair_of:?}");
        assert_eq!(fleet.pulled(), (40 - 24) + (64 - 40), "{pair_of:?}");
        assert_eq!(unused(&fleet), [0.0; 2], "{pair_of:?}: blocks are still in use");
    }
}

#[test]
fn what_several_devices_evict_is_loaded_again_and_pulled_from_their_lower_tiers() {
    let checkpoint = checkpoint();
    let talks = conversations(&checkpoint, 1..4);
    let mut more = 0;
    for pair_of in [[TP2, ONE], [PP2, BY_RANGE]] {
        let run = |fleet: TestFleet| {
            converse(&fleet, &SeededEnv::new(2), &talks);
            assert_eq!(unused(&fleet), [0.0; 2], "{pair_of:?}: blocks are still in use");
            (fleet.pulled(), fleet.tier_hits(0, "dram") + fleet.tier_hits(1, "dram"))
        };
        let (without, none) = run(pair(&checkpoint, pair_of).blocks(14));
        let (with, hits) = run(pair(&checkpoint, pair_of).blocks(14).lower(32, None));
        assert!(with >= without && none == 0 && hits > 0, "{pair_of:?}: {with} {without} {hits}");
        more += with - without;
    }
    assert!(more > 0, "nothing was pulled from a lower tier");
}

/// Runs one prompt after the other on a single instance, with a disk below it; returns the cached tokens of
/// each.
fn on_disk(checkpoint: &Checkpoint, has: Has, disk: &SimDisk, prompts: &[Vec<u32>]) -> (Vec<u32>, u64) {
    let fleet = TestFleet::new(checkpoint.clone()).blocks(7).lower(2, Some((disk.clone(), 1 << 20)));
    let fleet = with(fleet, checkpoint, has, (Role::Auto, 8, DType::F32));
    let env = SeededEnv::new(3);
    let handle = fleet.start(Arc::new(env.clone()));
    let expected: Vec<_> = prompts.iter().map(|prompt| greedy(checkpoint, prompt, 4)).collect();
    let (prompts, world) = (prompts.to_vec(), env.clone());
    let cached = env.run(async move {
        let mut cached = Vec::new();
        for (prompt, expected) in prompts.into_iter().zip(expected) {
            let answer = ask(&handle, "turn".into(), prompt, 4, None).await;
            assert_eq!((answer.tokens, answer.failure), (expected, None), "{has:?}");
            cached.push(answer.cached_tokens);
        }
        world.sleep(Duration::from_secs(1)).await;
        cached
    });
    (cached, fleet.tier_hits(0, "ssd"))
}

#[test]
fn blocks_that_some_devices_left_on_a_disk_serve_any_others() {
    let checkpoint = checkpoint();
    let prompts: Vec<_> = (1..4).map(|seed| prompt(40, seed, &checkpoint.config)).collect();
    for [before, after] in [[TP2, ONE], [ONE, TP3], [PP2, BY_RANGE], [BY_HEAD, PP_OF_TP]] {
        let disk = SimDisk::default();
        on_disk(&checkpoint, before, &disk, &prompts);
        let (cached, hits) = on_disk(&checkpoint, after, &disk.restart(), &prompts[..1]);
        assert_eq!((cached, hits), (vec![32], 4), "{before:?} -> {after:?}");
    }
}

#[test]
fn clients_that_leave_while_kv_of_several_devices_travels_leave_no_page_in_use() {
    let checkpoint = checkpoint();
    for (seed, pair_of) in (11..).zip([[TP2, BY_REQUEST], [BY_RANGE, PP2], [ONE, TP2], [TP3, ONE]]) {
        let fleet = pair(&checkpoint, pair_of).blocks(40);
        assert_eq!(fleet.run_leavers(&SeededEnv::new(seed), seed, 16), 0.0, "{pair_of:?}");
        assert_eq!(fleet.panics(), 0, "{pair_of:?}");
    }
}

#[test]
fn a_member_that_fails_while_kv_travels_costs_no_wrong_token() {
    let checkpoint = checkpoint();
    for (role, from) in [(Role::Prefill, 60), (Role::Prefill, 400), (Role::Decode, 60), (Role::Decode, 400)] {
        let failing = FaultyDevice::new(core(), FaultPlan::exactly(Fault::Fail, from, u64::MAX));
        let (device, partition) = (Arc::new(failing) as Arc<dyn Device>, checkpoint.config.divided(2));
        let fleet = TestFleet::new(checkpoint.clone()).with(Role::Auto);
        let fleet = fleet.with_partition((role, 8, DType::F32), vec![core(), device], partition.unwrap());
        let fleet = fleet.with(if role == Role::Prefill { Role::Decode } else { Role::Prefill });
        fleet.run_many(&SeededEnv::new(from), cases(&checkpoint, 300));
        assert_eq!((fleet.usage_of(0), fleet.usage_of(2)), (0.0, 0.0), "{role:?} from {from}");
        assert_eq!(fleet.panics(), 0);
    }
}

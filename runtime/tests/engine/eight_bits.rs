//! KV of eight bits: answers equal those of a float64 forward pass that keeps such KV, between instances over
//! each transport, under faults, and from the tiers below a device. Transfers have the bytes of the formula.

use crate::fleet::wayward::Wayward;
use crate::fleet::{Case, ReceivedAnswer, TestFleet, ask, prompt};
use mixfleet_hal::fault::{Fault, FaultPlan, Rule};
use mixfleet_hal::transport::Transport;
use mixfleet_hal::{DType, Device, OpSig};
use mixfleet_runtime::env::{Env, RealEnv, SeededEnv, SharedEnv};
use mixfleet_runtime::model::variants::{plain_variants, tiny_variants};
use mixfleet_runtime::model::{Checkpoint, ModelConfig, Oracle};
use mixfleet_runtime::pool::disk::SimDisk;
use mixfleet_scheduler::fleet::Role;
use mixfleet_wire::{FaultyTransport, InProcessTransport, Shm, Tcp, TcpConfig};
use std::sync::Arc;
use std::time::Duration;

const DTYPES: [DType; 2] = [DType::F8E4m3, DType::I8];

fn checkpoint() -> Checkpoint {
    tiny_variants().remove(0).1.load().unwrap()
}

/// The continuation by a forward pass that keeps KV in `kv`.
fn greedy(checkpoint: &Checkpoint, kv: DType, prompt: &[u32], count: usize) -> Vec<u32> {
    let oracle = Oracle::new(checkpoint).with_kv(kv);
    let mut ids = prompt.to_vec();
    for _ in 0..count {
        let logits = oracle.last_logits(&ids);
        let best = (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best });
        ids.push(best as u32);
    }
    ids.split_off(prompt.len())
}

/// Prompts of lengths around a block's and a chunk's, each with its answer.
fn cases(checkpoint: &Checkpoint, kv: DType, seed: u64) -> Vec<Case> {
    let case = |length: u32| {
        let prompt = prompt(length, seed + u64::from(length), &checkpoint.config);
        let expected = greedy(checkpoint, kv, &prompt, 6);
        Case { prompt, expected }
    };
    [1, 8, 29, 40].map(case).into()
}

/// An instance that computes prompts, and one that decodes, with KV of these dtypes.
fn pair(checkpoint: &Checkpoint, prefill: DType, decode: DType) -> TestFleet {
    let fleet = TestFleet::new(checkpoint.clone());
    fleet.with_kv(Role::Prefill, 8, prefill).with_kv(Role::Decode, 8, decode)
}

/// Bytes of a token's KV: in each layer, of keys and of values, a code for each element of each head, and the
/// four bytes of the head's scale.
fn token_bytes(config: &ModelConfig) -> u64 {
    u64::from(config.layers) * 2 * u64::from(config.kv_heads) * (u64::from(config.head_dim) + 4)
}

#[test]
fn every_family_answers_as_the_forward_pass_that_keeps_such_kv() {
    for (at, (name, checkpoint)) in plain_variants().into_iter().enumerate() {
        let checkpoint = checkpoint.load().unwrap();
        let kv = DTYPES[at % 2];
        let fleet = TestFleet::new(checkpoint.clone()).with_kv(Role::Auto, 8, kv);
        let usage = fleet.run_many(&SeededEnv::new(at as u64), cases(&checkpoint, kv, 300));
        assert_eq!((usage, fleet.panics()), (0.0, 0), "{name} in {kv}");
    }
}

#[test]
fn what_is_sent_has_the_bytes_of_the_formula() {
    let checkpoint = checkpoint();
    for kv in DTYPES {
        let cases = cases(&checkpoint, kv, 400);
        let tokens: usize = cases.iter().map(|case| case.prompt.len()).sum();
        let fleet = pair(&checkpoint, kv, kv);
        assert_eq!(fleet.run_many(&SeededEnv::new(1), cases), 0.0);
        assert_eq!(fleet.sent_bytes(), tokens as u64 * token_bytes(&checkpoint.config), "{kv}");
        assert_eq!(fleet.transfer_troubles(), (0, 0), "{kv}");
    }
}

#[test]
fn kv_of_a_wider_dtype_becomes_codes_on_the_way_and_codes_stay_codes() {
    let checkpoint = checkpoint();
    for kv in DTYPES {
        for wide in DType::FLOATS {
            for (from, to) in [(wide, kv), (kv, wide)] {
                let question = prompt(30, 5, &checkpoint.config);
                let fleet = pair(&checkpoint, from, to);
                let answer = fleet.run_one(&SeededEnv::new(5), question, 6);
                assert_eq!((answer.tokens.len(), answer.failure), (6, None), "{from} -> {to}");
                assert_eq!(fleet.sent_bytes(), 30 * token_bytes(&checkpoint.config), "{from} -> {to}");
            }
        }
    }
    // what the first device has is what the second one computes with
    let question = prompt(30, 6, &checkpoint.config);
    let expected = greedy(&checkpoint, DType::I8, &question, 2);
    let answer = pair(&checkpoint, DType::I8, DType::F32).run_one(&SeededEnv::new(6), question, 2);
    assert_eq!(answer.tokens, expected);
}

/// Runs all of `cases`, one after the other, in real time.
fn ask_all(fleet: &TestFleet, cases: &[Case]) -> Vec<ReceivedAnswer> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let env: SharedEnv = Arc::new(RealEnv::new(runtime.handle().clone()));
    let handle = fleet.start(env);
    let ask_one = |case: &Case| {
        let asked = ask(&handle, "one".into(), case.prompt.clone(), case.expected.len() as u32, None);
        runtime.block_on(asked)
    };
    cases.iter().map(ask_one).collect()
}

#[test]
fn it_crosses_shared_memory_and_tcp_with_and_without_faults() {
    let checkpoint = checkpoint();
    let rules = vec![Rule { fault: Fault::BitFlip, probability: 0.3, from: 20, until: None }];
    let plan = FaultPlan { seed: 3, rules };
    for kv in DTYPES {
        let cases = cases(&checkpoint, kv, 500);
        let tokens: usize = cases.iter().map(|case| case.prompt.len()).sum();
        let shm = || Shm::new().unwrap();
        let tcp = || Tcp::new(TcpConfig::loopback()).unwrap();
        let transports: [(&str, bool, Arc<dyn Transport>); 4] = [
            ("shm", false, Arc::new(shm())),
            ("shm", true, Arc::new(FaultyTransport::new(shm(), plan.clone()))),
            ("tcp", false, Arc::new(tcp())),
            ("tcp", true, Arc::new(FaultyTransport::new(tcp(), plan.clone()))),
        ];
        for (name, breaks, transport) in transports {
            let fleet = pair(&checkpoint, kv, kv).transport(transport);
            for (answer, case) in ask_all(&fleet, &cases).iter().zip(&cases) {
                assert_eq!((&answer.tokens, &answer.failure), (&case.expected, &None), "{kv} over {name}");
            }
            let least = tokens as u64 * token_bytes(&checkpoint.config);
            let (retries, _) = fleet.transfer_troubles();
            assert_eq!(retries > 0, breaks, "{kv} over {name}: {retries} retries");
            assert!(
                fleet.sent_bytes() >= least && (breaks || fleet.sent_bytes() == least),
                "{kv} over {name}"
            );
        }
    }
}

#[test]
fn pieces_that_break_or_get_lost_are_sent_again_or_computed() {
    let checkpoint = checkpoint();
    let (mut retries, mut recomputes) = (0, 0);
    for (seed, kv) in (0..).zip(DTYPES) {
        for (fault, probability) in [(Fault::BitFlip, 0.2), (Fault::BitFlip, 0.7), (Fault::Drop, 0.5)] {
            let rules = vec![Rule { fault, probability, from: 20, until: None }];
            let faulty = FaultyTransport::new(InProcessTransport::new(), FaultPlan { seed, rules });
            let fleet = pair(&checkpoint, kv, kv).transport(Arc::new(faulty));
            let fleet = fleet.hand_off_timeout(Duration::from_millis(50));
            let usage = fleet.run_many(&SeededEnv::new(seed), cases(&checkpoint, kv, 600 + seed));
            assert_eq!(usage, 0.0, "{kv}, {fault:?}: blocks are still in use");
            let troubles = fleet.transfer_troubles();
            (retries, recomputes) = (retries + troubles.0, recomputes + troubles.1);
        }
    }
    assert!(retries > 0 && recomputes > 0, "{retries} retries, {recomputes} recomputes");
}

#[test]
fn it_returns_from_host_memory_and_from_disk_also_where_bits_flip() {
    let checkpoint = checkpoint();
    for kv in DTYPES {
        let of = |seed| prompt(40, seed, &checkpoint.config);
        let prompts = [of(1), of(2), of(1), of(2), of(1)];
        let cases: Vec<Case> = prompts
            .into_iter()
            .map(|prompt| Case { expected: greedy(&checkpoint, kv, &prompt, 4), prompt })
            .collect();
        let disk = (SimDisk::default(), 1 << 20);
        for (below, tier) in [((16, None), "dram"), ((2, Some(disk)), "ssd")] {
            for rots in [false, true] {
                let fleet = TestFleet::new(checkpoint.clone()).with_kv(Role::Auto, 8, kv).blocks(7);
                let fleet = fleet.lower(below.0, below.1.clone());
                let env = SeededEnv::new(7);
                let handle = fleet.start(Arc::new(env.clone()));
                fleet.rot(rots);
                let (asked, world) = (cases.clone(), env.clone());
                let answers = env.run(async move {
                    let mut answers = Vec::new();
                    for case in asked {
                        answers.push(ask(&handle, "turn".into(), case.prompt, 4, None).await);
                        // evicted blocks reach the disk
                        world.sleep(Duration::from_secs(1)).await;
                    }
                    answers
                });
                for (answer, case) in answers.iter().zip(&cases) {
                    assert_eq!((&answer.tokens, &answer.failure), (&case.expected, &None), "{kv}, {tier}");
                }
                let hits = fleet.tier_hits(0, tier);
                assert!(rots || hits >= 4, "{kv}: {hits} blocks from {tier}");
            }
        }
    }
}

#[test]
fn a_device_without_codes_is_sent_what_it_keeps() {
    let checkpoint = checkpoint();
    let lacks = |sig: &OpSig| sig.operands().iter().any(|operand| operand.dtype.is_scaled());
    let plain: Arc<dyn Device> = Arc::new(Wayward::new("plain").refusing(lacks));
    let fleet = TestFleet::new(checkpoint.clone()).with_kv(Role::Prefill, 8, DType::I8);
    let fleet = fleet.with_device(Role::Decode, plain);
    let question = prompt(30, 8, &checkpoint.config);
    let expected = greedy(&checkpoint, DType::I8, &question, 2);
    let answer = fleet.run_one(&SeededEnv::new(8), question, 2);
    assert_eq!((answer.tokens, answer.failure), (expected, None));
    assert_eq!(fleet.sent_bytes(), 30 * checkpoint.config.kv_bytes_per_token(DType::F32));
}

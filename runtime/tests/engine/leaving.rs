//! KV that leaves several devices while they run a step: simulated parts that compute, and a link of a known
//! rate, in virtual time.

use super::divided::core;
use super::exposed::{LAYERS, Met, PATIENT, PROMPT_TOKENS, Paced, ask, checkpoint, part};
use crate::fleet::clock::WorldClock;
use crate::fleet::{TestFleet, greedy, prompt};
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{DType, Device};
use mixfleet_runtime::env::SeededEnv;
use mixfleet_runtime::model::Checkpoint;
use mixfleet_scheduler::cost::{AttnSplit, Partition};
use mixfleet_scheduler::fleet::Role;
use mixfleet_simulated::ComputeDevice;
use std::sync::Arc;

/// The tokens of a step.
const STEP_TOKENS: u32 = 24;

/// A group that computes prompts: its name, and who does what.
type Group = (&'static str, fn(&Checkpoint) -> Partition);

const GROUPS: [Group; 6] = [
    ("tp of 2", |checkpoint| checkpoint.config.divided(2).unwrap()),
    ("pp of 2", |checkpoint| checkpoint.config.in_stages(&[vec![1.0], vec![1.0]]).unwrap()),
    ("pp of tp of 2 and 1", |checkpoint| checkpoint.config.in_stages(&[vec![1.0; 2], vec![1.0]]).unwrap()),
    ("attn of 2 by head", |checkpoint| checkpoint.config.with_attention(2, AttnSplit::Head).unwrap()),
    ("attn of 2 by request", |checkpoint| checkpoint.config.with_attention(2, AttnSplit::Request).unwrap()),
    ("attn of 2 by range", |checkpoint| checkpoint.config.with_attention(2, AttnSplit::Range).unwrap()),
];

/// A piece that left: when, and its bytes.
type Piece = (Seconds, u64);

/// Sends a prompt of so many tokens from a group to a single device over a link of this rate.
fn hand_off(checkpoint: &Checkpoint, group: Group, tokens: u32, bytes_per_s: f64) -> (Met, Vec<Piece>) {
    let env = SeededEnv::with_blocking_workers(5);
    let device = |id: String| -> Arc<dyn Device> {
        let clock = Arc::new(WorldClock(env.clone()));
        Arc::new(ComputeDevice::computed_by(core(), &id, part(), clock).unwrap())
    };
    let link = Paced::new(&env, bytes_per_s);
    let left = link.left();
    let partition = group.1(checkpoint);
    let members = (0..partition.shares().len()).map(|at| device(format!("member{at}"))).collect();
    let fleet = TestFleet::new(checkpoint.clone())
        .with_partition((Role::Prefill, 8, DType::F32), members, partition)
        .with_device(Role::Decode, device("decoder".into()))
        .transport(Arc::new(link))
        .hand_off_timeout(PATIENT);
    let question = prompt(tokens, 3, &checkpoint.config);
    let expected = greedy(checkpoint, &question, 6);
    let left_before_it = left.clone();
    // pieces that measured the link are not counted
    let met = ask(&fleet, &env, question, move |_| left_before_it.lock().unwrap().clear());
    assert_eq!(met.tokens, expected, "{}", group.0);
    assert_eq!(met.retries, 0, "{}", group.0);
    let left = left.lock().unwrap().clone();
    let bytes: u64 = left.iter().map(|(_, bytes)| bytes).sum();
    let kv_bytes = u64::from(tokens) * checkpoint.config.kv_bytes_per_token(DType::F32);
    assert_eq!(bytes, kv_bytes, "{}: every layer of every token leaves once", group.0);
    (met, left)
}

/// The prompt is one step, so that all that has left when its token is drawn left while it ran.
#[test]
fn all_but_the_last_layers_leave_several_devices_before_the_step_has_ended() {
    let checkpoint = checkpoint();
    for group in GROUPS {
        let (met, left) = hand_off(&checkpoint, group, STEP_TOKENS, 1e15);
        let early: u64 = left.iter().filter(|(at, _)| *at < met.first_at).map(|(_, bytes)| bytes).sum();
        let layer =
            u64::from(STEP_TOKENS) * checkpoint.config.kv_bytes_per_token(DType::F32) / u64::from(LAYERS);
        let first = left[0].0;
        println!(
            "{}: {early} bytes of {} left before the step ended, the first {:.4} s before",
            group.0,
            layer * u64::from(LAYERS),
            (met.first_at - first).0
        );
        assert!(early >= layer * u64::from(LAYERS - 1), "{}: {early} of layers of {layer}", group.0);
        // the first layer left early in the step
        assert!((met.first_at - first).0 > 0.5 * met.ttft_s, "{}", group.0);
    }
}

/// As of a single device (`exposed.rs`).
#[test]
fn a_link_of_twice_the_need_hides_the_kv_of_several_devices_too() {
    let checkpoint = checkpoint();
    let kv_bytes = (u64::from(PROMPT_TOKENS) * checkpoint.config.kv_bytes_per_token(DType::F32)) as f64;
    for group in GROUPS {
        let (free, _) = hand_off(&checkpoint, group, PROMPT_TOKENS, 1e15);
        let need = kv_bytes / free.ttft_s;
        for times in [1.0, 2.0] {
            let (met, _) = hand_off(&checkpoint, group, PROMPT_TOKENS, times * need);
            let chunk_s = kv_bytes / (times * need) * f64::from(STEP_TOKENS) / f64::from(PROMPT_TOKENS);
            println!(
                "{}: {times} of the need: TTFT {:.4} s ({:.4} s without a link), exposed {:.4} s ({:.4} s), the \
                 last chunk takes {chunk_s:.4} s",
                group.0, met.ttft_s, free.ttft_s, met.exposed_s, free.exposed_s
            );
            if times > 1.0 {
                assert!(met.exposed_s < 0.5 * chunk_s, "{}: {} of {chunk_s} s", group.0, met.exposed_s);
                assert!(met.ttft_s <= 1.02 * free.ttft_s, "{}: {} s", group.0, met.ttft_s);
            }
        }
    }
}

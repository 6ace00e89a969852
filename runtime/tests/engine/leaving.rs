//! KV that leaves several devices and comes to them while they run a step: simulated parts that compute, and
//! a link of a known rate, in virtual time.

use super::beside::{checked, times};
use super::divided::core;
use super::exposed::{FLOPS, HandedOff, LAYERS, PATIENT, PROMPT_TOKENS, Paced, ask, checkpoint, part};
use crate::fleet::clock::WorldClock;
use crate::fleet::{TestFleet, greedy, pressure, prompt, request};
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{DType, Device};
use mixfleet_runtime::env::{Env, SeededEnv};
use mixfleet_runtime::model::Checkpoint;
use mixfleet_runtime::model::variants::tiny_variants;
use mixfleet_scheduler::cost::{AttnSplit, Partition};
use mixfleet_scheduler::fleet::Role;
use mixfleet_simulated::ComputeDevice;
use std::sync::Arc;
use std::time::Duration;

/// The tokens of a step.
const STEP_TOKENS: u32 = 24;

/// A group that computes prompts: its name, and its partition.
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

/// A part that computes, in the time of one with this many operations per second.
fn computing(env: &SeededEnv, id: String, flops: f64) -> Arc<dyn Device> {
    let clock = Arc::new(WorldClock(env.clone()));
    Arc::new(ComputeDevice::computed_by(core(), &id, part(flops), clock).unwrap())
}

/// Sends a prompt of this many tokens from a group to a single device over a link of this rate, with this
/// many slots.
fn hand_off(
    checkpoint: &Checkpoint,
    group: Group,
    (tokens, slots): (u32, u32),
    bytes_per_s: f64,
) -> (HandedOff, Vec<Piece>) {
    let env = SeededEnv::with_blocking_workers(5);
    let device = |id: String| computing(&env, id, FLOPS);
    let link = Paced::new(&env, bytes_per_s);
    let left = link.left();
    let partition = group.1(checkpoint);
    let members = (0..partition.shares().len()).map(|at| device(format!("member{at}"))).collect();
    let mut fleet = TestFleet::new(checkpoint.clone())
        .with_partition((Role::Prefill, 8, DType::F32), members, partition)
        .with_device(Role::Decode, device("decoder".into()))
        .transport(Arc::new(link))
        .hand_off_timeout(PATIENT);
    fleet.hand_off.slots = slots;
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
fn layers_leave_several_devices_before_the_step_has_ended() {
    let checkpoint = checkpoint();
    let all = u64::from(STEP_TOKENS) * checkpoint.config.kv_bytes_per_token(DType::F32);
    for group in GROUPS {
        let (met, left) = hand_off(&checkpoint, group, (STEP_TOKENS, 3), 1e15);
        let early: u64 = left.iter().filter(|(at, _)| *at < met.first_at).map(|(_, bytes)| bytes).sum();
        let before_s = (met.first_at - left[0].0).0;
        println!(
            "{}: {early} of {all} bytes left before the step of {:.4} s ended, the first {before_s:.4} s before",
            group.0, met.ttft_s
        );
        let of_all_but_one = all / u64::from(LAYERS) * u64::from(LAYERS - 1);
        assert!(early >= of_all_but_one, "{}: {early} of {of_all_but_one}", group.0);
        assert!(before_s > 0.5 * met.ttft_s, "{}: the first layer left late", group.0);
    }
}

/// As of a single device (`exposed.rs`): with the slots of `serve` and with very few, a prompt of five steps.
#[test]
fn a_link_of_twice_the_need_hides_the_kv_of_several_devices_too() {
    let checkpoint = checkpoint();
    let kv_bytes = (u64::from(PROMPT_TOKENS) * checkpoint.config.kv_bytes_per_token(DType::F32)) as f64;
    let mut hidden = Vec::new();
    for group in [GROUPS[0], GROUPS[1], GROUPS[3], GROUPS[5]] {
        let (free, _) = hand_off(&checkpoint, group, (PROMPT_TOKENS, 32), 1e15);
        for (slots, times) in [(32, 1.0), (32, 2.0), (3, 2.0)] {
            let serial_s = free.ttft_s / times;
            let (met, _) = hand_off(&checkpoint, group, (PROMPT_TOKENS, slots), kv_bytes / serial_s);
            let chunk_s = serial_s * f64::from(STEP_TOKENS) / f64::from(PROMPT_TOKENS);
            println!(
                "{}, {slots} slots, {times} of the need: TTFT {:.4} s ({:.4} s where the link takes no time), \
                 exposed {:.4} s of {chunk_s:.4} s that the last chunk takes",
                group.0, met.ttft_s, free.ttft_s, met.exposed_s
            );
            if times == 2.0 {
                hidden.push((group.0, met.exposed_s / chunk_s, met.ttft_s / free.ttft_s));
            }
        }
    }
    // pieces that find no slot in time leave the pages after the step, and are right all the same
    for group in GROUPS {
        let slow = kv_bytes / 30.0;
        let (met, _) = hand_off(&checkpoint, group, (PROMPT_TOKENS, 3), slow);
        assert!(met.exposed_s > 15.0, "{}: {} s", group.0, met.exposed_s);
    }
    for (name, exposed, later) in hidden {
        assert!(exposed < 0.1 && later < 1.01, "{name}: {exposed} of the last chunk, {later} of the TTFT");
    }
}

/// 120 tokens of 12 layers are many times as many pieces as there are slots.
#[test]
fn kv_lands_on_several_devices_within_about_one_step_of_theirs() {
    let (checkpoint, mut met) = (checkpoint(), Vec::new());
    for group in GROUPS {
        let env = SeededEnv::with_blocking_workers(5);
        let partition = group.1(&checkpoint);
        let members = (0..partition.shares().len()).map(|at| computing(&env, format!("member{at}"), 1e5));
        let fleet = TestFleet::new(checkpoint.clone())
            .with_device(Role::Prefill, computing(&env, "device0".into(), 1e10))
            .with_partition((Role::Decode, 8, DType::F32), members.collect(), partition);
        let handle = fleet.start(Arc::new(env.clone()));
        let (config, world) = (checkpoint.config.clone(), env.clone());
        let (step_s, second_s) = env.run(async move {
            let first = request("one".into(), prompt(8, 3, &config), 400, None);
            let mut one = handle.submit(first).await.expect("admitted");
            let of_one = times(&world, &mut one, 4).await;
            let step_s = of_one[3] - of_one[2];
            // It lands in the middle of a step.
            world.sleep(Duration::from_secs_f64(step_s / 2.0)).await;
            let second = request("two".into(), prompt(PROMPT_TOKENS, 4, &config), 2, None);
            let mut two = handle.submit(second).await.expect("admitted");
            (step_s, times(&world, &mut two, 2).await)
        });
        env.end();
        println!("{}: a step {step_s:.3} s, the tokens after {second_s:.3?} s", group.0);
        met.push((group.0, step_s, second_s[1], fleet.transfer_troubles()));
    }
    for (name, step_s, second_s, troubles) in met {
        assert!(step_s > 0.1 && second_s < 5.0 * step_s, "{name}: {second_s} s with steps of {step_s} s");
        assert_eq!(troubles, (0, 0), "{name}");
    }
}

/// As of single devices (`step.rs`).
#[test]
fn no_page_that_a_step_of_several_devices_uses_is_written_by_what_lands() {
    let checkpoint = tiny_variants().remove(0).1.load().unwrap();
    let mut beside = [0; GROUPS.len()];
    for (at, group) in GROUPS.into_iter().enumerate() {
        let env = SeededEnv::with_blocking_workers(at as u64);
        let partition = group.1(&checkpoint);
        let members = (0..partition.shares().len()).map(|at| {
            let (device, running) = checked(computing(&env, format!("member{at}"), 2e7));
            (device, running)
        });
        let (members, running): (Vec<_>, Vec<_>) = members.unzip();
        let fleet = TestFleet::new(checkpoint.clone())
            .with_device(Role::Prefill, computing(&env, "device0".into(), 4e7))
            .with_partition((Role::Decode, 8, DType::F32), members, partition)
            .blocks(20);
        let usage = fleet.run_many(&env, pressure(&checkpoint, at as u64, 12));
        assert_eq!((usage, fleet.panics()), (0.0, 0), "{}", group.0);
        env.end();
        beside[at] = running.iter().map(|running| running.lock().unwrap().beside).sum();
    }
    println!("pieces that landed beside steps: {beside:?}");
    assert!(beside.iter().all(|pieces| *pieces > 0), "{beside:?} pieces landed beside steps");
}

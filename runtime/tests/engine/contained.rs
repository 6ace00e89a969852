//! A failure ends only what it concerns.

use crate::fleet::wayward::Wayward;
use crate::fleet::{ReceivedAnswer, TestFleet, ask, greedy, prompt};
use mixfleet_hal::memory::{Mapping, SharedMemory};
use mixfleet_hal::sample::{Drawn, NO_TOKEN};
use mixfleet_hal::{Device, Error, ErrorKind, Result};
use mixfleet_runtime::env::{Env, SeededEnv};
use mixfleet_runtime::model::Checkpoint;
use mixfleet_runtime::model::variants::tiny_variants;
use mixfleet_runtime::request::{GenerateRequest, Rejection};
use mixfleet_scheduler::fleet::Role;
use mixfleet_wire::HostRegion;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const TOKENS: u32 = 6;

fn checkpoint() -> Checkpoint {
    tiny_variants().remove(0).1.load().unwrap()
}

/// A token that no other prompt of these tests has, and that equals no position, slot or page number.
fn poison(checkpoint: &Checkpoint) -> u32 {
    checkpoint.config.vocab - 1
}

fn sound(checkpoint: &Checkpoint, seed: u64) -> (Vec<u32>, Vec<u32>) {
    let below = poison(checkpoint);
    let prompt: Vec<u32> = prompt(9, seed, &checkpoint.config).into_iter().map(|id| id % below).collect();
    let expected = greedy(checkpoint, &prompt, TOKENS as usize);
    (prompt, expected)
}

/// Whether `data` contains `token` as a word.
fn has(data: &[u8], token: u32) -> bool {
    data.chunks_exact(4).any(|word| word == token.to_le_bytes())
}

/// A device that fails with `error` when it gets the poisoned token, and the number of failures.
fn dies_of(id: &str, token: u32, kind: ErrorKind) -> (Arc<dyn Device>, Arc<AtomicU32>) {
    let deaths = Arc::new(AtomicU32::new(0));
    let count = deaths.clone();
    let device = Wayward::new(id).writing(move |_, data| {
        if !has(data, token) {
            return Ok(());
        }
        count.fetch_add(1, Ordering::Relaxed);
        Err(Error::new(kind, "poisoned"))
    });
    (Arc::new(device), deaths)
}

/// Runs one poisoned request among others, all together, and another one after `pause`; the others' answers
/// must be right. Returns the poisoned one's answer.
fn one_among_others(
    fleet: &TestFleet,
    checkpoint: &Checkpoint,
    poisoned: Vec<u32>,
    pause: Duration,
) -> ReceivedAnswer {
    let env = SeededEnv::new(11);
    let handle = fleet.start(Arc::new(env.clone()));
    let others: Vec<_> = (0..5).map(|seed| sound(checkpoint, seed)).collect();
    let world = env.clone();
    env.run(async move {
        let mut ends = Vec::new();
        for (at, (prompt, expected)) in others.iter().cloned().enumerate() {
            let (done, end) = tokio::sync::oneshot::channel();
            let handle = handle.clone();
            world.spawn(Box::pin(async move {
                let answer = ask(&handle, format!("sound {at}"), prompt, TOKENS, None).await;
                let _ = done.send((answer, expected));
            }));
            ends.push(end);
        }
        let answer = ask(&handle, "poisoned".into(), poisoned, TOKENS, None).await;
        for end in ends {
            let (ReceivedAnswer { tokens, failure, .. }, expected) = end.await.unwrap();
            assert_eq!((tokens, failure), (expected, None));
        }
        world.sleep(pause).await;
        let (prompt, expected) = others[0].clone();
        let ReceivedAnswer { tokens, failure, .. } = ask(&handle, "after".into(), prompt, TOKENS, None).await;
        assert_eq!((tokens, failure), (expected, None));
        answer
    })
}

#[test]
fn a_token_beyond_the_embedding_ends_its_request_and_no_instance() {
    let checkpoint = checkpoint();
    let fleet = TestFleet::new(checkpoint.clone()).with(Role::Auto).with(Role::Auto);
    let answer = one_among_others(&fleet, &checkpoint, vec![1, 2, checkpoint.config.vocab], Duration::ZERO);
    let failure = answer.failure.unwrap();
    assert!(failure.contains("embedding"), "{failure}");
    assert_eq!((answer.tokens.len(), fleet.instances()), (0, 2));
}

#[test]
fn what_a_device_cannot_do_for_one_sequence_of_a_step_ends_that_one() {
    let checkpoint = checkpoint();
    let token = poison(&checkpoint);
    for kind in [ErrorKind::Invalid, ErrorKind::Unsupported, ErrorKind::OutOfMemory] {
        let (device, refusals) = dies_of("device0", token, kind);
        let fleet = TestFleet::new(checkpoint.clone()).with_device(Role::Auto, device);
        let answer = one_among_others(&fleet, &checkpoint, vec![1, 2, token], Duration::ZERO);
        assert_eq!((answer.failure.as_deref(), fleet.instances()), (Some("poisoned"), 1), "{kind:?}");
        assert!(refusals.load(Ordering::Relaxed) > 0, "{kind:?}: never met");
    }
}

#[test]
fn a_request_with_which_two_instances_were_lost_ends() {
    let checkpoint = checkpoint();
    let token = poison(&checkpoint);
    let mut fleet = TestFleet::new(checkpoint.clone());
    let mut deaths = Vec::new();
    for member in 0..4 {
        let (device, count) = dies_of(&format!("device{member}"), token, ErrorKind::DeviceLost);
        fleet = fleet.with_device(Role::Auto, device);
        deaths.push(count);
    }
    // Two other instances are left for the requests of the lost ones.
    let answer = one_among_others(&fleet, &checkpoint, vec![1, 2, token], Duration::ZERO);
    let failure = answer.failure.unwrap();
    assert!(failure.contains("2 instances were lost"), "{failure}");
    assert_eq!(deaths.iter().map(|count| count.load(Ordering::Relaxed)).sum::<u32>(), 2);
}

#[test]
fn who_sends_a_deadly_request_again_and_again_loses_two_instances() {
    let checkpoint = checkpoint();
    let token = poison(&checkpoint);
    let mut fleet = TestFleet::new(checkpoint.clone());
    let mut deaths = Vec::new();
    for member in 0..4 {
        let (device, count) = dies_of(&format!("device{member}"), token, ErrorKind::DeviceLost);
        fleet = fleet.with_device(Role::Auto, device);
        deaths.push(count);
    }
    let env = SeededEnv::new(12);
    let handle = fleet.start(Arc::new(env.clone()));
    let (prompt, expected) = sound(&checkpoint, 3);
    env.run(async move {
        let first = ask(&handle, "poisoned".into(), vec![1, 2, token], TOKENS, None).await;
        assert!(first.failure.unwrap().contains("2 instances were lost"));
        for retry in 0..20 {
            let mut again = GenerateRequest::greedy(format!("again {retry}"), vec![1, 2, token], TOKENS);
            again.sampling.seed = retry;
            let refused = handle.submit(again).await.unwrap_err();
            let Rejection::Quarantined(why) = refused else { panic!("{refused}") };
            assert!(why.contains("2 instances were lost"), "{why}");
        }
        let other = ask(&handle, "other".into(), prompt, TOKENS, None).await;
        assert_eq!((other.tokens, other.failure), (expected, None), "other requests are answered");
    });
    assert_eq!(deaths.iter().map(|count| count.load(Ordering::Relaxed)).sum::<u32>(), 2);
}

#[test]
fn an_instance_that_failed_is_opened_again_once_its_device_answers() {
    let checkpoint = checkpoint();
    let broken = Arc::new(AtomicBool::new(false));
    let state = broken.clone();
    let device = Wayward::new("device0").writing(move |_, _| match state.load(Ordering::Relaxed) {
        true => Err(Error::new(ErrorKind::DeviceLost, "the device fell off the bus")),
        false => Ok(()),
    });
    let fleet = TestFleet::new(checkpoint.clone()).with_device(Role::Auto, Arc::new(device));
    let env = SeededEnv::new(3);
    let handle = fleet.start(Arc::new(env.clone()));
    let ((prompt, expected), world) = (sound(&checkpoint, 1), env.clone());
    let up = fleet.watch();
    env.run(async move {
        let first = ask(&handle, "first".into(), prompt.clone(), TOKENS, None).await;
        assert_eq!((first.tokens, up()), (expected.clone(), (1, true)));
        broken.store(true, Ordering::Relaxed);
        let lost = ask(&handle, "lost".into(), prompt.clone(), TOKENS, None).await;
        assert!(lost.failure.unwrap().contains("instance was lost"));
        world.sleep(Duration::from_secs(30)).await;
        assert_eq!(up(), (0, false), "it does not answer yet");
        broken.store(false, Ordering::Relaxed);
        world.sleep(Duration::from_secs(120)).await;
        assert_eq!(up(), (1, true), "it answers");
        let again = ask(&handle, "again".into(), prompt, TOKENS, None).await;
        assert_eq!((again.tokens, again.cached_tokens), (expected, 0), "what it held is gone");
    });
}

#[test]
fn a_device_that_draws_a_token_that_there_is_not_is_lost_and_nothing_panics() {
    let checkpoint = checkpoint();
    let lies = Arc::new(AtomicU32::new(0));
    let count = lies.clone();
    let liar = Wayward::new("device0").reading(move |from, data| {
        // This is the drawn token of one row.
        let is_drawn = from.bytes == size_of::<Drawn>() as u64;
        if is_drawn && count.fetch_add(1, Ordering::Relaxed) == 0 {
            data[..4].copy_from_slice(&(NO_TOKEN - 1).to_le_bytes());
        }
        Ok(())
    });
    let fleet = TestFleet::new(checkpoint.clone()).with_device(Role::Auto, Arc::new(liar)).with(Role::Auto);
    let (prompt, expected) = sound(&checkpoint, 2);
    let env = SeededEnv::new(5);
    for _ in 0..2 {
        let answer = fleet.run_one(&env, prompt.clone(), TOKENS);
        assert_eq!((answer.tokens, answer.failure), (expected.clone(), None));
    }
    assert!(lies.load(Ordering::Relaxed) > 0 && fleet.panics() == 0);
}

/// Memory regions that are refused while `refused` is set, as if no descriptors were left.
fn scarce(
    refused: &Arc<AtomicBool>,
) -> impl Fn(u64) -> Result<Arc<dyn SharedMemory>> + Send + Sync + 'static {
    let refused = refused.clone();
    move |bytes| match refused.load(Ordering::Relaxed) {
        true => Err(Error::new(ErrorKind::OutOfMemory, "no descriptors are left")),
        false => Ok(Arc::new(HostRegion::new(bytes as usize)?)),
    }
}

#[test]
fn without_staging_memory_a_hand_off_is_refused_and_both_instances_live() {
    let checkpoint = checkpoint();
    let refused = Arc::new(AtomicBool::new(false));
    let fleet =
        TestFleet::new(checkpoint.clone()).with(Role::Prefill).with(Role::Decode).regions(scarce(&refused));
    let env = SeededEnv::new(8);
    let handle = fleet.start(Arc::new(env.clone()));
    let ((prompt, expected), world, up) = (sound(&checkpoint, 3), env.clone(), fleet.watch());
    env.run(async move {
        world.sleep(Duration::from_secs(1)).await;
        refused.store(true, Ordering::Relaxed);
        let turned_away = ask(&handle, "no memory".into(), prompt.clone(), TOKENS, None).await;
        assert!(turned_away.failure.is_some() && turned_away.tokens.is_empty());
        assert_eq!(up().0, 2, "both instances live");
        refused.store(false, Ordering::Relaxed);
        world.sleep(Duration::from_secs(5)).await;
        let answer = ask(&handle, "memory".into(), prompt, TOKENS, None).await;
        assert_eq!((answer.tokens, answer.failure, up()), (expected, None, (2, true)));
    });
}

#[test]
fn where_a_device_can_do_both_a_refused_hand_off_is_served_there() {
    let checkpoint = checkpoint();
    let refused = Arc::new(AtomicBool::new(true));
    let fleet =
        TestFleet::new(checkpoint.clone()).with(Role::Prefill).with(Role::Auto).regions(scarce(&refused));
    let (prompt, expected) = sound(&checkpoint, 4);
    let answer = fleet.run_one(&SeededEnv::new(9), prompt, TOKENS);
    assert_eq!((answer.tokens, answer.failure), (expected, None));
}

/// Records the memory that peers write to.
struct Watched {
    inner: HostRegion,
    seen: Arc<Mutex<Vec<Range<usize>>>>,
}

fn range(bytes: &[u8]) -> Range<usize> {
    let start = bytes.as_ptr() as usize;
    start..start + bytes.len()
}

impl SharedMemory for Watched {
    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }
    fn view(&self, offset: u64, bytes: u64, look: &mut dyn FnMut(&[u8])) -> Result<()> {
        self.inner.view(offset, bytes, &mut |payload| {
            self.seen.lock().unwrap().push(range(payload));
            look(payload);
        })
    }
    fn update(&self, offset: u64, bytes: u64, change: &mut dyn FnMut(&mut [u8])) -> Result<()> {
        self.inner.update(offset, bytes, change)
    }
    fn mapping(&self) -> Option<Mapping> {
        self.inner.mapping()
    }
}

/// A piece that is checked and read again for the device could change in between: the device must get it from
/// memory that no peer can write.
#[test]
fn what_the_device_gets_of_a_peers_kv_is_the_copy_that_was_checked() {
    let checkpoint = checkpoint();
    let seen = Arc::new(Mutex::new(Vec::<Range<usize>>::new()));
    let shared = Arc::new(AtomicU32::new(0));
    let (looked, count) = (seen.clone(), shared.clone());
    let device = Wayward::new("device1").writing(move |_, data| {
        let given = range(data);
        let inside = |place: &Range<usize>| place.start < given.end && given.start < place.end;
        if looked.lock().unwrap().iter().any(inside) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    });
    let watched = seen.clone();
    let fleet = TestFleet::new(checkpoint.clone())
        .with(Role::Prefill)
        .with_device(Role::Decode, Arc::new(device))
        .regions(move |bytes| {
            let inner = HostRegion::new(bytes as usize)?;
            // Memory of the size of one piece is the receiver's own.
            Ok(match bytes {
                2048 => Arc::new(inner) as Arc<dyn SharedMemory>,
                _ => Arc::new(Watched { inner, seen: watched.clone() }),
            })
        });
    let (prompt, expected) = sound(&checkpoint, 6);
    assert_eq!(fleet.run_one(&SeededEnv::new(2), prompt, TOKENS).tokens, expected);
    assert!(!seen.lock().unwrap().is_empty(), "no piece came");
    assert_eq!(shared.load(Ordering::Relaxed), 0);
}

//! The exposed part of a hand-off: simulated parts and a link of a known rate, in virtual time.

use crate::fleet::clock::WorldClock;
use crate::fleet::{TestFleet, prompt, request};
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hal::transport::{Descriptor, Endpoint, Piece, RemoteAccess, TransferId, Transport};
use mixfleet_hal::units::{Bytes, BytesPerSecond, FlopPerSecond, Seconds};
use mixfleet_hal::{DType, Device, Error, ErrorKind, Result};
use mixfleet_runtime::env::{Env, SeededEnv};
use mixfleet_runtime::model::Checkpoint;
use mixfleet_runtime::model::variants::tiny_variants;
use mixfleet_runtime::request::Update;
use mixfleet_scheduler::fleet::Role;
use mixfleet_simulated::TimeOnlyDevice;
use mixfleet_wire::InProcessTransport;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

pub(super) const LAYERS: u32 = 12;
pub(super) const FLOPS: f64 = 2e7;
/// Five chunks of the 24 tokens that the fleet's steps have.
pub(super) const PROMPT_TOKENS: u32 = 120;

/// A transport with a transmission time, which does not depend on the sender. Bytes are copied at once, but
/// are not read before the sender reports them.
pub(super) struct Paced {
    memory: InProcessTransport,
    env: SeededEnv,
    bytes_per_s: f64,
    /// Time from which every transfer fails, if the link breaks.
    breaks_at: Arc<OnceLock<Seconds>>,
    /// When pieces of this size began to leave.
    left: Arc<Mutex<Vec<(Seconds, u64)>>>,
}

impl Paced {
    pub(super) fn new(env: &SeededEnv, bytes_per_s: f64) -> Self {
        let (memory, env) = (InProcessTransport::new(), env.clone());
        Paced { memory, env, bytes_per_s, breaks_at: Arc::default(), left: Arc::default() }
    }

    /// The pieces that have left so far, with times.
    pub(super) fn left(&self) -> Arc<Mutex<Vec<(Seconds, u64)>>> {
        self.left.clone()
    }
}

impl Transport for Paced {
    fn name(&self) -> &'static str {
        self.memory.name()
    }

    fn register(&self, memory: Arc<dyn SharedMemory>, access: RemoteAccess) -> Result<Descriptor> {
        self.memory.register(memory, access)
    }

    fn deregister(&self, region: &Descriptor) -> Result<()> {
        self.memory.deregister(region)
    }

    fn connect(&self, local: Arc<dyn SharedMemory>, region: &Descriptor) -> Result<Box<dyn Endpoint>> {
        let inner = self.memory.connect(local, region)?;
        let Paced { env, bytes_per_s, breaks_at, left, .. } = self;
        let (env, bytes_per_s, breaks_at) = (env.clone(), *bytes_per_s, breaks_at.clone());
        let (left, free_at, landing) = (left.clone(), Seconds::ZERO, BTreeMap::new());
        Ok(Box::new(PacedWay { inner, env, bytes_per_s, breaks_at, left, free_at, landing }))
    }
}

struct PacedWay {
    inner: Box<dyn Endpoint>,
    env: SeededEnv,
    bytes_per_s: f64,
    breaks_at: Arc<OnceLock<Seconds>>,
    left: Arc<Mutex<Vec<(Seconds, u64)>>>,
    /// Time at which all started transfers have landed.
    free_at: Seconds,
    landing: BTreeMap<u64, Seconds>,
}

impl Endpoint for PacedWay {
    fn write(&mut self, pieces: &[Piece]) -> Result<TransferId> {
        let transfer = self.inner.write(pieces)?;
        let bytes: u64 = pieces.iter().map(|piece| piece.bytes).sum();
        self.left.lock().unwrap().push((self.env.now(), bytes));
        self.free_at = self.free_at.max(self.env.now()) + Seconds(bytes as f64 / self.bytes_per_s);
        self.landing.insert(transfer.0, self.free_at);
        Ok(transfer)
    }

    fn read(&mut self, _: &[Piece]) -> Result<TransferId> {
        Err(Error::unsupported("hand-offs only write"))
    }

    fn wait(&mut self, transfer: TransferId, timeout: Duration) -> Result<()> {
        if let Some(&lands) = self.landing.get(&transfer.0) {
            self.env.block_until(lands.min(self.env.now() + Seconds(timeout.as_secs_f64())));
            if self.breaks_at.get().is_some_and(|&at| self.env.now() >= at) {
                return Err(Error::new(ErrorKind::Closed, "the link broke"));
            }
            if self.env.now() < lands {
                return Err(Error::new(ErrorKind::Timeout, "it is in flight"));
            }
            self.landing.remove(&transfer.0);
        }
        self.inner.wait(transfer, timeout)
    }

    fn cancel(&mut self, transfer: TransferId) -> Result<()> {
        self.landing.remove(&transfer.0);
        self.inner.cancel(transfer)
    }
}

pub(super) fn checkpoint() -> Checkpoint {
    let (_, mut random) = tiny_variants().remove(1);
    random.config.insert("num_hidden_layers".into(), json!(LAYERS));
    random.load().unwrap()
}

/// The measured times of one request.
pub(super) struct HandedOff {
    pub(super) tokens: Vec<u32>,
    pub(super) ttft_s: f64,
    /// When the first token came.
    pub(super) first_at: Seconds,
    pub(super) exposed_s: f64,
    pub(super) retries: u64,
}

/// Sends one prompt over a link of this rate, with a `timeout` per piece.
fn hand_off(checkpoint: &Checkpoint, bytes_per_s: f64, timeout: Duration) -> HandedOff {
    hand_off_until(checkpoint, bytes_per_s, timeout, None)
}

/// The same, over a link that breaks after this time.
fn hand_off_until(
    checkpoint: &Checkpoint,
    bytes_per_s: f64,
    timeout: Duration,
    breaks_after: Option<Seconds>,
) -> HandedOff {
    let env = SeededEnv::with_blocking_workers(5);
    let device = |at: usize| -> Arc<dyn Device> {
        let clock = Arc::new(WorldClock(env.clone()));
        Arc::new(TimeOnlyDevice::new(&format!("device{at}"), part(FLOPS), clock).unwrap())
    };
    let link = Paced::new(&env, bytes_per_s);
    let breaks_at = link.breaks_at.clone();
    let fleet = TestFleet::new(checkpoint.clone())
        .with_device(Role::Prefill, device(0))
        .with_device(Role::Decode, device(1))
        .transport(Arc::new(link))
        .hand_off_timeout(timeout);
    ask(&fleet, &env, prompt(PROMPT_TOKENS, 3, &checkpoint.config), move |now| {
        if let Some(after) = breaks_after {
            breaks_at.set(now + after).expect("one request is sent");
        }
    })
}

/// A part whose time is mostly arithmetic.
pub(super) fn part(flops: f64) -> DeviceProfile {
    let rates = [DType::F32, DType::Bf16].map(|dtype| (dtype, FlopPerSecond(flops)));
    DeviceProfile::roof(rates.to_vec(), BytesPerSecond(1e9), Bytes(1e9))
}

/// Sends one prompt to a fleet; `begun` is notified of the start.
pub(super) fn ask(
    fleet: &TestFleet,
    env: &SeededEnv,
    prompt: Vec<u32>,
    begun: impl FnOnce(Seconds) + Send + 'static,
) -> HandedOff {
    let handle = fleet.start(Arc::new(env.clone()));
    let world = env.clone();
    let (tokens, times) = env.run(async move {
        let (mut tokens, mut times) = (Vec::new(), vec![world.now()]);
        begun(times[0]);
        let mut updates = handle.submit(request("one".into(), prompt, 6, None)).await.expect("admitted");
        while let Some(update) = updates.recv().await {
            match update {
                Update::Token { id, .. } => {
                    times.push(world.now());
                    tokens.push(id);
                }
                Update::Failed(failure) => panic!("{failure}"),
                _ => {}
            }
        }
        (tokens, times)
    });
    env.end();
    let (exposed_s, requests) = fleet.exposed_s();
    assert_eq!(requests, 1, "one request was handed off");
    let (first_at, retries) = (times[1], fleet.transfer_troubles().0);
    HandedOff { tokens, ttft_s: (first_at - times[0]).0, first_at, exposed_s, retries }
}

pub(super) const PATIENT: Duration = Duration::from_secs(1000);

#[test]
fn a_link_of_twice_the_need_hides_all_but_the_last_layer_and_one_of_half_shows_what_is_left() {
    let checkpoint = checkpoint();
    let kv_bytes = (u64::from(PROMPT_TOKENS) * checkpoint.config.kv_bytes_per_token(DType::F32)) as f64;
    let free = hand_off(&checkpoint, 1e15, PATIENT);
    let need = kv_bytes / free.ttft_s;
    assert!(free.exposed_s < 0.01 * free.ttft_s, "{} of {} s", free.exposed_s, free.ttft_s);

    let wide = hand_off(&checkpoint, 2.0 * need, PATIENT);
    let serial_s = kv_bytes / (2.0 * need);
    let layer_s = serial_s / f64::from(LAYERS * PROMPT_TOKENS / 24);
    assert!(wide.exposed_s <= 0.1 * serial_s + layer_s, "{} of {serial_s} s", wide.exposed_s);
    assert!(wide.exposed_s > 0.0, "the last layer's KV cannot leave before it is computed");
    println!("serial {serial_s:.3} s, a layer {layer_s:.4} s, exposed {:.4} s", wide.exposed_s);
    assert!(wide.ttft_s <= 1.01 * free.ttft_s, "the prompt waited for its KV: {} s", wide.ttft_s);

    // Slots bound the bytes in transit: the prompt waits for the link, or the transfer is exposed after it.
    let narrow = hand_off(&checkpoint, 0.5 * need, PATIENT);
    let late_s = narrow.ttft_s - free.ttft_s + narrow.exposed_s;
    let unhidden_s = kv_bytes / (0.5 * need) - free.ttft_s;
    assert!((0.95..1.3).contains(&(late_s / unhidden_s)), "{late_s} s late, {unhidden_s} s are not hidden");

    for other in [&wide, &narrow] {
        assert_eq!(other.tokens, free.tokens);
        assert_eq!(other.retries, 0);
    }
}

/// Three pieces are in transit at a time, so the last one takes three times as long as the link needs for
/// one.
#[test]
fn a_slow_link_is_not_taken_for_a_lost_one() {
    let checkpoint = checkpoint();
    let slot_bytes = 2048.0;
    let slow = hand_off(&checkpoint, slot_bytes / 1.0, Duration::from_millis(1500));
    assert_eq!(slow.retries, 0);
    assert_eq!(slow.tokens, hand_off(&checkpoint, 1e15, PATIENT).tokens);
}

/// The sender waits for a slot when all of its sends fail at once: no message tells it that slots are free.
#[test]
fn a_link_that_breaks_with_every_slot_in_transit_keeps_no_step_waiting() {
    let checkpoint = checkpoint();
    let met = hand_off_until(&checkpoint, 2048.0 / 10.0, PATIENT, Some(Seconds(5.0)));
    assert!(met.retries > 0 && met.ttft_s > 5.0, "{} retries, {} s", met.retries, met.ttft_s);
    assert_eq!(met.tokens, hand_off(&checkpoint, 1e15, PATIENT).tokens);
}

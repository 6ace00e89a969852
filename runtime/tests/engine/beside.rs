//! KV that lands while the receiver runs a step: simulated parts that take time only, in virtual time.

use crate::fleet::clock::WorldClock;
use crate::fleet::wayward::Wayward;
use crate::fleet::{Case, TestFleet, prompt, request};
use mixfleet_hal::profile::DeviceProfile;
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::{Bytes, BytesPerSecond, FlopPerSecond, Seconds};
use mixfleet_hal::{Cmd, DType, Device, Elapsed, Graph, OpSig, Queue, Result, Slice, Ticket};
use mixfleet_runtime::env::{Env, SeededEnv};
use mixfleet_runtime::model::Checkpoint;
use mixfleet_runtime::model::variants::tiny_variants;
use mixfleet_runtime::pool::disk::SimDisk;
use mixfleet_runtime::request::{Update, UpdateReceiver};
use mixfleet_scheduler::fleet::Role;
use mixfleet_simulated::{TimeOnlyDevice, VirtualClock};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

fn part(env: &SeededEnv, at: usize, flops: f64) -> Arc<dyn Device> {
    part_of(env, at, flops, 1e12)
}

/// A part with this many FLOP/s and bytes/s.
fn part_of(env: &SeededEnv, at: usize, flops: f64, bandwidth: f64) -> Arc<dyn Device> {
    let rates = [DType::F32, DType::Bf16].map(|dtype| (dtype, FlopPerSecond(flops)));
    let profile = DeviceProfile::roof(rates.to_vec(), BytesPerSecond(bandwidth), Bytes(1e9));
    let clock = Arc::new(WorldClock(env.clone()));
    Arc::new(TimeOnlyDevice::new(&format!("device{at}"), profile, clock).unwrap())
}

/// The times of a request's tokens since it was submitted, in seconds.
pub(super) async fn times(env: &SeededEnv, updates: &mut UpdateReceiver, count: usize) -> Vec<f64> {
    let begun = env.now();
    let mut times = Vec::new();
    while times.len() < count {
        match updates.recv().await.expect("it goes on") {
            Update::Token { .. } => times.push((env.now() - begun).0),
            Update::Failed(failure) => panic!("{failure}"),
            _ => {}
        }
    }
    times
}

/// 120 tokens of 12 layers are 60 pieces, three of which are in flight at a time.
#[test]
fn kv_of_many_more_pieces_than_slots_lands_within_about_one_step_of_its_receiver() {
    let (_, mut random) = tiny_variants().remove(1);
    random.config.insert("num_hidden_layers".into(), json!(12));
    let checkpoint = random.load().unwrap();
    let env = SeededEnv::with_blocking_workers(5);
    let fleet = TestFleet::new(checkpoint.clone())
        .with_device(Role::Prefill, part(&env, 0, 1e10))
        .with_device(Role::Decode, part(&env, 1, 1e5));
    let handle = fleet.start(Arc::new(env.clone()));
    let config = checkpoint.config.clone();
    let world = env.clone();
    let (step_s, second_s) = env.run(async move {
        let first = request("one".into(), prompt(8, 3, &config), 400, None);
        let mut one = handle.submit(first).await.expect("admitted");
        let of_one = times(&world, &mut one, 4).await;
        let step_s = of_one[3] - of_one[2];
        // It lands in the middle of a step.
        world.sleep(Duration::from_secs_f64(step_s / 2.0)).await;
        let second = request("two".into(), prompt(120, 4, &config), 2, None);
        let mut two = handle.submit(second).await.expect("admitted");
        (step_s, times(&world, &mut two, 2).await)
    });
    env.end();
    println!("a step {step_s:.3} s, the tokens after {second_s:.3?} s");
    assert!(step_s > 0.5, "{step_s}");
    // The prompt leaves at once after the step in which its request came. The next step is the one during
    // which it lands, and one of both requests takes up to three times as long.
    assert!(second_s[0] < 1.1 * step_s, "{second_s:?} of steps of {step_s} s");
    assert!(second_s[1] < 5.0 * step_s, "{second_s:?} of steps of {step_s} s");
    assert_eq!(fleet.transfer_troubles(), (0, 0));
}

/// Work on the queues of one device.
#[derive(Default)]
pub(super) struct Running {
    /// Pages that the batches which were not waited for use, by queue.
    pages: BTreeMap<usize, Vec<(Ticket, BTreeSet<u32>)>>,
    queues: usize,
    /// Number of pieces that were scattered while another queue's batch ran.
    pub(super) beside: usize,
}

/// A queue that checks scattered pages against the batches of other queues.
struct Checked {
    inner: Box<dyn Queue>,
    device: Arc<dyn Device>,
    running: Arc<Mutex<Running>>,
    number: usize,
}

impl Checked {
    fn words(&self, slice: &Slice) -> Vec<u32> {
        let mut bytes = vec![0; slice.bytes as usize];
        self.device.read(slice, &mut bytes).unwrap();
        bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
    }

    /// The pages that a command reads or writes.
    fn pages(&self, cmd: &Cmd) -> BTreeSet<u32> {
        let args = cmd.args();
        match *cmd.sig() {
            OpSig::KvWrite { kv, .. } => self.of_slots(&args[2], kv.page_tokens),
            OpSig::KvGather { kv, .. } => self.of_slots(&args[0], kv.page_tokens),
            OpSig::KvScatter { kv, .. } => self.of_slots(&args[1], kv.page_tokens),
            OpSig::AttnDecode { pages_max, kv, .. } => {
                let ranges = self.words(&args[1]);
                let ends = ranges.chunks_exact(2).map(|range| range[1]).collect();
                self.of_table(&args[2], pages_max, ends, kv.page_tokens)
            }
            OpSig::AttnPrefill { pages_max, kv, .. } => {
                self.of_table(&args[3], pages_max, self.words(&args[2]), kv.page_tokens)
            }
            _ => BTreeSet::new(),
        }
    }

    fn of_slots(&self, slots: &Slice, page_tokens: u32) -> BTreeSet<u32> {
        self.words(slots).into_iter().map(|slot| slot / page_tokens).collect()
    }

    /// The pages of the leading `ends` tokens of each row.
    fn of_table(&self, table: &Slice, pages_max: u32, ends: Vec<u32>, page_tokens: u32) -> BTreeSet<u32> {
        let table = self.words(table);
        let rows = table.chunks_exact(pages_max as usize).zip(ends);
        rows.flat_map(|(row, end)| row[..end.div_ceil(page_tokens) as usize].to_vec()).collect()
    }
}

impl Queue for Checked {
    fn submit(&mut self, cmds: &[Cmd]) -> Result<Ticket> {
        let pages = cmds.iter().map(|cmd| (matches!(cmd.sig(), OpSig::KvScatter { .. }), self.pages(cmd)));
        let pages: Vec<(bool, BTreeSet<u32>)> = pages.collect();
        let ticket = self.inner.submit(cmds)?;
        let mut running = self.running.lock().unwrap();
        for (_, written) in pages.iter().filter(|(scatters, _)| *scatters) {
            let others = running.pages.iter().filter(|(queue, _)| **queue != self.number);
            let others: Vec<&BTreeSet<u32>> = others.flat_map(|(_, b)| b.iter().map(|(_, p)| p)).collect();
            let both = others.iter().find_map(|pages| pages.intersection(written).next().copied());
            assert_eq!(both, None, "a page that a running step uses is written");
            running.beside += usize::from(others.iter().any(|pages| !pages.is_empty()));
        }
        let all = pages.into_iter().flat_map(|(_, pages)| pages).collect();
        running.pages.entry(self.number).or_default().push((ticket, all));
        Ok(ticket)
    }

    fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<Elapsed> {
        let elapsed = self.inner.wait(ticket, timeout)?;
        let mut running = self.running.lock().unwrap();
        running.pages.entry(self.number).or_default().retain(|(other, _)| *other > ticket);
        Ok(elapsed)
    }

    fn record(&mut self, cmds: &[Cmd]) -> Result<Arc<dyn Graph>> {
        self.inner.record(cmds)
    }

    fn replay(&mut self, graph: &Arc<dyn Graph>) -> Result<Ticket> {
        self.inner.replay(graph)
    }
}

/// A part whose queues are checked, and its work.
pub(super) fn checked(device: Arc<dyn Device>) -> (Arc<dyn Device>, Arc<Mutex<Running>>) {
    let running: Arc<Mutex<Running>> = Arc::default();
    let (inner, all) = (device.clone(), running.clone());
    let queue = move |queue| -> Box<dyn Queue> {
        let mut running = all.lock().unwrap();
        running.queues += 1;
        Box::new(Checked {
            inner: queue,
            device: inner.clone(),
            running: all.clone(),
            number: running.queues,
        })
    };
    (Arc::new(Wayward::over(device).queuing(queue)), running)
}

/// Requests with common prefixes, whose answers equal those of a part without other work.
fn cases(checkpoint: &Checkpoint, seed: u64, count: usize) -> Vec<Case> {
    let mut rng = Stream::new(seed);
    let family = prompt(60, 2000, &checkpoint.config);
    let alone = |prompt: &[u32], count| {
        let profile = mixfleet_hal::catalog::part("L4").unwrap().profile();
        let device = TimeOnlyDevice::new("device0", profile, Arc::new(VirtualClock::default())).unwrap();
        let fleet = TestFleet::new(checkpoint.clone()).with_device(Role::Auto, Arc::new(device));
        fleet.run_one(&SeededEnv::new(1), prompt.to_vec(), count).tokens
    };
    let case = |_| {
        let mut prompt = family[..rng.below(50) as usize].to_vec();
        let own = 1 + rng.below(12);
        prompt.extend((0..own).map(|_| rng.below(u64::from(checkpoint.config.vocab)) as u32));
        let expected = alone(&prompt, 1 + rng.below(24) as u32);
        Case { prompt, expected }
    };
    (0..count).map(case).collect()
}

/// Few blocks, so that blocks released by some are given to others at once; hand-offs, and pulls between two
/// that compute.
#[test]
fn no_page_that_a_running_step_uses_is_written_by_what_lands() {
    let checkpoint = tiny_variants().remove(0).1.load().unwrap();
    let mut beside = 0;
    for seed in 0..6 {
        let env = SeededEnv::with_blocking_workers(seed);
        let (one, of_one) = checked(part(&env, 0, 4e7));
        let (two, of_two) = checked(part(&env, 1, 2e7));
        let roles = [[Role::Prefill, Role::Decode], [Role::Auto, Role::Auto]][seed as usize % 2];
        let fleet = TestFleet::new(checkpoint.clone())
            .with_device(roles[0], one)
            .with_device(roles[1], two)
            .blocks(14);
        let usage = fleet.run_many(&env, cases(&checkpoint, seed, 24));
        assert_eq!(usage, 0.0, "seed {seed}: blocks are still in use");
        env.end();
        beside += [of_one, of_two].iter().map(|running| running.lock().unwrap().beside).sum::<usize>();
    }
    assert!(beside > 50, "{beside} pieces landed during steps");
}

/// Prompts that return, in memory for two of them, so that each is loaded from host memory while others
/// decode.
#[test]
fn no_page_that_a_running_step_uses_is_written_by_what_is_loaded() {
    let checkpoint = tiny_variants().remove(0).1.load().unwrap();
    let mut loaded = 0;
    for seed in 0..4 {
        let env = SeededEnv::with_blocking_workers(seed);
        let (device, running) = checked(part(&env, 0, 4e7));
        let fleet =
            TestFleet::new(checkpoint.clone()).with_device(Role::Auto, device).blocks(14).lower(64, None);
        let once = cases(&checkpoint, seed, 12);
        let twice = once
            .iter()
            .chain(&once)
            .map(|case| Case { prompt: case.prompt.clone(), expected: case.expected.clone() });
        let usage = fleet.run_many(&env, twice.collect());
        assert_eq!(usage, 0.0, "seed {seed}: blocks are still in use");
        env.end();
        loaded += running.lock().unwrap().beside;
    }
    assert!(loaded > 20, "{loaded} pieces were loaded during steps");
}

/// The holder of a request's prefix.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Holder {
    Device,
    HostMemory,
    Disk,
}

/// The longest gap of a stream beside a request whose prefix `holder` has; and that request's TTFT, alone and
/// beside the stream. A block takes 0.5 ms to the device or from it, and 20 ms from the disk.
fn beside_a_request(copies_beside: bool, holder: Holder) -> (f64, [f64; 2]) {
    const LINK: Seconds = Seconds(5e-4);
    const READ: Duration = Duration::from_millis(20);
    let (_, mut random) = tiny_variants().remove(1);
    random.config.insert("num_hidden_layers".into(), json!(12));
    let checkpoint = random.load().unwrap();
    let env = SeededEnv::with_blocking_workers(5);
    let block_bytes = 8 * checkpoint.config.kv_bytes_per_token(DType::F32);
    let takes = |env: &SeededEnv| {
        let world = env.clone();
        move |bytes: usize| {
            if bytes as u64 >= block_bytes / 2 {
                world.block_until(world.now() + LINK);
            }
            Ok(())
        }
    };
    let (writes, reads) = (takes(&env), takes(&env));
    let device = Wayward::over(part_of(&env, 0, 4e8, 1e10))
        .copies_beside(copies_beside)
        .writing(move |_, bytes| writes(bytes.len()))
        .reading(move |_, place| reads(place.len()));
    let (disk, world) = (SimDisk::default(), env.clone());
    disk.reads_take(READ, move |span| world.block_until(world.now() + Seconds(span.as_secs_f64())));
    // host memory keeps a few blocks only where the disk is to have the prefix
    let (dram_blocks, disk) = if holder == Holder::Disk { (8, Some((disk, 1 << 24))) } else { (512, None) };
    let fleet = TestFleet::new(checkpoint.clone())
        .with_device(Role::Auto, Arc::new(device))
        .blocks(64)
        .lower(dram_blocks, disk);
    let handle = fleet.start(Arc::new(env.clone()));
    let config = checkpoint.config.clone();
    let world = env.clone();
    let answer = env.run(async move {
        let ask = async |prompt: &Vec<u32>, tokens| {
            handle.submit(request("one".into(), prompt.clone(), tokens, None)).await.expect("admitted")
        };
        let (long, other) = (prompt(400, 3, &config), prompt(400, 4, &config));
        let mut alone_s = 0.0;
        // in the end the disk has a copy of all that host memory gives up
        let turns = match holder {
            Holder::Device => 3,
            Holder::HostMemory => 4,
            Holder::Disk => 8,
        };
        for prompt in [&long, &other].into_iter().cycle().take(turns) {
            let first_s = times(&world, &mut ask(prompt, 1).await, 1).await[0];
            alone_s = if std::ptr::eq(prompt, &long) { first_s } else { alone_s };
        }
        let mut stream = ask(&prompt(8, 5, &config), 120).await;
        times(&world, &mut stream, 40).await;
        let mut beside = ask(&long, 1).await;
        let first = async { times(&world, &mut beside, 1).await[0] };
        let streamed = async {
            let mut longest = 0.0f64;
            for _ in 0..60 {
                longest = longest.max(times(&world, &mut stream, 1).await[0]);
            }
            longest
        };
        let (beside_s, longest) = tokio::join!(first, streamed);
        (longest, [alone_s, beside_s])
    });
    env.end();
    let hits = fleet.tier_hits(0, if holder == Holder::Disk { "ssd" } else { "dram" });
    let least = if holder == Holder::HostMemory { 60 } else { 30 };
    assert!(hits >= least, "{hits} blocks were loaded, {holder:?}");
    assert_eq!(fleet.outages(0), 0);
    answer
}

#[test]
fn a_load_hardly_shows_in_the_stream_beside_it() {
    for copies_beside in [true, false] {
        let (without, _) = beside_a_request(copies_beside, Holder::Device);
        for holder in [Holder::HostMemory, Holder::Disk] {
            let (with, [alone_s, beside_s]) = beside_a_request(copies_beside, holder);
            println!(
                "copies beside steps: {copies_beside}, from {holder:?}: longest gap {with:.4} s, {without:.4} s without a load; \
                 TTFT of the loader {beside_s:.4} s, {alone_s:.4} s alone"
            );
            assert!(with <= 1.2 * without, "{with} {without}");
            // the step that runs as it comes, and the one in which it has its last tokens
            let steps_s = if copies_beside { 2.0 * without } else { f64::INFINITY };
            assert!(beside_s <= 1.1 * alone_s + steps_s, "{beside_s} {alone_s}");
        }
    }
}

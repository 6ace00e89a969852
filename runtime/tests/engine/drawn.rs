//! Tokens drawn by a device, against those that the host draws in f64.

use crate::fleet::wayward::Wayward;
use crate::fleet::{TestFleet, prompt, request};
use futures_util::future::join_all;
use mixfleet_cpu::CpuBackend;
use mixfleet_hal::random::{Stream, bits, unit};
use mixfleet_hal::sample::{Drawn, LOG2_E, Parameters, fraction};
use mixfleet_hal::{
    Backend, BufferUsage, Cmd, Device, Elapsed, Error, Graph, OpSig, Queue, Result, Slice, Ticket,
};
use mixfleet_runtime::env::SeededEnv;
use mixfleet_runtime::model::variants::tiny_variants;
use mixfleet_runtime::request::{Sampling, Update};
use mixfleet_runtime::sampling::{History, sample};
use mixfleet_scheduler::fleet::Role;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const VOCAB: usize = 1000;
/// Rows of one command; there are as many distinct rows of logits.
const ROWS: usize = 250;
const SEEDS: usize = 10_000;
/// How close to a boundary a draw is whose token may be another, and how many may.
const CLOSE: f64 = 1e-5;
const UNLIKE_MAX: usize = SEEDS / 1000;

/// Each penalised token, with the bits of what its logit loses.
fn penalties(sampling: &Sampling, history: History<'_>) -> Vec<[u32; 2]> {
    if sampling.repetition_penalty == 1.0 {
        return Vec::new();
    }
    let mut counts: BTreeMap<u32, u32> = history.prompt.iter().map(|&id| (id, 0)).collect();
    history.output.iter().for_each(|&id| *counts.entry(id).or_default() += 1);
    let lost = |count: u32| match count {
        0 => 0.0,
        count => sampling.presence_penalty + sampling.frequency_penalty * count as f32,
    };
    counts.into_iter().map(|(id, count)| [id, lost(count).to_bits()]).collect()
}

/// Draws one token of each row with seeds from `first` on.
fn on_device(
    device: &dyn Device,
    logits: &[f32],
    sampling: &Sampling,
    first: u64,
    history: History<'_>,
) -> Vec<u32> {
    let entries = penalties(sampling, history);
    drawn_with(device, logits, sampling, first, (history.output.len() as u64, &entries))
}

/// The same for token number `index`, whose logits `entries` change.
fn drawn_with(
    device: &dyn Device,
    logits: &[f32],
    sampling: &Sampling,
    first: u64,
    (index, entries): (u64, &[[u32; 2]]),
) -> Vec<u32> {
    let parameters: Vec<_> = (0..ROWS as u64)
        .map(|row| Parameters {
            scale: if sampling.temperature > 0.0 { LOG2_E / sampling.temperature } else { 0.0 },
            top_k: sampling.top_k,
            top_p: fraction(sampling.top_p.into()),
            min_p: sampling.min_p,
            repetition: sampling.repetition_penalty,
            repetition_inverse: 1.0 / sampling.repetition_penalty,
            uniform: (bits(first + row, index) >> 32) as u32,
            logprobs: 0,
        })
        .collect();
    let starts: Vec<u32> = (0..=ROWS).map(|row| (row * entries.len()) as u32).collect();
    let entries = entries.repeat(ROWS);
    let sig = OpSig::Sample { rows: ROWS as u32, cols: VOCAB as u32, history: entries.len() as u32, tops: 0 };
    let mut contents: Vec<&[u8]> = vec![bytemuck::cast_slice(logits), bytemuck::cast_slice(&parameters)];
    if !entries.is_empty() {
        contents.extend([bytemuck::cast_slice(&starts), bytemuck::cast_slice(&entries)]);
    }
    let mut slices = Vec::new();
    for data in contents {
        let slice = device.alloc(data.len() as u64, BufferUsage::Activations).unwrap();
        device.write(&slice, data).unwrap();
        slices.push(slice);
    }
    let out = device.alloc((ROWS * size_of::<Drawn>()) as u64, BufferUsage::Activations).unwrap();
    slices.push(out.clone());
    let mut queue = device.queue().unwrap();
    let ticket = queue.submit(&[Cmd::new(sig, &slices).unwrap()]).unwrap();
    queue.wait(ticket, Duration::from_secs(60)).unwrap();
    let mut bytes = vec![0; ROWS * size_of::<Drawn>()];
    device.read(&out, &mut bytes).unwrap();
    bytes.chunks(size_of::<Drawn>()).map(|drawn| bytemuck::pod_read_unaligned::<Drawn>(drawn).id).collect()
}

/// How far a draw is from the next boundary: of a token, or of what a filter keeps.
fn margin(logits: &[f32], sampling: &Sampling, history: History<'_>) -> f64 {
    let mut logits: Vec<f64> = logits.iter().map(|&logit| f64::from(logit)).collect();
    for (id, logit) in logits.iter_mut().enumerate() {
        let count = history.output.iter().filter(|&&token| token as usize == id).count();
        let repetition = f64::from(sampling.repetition_penalty);
        if count > 0 || history.prompt.contains(&(id as u32)) {
            *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
        }
        if count > 0 {
            let (presence, frequency) = (sampling.presence_penalty, sampling.frequency_penalty);
            *logit -= f64::from(presence + frequency * count as f32);
        }
    }
    let best = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weight = |id: &usize| ((logits[*id] - best) / f64::from(sampling.temperature)).exp();
    let mut kept: Vec<usize> = (0..logits.len()).collect();
    kept.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
    let mut margin = f64::INFINITY;
    if let Some(out) = kept.get(sampling.top_k as usize).filter(|_| sampling.top_k > 0) {
        margin = margin.min(weight(&kept[sampling.top_k as usize - 1]) - weight(out));
        kept.truncate(sampling.top_k as usize);
    }
    if sampling.top_p < 1.0 {
        let (total, mut sum) = (kept.iter().map(weight).sum::<f64>(), 0.0);
        let mut before = 0;
        for id in &kept {
            let reached = sum >= f64::from(sampling.top_p) * total;
            sum += weight(id);
            margin = margin.min((sum / total - f64::from(sampling.top_p)).abs());
            before += usize::from(!reached);
        }
        kept.truncate(before.max(1));
    }
    let min_p = f64::from(sampling.min_p);
    margin = kept.iter().map(|id| (weight(id) - min_p).abs()).fold(margin, f64::min);
    kept.retain(|id| weight(id) >= min_p);
    kept.sort_unstable();
    let (total, mut sum) = (kept.iter().map(weight).sum::<f64>(), 0.0);
    let uniform = unit(sampling.seed, history.output.len() as u64);
    for id in &kept {
        sum += weight(id);
        margin = margin.min((sum / total - uniform).abs());
    }
    margin
}

#[test]
fn a_device_draws_the_tokens_that_the_host_draws_but_at_boundaries() {
    let device = CpuBackend.open("cpu").unwrap();
    let mut stream = Stream::new(17);
    let logits: Vec<f32> = (0..ROWS * VOCAB).map(|_| (2.5 * stream.next_normal()) as f32).collect();
    let prompt: Vec<u32> = (0..60).map(|_| stream.below(VOCAB as u64) as u32).collect();
    let output: Vec<u32> = (0..20).map(|_| stream.below(50) as u32).collect();
    let history = History { prompt: &prompt, output: &output };
    let plain = Sampling::default();
    let filters = [
        ("none", plain.clone()),
        ("top_k", Sampling { top_k: 40, ..plain.clone() }),
        ("top_p", Sampling { top_p: 0.95, ..plain.clone() }),
        ("min_p", Sampling { min_p: 0.02, ..plain.clone() }),
        ("all", Sampling { top_k: 100, top_p: 0.9, min_p: 0.01, temperature: 0.8, ..plain.clone() }),
    ];
    for (name, filter) in filters {
        for (with, penalty) in [("", 0.0), (" with penalties", 0.25)] {
            let sampling = Sampling {
                repetition_penalty: 1.0 + penalty,
                presence_penalty: penalty,
                frequency_penalty: penalty,
                ..filter.clone()
            };
            let mut unlike = 0;
            for first in (0..SEEDS).step_by(ROWS) {
                let drawn = on_device(&*device, &logits, &sampling, first as u64, history);
                for (row, id) in drawn.into_iter().enumerate() {
                    let logits = &logits[row * VOCAB..][..VOCAB];
                    let sampling = Sampling { seed: (first + row) as u64, ..sampling.clone() };
                    let host = sample(logits, &sampling, history, &[], None).unwrap().id;
                    if host != id {
                        unlike += 1;
                        let margin = margin(logits, &sampling, history);
                        let seed = sampling.seed;
                        assert!(
                            margin < CLOSE,
                            "{name}{with}: {id}, not {host} at seed {seed}: {margin:e} off"
                        );
                    }
                }
            }
            println!("{name}{with}: {unlike} of {SEEDS} draws differ");
            assert!(unlike <= UNLIKE_MAX, "{name}{with}: {unlike}");
        }
    }
}

/// What a grammar forbids, as a worker tells a device: entries that lower logits so far that nothing is left.
#[test]
fn a_device_draws_as_the_host_does_where_most_tokens_are_forbidden() {
    let device = CpuBackend.open("cpu").unwrap();
    let mut stream = Stream::new(18);
    let logits: Vec<f32> = (0..ROWS * VOCAB).map(|_| (2.5 * stream.next_normal()) as f32).collect();
    for allowed in [1, 3, 500, VOCAB - 1] {
        let mut forbidden: Vec<u32> = (0..VOCAB as u32).collect();
        while forbidden.len() > VOCAB - allowed {
            forbidden.remove(stream.below(forbidden.len() as u64) as usize);
        }
        let entries: Vec<_> = forbidden.iter().map(|id| [*id, 3e38f32.to_bits()]).collect();
        for filter in [
            Sampling::default(),
            Sampling { temperature: 0.0, ..Sampling::default() },
            Sampling { top_k: 40, top_p: 0.9, min_p: 0.01, ..Sampling::default() },
        ] {
            let drawn = drawn_with(&*device, &logits, &filter, 0, (0, &entries));
            let mut unlike = 0;
            for (row, id) in drawn.into_iter().enumerate() {
                assert!(
                    forbidden.binary_search(&id).is_err(),
                    "{allowed} allowed, {filter:?}: {id} is forbidden"
                );
                let logits = &logits[row * VOCAB..][..VOCAB];
                let sampling = Sampling { seed: row as u64, ..filter.clone() };
                let host = sample(logits, &sampling, History::default(), &forbidden, None).unwrap().id;
                unlike += usize::from(host != id);
            }
            assert!(unlike <= 1, "{allowed} allowed, {filter:?}: {unlike} of {ROWS} draws differ");
        }
    }
}

/// A queue that notes what the last batch was submitted for.
struct NotingQueue(Box<dyn Queue>, Arc<Mutex<Vec<Slice>>>);

impl Queue for NotingQueue {
    fn submit(&mut self, cmds: &[Cmd]) -> Result<Ticket> {
        self.submit_for(cmds, &[])
    }
    fn submit_for(&mut self, cmds: &[Cmd], results: &[Slice]) -> Result<Ticket> {
        *self.1.lock().unwrap() = results.to_vec();
        self.0.submit_for(cmds, results)
    }
    fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<Elapsed> {
        self.0.wait(ticket, timeout)
    }
    fn record(&mut self, _: &[Cmd]) -> Result<Arc<dyn Graph>> {
        Err(Error::unsupported("this test records nothing"))
    }
    fn replay(&mut self, _: &Arc<dyn Graph>) -> Result<Ticket> {
        Err(Error::unsupported("this test records nothing"))
    }
}

#[test]
fn a_sampled_token_costs_16_bytes_from_the_device_and_no_logits() {
    for replays in [false, true] {
        costs_16_bytes_a_token(replays);
    }
}

/// Requests with every filter and penalty, decoded together. A step's last batch is submitted with its
/// results, so that a device can send them with it, also where steps would be recorded.
fn costs_16_bytes_a_token(replay_pays: bool) {
    const REQUESTS: u32 = 8;
    const TOKENS: u32 = 6;
    let (_, checkpoint) = tiny_variants().remove(0);
    let checkpoint = checkpoint.load().unwrap();
    let config = checkpoint.config.clone();
    let read = Arc::new(AtomicUsize::new(0));
    let counter = read.clone();
    let announced = Arc::new(Mutex::new(Vec::<Slice>::new()));
    let (noted, expected) = (announced.clone(), announced);
    let counting = Wayward::new("device0")
        .reading(move |from, data| {
            let is_it = |slice: &Slice| {
                Arc::ptr_eq(&slice.buffer, &from.buffer)
                    && (slice.offset, slice.bytes) == (from.offset, from.bytes)
            };
            assert!(expected.lock().unwrap().iter().any(is_it), "a read that no batch was submitted for");
            counter.fetch_add(data.len(), Relaxed);
            Ok(())
        })
        .queuing(move |queue| Box::new(NotingQueue(queue, noted.clone())))
        .replay_pays(replay_pays);
    let fleet = TestFleet::new(checkpoint).with_device(Role::Auto, Arc::new(counting));
    let env = SeededEnv::new(5);
    let handle = fleet.start(Arc::new(env.clone()));
    let started = read.load(Relaxed);
    env.run(async move {
        let answers = (0..REQUESTS).map(|at| {
            let mut wanted = request(format!("{at}"), prompt(9 + at, at.into(), &config), TOKENS, None);
            wanted.sampling = Sampling {
                temperature: 1.0,
                top_p: 0.95,
                top_k: 40,
                repetition_penalty: 1.1,
                presence_penalty: 0.2,
                frequency_penalty: 0.1,
                seed: at.into(),
                ..Sampling::default()
            };
            async {
                let mut updates = handle.submit(wanted).await.expect("admitted");
                while let Some(update) = updates.recv().await {
                    assert!(!matches!(update, Update::Failed(_)), "{update:?}");
                }
            }
        });
        join_all(answers).await;
    });
    env.end();
    assert_eq!(read.load(Relaxed) - started, size_of::<Drawn>() * (REQUESTS * TOKENS) as usize);
    assert_eq!(size_of::<Drawn>(), 16);
}

//! Attention offload: together with the device that has the weights, attention devices compute what one
//! device does, and each keeps only its own part.

use super::cost_shape::{BLOCK_TOKENS, counted};
use super::divided::{LOGIT_ERROR_MAX, Ran, Seen, core, seeing, two_sequences, unlike, worst_error};
use crate::fleet::{TestFleet, ask, greedy, prompt};
use bytemuck::Zeroable;
use mixfleet_hal::catalog::part;
use mixfleet_hal::sample::Drawn;
use mixfleet_hal::{
    AttendedPart, BufferUsage, Collective, DType, Device, HostMemory, MatrixPart, MemberSlice, OpSig, Queue,
    Result, Slice,
};
use mixfleet_hwtests::reference::ReferenceDevice;
use mixfleet_runtime::engine::{InstanceLimits, InstanceSpec, Loaded, MemberSpec};
use mixfleet_runtime::env::{SeededEnv, SharedEnv};
use mixfleet_runtime::model::apart::{ApartBatch, ApartQueues, AttentionMember, run_apart};
use mixfleet_runtime::model::divided::MicroBatch;
use mixfleet_runtime::model::draws::DrawInput;
use mixfleet_runtime::model::exchange::ThroughHost;
use mixfleet_runtime::model::graph::{Forward, StepInput, StepShape};
use mixfleet_runtime::model::leaving::KvStays;
use mixfleet_runtime::model::variants::{plain_variants, tiny_variants};
use mixfleet_runtime::model::{Checkpoint, Oracle};
use mixfleet_scheduler::cost::{
    Attending, AttnBytes, AttnSplit, CostModel, LinkCost, MemberShare, ModelShape, Partition, Pieces, Prefill,
};
use mixfleet_scheduler::fleet::Role;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);

const SHAPE: StepShape = StepShape {
    tokens_max: 32,
    sequences_max: 4,
    blocks: 16,
    block_tokens: BLOCK_TOKENS,
    activations: DType::F32,
    kv: DType::F32,
};

/// Counts what crosses.
struct Counting {
    inner: ThroughHost,
    crossed: AttnBytes,
}

impl Collective for Counting {
    fn sum(&mut self, _: &[MemberSlice<'_>]) -> Result<()> {
        unreachable!("only one member has weights: there is nothing to sum")
    }
    fn deal(&mut self, from: &MemberSlice<'_>, rows: u32, to: &[MatrixPart<'_>]) -> Result<()> {
        self.crossed.out += to.iter().map(|part| part.at.slice.bytes).sum::<u64>();
        self.inner.deal(from, rows, to)
    }
    fn join(&mut self, from: &[MatrixPart<'_>], rows: u32, to: &MemberSlice<'_>) -> Result<()> {
        self.crossed.back += from.iter().map(|part| part.at.slice.bytes).sum::<u64>();
        self.inner.join(from, rows, to)
    }
    fn merge(
        &mut self,
        from: &[AttendedPart<'_>],
        shape: (u32, u32),
        dtype: DType,
        sinks: &[f32],
        to: &MemberSlice<'_>,
    ) -> Result<()> {
        let bytes = |part: &AttendedPart<'_>| part.rows.at.slice.bytes + part.stat.slice.bytes;
        self.crossed.back += from.iter().map(bytes).sum::<u64>();
        self.inner.merge(from, shape, dtype, sinks, to)
    }
}

/// A device that attends, and what it has for each of two batches.
type Attends = (Arc<dyn Device>, Box<dyn Queue>, [AttentionMember; 2]);

/// A model on the device of its weights and its attention devices.
struct Apart {
    device: Arc<dyn Device>,
    queue: Box<dyn Queue>,
    forward: [Forward; 2],
    attending: Vec<Attends>,
    groups: u32,
    partition: Partition,
    cost: ModelShape,
    exchange: Counting,
}

impl Apart {
    fn new(checkpoint: &Checkpoint, devices: Vec<Arc<dyn Device>>, split: AttnSplit) -> Self {
        let config = &checkpoint.config;
        let partition = config.with_attention(devices.len() - 1, split).unwrap();
        let mut members = devices.into_iter().zip(partition.shares());
        let (device, share) = members.next().unwrap();
        let weights = checkpoint.place_share(&*device, share, &mut |_, _| {}).unwrap().unwrap();
        let forward = Forward::of_member(&*device, config, share, weights, SHAPE).unwrap();
        let second = forward.for_second_batch(&*device).unwrap();
        let attending = members.map(|(device, share)| {
            let placed = checkpoint.place_share(&*device, share, &mut |_, _| {}).unwrap();
            assert!(placed.is_none(), "it has no weights");
            // whichever members have the pages of two sequences
            let shape = StepShape { blocks: 16, ..SHAPE };
            let which = (&partition, share.member);
            let member = AttentionMember::new(&*device, config, which, shape).unwrap();
            let second = member.for_second_batch(&*device, config).unwrap();
            let queue = device.queue().unwrap();
            (device, queue, [member, second])
        });
        let crossed = AttnBytes { out: 0, back: 0 };
        Apart {
            queue: device.queue().unwrap(),
            attending: attending.collect(),
            forward: [forward, second],
            device,
            groups: 1,
            cost: config.cost_shape(DType::F32, DType::F32, BLOCK_TOKENS),
            partition,
            exchange: Counting { inner: ThroughHost::default(), crossed },
        }
    }

    /// What should cross in a step: of each token as often as there are members with keys that it sees. A
    /// sequence that is whole on a member is attended to there.
    fn expected_bytes(&self, parts: &[StepInput<'_>]) -> AttnBytes {
        let mut all = AttnBytes { out: 0, back: 0 };
        let members = self.partition.page_holders();
        for part in parts {
            let end = part.start + part.tokens.len() as u32;
            let holder = |position: u32| part.pages[(position / BLOCK_TOKENS) as usize] % members;
            let holding = |positions: std::ops::Range<u32>| positions.map(holder).collect::<BTreeSet<_>>();
            let is_whole = holding(0..end).len() == 1;
            for position in part.start..end {
                let reach = self.cost.windows.iter().map(|w| w.unwrap_or(u32::MAX).min(position + 1)).max();
                let holders = holding(position + 1 - reach.unwrap()..position + 1).len() as u32;
                let AttnBytes { out, back } = self.partition.attention_bytes(&self.cost, holders).unwrap();
                // a row of a divided sequence has a maximum even if only one member sees keys of it
                let alone = if is_whole || holders > 1 { 0 } else { 8 * u64::from(self.cost.heads) };
                all.out += out * u64::from(self.cost.layers());
                all.back += (back + alone) * u64::from(self.cost.layers());
            }
        }
        all
    }

    /// With sequences that decode in this many batches.
    fn in_batches(self, groups: u32) -> Self {
        Apart { groups, ..self }
    }

    /// Runs a step; its rows of logits, and the tokens drawn from them.
    fn run(&mut self, parts: &[StepInput<'_>]) -> Ran {
        let Apart { device, queue, forward, attending, exchange, groups, .. } = self;
        let pieces =
            MicroBatch::cut(parts, Pieces { chunk_tokens: u32::MAX, groups: *groups }, (BLOCK_TOKENS, 1));
        let (mut members, mut queues) = (Vec::new(), Vec::<&mut dyn Queue>::new());
        for (device, queue, halves) in attending {
            members.push((&**device, &*halves));
            queues.push(&mut **queue);
        }
        let batches = pieces.iter().enumerate().map(|(at, piece)| {
            let attending = members.iter().map(|(device, halves)| (*device, &halves[at]));
            ApartBatch::begin((&**device, &forward[at]), attending, &piece.parts).unwrap()
        });
        let batches: Vec<_> = batches.collect();
        let mut queues = ApartQueues { first: &mut **queue, attending: queues };
        exchange.crossed = AttnBytes { out: 0, back: 0 };
        let mut ran = Vec::new();
        let mut read = |which: usize, batch: &ApartBatch<'_>| {
            let (device, forward, pass) = batch.first();
            let (vocab, count) = (forward.config().vocab as usize, pass.rows() as usize);
            let (mut logits, mut drawn) = (vec![0f32; count * vocab], vec![Drawn::zeroed(); count]);
            device.read(&forward.logits(pass), bytemuck::cast_slice_mut(&mut logits))?;
            let outputs = forward.drawn(pass).expect("the first member draws");
            device.read(outputs.drawn(), bytemuck::cast_slice_mut(&mut drawn))?;
            let rows = logits.chunks_exact(vocab).map(<[f32]>::to_vec).zip(drawn);
            ran.extend(pieces[which].drawing().zip(rows).map(|(part, (row, drawn))| (part, row, drawn.id)));
            Ok(())
        };
        run_apart(&mut queues, &batches, exchange, TIMEOUT, &mut KvStays, &mut read).unwrap();
        let crossed = exchange.crossed;
        assert_eq!(crossed, self.expected_bytes(parts));
        ran.sort_by_key(|(part, ..)| *part);
        ran.into_iter().map(|(_, row, id)| (row, id)).unzip()
    }
}

#[test]
fn every_family_gives_the_oracles_logits_however_kv_is_divided_and_the_same_bits_twice() {
    for (name, checkpoint) in plain_variants() {
        let checkpoint = checkpoint.load().unwrap();
        let (config, oracle) = (&checkpoint.config, Oracle::new(&checkpoint));
        let (long, short) = (prompt(19, 1, config), prompt(6, 2, config));
        for split in AttnSplit::ALL {
            for (workers, batches) in [(1, 1), (2, 1), (3, 1), (1, 2), (3, 2)] {
                let run = || {
                    let mut apart = Apart::new(&checkpoint, unlike(1 + workers), split).in_batches(batches);
                    two_sequences(&mut |parts| apart.run(parts), [&long, &short], 6)
                };
                let first = run();
                let error = worst_error(&oracle, &first);
                let what = format!("{name} by {split} over {workers} in {batches} batches");
                assert!(error < LOGIT_ERROR_MAX, "{what}: a logit is off by {error:e}");
                assert_eq!(first, run(), "{what}");
            }
        }
    }
}

#[test]
fn every_member_runs_what_the_cost_model_counts_for_it() {
    for (name, checkpoint) in plain_variants() {
        let checkpoint = checkpoint.load().unwrap();
        for workers in [1, 2] {
            let seen: Vec<Seen> = (0..=workers).map(|_| Seen::default()).collect();
            let mut apart = Apart::new(&checkpoint, seen.iter().map(seeing).collect(), AttnSplit::Head);
            let (pages, ids) = (Vec::from_iter(0..16u32), [1u32; 12]);
            let part =
                |start, tokens, pages| StepInput { start, tokens, pages, draw: Some(DrawInput::GREEDY) };
            let prompt = Prefill { context: 9, tokens: 12, last: true };
            let (cost, shares) = (apart.cost.clone(), apart.partition.shares().to_vec());
            let of = |share: &MemberShare, prompts: &[Prefill], sequences: u32| {
                share.step_ops(&cost, prompts, sequences, u64::from(sequences) * 21)
            };
            let ops = |share: &MemberShare, at: usize| match at {
                0 => of(share, &[prompt], 0),
                1 => of(share, &[], 4),
                2 => [of(share, &[], 2), of(share, &[], 1)].concat(),
                // the prompt goes with the first batch
                _ => [of(share, &[prompt], 2), of(share, &[], 1)].concat(),
            };
            let decodes = |count| vec![part(20, &ids[..1], &pages[..3]); count];
            let one = vec![part(9, &ids[..], &pages[..3])];
            let steps = [(1, one.clone()), (1, decodes(4)), (2, decodes(3)), (2, [decodes(3), one].concat())];
            for (at, (batches, parts)) in steps.into_iter().enumerate() {
                apart = apart.in_batches(batches);
                apart.run(&parts);
                for (share, seen) in shares.iter().zip(&seen) {
                    let submitted = std::mem::take(&mut *seen.lock().unwrap());
                    assert_eq!(
                        counted(ops(share, at).into_iter()),
                        counted(submitted.into_iter().map(|sig| (sig, 1))),
                        "{name}: step {at} of member {} of {}",
                        share.member,
                        1 + workers
                    );
                }
            }
        }
    }
}

/// The operations in which a member attends to four rows of sequences that are divided by pages: it has
/// `kv_tokens` of their keys, and writes those of `written` tokens.
fn partial_ops(share: &MemberShare, shape: &ModelShape, kv_tokens: u64, written: u32) -> Vec<(OpSig, u64)> {
    let mut ops = share.step_ops(shape, &[], 4, kv_tokens);
    for (sig, _) in &mut ops {
        match sig {
            OpSig::KvWrite { tokens, .. } => *tokens = written,
            // they join where parts are put together
            OpSig::AttnMerge { sinks, .. } => *sinks = 0,
            _ => {}
        }
    }
    ops.retain(|(sig, _)| written > 0 || !matches!(sig, OpSig::KvWrite { .. }));
    ops
}

#[test]
fn where_pages_are_divided_every_member_runs_what_the_cost_model_counts_for_its_own() {
    for (name, checkpoint) in plain_variants() {
        let checkpoint = checkpoint.load().unwrap();
        let ids = [1u32; 12];
        let [even, odd, both] = [[0u32, 2, 4], [1, 3, 5], [0, 1, 2]];
        let part = |start, tokens, pages| StepInput { start, tokens, pages, draw: Some(DrawInput::GREEDY) };
        let decode = |pages| part(20, &ids[..1], pages);
        let prompt = Prefill { context: 9, tokens: 12, last: true };
        let submitted = |split, parts: Vec<StepInput<'_>>| {
            let seen: Vec<Seen> = (0..3).map(|_| Seen::default()).collect();
            let mut apart = Apart::new(&checkpoint, seen.iter().map(seeing).collect(), split);
            apart.run(&parts);
            let of = |seen: &Seen| counted(seen.lock().unwrap().iter().map(|sig| (*sig, 1)));
            (apart.cost.clone(), apart.partition.shares().to_vec(), seen.iter().map(of).collect::<Vec<_>>())
        };
        // two sequences on one member, one on the other
        let parts = vec![decode(&even), decode(&even), decode(&odd)];
        let (cost, shares, of) = submitted(AttnSplit::Request, parts);
        for (at, sequences) in [(0, 3), (1, 2), (2, 1)] {
            let ops = shares[at].step_ops(&cost, &[], sequences, u64::from(sequences) * 21);
            assert_eq!(of[at], counted(ops.into_iter()), "{name}: decodes on member {at}");
        }
        // a prompt on one member
        let (cost, shares, of) = submitted(AttnSplit::Request, vec![part(9, &ids, &odd)]);
        for at in [0, 2] {
            let ops = shares[at].step_ops(&cost, &[prompt], 0, 0);
            assert_eq!(of[at], counted(ops.into_iter()), "{name}: a prompt on member {at}");
        }
        assert!(of[1].is_empty(), "{name}: {:?}", of[1]);
        // sequences; one member has 13 of their keys and the newest one, and the other 8
        let (cost, shares, of) = submitted(AttnSplit::Range, vec![decode(&both); 4]);
        for (at, keys, written) in [(1, 13, 4), (2, 8, 0)] {
            let ops = partial_ops(&shares[at], &cost, 4 * keys, written);
            assert_eq!(of[at], counted(ops.into_iter()), "{name}: divided sequences on member {at}");
        }
    }
}

/// Allocations on a device, and whether it imported memory.
type Allocated = Arc<Mutex<Vec<Option<BufferUsage>>>>;

/// A device that notes what memory is taken on it.
struct Watched(ReferenceDevice, Allocated);

impl Device for Watched {
    mixfleet_hal::forward_device!(
        self => self.0;
        info, limits, support, reaches, pin, write, read, queue, memory_free, health
    );
    fn alloc(&self, bytes: u64, usage: BufferUsage) -> Result<Slice> {
        self.1.lock().unwrap().push(Some(usage));
        self.0.alloc(bytes, usage)
    }
    fn import(&self, memory: Arc<dyn HostMemory>) -> Result<Slice> {
        self.1.lock().unwrap().push(None);
        self.0.import(memory)
    }
}

#[test]
fn the_device_of_the_weights_keeps_no_kv_and_those_that_attend_keep_no_weights() {
    let (_, checkpoint) = tiny_variants().remove(0);
    let checkpoint = checkpoint.load().unwrap();
    for split in AttnSplit::ALL {
        let allocated: [Allocated; 3] = Default::default();
        let device = |at: usize| -> Arc<dyn Device> {
            let id = format!("reference:{at}");
            Arc::new(Watched(ReferenceDevice::named(&id), allocated[at].clone()))
        };
        let fleet =
            TestFleet::new(checkpoint.clone()).with_attention(device(0), vec![device(1), device(2)], split);
        let env = SeededEnv::new(3);
        let shared: SharedEnv = Arc::new(env.clone());
        let handle = fleet.start(shared);
        let question = prompt(11, 5, &checkpoint.config);
        let expected = greedy(&checkpoint, &question, 5);
        let answer = env.run(async move { ask(&handle, "one".into(), question, 5, None).await });
        assert_eq!((answer.tokens, answer.failure), (expected, None));
        let [model, first, second] = allocated.map(|all| all.lock().unwrap().clone());
        let kv = Some(BufferUsage::Kv);
        assert!(model.contains(&Some(BufferUsage::Weights)) || model.contains(&None), "{model:?}");
        assert!(!model.contains(&kv), "the device of the weights keeps KV: {model:?}");
        for attends in [first, second] {
            assert!(attends.contains(&kv), "{attends:?}");
            let weights = attends.contains(&Some(BufferUsage::Weights)) || attends.contains(&None);
            assert!(!weights, "a device that attends has weights: {attends:?}");
        }
    }
}

#[test]
fn an_instance_with_attention_apart_answers_beside_one_of_a_single_device() {
    let (_, checkpoint) = tiny_variants().remove(0);
    let checkpoint = checkpoint.load().unwrap();
    let shared = prompt(20, 3, &checkpoint.config);
    let prompts: Vec<Vec<u32>> = (0..12)
        .map(|at| [&shared[..], &prompt(3 + at, 10 + u64::from(at), &checkpoint.config)].concat())
        .collect();
    let expected: Vec<_> = prompts.iter().map(|prompt| greedy(&checkpoint, prompt, 7)).collect();
    for split in AttnSplit::ALL {
        for (alone, unlike) in [(true, false), (false, false), (true, true), (false, true)] {
            let (first, other) = (core(), core());
            // the device with the weights attends as well, and has less room for it than the other
            let attend = if unlike { vec![first.clone(), other] } else { vec![core(), other] };
            let fleet = TestFleet::new(checkpoint.clone()).with_attention(first, attend, split);
            let fleet = if alone { fleet } else { fleet.with(Role::Auto) };
            let fleet = if unlike { fleet.with_unlike_rooms() } else { fleet };
            let env = SeededEnv::new(7);
            let shared: SharedEnv = Arc::new(env.clone());
            let handle = fleet.start(shared);
            let prompts = prompts.clone();
            let answers = env.run(async move {
                let asked = prompts.into_iter().enumerate();
                let asked = asked.map(|(at, prompt)| ask(&handle, format!("r{at}"), prompt, 7, None));
                futures_util::future::join_all(asked).await
            });
            for (answer, expected) in answers.iter().zip(&expected) {
                assert_eq!((&answer.tokens, &answer.failure), (expected, &None), "by {split}");
            }
            assert_eq!(fleet.panics(), 0);
        }
    }
}

#[test]
fn steps_decode_in_two_batches_where_that_is_predicted_to_take_less_and_give_the_same_tokens() {
    let (_, checkpoint) = tiny_variants().remove(0);
    let checkpoint = checkpoint.load().unwrap();
    let prompts: Vec<Vec<u32>> = (0..4).map(|at| prompt(9, 20 + at, &checkpoint.config)).collect();
    let expected: Vec<_> = prompts.iter().map(|prompt| greedy(&checkpoint, prompt, 8)).collect();
    for split in AttnSplit::ALL {
        // reading the weights twice pays once attention takes as long as that
        for (seconds_per_key, together) in [(0.0, 4), (1e-3, 2)] {
            let seen: Vec<Seen> = (0..2).map(|_| Seen::default()).collect();
            let mut devices: Vec<_> = seen.iter().map(seeing).collect();
            let attends = devices.split_off(1);
            let fleet = TestFleet::new(checkpoint.clone()).with_attention(devices.remove(0), attends, split);
            let fleet = fleet.attending_slowly(seconds_per_key);
            let env = SeededEnv::new(5);
            let shared: SharedEnv = Arc::new(env.clone());
            let handle = fleet.start(shared);
            let prompts = prompts.clone();
            let answers = env.run(async move {
                let asked = prompts.into_iter().enumerate();
                let asked = asked.map(|(at, prompt)| ask(&handle, format!("r{at}"), prompt, 8, None));
                futures_util::future::join_all(asked).await
            });
            for (answer, expected) in answers.iter().zip(&expected) {
                assert_eq!((&answer.tokens, &answer.failure), (expected, &None), "by {split}");
            }
            let seen = seen[1].lock().unwrap();
            let decodes = seen.iter().filter_map(|sig| match sig {
                OpSig::AttnDecode { sequences, .. } => Some(*sequences),
                _ => None,
            });
            assert_eq!(decodes.max(), Some(together), "by {split} with {seconds_per_key} s per key");
            assert_eq!(fleet.panics(), 0);
        }
    }
}

/// One token of each prompt is not in any cache, so that all are decodes; each batch has two.
#[test]
fn of_two_batches_in_flight_each_hands_over_the_kv_of_its_own_prompts() {
    let (_, checkpoint) = tiny_variants().remove(0);
    let checkpoint = checkpoint.load().unwrap();
    let prompts: Vec<Vec<u32>> = (0..4).map(|at| prompt(9, 40 + at, &checkpoint.config)).collect();
    let expected: Vec<_> = prompts.iter().map(|prompt| greedy(&checkpoint, prompt, 8)).collect();
    for split in AttnSplit::ALL {
        let seen: Vec<Seen> = (0..2).map(|_| Seen::default()).collect();
        let partition = checkpoint.config.with_attention(1, split).unwrap();
        let fleet = TestFleet::new(checkpoint.clone())
            .with_partition((Role::Prefill, 8, DType::F32), seen.iter().map(seeing).collect(), partition)
            .with(Role::Decode)
            .attending_slowly(1e-3);
        let env = SeededEnv::new(6);
        let handle = fleet.start(Arc::new(env.clone()));
        let (prompts, attends) = (prompts.clone(), seen[1].clone());
        let answers = env.run(async move {
            for prompt in &prompts {
                ask(&handle, "first".into(), prompt.clone(), 2, None).await;
            }
            attends.lock().unwrap().clear();
            let asked = prompts.into_iter().enumerate();
            let asked = asked.map(|(at, prompt)| ask(&handle, format!("r{at}"), prompt, 8, None));
            futures_util::future::join_all(asked).await
        });
        for (answer, expected) in answers.iter().zip(&expected) {
            assert_eq!((&answer.tokens, &answer.cached_tokens), (expected, &8), "by {split}");
        }
        let seen = seen[1].lock().unwrap();
        let decodes = seen.iter().filter_map(|sig| match sig {
            OpSig::AttnDecode { sequences, .. } => Some(*sequences),
            _ => None,
        });
        let gathers = seen.iter().filter(|sig| matches!(sig, OpSig::KvGather { tokens: 1, .. }));
        let layers = checkpoint.config.layers as usize;
        assert_eq!(decodes.max(), Some(2), "by {split}");
        // what found no slot is gathered again from the pages
        assert!(gathers.count() >= 4 * layers, "by {split}");
    }
}

#[test]
fn clients_that_leave_an_instance_with_attention_apart_leave_no_page_in_use() {
    let (_, checkpoint) = tiny_variants().remove(0);
    let checkpoint = checkpoint.load().unwrap();
    for split in AttnSplit::ALL {
        let fleet = TestFleet::new(checkpoint.clone()).with_attention(core(), vec![core(), core()], split);
        let env = SeededEnv::new(11);
        assert_eq!(fleet.run_leavers(&env, 11, 12), 0.0, "by {split}");
        assert_eq!(fleet.panics(), 0);
    }
}

#[test]
fn steps_are_predicted_by_the_profiles_of_the_members() {
    let (_, checkpoint) = tiny_variants().remove(0);
    let checkpoint = checkpoint.load().unwrap();
    let config = Arc::new(checkpoint.config.clone());
    let limits = InstanceLimits {
        activations: DType::F32,
        kv: DType::F32,
        kv_bytes: 1 << 20,
        step_tokens_max: 24,
        prefill_tokens_beside_decode_max: None,
        sequences_max: 4,
        block_tokens: Some(BLOCK_TOKENS),
    };
    let profiles = ["H100-SXM-80GB", "L40S", "L4"].map(|id| part(id).unwrap().profile());
    // in virtual time only predicted times pass
    let env = SeededEnv::new(1);
    let no_time = LinkCost::default();
    for split in AttnSplit::ALL {
        let partition = config.with_attention(2, split).unwrap();
        let mut members = partition.shares().iter().map(|share| {
            let device = core();
            let weights = checkpoint.place_share(&*device, share, &mut |_, _| {}).unwrap();
            MemberSpec { device, weights, kv_bytes: limits.kv_bytes }
        });
        let MemberSpec { device, weights, .. } = members.next().unwrap();
        let weights = weights.unwrap();
        let spec = InstanceSpec { device, weights, role: Role::Auto, price: None, limits };
        let mut loaded = Loaded::divided(&config, &partition, spec, members.collect()).unwrap();
        assert_eq!(loaded.id(), "attn:cpu@0,cpu@0,cpu@0");
        assert!(loaded.fingerprint().starts_with(&format!("attn-{split}:")), "{}", loaded.fingerprint());
        let shape = config.cost_shape(DType::F32, DType::F32, BLOCK_TOKENS);
        let expected =
            CostModel::lockstep(&partition, &shape, &profiles, (no_time, Attending::ENGINE), 24).unwrap();
        let predicted = loaded.predicted_by_members(&profiles, &env).unwrap();
        assert_eq!(predicted.decode_step_s(3, 90), expected.decode_step_s(3, 90), "by {split}");
        assert!(predicted.decode_step_s(3, 90) > predicted.decode_step_s(3, 3));
        assert!(loaded.predicted_by_members(&profiles[..2], &env).is_err());
    }
}

#[test]
fn operations_with_weights_and_with_kv_never_meet_on_a_device() {
    let (_, checkpoint) = tiny_variants().remove(0);
    let checkpoint = checkpoint.load().unwrap();
    for split in AttnSplit::ALL {
        let seen: Vec<Seen> = (0..3).map(|_| Seen::default()).collect();
        let mut apart = Apart::new(&checkpoint, seen.iter().map(seeing).collect(), split);
        let config = &checkpoint.config;
        let (long, short) = (prompt(19, 1, config), prompt(6, 2, config));
        two_sequences(&mut |parts| apart.run(parts), [&long, &short], 3);
        for (at, seen) in seen.iter().enumerate() {
            let is_kv = |sig: &OpSig| sig.kv().is_some();
            let is_product = |sig: &OpSig| matches!(sig, OpSig::Gemm { .. } | OpSig::RmsNorm { .. });
            let seen = seen.lock().unwrap();
            let (kv, products) = (seen.iter().any(is_kv), seen.iter().any(is_product));
            assert_eq!((kv, products), (at > 0, at == 0), "member {at} by {split}");
        }
    }
}

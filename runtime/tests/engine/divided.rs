//! Several devices divide one model, by layers or within them: they compute what one device does, each only
//! its share.

use super::cost_shape::{BLOCK_TOKENS, counted};
use crate::fleet::wayward::Wayward;
use crate::fleet::{TestFleet, ask, greedy, prompt};
use bytemuck::Zeroable;
use mixfleet_cpu::CpuBackend;
use mixfleet_hal::sample::Drawn;
use mixfleet_hal::{Backend, Cmd, DType, Device, Elapsed, Graph, OpSig, Queue, Result, Ticket};
use mixfleet_hwtests::reference::ReferenceDevice;
use mixfleet_runtime::engine::{InstanceLimits, InstanceSpec, Loaded, MemberSpec};
use mixfleet_runtime::env::{SeededEnv, SharedEnv};
use mixfleet_runtime::model::divided::{MemberRun, MicroBatch, run_stages};
use mixfleet_runtime::model::draws::DrawInput;
use mixfleet_runtime::model::exchange::ThroughHost;
use mixfleet_runtime::model::graph::{Forward, Pass, StepInput, StepShape};
use mixfleet_runtime::model::leaving::KvStays;
use mixfleet_runtime::model::peers::{Carriers, PeerCopies};
use mixfleet_runtime::model::variants::{styled_variants, tiny_variants};
use mixfleet_runtime::model::{Checkpoint, Oracle};
use mixfleet_scheduler::cost::{ExpertsBy, MemberShare, Pieces, Prefill};
use mixfleet_scheduler::fleet::Role;
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// In f32 a logit is off by less than this.
pub(super) const LOGIT_ERROR_MAX: f64 = 1e-4;

pub(super) fn core() -> Arc<dyn Device> {
    CpuBackend.open("cpu@0").unwrap()
}

/// This many devices; the last is unlike the others.
pub(super) fn unlike(members: usize) -> Vec<Arc<dyn Device>> {
    let cores = (1..members).map(|_| core());
    cores.chain([Arc::new(ReferenceDevice::default()) as Arc<dyn Device>]).collect()
}

type OneMember = (Arc<dyn Device>, Box<dyn Queue>, Forward);

/// A model on the devices that divide it, by stages.
struct Divided {
    stages: Vec<Vec<OneMember>>,
    shares: Vec<MemberShare>,
    vocab: usize,
    how: Pieces,
}

impl Divided {
    fn new(checkpoint: &Checkpoint, devices: Vec<Arc<dyn Device>>, stages: &[usize]) -> Self {
        let weights: Vec<_> = stages.iter().map(|count| vec![1.0; *count]).collect();
        Divided::by(checkpoint, devices, &weights, ExpertsBy::Columns)
    }

    /// Members of stages with these weights divide this of experts.
    fn by(
        checkpoint: &Checkpoint,
        devices: Vec<Arc<dyn Device>>,
        weights: &[Vec<f64>],
        by: ExpertsBy,
    ) -> Self {
        let config = &checkpoint.config;
        let shape = StepShape {
            tokens_max: 32,
            sequences_max: 4,
            blocks: 16,
            block_tokens: BLOCK_TOKENS,
            activations: DType::F32,
            kv: DType::F32,
        };
        let shares = config.in_stages_by(weights, &vec![by; weights.len()]).unwrap().shares().to_vec();
        let members = devices.into_iter().zip(&shares).map(|(device, share)| {
            let weights = checkpoint.place_share(&*device, share, &mut |_, _| {}).unwrap().unwrap();
            let forward = Forward::of_member(&*device, config, share, weights, shape).unwrap();
            let queue = device.queue().unwrap();
            (device, queue, forward)
        });
        let mut members = members.collect::<Vec<_>>().into_iter();
        let stages = weights.iter().map(|stage| members.by_ref().take(stage.len()).collect()).collect();
        Divided { stages, shares: shares.clone(), vocab: config.vocab as usize, how: Pieces::ONE }
    }

    /// The rows of logits of a step, and the tokens drawn from them.
    fn run(&mut self, parts: &[StepInput<'_>]) -> Ran {
        fn ready(members: &mut [OneMember]) -> Vec<MemberRun<'_>> {
            let members = members.iter_mut().map(|(device, queue, forward)| MemberRun {
                device: &**device,
                queue: &mut **queue,
                forward,
            });
            members.collect()
        }
        let (vocab, batches) = (self.vocab, MicroBatch::cut(parts, self.how, (BLOCK_TOKENS, 1)));
        let mut stages: Vec<_> = self.stages.iter_mut().map(|stage| ready(stage)).collect();
        let mut ran = Vec::new();
        let mut read = |last: &MemberRun<'_>, pass: &Pass, batch: &MicroBatch<'_>| {
            let count = pass.rows() as usize;
            assert_eq!(count, batch.drawing().count());
            let mut logits = vec![0f32; count * vocab];
            last.device.read(&last.forward.logits(pass), bytemuck::cast_slice_mut(&mut logits))?;
            let mut drawn = vec![Drawn::zeroed(); count];
            if let Some(outputs) = last.forward.drawn(pass) {
                last.device.read(outputs.drawn(), bytemuck::cast_slice_mut(&mut drawn))?;
            }
            for ((part, row), drawn) in batch.drawing().zip(logits.chunks_exact(vocab)).zip(drawn) {
                ran.push((part, row.to_vec(), drawn.id));
            }
            Ok(())
        };
        let carriers = Carriers { host: &mut ThroughHost::default(), peers: &mut PeerCopies::default() };
        run_stages(&mut stages, carriers, &batches, Duration::from_secs(60), &mut KvStays, &mut read)
            .unwrap();
        ran.sort_by_key(|(part, ..)| *part);
        ran.into_iter().map(|(_, row, id)| (row, id)).unzip()
    }

    fn two_sequences(&mut self, prompts: [&[u32]; 2], steps: usize) -> [(Vec<u32>, Vec<Vec<f32>>); 2] {
        two_sequences(&mut |parts| self.run(parts), prompts, steps)
    }
}

/// Rows of logits, and the tokens drawn from them.
pub(super) type Ran = (Vec<Vec<f32>>, Vec<u32>);

/// Two sequences; the second begins while the first decodes: their texts, and their logits from step to step.
pub(super) fn two_sequences(
    run: &mut dyn FnMut(&[StepInput<'_>]) -> Ran,
    prompts: [&[u32]; 2],
    steps: usize,
) -> [(Vec<u32>, Vec<Vec<f32>>); 2] {
    let draw = Some(DrawInput::GREEDY);
    let pages: [Vec<u32>; 2] = [(0..8).rev().collect(), (8..16).collect()];
    let pages_of = |which: usize, end: usize| &pages[which][..end.div_ceil(BLOCK_TOKENS as usize)];
    let mut texts = prompts.map(<[u32]>::to_vec);
    let mut logits = [Vec::new(), Vec::new()];
    for step in 0..steps {
        let mut parts = Vec::new();
        for which in (0..2).filter(|which| step >= *which) {
            let start = if step == which { 0 } else { texts[which].len() - 1 };
            let tokens = &texts[which][start..];
            let pages = pages_of(which, texts[which].len());
            parts.push(StepInput { start: start as u32, tokens, pages, draw });
        }
        let (rows, drawn) = run(&parts);
        for (which, (row, id)) in rows.into_iter().zip(drawn).enumerate() {
            let best = (0..row.len()).fold(0, |best, i| if row[i] > row[best] { i } else { best });
            assert_eq!(id as usize, best, "the draw is from whole logits");
            logits[which].push(row);
            texts[which].push(id);
        }
    }
    let [a, b] = texts;
    let [of_a, of_b] = logits;
    [(a, of_a), (b, of_b)]
}

/// The largest error of any logit of two such sequences.
pub(super) fn worst_error(oracle: &Oracle, ran: &[(Vec<u32>, Vec<Vec<f32>>); 2]) -> f64 {
    let mut worst = 0.0f64;
    for (text, rows) in ran {
        let prompt = text.len() - rows.len();
        for (at, row) in rows.iter().enumerate() {
            let exact = oracle.last_logits(&text[..prompt + at]);
            let errors = row.iter().zip(&exact).map(|(a, b)| (f64::from(*a) - b).abs());
            worst = errors.fold(worst, f64::max);
        }
    }
    worst
}

#[test]
fn every_family_gives_the_oracles_logits_however_it_is_divided_and_the_same_bits_twice() {
    for (name, checkpoint) in tiny_variants() {
        let checkpoint = checkpoint.load().unwrap();
        let (config, oracle) = (&checkpoint.config, Oracle::new(&checkpoint));
        let (long, short) = (prompt(19, 1, config), prompt(6, 2, config));
        // 6 heads, of 2 KV heads in most: 3 and 4 members are uneven
        for members in 2..=4 {
            let new = || Divided::new(&checkpoint, unlike(members), &[members]);
            let run = || new().two_sequences([&long, &short], 6);
            let first = run();
            let error = worst_error(&oracle, &first);
            assert!(error < LOGIT_ERROR_MAX, "{name} over {members}: a logit is off by {error:e}");
            assert_eq!(first, run(), "{name} over {members}");
        }
    }
}

#[test]
fn mixtures_give_the_oracles_logits_however_their_experts_are_divided_and_the_same_bits_twice() {
    let mut tried = 0;
    for (name, checkpoint) in tiny_variants() {
        let checkpoint = checkpoint.load().unwrap();
        if checkpoint.config.experts.is_none() {
            continue;
        }
        tried += 1;
        let (config, oracle) = (&checkpoint.config, Oracle::new(&checkpoint));
        let (long, short) = (prompt(19, 1, config), prompt(6, 2, config));
        let placements = [vec![vec![1.0; 2]], vec![vec![1.0, 1.0, 3.0]], vec![vec![2.0, 1.0], vec![1.0]]];
        for weights in placements {
            let run = || {
                let devices = unlike(weights.iter().map(Vec::len).sum());
                let mut divided = Divided::by(&checkpoint, devices, &weights, ExpertsBy::Member);
                divided.two_sequences([&long, &short], 6)
            };
            let first = run();
            let error = worst_error(&oracle, &first);
            assert!(error < LOGIT_ERROR_MAX, "{name} over {weights:?}: a logit is off by {error:e}");
            assert_eq!(first, run(), "{name} over {weights:?}");
        }
    }
    assert!(tried >= 5, "{tried} mixtures");
}

/// Matrices in blocks of codes are cut by heads, whose rows are no multiples of blocks.
#[test]
fn a_checkpoint_in_fp8_with_latents_gives_its_golden_tokens_however_heads_are_divided() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/fixtures/deepseek-v3-mla-fp8");
    let Ok(golden) = std::fs::read_to_string(fixture.join("golden.json")) else {
        return eprintln!("SKIPPED: no fixture at {}", fixture.display());
    };
    let golden: serde_json::Value = serde_json::from_str(&golden).unwrap();
    let checkpoint = Checkpoint::open(&fixture, &mixfleet_cpu::host::Mapper).unwrap();
    let ids = |case: usize, what: &str| -> Vec<u32> {
        let ids = golden["cases"][case][what].as_array().unwrap();
        ids.iter().map(|id| id.as_u64().unwrap() as u32).collect()
    };
    let steps = 12;
    for stages in [vec![2], vec![3], vec![4], vec![2, 1]] {
        for cases in [[0, 1], [2, 3]] {
            let prompts = cases.map(|case| ids(case, "prompt_ids"));
            let mut divided = Divided::new(&checkpoint, unlike(stages.iter().sum()), &stages);
            let ran = divided.two_sequences(prompts.each_ref().map(Vec::as_slice), steps);
            for ((text, rows), (case, prompt)) in ran.iter().zip(cases.into_iter().zip(&prompts)) {
                let drawn = &text[prompt.len()..prompt.len() + rows.len()];
                assert_eq!(drawn, &ids(case, "greedy_ids")[..rows.len()], "case {case} over {stages:?}");
            }
        }
    }
}

/// The operations that were submitted to a device.
pub(super) type Seen = Arc<Mutex<Vec<OpSig>>>;

struct SeeingQueue(Box<dyn Queue>, Seen);

impl Queue for SeeingQueue {
    fn submit(&mut self, cmds: &[Cmd]) -> Result<Ticket> {
        self.1.lock().unwrap().extend(cmds.iter().map(|cmd| *cmd.sig()));
        self.0.submit(cmds)
    }
    fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<Elapsed> {
        self.0.wait(ticket, timeout)
    }
    fn record(&mut self, cmds: &[Cmd]) -> Result<Arc<dyn Graph>> {
        self.0.record(cmds)
    }
    fn replay(&mut self, graph: &Arc<dyn Graph>) -> Result<Ticket> {
        self.0.replay(graph)
    }
}

/// A device that records the submitted commands.
pub(super) fn seeing(seen: &Seen) -> Arc<dyn Device> {
    let seen = seen.clone();
    Arc::new(Wayward::new("seeing").queuing(move |queue| Box::new(SeeingQueue(queue, seen.clone()))))
}

#[test]
fn stages_give_the_oracles_logits_however_steps_are_cut_and_the_same_bits_twice() {
    for (name, checkpoint) in tiny_variants() {
        let checkpoint = checkpoint.load().unwrap();
        let (config, oracle) = (&checkpoint.config, Oracle::new(&checkpoint));
        let (long, short) = (prompt(19, 1, config), prompt(6, 2, config));
        let layers = config.layers as usize;
        for stages in [vec![1, 1], vec![2, 2], vec![1, 2], vec![3, 1], vec![1; layers]] {
            for how in
                [Pieces::ONE, Pieces { chunk_tokens: 7, groups: 1 }, Pieces { chunk_tokens: 4, groups: 2 }]
            {
                let run = || {
                    let devices = unlike(stages.iter().sum());
                    let divided = Divided { how, ..Divided::new(&checkpoint, devices, &stages) };
                    { divided }.two_sequences([&long, &short], 6)
                };
                let first = run();
                let error = worst_error(&oracle, &first);
                assert!(
                    error < LOGIT_ERROR_MAX,
                    "{name} in {stages:?} by {how:?}: a logit is off by {error:e}"
                );
                assert_eq!(first, run(), "{name} in {stages:?} by {how:?}");
            }
        }
    }
}

#[test]
fn norms_over_all_heads_are_divided_in_stages_alone() {
    let mut refused = 0;
    for (name, checkpoint) in styled_variants() {
        let checkpoint = checkpoint.load().unwrap();
        let (config, oracle) = (&checkpoint.config, Oracle::new(&checkpoint));
        let (long, short) = (prompt(19, 1, config), prompt(6, 2, config));
        let in_two = config.divided(2);
        let has_whole_norms = config.style.undivided().is_some();
        match &in_two {
            Err(error) => assert!(has_whole_norms && error.contains("pp:"), "{name}: {error}"),
            Ok(_) => assert!(!has_whole_norms, "{name}"),
        }
        refused += u32::from(in_two.is_err());
        let whole = [vec![1, 1], vec![1; 4]].into_iter();
        for stages in whole.chain(in_two.ok().map(|_| vec![2])) {
            let ran = Divided::new(&checkpoint, unlike(stages.iter().sum()), &stages)
                .two_sequences([&long, &short], 6);
            let error = worst_error(&oracle, &ran);
            assert!(error < LOGIT_ERROR_MAX, "{name} in {stages:?}: a logit is off by {error:e}");
        }
    }
    assert!(refused >= 5, "{refused} families");
}

#[test]
fn every_member_runs_what_the_cost_model_counts_for_its_share() {
    for (name, checkpoint) in tiny_variants() {
        let checkpoint = checkpoint.load().unwrap();
        let cost = checkpoint.config.cost_shape(DType::F32, DType::F32, BLOCK_TOKENS);
        // the layers with experts of a stage are counted as if all came after the plain ones
        let is_mixed = checkpoint.config.experts.as_ref().is_some_and(|experts| !experts.layers.is_sorted());
        let all = [vec![2], vec![3], vec![1, 1], vec![2, 1], vec![2, 2]];
        let all = all.map(|stages| stages.into_iter().map(|count| vec![1.0; count]).collect::<Vec<_>>());
        let by_columns = all.iter().map(|stages| (stages, ExpertsBy::Columns));
        let uneven = vec![vec![1.0, 2.0, 1.0]];
        let by_member = all.iter().chain([&uneven]).map(|stages| (stages, ExpertsBy::Member));
        let has_experts = checkpoint.config.experts.is_some();
        for (stages, by) in by_columns.chain(by_member.filter(|_| has_experts)) {
            if is_mixed && stages.len() > 1 {
                continue;
            }
            let seen: Vec<Seen> = (0..stages.iter().map(Vec::len).sum()).map(|_| Seen::default()).collect();
            let mut divided = Divided::by(&checkpoint, seen.iter().map(seeing).collect(), stages, by);
            let (pages, ids) = (Vec::from_iter(0..16u32), [1u32; 12]);
            let part =
                |start, tokens, pages| StepInput { start, tokens, pages, draw: Some(DrawInput::GREEDY) };
            let piece = |context, tokens, last| Prefill { context, tokens, last };
            let steps = [
                (Pieces::ONE, vec![(vec![piece(9, 12, true)], 0)], vec![part(9, &ids[..], &pages[..3])]),
                (Pieces::ONE, vec![(vec![], 4)], vec![part(20, &ids[..1], &pages[..3]); 4]),
                (
                    Pieces { chunk_tokens: 7, groups: 2 },
                    vec![(vec![piece(9, 7, false)], 2), (vec![piece(16, 5, true)], 1)],
                    [vec![part(20, &ids[..1], &pages[..3]); 3], vec![part(9, &ids[..], &pages[..3])]]
                        .concat(),
                ),
            ];
            for (at, (how, batches, parts)) in steps.into_iter().enumerate() {
                divided.how = how;
                divided.run(&parts);
                for (share, seen) in divided.shares.iter().zip(&seen) {
                    let ops = batches.iter().flat_map(|(prompts, decodes)| {
                        share.step_ops(&cost, prompts, *decodes, u64::from(*decodes) * 21)
                    });
                    let submitted = std::mem::take(&mut *seen.lock().unwrap());
                    assert_eq!(
                        counted(ops),
                        counted(submitted.into_iter().map(|sig| (sig, 1))),
                        "{name}: step {at} of member {} of {stages:?} by {by:?}",
                        share.member
                    );
                }
            }
        }
    }
}

#[test]
fn an_instance_over_several_devices_answers_beside_one_of_a_single_device() {
    let (_, checkpoint) = tiny_variants().remove(0);
    let checkpoint = checkpoint.load().unwrap();
    let shared = prompt(20, 3, &checkpoint.config);
    let prompts: Vec<Vec<u32>> = (0..12)
        .map(|at| [&shared[..], &prompt(3 + at, 10 + u64::from(at), &checkpoint.config)].concat())
        .collect();
    let expected: Vec<_> = prompts.iter().map(|prompt| greedy(&checkpoint, prompt, 7)).collect();
    for (alone, stages) in [(true, vec![3]), (false, vec![3]), (true, vec![1, 2]), (false, vec![1, 1, 1])] {
        let fleet = TestFleet::new(checkpoint.clone());
        let fleet = fleet.with_stages(core(), vec![core(), core()], &stages);
        let fleet = if alone { fleet } else { fleet.with(Role::Auto) };
        let env = SeededEnv::new(7);
        let shared: SharedEnv = Arc::new(env.clone());
        let handle = fleet.start(shared);
        let prompts = prompts.clone();
        let answers = env.run(async move {
            let asked = prompts.into_iter().enumerate();
            let asked = asked.map(|(at, prompt)| ask(&handle, format!("r{at}"), prompt, 7, None));
            futures_util::future::join_all(asked).await
        });
        let mut placed: HashMap<String, usize> = HashMap::new();
        for (answer, expected) in answers.iter().zip(&expected) {
            assert_eq!((&answer.tokens, &answer.failure), (expected, &None));
            for (prefill, _) in &answer.placed {
                *placed.entry(prefill.clone()).or_default() += 1;
            }
        }
        assert_eq!(placed.len(), if alone { 1 } else { 2 }, "{placed:?}");
        assert_eq!(fleet.panics(), 0);
    }
}

#[test]
fn shares_that_are_not_those_of_the_devices_are_refused_and_the_least_room_counts() {
    let (_, checkpoint) = tiny_variants().remove(0);
    let checkpoint = checkpoint.load().unwrap();
    let config = Arc::new(checkpoint.config.clone());
    let partition = config.divided(2).unwrap();
    let loaded = |devices: usize, kv_bytes: u64| {
        let limits = InstanceLimits {
            activations: DType::F32,
            kv: DType::F32,
            kv_bytes: 1 << 20,
            step_tokens_max: 24,
            prefill_tokens_beside_decode_max: None,
            sequences_max: 4,
            block_tokens: Some(8),
        };
        let mut placed = partition.shares().iter().map(|share| {
            let device = core();
            let weights = checkpoint.place_share(&*device, share, &mut |_, _| {}).unwrap();
            MemberSpec { device, weights, kv_bytes }
        });
        let MemberSpec { device, weights, .. } = placed.next().unwrap();
        let weights = weights.unwrap();
        let spec = InstanceSpec { device, weights, role: Role::Prefill, price: None, limits };
        Loaded::divided(&config, &partition, spec, placed.take(devices - 1).collect())
    };
    let error = |loaded: Result<Loaded>| loaded.err().expect("it is refused").to_string();
    assert!(error(loaded(1, 1 << 20)).contains("2 shares"));
    assert!(error(loaded(2, 64)).contains("give it more"));
    let fits = |kv_bytes| loaded(2, kv_bytes).unwrap();
    assert_eq!(fits(1 << 20).id(), "tp:cpu@0,cpu@0");
    let blocks = |kv_bytes| fits(kv_bytes).kv_capacity_tokens() / 8;
    assert_eq!(blocks(1 << 19), blocks(1 << 20) / 2, "the least room counts");
}

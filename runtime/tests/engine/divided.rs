//! Several devices divide one model: they compute what one device does, each only its share.

use super::cost_shape::{BLOCK_TOKENS, counted};
use crate::fleet::wayward::Wayward;
use crate::fleet::{TestFleet, ask, greedy, prompt};
use bytemuck::Zeroable;
use mixfleet_cpu::CpuBackend;
use mixfleet_hal::sample::Drawn;
use mixfleet_hal::{Backend, Cmd, DType, Device, Elapsed, Graph, OpSig, Queue, Result, Ticket};
use mixfleet_hwtests::reference::ReferenceDevice;
use mixfleet_runtime::engine::{InstanceLimits, InstanceSpec, Loaded, LowerTiers, MemberSpec};
use mixfleet_runtime::env::{SeededEnv, SharedEnv};
use mixfleet_runtime::model::divided::{MemberRun, run_divided};
use mixfleet_runtime::model::draws::DrawInput;
use mixfleet_runtime::model::exchange::ThroughHost;
use mixfleet_runtime::model::graph::{Forward, StepInput, StepShape};
use mixfleet_runtime::model::random::tiny_variants;
use mixfleet_runtime::model::{Checkpoint, Oracle};
use mixfleet_scheduler::cost::MemberShare;
use mixfleet_scheduler::fleet::Role;
use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// In f32 a logit is off by less than this.
pub(super) const LOGIT_ERROR_MAX: f64 = 1e-4;

pub(super) fn core() -> Arc<dyn Device> {
    CpuBackend.open("cpu@0").unwrap()
}

/// So many devices, the last of which is unlike the others.
pub(super) fn unlike(members: usize) -> Vec<Arc<dyn Device>> {
    let cores = (1..members).map(|_| core());
    cores.chain([Arc::new(ReferenceDevice::default()) as Arc<dyn Device>]).collect()
}

type OneMember = (Arc<dyn Device>, Box<dyn Queue>, Forward);

/// A model on the devices that divide it.
struct Divided {
    members: Vec<OneMember>,
    shares: Vec<MemberShare>,
    vocab: usize,
}

impl Divided {
    fn new(checkpoint: &Checkpoint, devices: Vec<Arc<dyn Device>>) -> Self {
        let config = &checkpoint.config;
        let shape = StepShape {
            tokens_max: 32,
            sequences_max: 4,
            blocks: 16,
            block_tokens: BLOCK_TOKENS,
            activations: DType::F32,
            kv: DType::F32,
        };
        let shares = config.divided(devices.len()).unwrap().shares().to_vec();
        let members = devices.into_iter().zip(&shares).map(|(device, share)| {
            let weights = checkpoint.place_share(&*device, share, &mut |_, _| {}).unwrap().unwrap();
            let forward = Forward::of_member(&*device, config, share, weights, shape).unwrap();
            let queue = device.queue().unwrap();
            (device, queue, forward)
        });
        Divided { members: members.collect(), shares: shares.clone(), vocab: config.vocab as usize }
    }

    /// The rows of logits of a step, and the tokens drawn from them.
    fn run(&mut self, parts: &[StepInput<'_>]) -> Ran {
        let begin = |(device, _, forward): &OneMember| forward.begin(&**device, parts);
        let passes: Vec<_> = self.members.iter().map(|member| begin(member).unwrap()).collect();
        let members = self.members.iter_mut().map(|(device, queue, forward)| MemberRun {
            device: &**device,
            queue: &mut **queue,
            forward,
        });
        let mut members: Vec<_> = members.collect();
        run_divided(&mut members, &mut ThroughHost::default(), &passes, Duration::from_secs(60)).unwrap();
        let (device, _, forward) = &self.members[0];
        let mut logits = vec![0f32; passes[0].rows() as usize * self.vocab];
        device.read(&forward.logits(&passes[0]), bytemuck::cast_slice_mut(&mut logits)).unwrap();
        let mut drawn = vec![Drawn::zeroed(); passes[0].rows() as usize];
        let outputs = forward.drawn(&passes[0]).expect("the first member draws");
        device.read(outputs.drawn(), bytemuck::cast_slice_mut(&mut drawn)).unwrap();
        let rows = logits.chunks_exact(self.vocab).map(<[f32]>::to_vec).collect();
        (rows, drawn.into_iter().map(|drawn| drawn.id).collect())
    }

    fn two_sequences(&mut self, prompts: [&[u32]; 2], steps: usize) -> [(Vec<u32>, Vec<Vec<f32>>); 2] {
        two_sequences(&mut |parts| self.run(parts), prompts, steps)
    }
}

/// Rows of logits, and the tokens drawn from them.
pub(super) type Ran = (Vec<Vec<f32>>, Vec<u32>);

/// Two sequences, the second of which begins while the first decodes: their texts, and their logits from step
/// to step.
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
            let run = || Divided::new(&checkpoint, unlike(members)).two_sequences([&long, &short], 6);
            let first = run();
            let error = worst_error(&oracle, &first);
            assert!(error < LOGIT_ERROR_MAX, "{name} over {members}: a logit is off by {error:e}");
            assert_eq!(first, run(), "{name} over {members}");
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

/// A device that notes what is submitted to it.
pub(super) fn seeing(seen: &Seen) -> Arc<dyn Device> {
    let seen = seen.clone();
    Arc::new(Wayward::new("seeing").queuing(move |queue| Box::new(SeeingQueue(queue, seen.clone()))))
}

/// What the cost model counts for a member: only the first one adds the residual and biases, and draws.
fn counted_for(share: &MemberShare, sig: OpSig) -> OpSig {
    match sig {
        OpSig::Gemm { m, n, k, x, weight, out, accumulate: true, .. } if !share.is_first() => {
            OpSig::Gemm { m, n, k, x, weight, out, bias: false, accumulate: false }
        }
        sig => sig,
    }
}

#[test]
fn every_member_runs_what_the_cost_model_counts_for_its_share() {
    for (name, checkpoint) in tiny_variants() {
        let checkpoint = checkpoint.load().unwrap();
        let cost = checkpoint.config.cost_shape(DType::F32, DType::F32, BLOCK_TOKENS);
        for members in [2, 3] {
            let seen: Vec<Seen> = (0..members).map(|_| Seen::default()).collect();
            let mut divided = Divided::new(&checkpoint, seen.iter().map(seeing).collect());
            let (pages, ids) = (Vec::from_iter(0..16u32), [1u32; 12]);
            let part =
                |start, tokens, pages| StepInput { start, tokens, pages, draw: Some(DrawInput::GREEDY) };
            let steps = [
                (cost.prefill_ops(9, 12, true), vec![part(9, &ids[..], &pages[..3])]),
                (cost.decode_ops(4, 4 * 21), vec![part(20, &ids[..1], &pages[..3]); 4]),
            ];
            for (at, (whole, parts)) in steps.into_iter().enumerate() {
                let rows = divided.run(&parts).0.len() as u32;
                for (share, seen) in divided.shares.iter().zip(&seen) {
                    let of_member = share.of(&cost);
                    let ops = if at == 0 {
                        of_member.prefill_ops(9, 12, true)
                    } else {
                        of_member.decode_ops(4, 4 * 21)
                    };
                    let is_draw = |sig: &OpSig| matches!(sig, OpSig::Sample { .. });
                    let ops = ops.into_iter().filter(|(sig, _)| !is_draw(sig));
                    let (draws, submitted): (Vec<_>, Vec<_>) =
                        std::mem::take(&mut *seen.lock().unwrap()).into_iter().partition(is_draw);
                    let what = format!("{name}: step {at} of member {} of {members}", share.member);
                    assert_eq!(
                        counted(ops.map(|(sig, count)| (counted_for(share, sig), count))),
                        counted(submitted.into_iter().map(|sig| (sig, 1))),
                        "{what}"
                    );
                    let draw = whole.iter().map(|(sig, _)| *sig).find(is_draw).expect("the step draws");
                    assert!(matches!(draw, OpSig::Sample { rows: drawn, .. } if drawn == rows), "{what}");
                    assert_eq!(draws, if share.is_first() { vec![draw] } else { vec![] }, "{what}");
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
    for alone in [true, false] {
        let fleet = TestFleet::new(checkpoint.clone()).with_devices(core(), vec![core(), core()]);
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
            for (prefill, decode) in &answer.placed {
                assert_eq!(prefill, decode, "no KV moves");
                *placed.entry(prefill.clone()).or_default() += 1;
            }
        }
        assert_eq!(placed.len(), if alone { 1 } else { 2 }, "{placed:?}");
        assert_eq!(fleet.panics(), 0);
    }
}

#[test]
fn what_several_devices_cannot_do_yet_is_refused_at_the_start() {
    let (_, checkpoint) = tiny_variants().remove(0);
    let checkpoint = checkpoint.load().unwrap();
    let config = Arc::new(checkpoint.config.clone());
    let partition = config.divided(2).unwrap();
    let loaded = |role, devices: usize, kv_bytes: u64| {
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
        let spec = InstanceSpec { device, weights, role, price: None, limits };
        Loaded::divided(&config, &partition, spec, placed.take(devices - 1).collect())
    };
    let error = |loaded: Result<Loaded>| loaded.err().expect("it is refused").to_string();
    assert!(error(loaded(Role::Prefill, 2, 1 << 20)).contains("no role"));
    assert!(error(loaded(Role::Auto, 1, 1 << 20)).contains("2 shares"));
    assert!(error(loaded(Role::Auto, 2, 64)).contains("give it more"));
    let fits = |kv_bytes| loaded(Role::Auto, 2, kv_bytes).unwrap();
    assert_eq!(fits(1 << 20).id(), "tp:cpu@0,cpu@0");
    let blocks = |kv_bytes| fits(kv_bytes).kv_capacity_tokens() / 8;
    assert_eq!(blocks(1 << 19), blocks(1 << 20) / 2, "the least room counts");
    let tiers = LowerTiers { dram_bytes: 1 << 20, ssd: None, namespace: Box::pin(std::future::ready(None)) };
    let region = |_: u64| Err(mixfleet_hal::Error::unsupported("none is needed"));
    assert!(error(fits(1 << 20).with_lower_tiers(tiers, &region)).contains("--kv-dram"));
}

//! Several devices that copy to each other: the queue, and members of an instance that exchange by it.
//!
//! The fake driver runs a stream's work as late as it may, so that a missing wait for another device's queue
//! adds stale bytes; in the other mode it lets the other devices run first, so that an early write overwrites
//! bytes not yet read.

use super::{Driver, LONG, counts, fill, in_children};
use mixfleet_cuda::CudaBackend;
use mixfleet_hal::{Backend, BufferUsage, Cmd, DType, Device, ErrorKind, OpSig, Queue, Result, Slice};
use mixfleet_runtime::model::divided::{MemberRun, MicroBatch, run_stages};
use mixfleet_runtime::model::draws::DrawInput;
use mixfleet_runtime::model::exchange::ThroughHost;
use mixfleet_runtime::model::graph::{Forward, Pass, StepInput, StepShape};
use mixfleet_runtime::model::leaving::{KvStays, LayerKv};
use mixfleet_runtime::model::peers::{Carriers, PeerCopies};
use mixfleet_runtime::model::variants::tiny_variants;
use mixfleet_runtime::model::{Checkpoint, Oracle};
use mixfleet_scheduler::cost::Pieces;
use std::sync::Arc;
use std::time::Duration;

const BLOCK_TOKENS: u32 = 8;
/// In f32 a logit is off by less than this.
const LOGIT_ERROR_MAX: f64 = 1e-4;
/// More than any residual stream here.
const WHOLE: u64 = 1 << 20;

/// Bytes that crossed so far: between devices, from the host to a device, and back.
fn crossed() -> [u64; 3] {
    let mut bytes = [0; 3];
    // SAFETY: the library is the one that the backend loaded; the function fills three numbers.
    unsafe {
        let driver = libloading::Library::new("libcuda.so.1").unwrap();
        let told: libloading::Symbol<unsafe extern "C" fn(*mut u64) -> i32> =
            driver.get(b"fake_crossed").unwrap();
        assert_eq!(told(bytes.as_mut_ptr()), 0);
    }
    bytes
}

/// Runs `test` in children of this process, each with three devices and this answer about copies between
/// them; a second environment value is the order of streams.
fn with_peers(name: &str, peers: &[&'static str], test: impl FnOnce()) {
    let of = |peers: &&'static str| {
        let (peers, order) = peers.split_once(' ').unwrap_or((peers, ""));
        [("FAKE_CUDA_DEVICES", "3"), ("FAKE_CUDA_PEERS", peers), ("FAKE_CUDA_ORDER", order)]
    };
    let choices: Vec<_> = peers.iter().map(of).collect();
    let choices: Vec<&[(&str, &str)]> = choices.iter().map(|choices| &choices[..]).collect();
    in_children(&format!("peers::{name}"), Driver::New, &choices, |_| test());
}

fn copy(from: &Slice, to: &Slice) -> Cmd {
    Cmd::new(OpSig::Copy { bytes: from.bytes }, &[from.clone(), to.clone()]).unwrap()
}

fn words(device: &dyn Device, slice: &Slice) -> Vec<u32> {
    let mut bytes = vec![0; slice.bytes as usize];
    device.read(slice, &mut bytes).unwrap();
    bytes.as_chunks::<4>().0.iter().map(|word| u32::from_ne_bytes(*word)).collect()
}

#[test]
fn a_queue_copies_to_another_device_whose_queue_follows_it() {
    with_peers("a_queue_copies_to_another_device_whose_queue_follows_it", &[""], || {
        let [one, two] = ["cuda:0", "cuda:1"].map(|name| CudaBackend.open(name).unwrap());
        let alloc = |device: &Arc<dyn Device>, role| device.alloc(64, role).unwrap();
        let [source, far, further] = [&one, &two, &two].map(|at| alloc(at, BufferUsage::Activations));
        let (mut first, mut second) = (one.queue().unwrap(), two.queue().unwrap());
        assert_eq!(first.submit(&[copy(&source, &far)]).unwrap_err().kind, ErrorKind::Invalid, "not yet");
        assert!(one.reaches(&far) && one.reaches(&far) && one.reaches(&source));
        assert!(!one.reaches(&alloc(&two, BufferUsage::Staging)), "memory of the host");

        let pushed = first.submit(&[fill(&source, 7), copy(&source, &far)]).unwrap();
        let end = first.end().unwrap();
        second.submit(&[copy(&far, &further)]).unwrap();
        assert_eq!(words(&*two, &further), [!0; 16], "no queue has waited for the other device");
        second.follow(&*end).unwrap();
        let came = second.submit(&[copy(&far, &further)]).unwrap();
        second.wait(came, LONG).unwrap();
        assert_eq!(words(&*two, &further), [7; 16]);
        first.wait(pushed, LONG).unwrap();
        assert_eq!(crossed()[0], 64);

        // the host sees the writes of another device's queue, and a dropped buffer is not written to
        first.submit(&[fill(&source, 8), copy(&source, &far)]).unwrap();
        assert_eq!(words(&*two, &far), [8; 16]);
        first.submit(&[copy(&source, &far)]).unwrap();
        drop(far);

        // only copies, and only into the other's memory
        let far = alloc(&two, BufferUsage::Activations);
        let add = |to: &Slice| {
            Cmd::new(
                OpSig::Add { elements: 16, x: DType::F32 },
                &[source.clone(), source.clone(), to.clone()],
            )
        };
        for refused in [copy(&far, &source), fill(&far, 1), add(&far).unwrap()] {
            assert_eq!(first.submit(&[refused]).unwrap_err().kind, ErrorKind::Invalid);
        }
        let graph = first.record(&[fill(&source, 9), copy(&source, &far)]).unwrap();
        assert_eq!(second.replay(&graph).unwrap_err().kind, ErrorKind::Invalid);
        first.replay(&graph).unwrap();
        assert_eq!(words(&*two, &far), [9; 16]);

        // one device, opened twice, has one memory
        let again = CudaBackend.open("cuda").unwrap();
        let near = alloc(&again, BufferUsage::Activations);
        let before = crossed()[0];
        assert!(one.reaches(&near));
        first.submit(&[copy(&source, &near)]).unwrap();
        assert_eq!((words(&*again, &near), crossed()[0]), (vec![9; 16], before));
    });
}

#[test]
fn a_device_tells_which_others_it_reaches() {
    with_peers("a_device_tells_which_others_it_reaches", &["", "none"], || {
        let is_denied = std::env::var("FAKE_CUDA_PEERS").unwrap() == "none";
        let infos = CudaBackend.probe().unwrap();
        let notes = infos.iter().map(|info| {
            let note = info.notes.iter().find(|(name, _)| name == "peers");
            note.map(|(_, value)| value.clone()).unwrap()
        });
        let expected = ["cuda:1 cuda:2", "cuda:0 cuda:2", "cuda:0 cuda:1"]
            .map(|all| if is_denied { "none" } else { all });
        assert_eq!(notes.collect::<Vec<_>>(), expected);
        let [one, two] = ["cuda:0", "cuda:1"].map(|name| CudaBackend.open(name).unwrap());
        assert_eq!(one.info(), &infos[0]);
        let far = two.alloc(64, BufferUsage::Activations).unwrap();
        assert_eq!(one.reaches(&far), !is_denied);
    });
}

type OneMember = (Arc<dyn Device>, Box<dyn Queue>, Forward);

/// Rows of logits, and the tokens drawn from them.
type Rows = Vec<(Vec<f32>, u32)>;

/// A model on devices that divide it.
struct Group {
    stages: Vec<Vec<OneMember>>,
    peers: PeerCopies,
    vocab: usize,
    how: Pieces,
}

/// What carries what members exchange.
#[derive(Clone, Copy, Debug, PartialEq)]
enum By {
    Host,
    /// Devices, with the bytes in one piece.
    Peers(u64),
}

impl Group {
    /// Devices from `cuda:0` on, in stages with these speeds.
    fn new(checkpoint: &Checkpoint, speeds: &[Vec<f64>], by: By) -> Self {
        let config = &checkpoint.config;
        let shape = StepShape {
            tokens_max: 32,
            sequences_max: 4,
            blocks: 16,
            block_tokens: BLOCK_TOKENS,
            activations: DType::F32,
            kv: DType::F32,
        };
        let partition = config.in_stages(speeds).unwrap();
        let mut members = partition.shares().iter().map(|share| {
            let device = CudaBackend.open(&format!("cuda:{}", share.member)).unwrap();
            let weights = checkpoint.place_share(&*device, share, &mut |_, _| {}).unwrap().unwrap();
            let forward = Forward::of_member(&*device, config, share, weights, shape).unwrap();
            let queue = device.queue().unwrap();
            (device, queue, forward)
        });
        let stages: Vec<Vec<OneMember>> =
            speeds.iter().map(|stage| members.by_ref().take(stage.len()).collect()).collect();
        let peers = match by {
            By::Host => PeerCopies::default(),
            By::Peers(bytes) => {
                fn members(stage: &Vec<OneMember>) -> Vec<(&dyn Device, &Forward)> {
                    stage.iter().map(|(device, _, forward)| (&**device, forward)).collect()
                }
                PeerCopies::in_pieces(&stages.iter().map(members).collect::<Vec<_>>(), bytes)
            }
        };
        Group { stages, peers, vocab: config.vocab as usize, how: Pieces::ONE }
    }

    /// The rows of logits of a step and the tokens drawn from them, by number of the sequence.
    fn step(&mut self, parts: &[StepInput<'_>], kv: &mut dyn LayerKv) -> Result<Rows> {
        let (vocab, batches) = (self.vocab, MicroBatch::cut(parts, self.how, (BLOCK_TOKENS, 1)));
        fn ready(stage: &mut Vec<OneMember>) -> Vec<MemberRun<'_>> {
            let members = stage.iter_mut().map(|(device, queue, forward)| MemberRun {
                device: &**device,
                queue: &mut **queue,
                forward,
            });
            members.collect()
        }
        let mut stages: Vec<_> = self.stages.iter_mut().map(ready).collect();
        let mut ran = Vec::new();
        let mut read = |last: &MemberRun<'_>, pass: &Pass, batch: &MicroBatch<'_>| {
            let count = pass.rows() as usize;
            if count == 0 {
                return Ok(());
            }
            let mut logits = vec![0u8; count * vocab * 4];
            last.device.read(&last.forward.logits(pass), &mut logits)?;
            let logits: Vec<f32> = logits.as_chunks::<4>().0.iter().map(|x| f32::from_ne_bytes(*x)).collect();
            let drawn = last.forward.drawn(pass).expect("the device draws");
            let drawn = words(last.device, drawn.drawn());
            for ((part, row), id) in
                batch.drawing().zip(logits.chunks_exact(vocab)).zip(drawn.chunks_exact(4))
            {
                ran.push((part, (row.to_vec(), id[0])));
            }
            Ok(())
        };
        let carriers = Carriers { host: &mut ThroughHost::default(), peers: &mut self.peers };
        run_stages(&mut stages, carriers, &batches, Duration::from_secs(60), kv, &mut read)?;
        ran.sort_by_key(|(part, _)| *part);
        Ok(ran.into_iter().map(|(_, row)| row).collect())
    }

    /// Two sequences, the second of which begins while the first decodes: each step's rows, until one fails.
    fn steps(&mut self, kv: &mut dyn LayerKv) -> Vec<Result<Rows>> {
        let draw = Some(DrawInput::GREEDY);
        let pages: [Vec<u32>; 2] = [(0..8).rev().collect(), (8..16).collect()];
        let mut texts = prompts();
        let mut ran = Vec::new();
        for step in 0..STEPS {
            let parts = (0..2).filter(|which| step >= *which).map(|which| {
                let start = if step == which { 0 } else { texts[which].len() - 1 };
                let pages = &pages[which][..texts[which].len().div_ceil(BLOCK_TOKENS as usize)];
                StepInput { start: start as u32, tokens: &texts[which][start..], pages, draw }
            });
            let rows = self.step(&parts.collect::<Vec<_>>(), kv);
            if let Ok(rows) = &rows {
                texts.iter_mut().zip(rows).for_each(|(text, (_, id))| text.push(*id));
            }
            let failed = rows.is_err();
            ran.push(rows);
            if failed {
                break;
            }
        }
        ran
    }
}

const STEPS: usize = 4;
/// Rows of activations of these steps, and rows of logits.
const ROWS: [(u64, u64); STEPS] = [(19, 1), (7, 2), (2, 2), (2, 2)];

fn prompts() -> [Vec<u32>; 2] {
    [(0..19).map(|at| 3 + at * 7 % 90).collect(), (0..6).map(|at| 5 + at * 11 % 90).collect()]
}

/// The largest error of any logit of such steps.
fn worst_error(oracle: &Oracle, steps: &[Rows]) -> f64 {
    let (mut texts, mut worst) = (prompts(), 0.0f64);
    for rows in steps {
        for (text, (row, id)) in texts.iter_mut().zip(rows) {
            let exact = oracle.last_logits(text);
            worst = row.iter().zip(&exact).map(|(a, b)| (f64::from(*a) - b).abs()).fold(worst, f64::max);
            let best = (0..row.len()).fold(0, |best, i| if row[i] > row[best] { i } else { best });
            assert_eq!(*id as usize, best, "the draw is from whole logits");
            text.push(*id);
        }
    }
    worst
}

/// Notes whose KV leaves.
#[derive(Default)]
struct Leaves(Vec<(usize, usize)>);

impl LayerKv for Leaves {
    fn leaves(&self, _: usize) -> bool {
        true
    }
    fn gather(&mut self, _: usize, _: usize, _: usize) -> Result<Vec<Cmd>> {
        Ok(Vec::new())
    }
    fn leave(&mut self, member: usize, _: usize, layer: usize) -> Result<()> {
        self.0.push((member, layer));
        Ok(())
    }
    fn go_on(&mut self, _: Duration) -> Result<Option<Duration>> {
        Ok(None)
    }
}

fn checkpoint(name: &str) -> Checkpoint {
    let (_, found) = tiny_variants().into_iter().find(|(known, _)| *known == name).unwrap();
    found.load().unwrap()
}

fn all(steps: Vec<Result<Rows>>) -> Vec<Rows> {
    steps.into_iter().map(|step| step.unwrap()).collect()
}

#[test]
fn members_that_exchange_between_devices_have_the_bits_of_those_that_go_through_the_host() {
    let name = "members_that_exchange_between_devices_have_the_bits_of_those_that_go_through_the_host";
    with_peers(name, &["", " others"], || {
        // three devices show the order of sums; unequal shares, that rows of logits are moved over themselves
        let divided: [&[Vec<f64>]; 5] = [
            &[vec![1.0; 2]],
            &[vec![1.0; 3]],
            &[vec![2.0, 1.0]],
            &[vec![1.0], vec![1.0; 2]],
            &[vec![1.0; 2], vec![1.0]],
        ];
        for (family, divided) in [("llama2", &divided[..]), ("qwen2", &divided[1..2])] {
            let checkpoint = checkpoint(family);
            let oracle = Oracle::new(&checkpoint);
            for speeds in divided {
                let run = |by, how| {
                    let mut group = Group { how, ..Group::new(&checkpoint, speeds, by) };
                    let between = crossed()[0];
                    let ran = all(group.steps(&mut KvStays));
                    assert_eq!(crossed()[0] > between, by != By::Host, "{family} {speeds:?} {by:?}");
                    ran
                };
                let expected = run(By::Host, Pieces::ONE);
                let error = worst_error(&oracle, &expected);
                assert!(error < LOGIT_ERROR_MAX, "{family} {speeds:?}: a logit is off by {error:e}");
                assert!(run(By::Peers(WHOLE), Pieces::ONE) == expected, "{family} {speeds:?}");
                // and where KV leaves, for which the host waits in each layer
                let (mut group, mut leaves) =
                    (Group::new(&checkpoint, speeds, By::Peers(WHOLE)), Leaves::default());
                assert!(all(group.steps(&mut leaves)) == expected, "{family} {speeds:?}, KV leaves");
                let first = |stage: usize| speeds[..stage].iter().map(Vec::len).sum::<usize>();
                let left = group.stages.iter().enumerate().flat_map(|(stage, members)| {
                    (0..members[0].2.config().layers as usize).map(move |layer| (first(stage), layer))
                });
                assert_eq!(leaves.0, left.collect::<Vec<_>>().repeat(STEPS), "{family} {speeds:?}");
            }
            // in pieces of 2 rows of 48, which share two places
            let three = [vec![1.0; 3]];
            let expected = all(Group::new(&checkpoint, &three, By::Host).steps(&mut KvStays));
            let pieces = all(Group::new(&checkpoint, &three, By::Peers(384)).steps(&mut KvStays));
            assert!(pieces == expected, "{family}, in pieces");
            // micro-batches follow each other through stages
            let (stages, how) = ([vec![1.0; 2], vec![1.0]], Pieces { chunk_tokens: 4, groups: 2 });
            let run = |by| all(Group { how, ..Group::new(&checkpoint, &stages, by) }.steps(&mut KvStays));
            assert!(run(By::Peers(WHOLE)) == run(By::Host), "{family}, in micro-batches");
        }
    });
}

/// The numbers that docs/results/parallel.md has.
#[test]
fn what_crosses_goes_from_device_to_device_and_not_through_the_host() {
    with_peers("what_crosses_goes_from_device_to_device_and_not_through_the_host", &[""], || {
        let checkpoint = checkpoint("llama2");
        let (hidden, vocab) = (u64::from(checkpoint.config.hidden), u64::from(checkpoint.config.vocab));
        let sums = 2 * u64::from(checkpoint.config.layers);
        for members in [2u64, 3] {
            let speeds = [vec![1.0; members as usize]];
            let ran = [By::Host, By::Peers(WHOLE)].map(|by| {
                let mut group = Group::new(&checkpoint, &speeds, by);
                let before = crossed();
                let calls = counts::calls_of(|| drop(all(group.steps(&mut KvStays))));
                let after = crossed();
                ([0, 1, 2].map(|way| after[way] - before[way]), calls)
            });
            let [(host, host_calls), (peers, peer_calls)] = &ran;
            let pushed = vocab - checkpoint.config.in_stages(&speeds).unwrap().shares()[0].vocab.len() as u64;
            let of_rows = |bytes: u64| ROWS.iter().map(|(_, rows)| rows * bytes).sum::<u64>();
            let summed: u64 = ROWS.iter().map(|(rows, _)| sums * rows * hidden * 4).sum();
            assert_eq!((host[0], peers[0]), (0, members * (members - 1) * summed + of_rows(pushed * 4)));
            let saved = members * summed + of_rows(vocab * 4);
            assert_eq!([host[1] - peers[1], host[2] - peers[2]], [saved; 2]);

            // each copy to or from the host is waited for, and so is each member before each exchange
            let calls = |name| [host_calls, peer_calls].map(|calls| counts::count(calls, name));
            let less = |name| calls(name)[0] - calls(name)[1];
            let steps = STEPS as u64;
            assert_eq!(less("copy_host"), steps * (2 * members * sums + members + 1));
            assert_eq!(less("cuEventElapsedTime_v2"), steps * (members * sums + 1), "batches waited for");
            let between = members * (members - 1) * steps * sums + of_rows(members - 1);
            assert_eq!(calls("cuMemcpyPeerAsync"), [0, between]);
            let total = [host_calls, peer_calls].map(|calls| calls.values().sum::<u64>());
            eprintln!(
                "{members} members, {steps} steps of {sums} sums: {total:?} calls, bytes {host:?} and {peers:?}"
            );
            for name in [
                "cuEventElapsedTime_v2",
                "cuEventSynchronize",
                "cuStreamSynchronize",
                "copy_host",
                "cuMemcpyPeerAsync",
                "cuMemcpyDtoDAsync_v2",
                "cuStreamWaitEvent",
                "cuLaunchKernel",
            ] {
                eprintln!("{name}: {:?}", calls(name));
            }
        }
    });
}

#[test]
fn devices_that_do_not_reach_each_other_exchange_through_the_host() {
    with_peers("devices_that_do_not_reach_each_other_exchange_through_the_host", &["none", "lost"], || {
        let checkpoint = checkpoint("llama2");
        for speeds in [&[vec![1.0; 2]][..], &[vec![1.0], vec![1.0]]] {
            let expected = all(Group::new(&checkpoint, speeds, By::Host).steps(&mut KvStays));
            let mut group = Group::new(&checkpoint, speeds, By::Peers(WHOLE));
            let before = crossed()[0];
            assert!(all(group.steps(&mut KvStays)) == expected);
            assert_eq!(crossed()[0], before, "only trials went between devices");
        }
    });
}

/// The numbers are those of copies between devices from the start on: the first two are trials, then come six
/// sums of two copies each and one row of logits, and in later steps two.
#[test]
fn a_copy_that_fails_ends_the_step_and_no_value_of_it_is_seen() {
    let at = ["3", "4", "9", "14", "15", "16", "29", "1000"];
    with_peers("a_copy_that_fails_ends_the_step_and_no_value_of_it_is_seen", &at, || {
        let fails: usize = std::env::var("FAKE_CUDA_PEERS").unwrap().parse().unwrap();
        let checkpoint = checkpoint("llama2");
        let speeds = [vec![1.0; 2]];
        let expected = all(Group::new(&checkpoint, &speeds, By::Host).steps(&mut KvStays));
        let ran = Group::new(&checkpoint, &speeds, By::Peers(WHOLE)).steps(&mut KvStays);
        let copies = [13, 14, 14, 14];
        let last = (0..STEPS).find(|step| fails <= 2 + copies[..=*step].iter().sum::<usize>());
        assert_eq!(ran.len(), last.map_or(STEPS, |step| step + 1));
        for (step, (ran, expected)) in ran.into_iter().zip(&expected).enumerate() {
            match ran {
                Ok(rows) => assert!(rows == *expected && Some(step) != last, "step {step}"),
                Err(error) => assert_eq!((error.kind, Some(step)), (ErrorKind::DeviceLost, last), "{error}"),
            }
        }
    });
}

/// The same for stages: one copy a step, behind a trial.
#[test]
fn a_stage_that_is_not_handed_on_ends_the_step() {
    with_peers("a_stage_that_is_not_handed_on_ends_the_step", &["2", "4"], || {
        let fails: usize = std::env::var("FAKE_CUDA_PEERS").unwrap().parse().unwrap();
        let checkpoint = checkpoint("llama2");
        let ran = Group::new(&checkpoint, &[vec![1.0], vec![1.0]], By::Peers(WHOLE)).steps(&mut KvStays);
        assert_eq!((ran.len(), ran.iter().filter(|step| step.is_err()).count()), (fails - 1, 1));
    });
}

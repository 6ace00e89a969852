//! Measures how much of a decode step with attention offload two batches in flight hide.
//!
//! `cargo run -p mixfleet-runtime --example two_batches [cpu]`: by default on two simulated parts, on a clock
//! so much slower than real time that this machine's own work hardly counts; with `cpu`, on `cpu@0` and
//! `cpu@1`. It looks for the context at which products and attention take equally long, and then runs steps
//! in turn as one batch, as two of half the sequences one after the other (staggering off), and as the same
//! two in flight together. The difference between the latter two is what staggering hides; the smaller side
//! is the busy time of the device with less work. docs/results/attention.md has the results.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout)]

use mixfleet_cpu::CpuBackend;
use mixfleet_hal::cast::{to_u32, to_usize};
use mixfleet_hal::catalog::part;
use mixfleet_hal::{Backend, BufferUsage, Cmd, DType, Device, Elapsed, Graph, Queue, Result, Slice, Ticket};
use mixfleet_runtime::model::apart::{ApartBatch, ApartQueues, AttentionMember, run_apart};
use mixfleet_runtime::model::draws::DrawInput;
use mixfleet_runtime::model::exchange::ThroughHost;
use mixfleet_runtime::model::graph::{Forward, StepInput, StepShape};
use mixfleet_runtime::model::leaving::KvStays;
use mixfleet_runtime::model::random::RandomCheckpoint;
use mixfleet_scheduler::cost::AttnSplit;
use mixfleet_simulated::{RealClock, TimeOnlyDevice};
use serde_json::json;
use std::error::Error;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(120);
const BLOCK_TOKENS: u32 = 32;
const SEQUENCES: u32 = 16;
const CONTEXT_MAX: u32 = 4096;
/// Dilation of the simulated parts' clock.
const DILATION: f64 = 25.0;
const PART: &str = "L4";

/// Four layers of a model with this many KV heads and dimensions of each.
fn model(hidden: u32, (heads, kv_heads, head_dim): (u32, u32, u32)) -> RandomCheckpoint {
    let config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": hidden * 11 / 4, "num_hidden_layers": 4,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "vocab_size": 8192, "max_position_embeddings": 2 * CONTEXT_MAX, "rms_norm_eps": 1e-5,
        "bos_token_id": 1, "eos_token_id": 2,
    });
    RandomCheckpoint { config: config.as_object().cloned().unwrap_or_default(), dtype: DType::Bf16, seed: 1 }
}

/// A device whose memory is written once, like weights and KV: memory never written takes no space, and reads
/// of it come from a cache.
struct Touched(Arc<dyn Device>);

impl Device for Touched {
    mixfleet_hal::forward_device!(
        self => self.0;
        info, limits, support, import, reaches, write, read, pin, queue, memory_free, health
    );
    fn alloc(&self, bytes: u64, usage: BufferUsage) -> Result<Slice> {
        let slice = self.0.alloc(bytes, usage)?;
        // small numbers in every dtype
        self.0.write(&slice, &vec![0x3c; to_usize(bytes)])?;
        Ok(slice)
    }
}

/// A queue that adds up what its batches take.
struct Timed(Box<dyn Queue>, Arc<Mutex<f64>>);

impl Queue for Timed {
    fn submit(&mut self, cmds: &[Cmd]) -> Result<Ticket> {
        self.0.submit(cmds)
    }
    fn submit_for(&mut self, cmds: &[Cmd], results: &[Slice]) -> Result<Ticket> {
        self.0.submit_for(cmds, results)
    }
    fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<Elapsed> {
        let elapsed = self.0.wait(ticket, timeout)?;
        *self.1.lock().expect("nothing panics") += elapsed.time.0;
        Ok(elapsed)
    }
    fn record(&mut self, cmds: &[Cmd]) -> Result<Arc<dyn Graph>> {
        self.0.record(cmds)
    }
    fn replay(&mut self, graph: &Arc<dyn Graph>) -> Result<Ticket> {
        self.0.replay(graph)
    }
}

/// How a step is run.
#[derive(Clone, Copy)]
enum Batches {
    One,
    TwoInTurn,
    TwoInFlight,
}

/// A model with attention offload.
struct Bench {
    devices: [Arc<dyn Device>; 2],
    queues: [Timed; 2],
    forward: [Forward; 2],
    attending: [AttentionMember; 2],
    pages: Vec<Vec<u32>>,
}

impl Bench {
    fn new(checkpoint: &RandomCheckpoint, devices: [Arc<dyn Device>; 2]) -> Result<Self> {
        let config = checkpoint.model_config().expect("a known shape");
        let blocks = CONTEXT_MAX.div_ceil(BLOCK_TOKENS);
        let shape = StepShape {
            tokens_max: SEQUENCES,
            sequences_max: SEQUENCES,
            blocks: SEQUENCES * blocks,
            block_tokens: BLOCK_TOKENS,
            activations: DType::Bf16,
            kv: DType::Bf16,
        };
        let partition = config.with_attention(1, AttnSplit::Head).expect("heads to attend to");
        let [first, second] = &devices;
        let weights = checkpoint.unwritten(&**first).expect("memory");
        let forward = Forward::of_member(&**first, &config, &partition.shares()[0], weights, shape)?;
        let attends = AttentionMember::new(&**second, &config, (&partition, 1), shape)?;
        let timed = |device: &Arc<dyn Device>| Ok(Timed(device.queue()?, Arc::default()));
        Ok(Bench {
            queues: [timed(first)?, timed(second)?],
            forward: [forward.for_second_batch(&**first)?, forward],
            attending: [attends.for_second_batch(&**second, &config)?, attends],
            pages: (0..SEQUENCES).map(|at| (at * blocks..(at + 1) * blocks).collect()).collect(),
            devices,
        })
    }

    /// Seconds of a step of sequences with this many tokens, and the busy seconds of each side.
    fn step(&mut self, context: u32, how: Batches) -> Result<(f64, [f64; 2])> {
        let draw = Some(DrawInput::GREEDY);
        let used = context.div_ceil(BLOCK_TOKENS) as usize;
        let part = |pages: &'_ Vec<u32>| pages[..used].to_vec();
        let pages: Vec<Vec<u32>> = self.pages.iter().map(part).collect();
        let parts: Vec<_> =
            pages.iter().map(|pages| StepInput { start: context - 1, tokens: &[1], pages, draw }).collect();
        let half = parts.len() / 2;
        let pieces = match how {
            Batches::One => vec![(1, &parts[..])],
            _ => vec![(1, &parts[..half]), (0, &parts[half..])],
        };
        let before = self.busy();
        let began = Instant::now();
        let [first, second] = &self.devices;
        let batches = pieces.iter().map(|&(at, parts)| {
            let attending = [(&**second, &self.attending[at])];
            ApartBatch::begin((&**first, &self.forward[at]), attending, parts)
        });
        let batches = batches.collect::<Result<Vec<_>>>()?;
        let [one, other] = &mut self.queues;
        let mut queues = ApartQueues { first: one, attending: vec![other] };
        let at_a_time = if let Batches::TwoInTurn = how { 1 } else { 2 };
        for batches in batches.chunks(at_a_time) {
            let exchange = &mut ThroughHost::default();
            run_apart(&mut queues, batches, exchange, TIMEOUT, &mut KvStays, &mut |_, _| Ok(()))?;
        }
        let took = began.elapsed().as_secs_f64();
        let after = self.busy();
        Ok((took, [after[0] - before[0], after[1] - before[1]]))
    }

    fn busy(&self) -> [f64; 2] {
        [0, 1].map(|at| *self.queues[at].1.lock().expect("nothing panics"))
    }

    /// The shortest time that each side of two batches in turn is busy for.
    fn sides(&mut self, context: u32, rounds: usize) -> Result<[f64; 2]> {
        let mut least = [f64::INFINITY; 2];
        for _ in 0..rounds {
            let (_, sides) = self.step(context, Batches::TwoInTurn)?;
            least = [least[0].min(sides[0]), least[1].min(sides[1])];
        }
        Ok(least)
    }

    /// The context at which both sides take about equally long.
    fn even(&mut self, rounds: usize) -> Result<u32> {
        let (mut low, mut high) = (BLOCK_TOKENS, CONTEXT_MAX - BLOCK_TOKENS);
        while high - low > BLOCK_TOKENS {
            let middle = (low + high) / 2;
            let [products, attention] = self.sides(middle, rounds)?;
            if attention < products { low = middle } else { high = middle }
        }
        Ok(high)
    }
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let on_cores = std::env::args().nth(1).is_some_and(|word| word == "cpu");
    let (checkpoint, devices, dilation) = if on_cores {
        let core = |id| CpuBackend.open(id).map(|core| Arc::new(Touched(core)));
        let cores: [Arc<dyn Device>; 2] = [core("cpu@0")?, core("cpu@1")?];
        (model(1024, (16, 8, 64)), cores, 1.0)
    } else {
        let profile = part(PART).ok_or("no such part")?.profile();
        let clock = Arc::new(RealClock::new(DILATION)?);
        let one = |id| TimeOnlyDevice::new(id, profile.clone(), clock.clone()).map(Arc::new);
        let parts: [Arc<dyn Device>; 2] = [one("sim:0")?, one("sim:1")?];
        (model(4096, (32, 32, 128)), parts, DILATION)
    };
    let mut bench = Bench::new(&checkpoint, devices)?;
    let (looking, rounds) = if on_cores { (3, 40) } else { (1, 20) };
    let context = bench.even(looking)?;
    let all = [Batches::One, Batches::TwoInTurn, Batches::TwoInFlight];
    let (mut times, mut sides) = ([const { Vec::new() }; 3], [f64::INFINITY; 2]);
    for round in 0..=rounds {
        for (how, times) in all.into_iter().zip(&mut times) {
            let (took, busy) = bench.step(context, how)?;
            if round > 0 {
                times.push(took);
            }
            if let Batches::TwoInTurn = how {
                sides = [sides[0].min(busy[0] * dilation), sides[1].min(busy[1] * dilation)];
            }
        }
    }
    let smaller = sides[0].min(sides[1]);
    println!(
        "{SEQUENCES} sequences of {context} tokens; two batches in turn compute products for {:.1} ms",
        sides[0] * 1e3
    );
    println!(
        "and attend for {:.1} ms, shortest of {} (ms of this machine's time)",
        sides[1] * 1e3,
        to_u32(times[1].len())
    );
    println!(
        "ms of a step, shortest and middle: one batch | two in turn | two in flight | hidden of smaller side"
    );
    times.iter_mut().for_each(|times| times.sort_by(f64::total_cmp));
    let [one, turn, flight] = times.map(|times| [times[0] * 1e3, times[times.len() / 2] * 1e3]);
    let hidden = [0, 1].map(|at| (turn[at] - flight[at]) / (smaller * 1e3) * 100.0);
    println!(
        "{:.1} {:.1} | {:.1} {:.1} | {:.1} {:.1} | {:.0} % {:.0} %",
        one[0], one[1], turn[0], turn[1], flight[0], flight[1], hidden[0], hidden[1]
    );
    Ok(())
}

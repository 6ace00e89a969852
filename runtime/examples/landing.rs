//! What KV that lands takes of a decode step on this machine's cores, measured and predicted.
//!
//! `cargo run --release -p mixfleet-runtime --example landing [ROUNDS]`: profiles the device, then measures
//! in turn a decode step, the landing of some tokens, and both: pieces are copied out of staging slots,
//! hashed, written to the device and scattered into pages, as by a worker between two steps. Times are of the
//! shortest tenth, and the profile's are the shortest of four, since other work of the machine only adds
//! time. The cost model has the profile and none of these times. docs/results/overlap.md has the results.
#![allow(clippy::print_stdout)]

use mixfleet_cpu::CpuBackend;
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::profile::{CopyCost, DeviceProfile};
use mixfleet_hal::units::Bytes;
use mixfleet_hal::{Backend, BufferUsage, DType, Device, Queue, Slice};
use mixfleet_hwtests::profile::{ProfileLevel, ProfileOptions, run};
use mixfleet_runtime::engine::Pages;
use mixfleet_runtime::model::draws::DrawInput;
use mixfleet_runtime::model::graph::{Forward, StepInput, StepShape};
use mixfleet_runtime::model::random::RandomCheckpoint;
use mixfleet_scheduler::cost::{CostModel, EngineCost, KvCopyCost, PIECE_BYTES, ProfileCost};
use mixfleet_wire::HostRegion;
use serde_json::json;
use std::collections::HashMap;
use std::error::Error;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use twox_hash::XxHash3_64;

const TIMEOUT: Duration = Duration::from_secs(60);
const BLOCK_TOKENS: u32 = 32;
/// Tokens of a step, and of the context of each of its sequences.
const SEQUENCES: u32 = 8;
const CONTEXT: u32 = 512;
/// Tokens that land before a step.
const LANDING: [u32; 4] = [64, 256, 1024, 2048];
const SLOTS: u64 = 32;
const WIRE: DType = DType::Bf16;

/// A model of 64 million parameters, whose KV has 8 KiB a token.
fn checkpoint() -> RandomCheckpoint {
    let config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
        "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 8192, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2,
    });
    RandomCheckpoint { config: config.as_object().cloned().unwrap_or_default(), dtype: DType::Bf16, seed: 1 }
}

struct Bench {
    device: Arc<dyn Device>,
    queue: Box<dyn Queue>,
    forward: Forward,
    pages: Pages,
    /// The device's buffer for a piece, the slots of a peer, and the memory in which a piece is checked.
    landing: Slice,
    slots: HostRegion,
    private: HostRegion,
    /// Hashes of a piece's bytes in each slot.
    hashes: HashMap<(u64, u64), u64>,
    used: u64,
}

impl Bench {
    fn new(device: Arc<dyn Device>) -> Result<Self, Box<dyn Error>> {
        let checkpoint = checkpoint().load()?;
        let config = Arc::new(checkpoint.config.clone());
        let weights = checkpoint.place(&*device, &mut |_, _| {})?;
        let most = LANDING.iter().max().copied().unwrap_or(0);
        let shape = StepShape {
            tokens_max: 64,
            sequences_max: SEQUENCES,
            blocks: (SEQUENCES * CONTEXT + most) / BLOCK_TOKENS,
            block_tokens: BLOCK_TOKENS,
            activations: DType::Bf16,
            kv: DType::Bf16,
        };
        let kv = shape.kv_shape(&config);
        let slots = HostRegion::new(usize::try_from(SLOTS * PIECE_BYTES)?)?;
        let sizes = LANDING.map(|tokens| PIECE_BYTES.min(u64::from(tokens) * kv.wire_token_bytes(WIRE)));
        let mut hashes = HashMap::new();
        for slot in 0..SLOTS {
            slots.update(slot * PIECE_BYTES, PIECE_BYTES, &mut |place| {
                place.fill(slot as u8);
                hashes.extend(
                    sizes.map(|bytes| ((slot, bytes), XxHash3_64::oneshot(&place[..bytes as usize]))),
                );
            })?;
        }
        Ok(Bench {
            queue: device.queue()?,
            forward: Forward::new(&*device, config, weights, shape)?,
            pages: Pages::new(&*device, kv, PIECE_BYTES / kv.wire_token_bytes(WIRE))?,
            landing: device.alloc(PIECE_BYTES, BufferUsage::Kv)?,
            private: HostRegion::new(usize::try_from(PIECE_BYTES)?)?,
            device,
            slots,
            hashes,
            used: 0,
        })
    }

    fn layers(&self) -> u32 {
        self.forward.config().layers
    }

    /// Bytes of the KV of this many tokens in all layers.
    fn kv_bytes(&self, tokens: u32) -> u64 {
        u64::from(tokens) * self.forward.config().kv_bytes_per_token(WIRE)
    }

    /// Runs a decode step as a worker does, and reads what it drew.
    fn step(&mut self) -> Result<(), Box<dyn Error>> {
        let blocks = CONTEXT / BLOCK_TOKENS;
        let tables: Vec<Vec<u32>> =
            (0..SEQUENCES).map(|sequence| (sequence * blocks..(sequence + 1) * blocks).collect()).collect();
        let parts: Vec<StepInput<'_>> = tables
            .iter()
            .map(|pages| StepInput { start: CONTEXT - 1, tokens: &[7], pages, draw: Some(DrawInput::GREEDY) })
            .collect();
        let pass = self.forward.begin(&*self.device, &parts)?;
        for layer in 0..self.layers() as usize {
            let mut list = if layer == 0 { self.forward.embed(&pass)? } else { Vec::new() };
            list.extend(self.forward.layer(layer, &pass)?);
            self.queue.submit(&list)?;
        }
        let last = self.queue.submit(&self.forward.head(&pass)?)?;
        self.queue.wait(last, TIMEOUT)?;
        let drawn = self.forward.drawn(&pass).ok_or("the device draws")?.drawn();
        self.device.read(drawn, &mut vec![0; usize::try_from(drawn.bytes)?])?;
        Ok(())
    }

    /// Lands the KV of `tokens`, layer by layer and in pieces of a slot.
    fn land(&mut self, tokens: u32) -> Result<(), Box<dyn Error>> {
        let token_bytes = self.token_bytes();
        let piece_tokens = u32::try_from(PIECE_BYTES / token_bytes)?;
        let first_block = SEQUENCES * CONTEXT / BLOCK_TOKENS;
        let table: Vec<u32> = (first_block..first_block + tokens.div_ceil(BLOCK_TOKENS)).collect();
        for layer in 0..self.layers() as usize {
            for first in (0..tokens).step_by(piece_tokens as usize) {
                self.piece(layer, &table, first..tokens.min(first + piece_tokens), token_bytes)?;
            }
        }
        Ok(())
    }

    /// Bytes of a layer's KV of a token.
    fn token_bytes(&self) -> u64 {
        self.forward.shape().kv_shape(self.forward.config()).wire_token_bytes(WIRE)
    }

    fn piece(
        &mut self,
        layer: usize,
        table: &[u32],
        tokens: Range<u32>,
        token_bytes: u64,
    ) -> Result<(), Box<dyn Error>> {
        let (slot, bytes) = (self.used % SLOTS, tokens.len() as u64 * token_bytes);
        self.used += 1;
        let mut copied = Ok(0);
        self.slots.view(slot * PIECE_BYTES, bytes, &mut |payload| {
            copied = self.private.store_hashed(0, payload);
        })?;
        if copied? != self.hashes[&(slot, bytes)] {
            return Err("a piece changed in flight".into());
        }
        let (landed, mut written) = (self.landing.range(0, bytes), Ok(()));
        self.private.view(0, bytes, &mut |payload| written = self.device.write(&landed, payload))?;
        written?;
        let slots = self.pages.slots(&*self.device, table, tokens)?;
        let pools = &self.forward.kv_pools()[layer];
        let command = self.pages.scatter(pools, slots, (landed, WIRE))?;
        let ticket = self.queue.submit(&[command])?;
        self.queue.wait(ticket, TIMEOUT)?;
        Ok(())
    }
}

/// The device's own profile, with this model's shapes among the standard ones.
fn profile(device: &dyn Device) -> Result<DeviceProfile, Box<dyn Error>> {
    let config = checkpoint().load()?.config;
    let shape = config.cost_shape(DType::Bf16, DType::Bf16, device.limits().kv_page_tokens);
    let model = shape.distinct_ops(ProfileLevel::Quick.rows());
    let options = ProfileOptions { model, ..ProfileOptions::new(ProfileLevel::Quick) };
    let document = run(device, &options, &mut |_| {});
    document.device_profile().ok_or_else(|| "the device has no measured product or bandwidth".into())
}

/// The shortest times of both: other work of the machine only adds time.
fn best(mut one: DeviceProfile, other: DeviceProfile) -> DeviceProfile {
    for point in &mut one.points {
        let again = other.points.iter().find(|again| again.sig == point.sig);
        point.time = again.map_or(point.time, |again| again.time.min(point.time));
    }
    let piece = |cost: &CopyCost| cost.time(Bytes(PIECE_BYTES as f64)).map(|time| time.0);
    if piece(&other.host_to_device) < piece(&one.host_to_device) {
        (one.host_to_device, one.device_to_host) = (other.host_to_device, other.device_to_host);
    }
    one.launch = one.launch.min(other.launch);
    one.launch_per_command = one.launch_per_command.min(other.launch_per_command);
    one.bandwidth = if other.bandwidth.0 > one.bandwidth.0 { other.bandwidth } else { one.bandwidth };
    one
}

/// Times of a step, of the landing, and of both, of each number of tokens.
type Times = [[Vec<f64>; 3]; LANDING.len()];

/// Measures alone and together in turn, so that the machine's moods meet both.
fn measure(bench: &mut Bench, rounds: usize, times: &mut Times) -> Result<(), Box<dyn Error>> {
    for round in 0..=rounds {
        for (tokens, times) in LANDING.into_iter().zip(&mut *times) {
            for (what, times) in times.iter_mut().enumerate() {
                let start = Instant::now();
                if what > 0 {
                    bench.land(tokens)?;
                }
                if what != 1 {
                    bench.step()?;
                }
                if round > 0 {
                    times.push(start.elapsed().as_secs_f64());
                }
            }
        }
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let rounds = std::env::args().nth(1).map_or(Ok(100), |rounds| rounds.parse::<usize>())?.max(1);
    let device = CpuBackend.open("cpu")?;
    println!("{}", device.info().fingerprint);
    let mut bench = Bench::new(device.clone())?;
    let (mut known, mut times) = (profile(&*device)?, Times::default());
    for _ in 0..3 {
        measure(&mut bench, rounds, &mut times)?;
        known = best(known, profile(&*device)?);
    }
    let (copies, layers) = (KvCopyCost::between(&known), bench.layers());
    let shape = bench.forward.config().cost_shape(DType::Bf16, DType::Bf16, BLOCK_TOKENS);
    let (chunk_tokens, engine) = (64, EngineCost::OURS);
    let cost = ProfileCost { profile: known, shape, chunk_tokens, all_reduce: None, engine };
    let step_s =
        CostModel::Profile(Box::new(cost)).decode_step_s(SEQUENCES, u64::from(SEQUENCES * CONTEXT)).0;
    println!("| tokens | KV, MiB | | measured, ms | median | predicted, ms | predicted / measured |");
    println!("|---|---|---|---|---|---|---|");
    for (tokens, [step, land, both]) in LANDING.into_iter().zip(times) {
        let bytes = bench.kv_bytes(tokens) as f64;
        let lands_s = copies.lands(Bytes(bytes), layers).0;
        let rows = [("step", step, step_s), ("landing", land, lands_s), ("both", both, step_s + lands_s)];
        for (what, mut times, predicted_s) in rows {
            times.sort_by(f64::total_cmp);
            // Other work of the machine only adds time.
            let (short, median) = (times[times.len() / 10], times[times.len() / 2]);
            println!(
                "| {tokens} | {:.1} | {what} | {:.2} | {:.2} | {:.2} | {:.2} |",
                bytes / f64::from(1 << 20),
                short * 1e3,
                median * 1e3,
                predicted_s * 1e3,
                predicted_s / short
            );
        }
    }
    Ok(())
}

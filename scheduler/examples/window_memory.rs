//! Compares how many sequences decode in the same KV memory, with blocks of all layers, and with pages of
//! parts of the layers that give back KV outside their window.
//!
//! `cargo run --release -p mixfleet-scheduler --example window_memory`
#![allow(clippy::print_stdout, reason = "the table is what it is for")]

use mixfleet_hal::DType;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::batch::{
    Action, After, BatchLimits, Event, Instance, LayerPages, PageDevices, PageParts, Sampled, Text, Urgency,
};
use mixfleet_scheduler::kv::{BlockHash, CachePolicy};
use mixfleet_scheduler::models;

/// KV memory of the instance.
const GIB: u64 = 24;
const BLOCK_TOKENS: u32 = 16;
const CHUNK: u32 = 8192;

/// A prompt of this many tokens that shares no prefix; its tokens are never read.
#[derive(Debug)]
struct Prompt(u64, u32);

impl Text for Prompt {
    type Block = ();

    fn length(&self) -> u32 {
        self.1
    }

    fn hash(&mut self, block: u32) -> BlockHash {
        BlockHash(self.0 << 32 | u64::from(block))
    }

    fn block(&self, _: u32) {}

    fn has(&self, _: u32, (): &()) -> bool {
        true
    }
}

/// The number of sequences of this many tokens that decode together when the next one finds no room; each
/// arrives once those before it decode.
fn at_once(blocks_total: u32, page_parts: PageParts, tokens: u32) -> usize {
    let mut machine = Instance::new(BatchLimits {
        blocks_total,
        block_tokens: BLOCK_TOKENS,
        step_tokens_max: CHUNK,
        prefill_tokens_beside_decode_max: Some(CHUNK / 2),
        sequences_max: CHUNK as usize / 2,
        spare_blocks: 0,
        lower_tiers: false,
        cache_policy: CachePolicy::Lru,
        page_devices: PageDevices::ONE,
        page_parts,
    });
    for request in 0.. {
        let (text, urgency) = (Prompt(request, tokens), Urgency::due_at(Seconds::ZERO));
        let event = Event::Add { request, urgency, text, pulls: 0, after: After::Decode };
        machine.step(event, &mut Vec::new());
        loop {
            let mut actions = Vec::new();
            machine.step(Event::Idle, &mut actions);
            let phases = machine.phases();
            let Some(Action::Run(step)) = actions.pop() else { return phases.decoding };
            if phases.queued > 0 {
                return phases.decoding;
            }
            let drawing = step.sequences.iter().filter(|part| part.sample);
            let sampled = drawing.map(|part| Sampled { request: part.request, finished: false }).collect();
            machine.step(Event::StepDone { sampled }, &mut Vec::new());
            if machine.phases().prefilling == 0 {
                break;
            }
        }
    }
    0
}

fn main() {
    println!("| model, {GIB} GiB for KV in bf16 | tokens | blocks of all layers | parts of layers | |");
    println!("|---|---|---|---|---|");
    for name in ["gpt-oss-20b", "gpt-oss-120b"] {
        let Ok(model) = models::find(name) else { continue };
        let shape = model.shape(DType::Bf16);
        let blocks = GIB * (1 << 30) / (u64::from(BLOCK_TOKENS) * shape.kv_bytes_per_token());
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        let parts = LayerPages::of(&shape.windows, u32::MAX).parts;
        for tokens in [2048, 8192, 32_768] {
            let whole = at_once(blocks, PageParts::ONE, tokens);
            let windows = at_once(blocks, parts.clone(), tokens);
            let more = windows as f64 / whole.max(1) as f64;
            println!("| {name} | {tokens} | {whole} | {windows} | x {more:.2} |");
        }
    }
}

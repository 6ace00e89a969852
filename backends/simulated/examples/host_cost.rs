//! What a time-only device costs the host, for the shapes of Llama 3.1 8B in bf16: `cargo run --release -p
//! mixfleet-simulated --example host_cost`
//!
//! Takes 2.2 GB of host memory for KV. A part is simulated at its own speed where its steps take longer than
//! these.

#![allow(clippy::print_stdout, reason = "its purpose")]

use mixfleet_hal::catalog::part;
use mixfleet_hal::{DType, Device, Result};
use mixfleet_runtime::model::RandomCheckpoint;
use mixfleet_runtime::model::draws::DrawInput;
use mixfleet_runtime::model::graph::{Forward, StepInput, StepShape};
use mixfleet_simulated::{SimulatedClock, TimeOnlyDevice, VirtualClock};
use std::sync::Arc;
use std::time::{Duration, Instant};

const PAGE: u32 = 16;
const SEQUENCES: u32 = 16;
const CONTEXT: u32 = 1024;

fn model() -> RandomCheckpoint {
    let config = serde_json::json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128_256, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": false,
    });
    let config = config.as_object().expect("an object").clone();
    RandomCheckpoint { config, dtype: DType::Bf16, seed: 0 }
}

fn main() -> Result<()> {
    let profile = part("H100-SXM-80GB").expect("in the catalog").profile();
    let clock = Arc::new(VirtualClock::default());
    let device = TimeOnlyDevice::new("sim:h100-sxm-80gb", profile, clock.clone())?;
    let config = Arc::new(model().model_config().expect("a known shape"));
    let shape = StepShape {
        tokens_max: 512,
        sequences_max: SEQUENCES,
        blocks: SEQUENCES * (CONTEXT / PAGE + 1),
        block_tokens: PAGE,
        activations: DType::Bf16,
        kv: DType::Bf16,
    };
    let forward = Forward::new(&device, config.clone(), model().unwritten(&device).expect("it fits"), shape)?;
    let mut queue = device.queue()?;
    let mut step = |parts: &[StepInput<'_>]| -> Result<(f64, f64)> {
        let (start, simulated) = (Instant::now(), clock.now());
        let pass = forward.begin(&device, parts)?;
        let ticket = queue.submit(&forward.whole(&pass)?)?;
        queue.wait(ticket, Duration::from_secs(600))?;
        Ok((start.elapsed().as_secs_f64() * 1e3, (clock.now() - simulated).0 * 1e3))
    };
    let ids: Vec<u32> = (0..512).collect();
    let pages: Vec<Vec<u32>> = (0..SEQUENCES)
        .map(|s| (0..CONTEXT / PAGE + 1).map(|page| s * (CONTEXT / PAGE + 1) + page).collect())
        .collect();
    println!("host ms, simulated ms");
    for (sequence, pages) in pages.iter().enumerate() {
        for start in [0, 512] {
            let draw = (start > 0).then_some(DrawInput::GREEDY);
            let (host, simulated) = step(&[StepInput { start, tokens: &ids, pages, draw }])?;
            if sequence % 8 == 0 {
                println!("prefill of 512 after {start:>4}: {host:7.1} {simulated:7.1}");
            }
        }
    }
    for batch in [1, 4, 16] {
        for round in 0..2 {
            let draw = Some(DrawInput::GREEDY);
            let part = |pages| StepInput { start: CONTEXT + round, tokens: &ids[..1], pages, draw };
            let parts: Vec<StepInput<'_>> = pages[..batch].iter().map(|pages| part(pages)).collect();
            let (host, simulated) = step(&parts)?;
            println!("decode of {batch:>2} after {}: {host:7.1} {simulated:7.1}", CONTEXT + round);
        }
    }
    Ok(())
}

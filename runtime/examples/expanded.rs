//! Times a prompt of a model with latent attention on this machine's cores, over latents and over expanded
//! keys and values.
//!
//! `cargo run --release -p mixfleet-runtime --example expanded [TOKENS [ROUNDS]]`: one dense layer of the
//! shape of DeepSeek-V2-Lite with random weights in bf16, a prompt in one step, both ways in turn. Times are
//! of a whole step and of all its operations but those of the MLP and the logits, the shortest of the rounds,
//! since other work of the machine only adds time. docs/results/cpu.md has the results.
#![allow(clippy::print_stdout)]

use mixfleet_cpu::CpuBackend;
use mixfleet_hal::{Backend, Cmd, DType, Device, OpSig, Queue};
use mixfleet_runtime::model::draws::DrawInput;
use mixfleet_runtime::model::graph::{Forward, StepInput, StepShape};
use mixfleet_runtime::model::random::RandomCheckpoint;
use serde_json::json;
use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(600);
const BLOCK_TOKENS: u32 = 32;
/// Length of the MLP's inner layer.
const INNER: u32 = 10944;

fn checkpoint() -> RandomCheckpoint {
    let config = json!({
        "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": 16,
        "num_key_value_heads": 16, "q_lora_rank": null, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
        "topk_method": "greedy", "vocab_size": 4096, "max_position_embeddings": 16384, "rms_norm_eps": 1e-6,
        "bos_token_id": 1, "eos_token_id": 2,
    });
    RandomCheckpoint { config: config.as_object().cloned().unwrap_or_default(), dtype: DType::Bf16, seed: 1 }
}

struct Bench {
    device: Arc<dyn Device>,
    queue: Box<dyn Queue>,
    forward: Forward,
    tokens: Vec<u32>,
    pages: Vec<u32>,
}

impl Bench {
    fn new(device: Arc<dyn Device>, tokens: u32, expands: bool) -> Result<Self, Box<dyn Error>> {
        let mut checkpoint = checkpoint().load()?;
        if let Some(latent) = checkpoint.config.latent.as_mut().filter(|_| !expands) {
            latent.lengths.expanded_tokens = 0;
        }
        let config = Arc::new(checkpoint.config.clone());
        let weights = checkpoint.place(&*device, &mut |_, _| {})?;
        let blocks = tokens.div_ceil(BLOCK_TOKENS);
        let shape = StepShape {
            tokens_max: tokens,
            sequences_max: 1,
            blocks,
            block_tokens: BLOCK_TOKENS,
            activations: DType::Bf16,
            kv: DType::Bf16,
        };
        let forward = Forward::new(&*device, config, weights, shape)?;
        let tokens = (0..tokens).map(|i| (i * 7 + 3) % 4096).collect();
        Ok(Bench { queue: device.queue()?, device, forward, tokens, pages: (0..blocks).collect() })
    }

    fn run(&mut self, list: &[Cmd]) -> Result<f64, Box<dyn Error>> {
        let start = Instant::now();
        let ticket = self.queue.submit(list)?;
        self.queue.wait(ticket, TIMEOUT)?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Seconds of a step, and of its attention with all that belongs to it; and its logits.
    fn step(&mut self) -> Result<([f64; 2], Vec<f32>), Box<dyn Error>> {
        let draw = Some(DrawInput::GREEDY);
        let part = StepInput { start: 0, tokens: &self.tokens, pages: &self.pages, draw };
        let pass = self.forward.begin(&*self.device, &[part])?;
        let all = self.forward.whole(&pass)?;
        let of_mlp = |cmd: &&Cmd| match *cmd.sig() {
            OpSig::Gemm { n, k, .. } => n == INNER || k == INNER || n == 4096,
            OpSig::SiluMul { .. } | OpSig::Sample { .. } => true,
            _ => false,
        };
        let attention: Vec<Cmd> = all.iter().filter(|cmd| !of_mlp(cmd)).cloned().collect();
        let attention_s = self.run(&attention)?;
        let whole_s = self.run(&all)?;
        let mut logits = vec![0f32; 4096];
        self.device.read(&self.forward.logits(&pass), bytemuck::cast_slice_mut(&mut logits))?;
        Ok(([whole_s, attention_s], logits))
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let number =
        |at: usize, other: u32| std::env::args().nth(at).map_or(Ok(other), |text| text.parse::<u32>());
    let (tokens, rounds) = (number(1, 2048)?, number(2, 5)?);
    let device = CpuBackend.open("cpu")?;
    println!("{}", device.info().fingerprint);
    let mut ways = [Bench::new(device.clone(), tokens, false)?, Bench::new(device, tokens, true)?];
    let (mut best, mut logits) = ([[f64::INFINITY; 2]; 2], [Vec::new(), Vec::new()]);
    for _ in 0..rounds {
        for (at, bench) in ways.iter_mut().enumerate() {
            let (seconds, row) = bench.step()?;
            logits[at] = row;
            best[at] = [0, 1].map(|what| best[at][what].min(seconds[what]));
        }
    }
    let most = logits[0].iter().fold(0f32, |most, x| most.max(x.abs()));
    let pairs = logits[0].iter().zip(&logits[1]);
    let apart = pairs.fold(0f32, |most, (a, b)| most.max((a - b).abs()));
    println!("{tokens} tokens, one layer; logits differ by {apart:.4} of {most:.2}");
    for (what, name) in ["step", "attention"].into_iter().enumerate() {
        let [over, made] = best.map(|seconds| seconds[what]);
        println!(
            "{name}: over latents {:.1} ms, expanded {:.1} ms: {:.2} times",
            over * 1e3,
            made * 1e3,
            over / made
        );
    }
    Ok(())
}

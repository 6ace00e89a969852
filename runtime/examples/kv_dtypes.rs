//! Measures the effect of each KV dtype on a model's logits and on its loss on self-generated text, against
//! KV in f32: in the float64 forward pass, which rounds KV and nothing else.
//!
//! `cargo run -p mixfleet-runtime --example kv_dtypes -- CHECKPOINT...`: a table, of these checkpoints and of
//! the tests' random models.
#![allow(clippy::print_stdout)]

use mixfleet_hal::DType;
use mixfleet_hal::memory::{FileMapper, HostMemory};
use mixfleet_hal::random::Stream;
use mixfleet_runtime::model::variants::tiny_variants;
use mixfleet_runtime::model::{Checkpoint, Oracle};
use std::path::Path;
use std::sync::Arc;

/// Tokens of a prompt at random, and of what the model says after it.
const PROMPT: usize = 16;
const TEXT: usize = 112;
const TEXTS: u64 = 4;

struct ReadFiles;

impl FileMapper for ReadFiles {
    fn map(&self, path: &Path) -> std::io::Result<Arc<dyn HostMemory>> {
        Ok(Arc::new(std::fs::read(path)?))
    }
}

/// The logarithms of the probabilities.
fn log_softmax(logits: &[f64]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|logit| (logit - max).exp()).sum();
    logits.iter().map(|logit| logit - max - sum.ln()).collect()
}

/// A prompt at random, and a continuation that the model draws at a temperature of 1.
fn text(oracle: &Oracle, vocab: usize, seed: u64) -> Vec<u32> {
    let mut rng = Stream::new(seed);
    let mut ids: Vec<u32> = (0..PROMPT).map(|_| rng.below(vocab as u64) as u32).collect();
    for _ in 0..TEXT {
        let mut left = rng.next_unit();
        let logs = log_softmax(&oracle.last_logits(&ids));
        let drawn = logs.iter().position(|log| {
            left -= log.exp();
            left < 0.0
        });
        ids.push(drawn.unwrap_or(vocab - 1) as u32);
    }
    ids
}

/// The mean negative logarithm of the next token's probability.
fn loss(logits: &[f64], ids: &[u32], vocab: usize) -> f64 {
    let next = logits.chunks(vocab).zip(&ids[1..]).skip(PROMPT - 1);
    let losses: Vec<f64> = next.map(|(row, &id)| -log_softmax(row)[id as usize]).collect();
    losses.iter().sum::<f64>() / losses.len() as f64
}

fn table(name: &str, checkpoint: &Checkpoint) {
    let (config, plain) = (&checkpoint.config, Oracle::new(checkpoint).with_kv(DType::F32));
    let vocab = config.vocab as usize;
    let texts: Vec<Vec<u32>> = (0..TEXTS).map(|seed| text(&plain, vocab, seed)).collect();
    let all = |oracle: &Oracle| texts.iter().map(|ids| oracle.logits(ids)).collect::<Vec<_>>();
    let exact = all(&plain);
    let flat: Vec<f64> = exact.iter().flatten().copied().collect();
    let mean = flat.iter().sum::<f64>() / flat.len() as f64;
    let spread = (flat.iter().map(|logit| (logit - mean).powi(2)).sum::<f64>() / flat.len() as f64).sqrt();
    let mean_loss = |logits: &[Vec<f64>]| {
        logits.iter().zip(&texts).map(|(logits, ids)| loss(logits, ids, vocab)).sum::<f64>() / TEXTS as f64
    };
    let base = mean_loss(&exact);
    // latents have no KV of eight bits
    for dtype in DType::KV.into_iter().filter(|dtype| config.latent.is_none() || !dtype.is_scaled()) {
        let logits = all(&Oracle::new(checkpoint).with_kv(dtype));
        let differences =
            || logits.iter().flatten().zip(&flat).map(|(logit, exact)| (logit - exact).abs() / spread);
        let largest = differences().fold(0.0, f64::max);
        let mean_square = differences().map(|d| d * d).sum::<f64>() / flat.len() as f64;
        let same = |row: (&[f64], &[f64])| {
            let best =
                |row: &[f64]| (0..row.len()).fold(0, |best, i| if row[i] > row[best] { i } else { best });
            best(row.0) == best(row.1)
        };
        let rows = || logits.iter().zip(&exact).flat_map(|(a, b)| a.chunks(vocab).zip(b.chunks(vocab)));
        let agree = rows().filter(|row| same(*row)).count() as f64 / rows().count() as f64;
        println!(
            "| {name} | {dtype} | {} | {largest:.1e} | {:.1e} | {:.1} % | {base:.4} | {:+.5} |",
            config.kv_bytes_per_token(dtype),
            mean_square.sqrt(),
            100.0 * agree,
            mean_loss(&logits) - base,
        );
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("| model | KV | B/token | largest | rms | same best | loss in f32 | change of loss |");
    println!("|---|---|---:|---:|---:|---:|---:|---:|");
    for directory in std::env::args().skip(1) {
        let checkpoint = Checkpoint::open(Path::new(&directory), &ReadFiles)?;
        let name = Path::new(&directory).file_name().unwrap_or_default().to_string_lossy().into_owned();
        table(&name, &checkpoint);
    }
    for (name, random) in tiny_variants() {
        table(&format!("random {name}"), &random.load()?);
    }
    Ok(())
}

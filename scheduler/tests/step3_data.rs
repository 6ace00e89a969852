//! Compares the operations of a decode step with the costs per token that Step-3's authors list (arXiv
//! 2507.19427, tables 2 and 3), where the file that restates them is available.

use mixfleet_hal::{DType, OpSig};
use mixfleet_scheduler::cost::ModelShape;
use mixfleet_scheduler::models::{KnownModel, find};
use std::path::Path;

/// Enough sequences that every expert has the same whole number of rows.
const BATCH: u32 = 12_288;

/// FLOP of the matched operations of a decode step, for one sequence.
fn flop(shape: &ModelShape, batch: u32, context: u64, counts: impl Fn(&OpSig) -> bool) -> f64 {
    let ops = shape.decode_ops(batch, u64::from(batch) * context);
    let matched = ops.iter().filter(|(sig, _)| counts(sig));
    matched.map(|(sig, runs)| sig.flops() * *runs as f64).sum::<f64>() / f64::from(batch)
}

/// Arithmetic of the layers' matrices without the gates of experts, which the authors leave out.
fn matrices(model: &KnownModel, shape: &ModelShape) -> f64 {
    let gate = model.experts.map_or(0, |experts| experts.count);
    flop(shape, BATCH, 1, |sig| match sig {
        OpSig::Gemm { n, .. } => *n != model.vocab && *n != gate,
        OpSig::GroupedGemm { .. } => true,
        _ => false,
    })
}

fn attention(model: &KnownModel, shape: &ModelShape, context: u64) -> f64 {
    let exact = flop(shape, 1, context, |sig| matches!(sig, OpSig::AttnDecode { .. }));
    // The authors count the values of latent attention with the rotated part, which no value has.
    let counted = model
        .latent
        .map_or(1.0, |latent| f64::from(2 * latent.stored()) / f64::from(latent.stored() + latent.kv_rank));
    exact * counted
}

#[test]
fn a_decode_step_has_the_arithmetic_and_kv_that_step_3_lists() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data/measured/step3_cost_table.csv");
    if !path.exists() {
        eprintln!("SKIPPED: ../shared/data/measured/step3_cost_table.csv is absent; nothing compared");
        return;
    }
    let text = std::fs::read_to_string(&path).expect("readable");
    let mut lines = text.lines().filter(|line| !line.starts_with('#'));
    let columns: Vec<&str> = lines.next().expect("a head").split(',').collect();
    let known = [
        ("DSv3", "deepseek-v3"),
        ("Kimi K2", "kimi-k2"),
        ("Qwen3 MoE", "qwen3-235b-a22b"),
        ("Qwen3 32B", "qwen3-32b"),
        ("Llama 4 M", "llama-4-maverick"),
    ];
    let mut compared = 0;
    for line in lines {
        let fields: Vec<&str> = line.split(',').collect();
        let Some((_, name)) = known.iter().find(|(theirs, _)| *theirs == fields[0]) else { continue };
        let theirs = |column: &str| -> f64 {
            let at = columns.iter().position(|known| *known == column).expect("a column");
            fields[at].parse().expect("a number")
        };
        let near = |ours: f64, column: &str| {
            let theirs = theirs(column);
            assert!((ours / theirs - 1.0).abs() < 0.01, "{name}: {column} {ours:e} against {theirs:e}");
        };
        let model = find(name).expect("in the catalog");
        let shape = model.shape(DType::Bf16);
        for (context, flop) in [(8192, "attn_flop_8k"), (32_768, "attn_flop_32k")] {
            near(attention(model, &shape, context), flop);
        }
        let both = theirs("linear_flop") + theirs("ffn_flop");
        let ours = matrices(model, &shape);
        assert!((ours / both - 1.0).abs() < 0.01, "{name}: matrices {ours:e} against {both:e}");
        // the KV that they count for Llama 4's windows follows from none of its published numbers
        if model.windows.is_none() {
            // theirs have no scales, as latents have none here
            let codes = match shape.latent.is_some() {
                true => 1.0,
                false => f64::from(shape.head_dim) / f64::from(shape.head_dim + 4),
            };
            let eight = shape.with_kv(DType::F8E4m3);
            near(eight.sequence_bytes(8192) as f64 * codes, "kv_bytes_8k");
            near(eight.sequence_bytes(32_768) as f64 * codes, "kv_bytes_32k");
        }
        compared += 1;
    }
    assert_eq!(compared, known.len());
}

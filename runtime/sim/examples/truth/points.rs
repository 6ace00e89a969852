//! Published times of single prompts and steps, which no number was fitted on.

use mixfleet_hal::DType;
use mixfleet_hal::catalog;
use mixfleet_scheduler::cost::{AllReduce, CostModel, ProfileCost};
use mixfleet_scheduler::{engines, models};

/// A measurement.
enum Measured {
    /// Seconds for a prompt of this many tokens.
    Prompt(u32, f64),
    /// Tokens per second of one sequence with this much context.
    Alone(u32, f64),
}

struct Point {
    source: &'static str,
    model: &'static str,
    part: &'static str,
    devices: u32,
    dtype: DType,
    measured: Measured,
}

const fn of(
    source: &'static str,
    model: &'static str,
    (part, devices): (&'static str, u32),
    dtype: DType,
    measured: Measured,
) -> Point {
    Point { source, model, part, devices, dtype, measured }
}

const FAST25: &str = "Mooncake, FAST'25, figure 14a (A800)";
const SUM: &str = "sum of aiconfigurator's kernels";
const NIM: &str = "NVIDIA NIM's published figures";
const VLLM: &str = "vLLM's blog";

const POINTS: [Point; 8] = [
    of(FAST25, "llama-2-70b", ("A800-SXM-80GB", 8), DType::Bf16, Measured::Prompt(8192, 1.00)),
    of(FAST25, "llama-2-70b", ("A800-SXM-80GB", 8), DType::Bf16, Measured::Prompt(32_768, 4.47)),
    of(FAST25, "llama-2-70b", ("A800-SXM-80GB", 8), DType::Bf16, Measured::Prompt(131_072, 27.5)),
    of(SUM, "llama-3.1-8b", ("L40S", 1), DType::Bf16, Measured::Prompt(16_384, 1.67)),
    of(NIM, "llama-3.1-70b", ("H100-SXM-80GB", 2), DType::F8E4m3, Measured::Prompt(5000, 0.407)),
    of(NIM, "llama-3.1-70b", ("H100-SXM-80GB", 2), DType::F8E4m3, Measured::Alone(5000, 1.0 / 18.6e-3)),
    of(VLLM, "llama-3.1-8b", ("A100-SXM-40GB", 1), DType::Bf16, Measured::Alone(512, 75.0)),
    of(NIM, "llama-3.1-8b", ("GH200-96GB", 1), DType::Bf16, Measured::Alone(512, 165.8)),
];

fn cost(point: &Point) -> Result<CostModel, String> {
    let part = catalog::part(point.part).ok_or_else(|| format!("the catalog has no {}", point.part))?;
    let profile = part.best_profile();
    let engine = engines::find("vllm")?;
    let shape = models::find(point.model).map_err(|error| error.to_string())?.shape(point.dtype);
    let all_reduce = AllReduce::of(part, point.devices);
    let (chunk_tokens, engine) = (engine.step_tokens, engine.cost);
    Ok(CostModel::Profile(Box::new(ProfileCost { profile, shape, chunk_tokens, all_reduce, engine })))
}

/// Prints each with its prediction.
pub(crate) fn print() -> Result<(), String> {
    println!("\n| source | what | measured | predicted | off |\n|---|---|---|---|---|");
    for point in &POINTS {
        let cost = cost(point)?;
        let Point { source, model, part, devices, dtype, .. } = point;
        let what = format!("{model} {}, {devices} x {part}", dtype.name());
        match point.measured {
            Measured::Prompt(tokens, s) => {
                let predicted = cost.prefill_s(0, tokens).0;
                let off = 100.0 * (predicted / s - 1.0);
                println!(
                    "| {source} | {what}: {tokens} tokens | {s:.3} s | {predicted:.3} s | {off:+.1} % |"
                );
            }
            Measured::Alone(context, rate) => {
                let predicted = 1.0 / cost.decode_step_s(1, u64::from(context)).0;
                let off = 100.0 * (predicted / rate - 1.0);
                println!(
                    "| {source} | {what}: one sequence at {context} | {rate:.1} tok/s | {predicted:.1} tok/s | {off:+.1} % |"
                );
            }
        }
    }
    Ok(())
}

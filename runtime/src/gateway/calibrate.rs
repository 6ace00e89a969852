//! Measures an engine by asking it: one short answer, one behind a long prompt, four short ones at once.

use crate::env::Env;
use mixfleet_hal::outside::{
    EngineAnswer, EngineCall, EngineEndpoint, EngineFault, EngineFaultKind, EngineShare, OutsideEngine,
};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::cost::{Coefficients, DecodeCoefficients, PrefillCoefficients};
use std::sync::Arc;

/// Number of random texts of a short prompt, and most of a long one.
const SHORT: u32 = 8;
const LONG_MAX: u32 = 512;
/// Tokens of an answer.
const TOKENS: u32 = 16;
/// Answers at once.
const BATCH: usize = 4;
/// Least time that anything is taken to need, so that no prediction is 0.
const LEAST_S: f64 = 1e-6;

/// What an answer took.
struct Took {
    prompt_tokens: u32,
    first: Seconds,
    /// Mean time of a further token.
    step: Seconds,
}

/// Fits coefficients to the times of a few answers.
///
/// # Errors
/// The engine's fault.
pub(super) async fn calibrate(
    env: &dyn Env,
    engine: &Arc<dyn OutsideEngine>,
    model: &str,
    context: u32,
) -> Result<Coefficients, EngineFault> {
    // a text of random letters takes some 4 tokens
    let words = (context.saturating_sub(2 * TOKENS) / 8).clamp(1, LONG_MAX);
    let answer = |words: u32| async move { timed(env, engine, model, words).await };
    // what an engine does once, at its first request, is not measured
    answer(SHORT.min(words)).await?;
    let alone = answer(SHORT.min(words)).await?;
    let long = answer(words).await?;
    let together = futures_util::future::try_join_all((0..BATCH).map(|_| answer(SHORT.min(words)))).await?;
    let batch_step = together.iter().map(|took| took.step.0).sum::<f64>() / BATCH as f64;
    Ok(fit(&alone, &long, batch_step))
}

fn fit(alone: &Took, long: &Took, batch_step_s: f64) -> Coefficients {
    let more = f64::from(long.prompt_tokens) - f64::from(alone.prompt_tokens);
    let rise = (long.first - alone.first).0;
    let per_token = if more > 0.0 { (rise / more).max(LEAST_S) } else { LEAST_S };
    let overhead = (alone.first.0 - per_token * f64::from(alone.prompt_tokens)).max(0.0);
    let per_sequence = ((batch_step_s - alone.step.0) / (BATCH as f64 - 1.0)).max(0.0);
    let base = (alone.step.0 - per_sequence).max(LEAST_S);
    Coefficients {
        prefill_s: PrefillCoefficients { overhead, per_token, per_token_squared: 0.0 },
        decode_s: DecodeCoefficients { base, per_sequence, per_kv_token: 0.0 },
    }
}

/// A prompt that no cache has.
fn prompt(env: &dyn Env, words: u32) -> String {
    let word = |_| format!("{:06x}", env.random() & 0xff_ffff);
    (0..words).map(word).collect::<Vec<_>>().join(" ")
}

async fn timed(
    env: &dyn Env,
    engine: &Arc<dyn OutsideEngine>,
    model: &str,
    words: u32,
) -> Result<Took, EngineFault> {
    let body = serde_json::json!({
        "model": model,
        "prompt": prompt(env, words),
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": true,
        "stream": true,
    });
    let call = EngineCall {
        endpoint: EngineEndpoint::Completions,
        body: body.to_string().into_bytes().into(),
        stream: true,
        begun: None,
        tokens_max: None,
        trace: None,
        share: EngineShare::Whole,
    };
    let asked = env.now();
    let wrong = |detail: &str| EngineFault::new(EngineFaultKind::Malformed, detail);
    let mut stream = match engine.ask(&call).await? {
        EngineAnswer::Stream(stream) => stream,
        EngineAnswer::Whole(_) | EngineAnswer::HandedOff { .. } => return Err(wrong("it does not stream")),
        EngineAnswer::Refused { status, .. } => {
            return Err(wrong(&format!("it refuses a completion with status {status}")));
        }
    };
    let (mut first, mut last, mut usage, mut chunks) = (None, asked, None, 0_u32);
    while let Some(chunk) = stream.next().await {
        let chunk = chunk?;
        // text may be held back while a character is not complete
        if chunk.has_token() || (chunk.data.is_some() && !chunk.ends_choice) {
            last = env.now();
            first.get_or_insert(last);
            chunks += 1;
        }
        usage = chunk.usage.or(usage);
    }
    let first = first.ok_or_else(|| wrong("its answer has no tokens"))?;
    let usage = usage.ok_or_else(|| wrong("its stream reports no lengths"))?;
    let steps = usage.completion_tokens.max(2) - 1;
    let step = if chunks > 1 { (last - first) * (1.0 / f64::from(steps)) } else { Seconds::ZERO };
    Ok(Took { prompt_tokens: usage.prompt_tokens, first: first - asked, step })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coefficients_give_the_measured_times_back() {
        let took =
            |prompt_tokens, first, step| Took { prompt_tokens, first: Seconds(first), step: Seconds(step) };
        let fitted = fit(&took(10, 0.12, 0.02), &took(510, 0.62, 0.02), 0.035);
        let cost = mixfleet_scheduler::cost::CostModel::Coefficients(fitted);
        assert!((cost.prefill_s(0, 510).0 - 0.62).abs() < 1e-9);
        assert!((cost.decode_step_s(1, 100).0 - 0.02).abs() < 1e-9);
        assert!((cost.decode_step_s(4, 100).0 - 0.035).abs() < 1e-9);
        let odd = fit(&took(10, 0.5, 0.02), &took(10, 0.1, 0.02), 0.0);
        let cost = mixfleet_scheduler::cost::CostModel::Coefficients(odd);
        assert!(cost.prefill_s(0, 10).0 > 0.0 && cost.decode_step_s(1, 1).0 > 0.0, "{odd:?}");
    }
}

//! The target of a measurement: a model on devices of this process, or a server.

use crate::generate::ReadyModel;
use crate::generate::answer::CollectedAnswer;
use crate::server::NamedServer;
use anyhow::{Context, Result, bail};
use mixfleet_engines::HttpEngine;
use mixfleet_hal::outside::{EngineAnswer, EngineCall, EngineEndpoint, EngineShare, OutsideEngine};
use mixfleet_hal::random::mix;
use mixfleet_runtime::env::Env;
use mixfleet_runtime::request::GenerateRequest;
use serde_json::json;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Token ids that any vocabulary has, and that are hardly special ones.
const ANY_VOCABULARY: std::ops::Range<u32> = 10..250;

/// Numbers prompts, so that no two are alike.
static PROMPTS: AtomicU64 = AtomicU64::new(0);

pub(super) enum BenchTarget {
    /// Devices of this process.
    Here(Box<ReadyModel>),
    There(Box<NamedServer>),
}

/// When the tokens of an answer came.
pub(super) struct TokenTimes {
    /// Seconds from the request to each piece of the answer.
    pub(super) times_s: Vec<f64>,
    /// Tokens of the answer; several may have come together.
    pub(super) tokens: u32,
}

impl TokenTimes {
    /// Time to the first token.
    ///
    /// # Errors
    /// When the answer has none.
    pub(super) fn first_s(&self) -> Result<f64> {
        self.times_s.first().copied().context("an answer has no tokens")
    }

    /// Tokens per second behind the first one.
    pub(super) fn tokens_per_s(&self) -> Option<f64> {
        let [first, .., last] = self.times_s[..] else { return None };
        (self.tokens > 1 && last > first).then(|| f64::from(self.tokens - 1) / (last - first))
    }
}

impl BenchTarget {
    pub(super) fn name(&self) -> String {
        match self {
            BenchTarget::Here(ready) => ready.model.name.clone(),
            BenchTarget::There(named) => named.name(),
        }
    }

    /// The id that stands for a number.
    pub(super) fn id(&self, number: u64) -> u32 {
        let ids = match self {
            BenchTarget::Here(ready) => 0..ready.model.checkpoint.config.vocab,
            BenchTarget::There(..) => ANY_VOCABULARY,
        };
        let span = u64::from(ids.end - ids.start);
        ids.start + mixfleet_hal::cast::to_u32(mix(number) % span)
    }

    /// A prompt that has not been used before.
    pub(super) fn prompt(&self, tokens: u32) -> Vec<u32> {
        let prompt = PROMPTS.fetch_add(1, Ordering::Relaxed);
        (0..u64::from(tokens)).map(|token| self.id((prompt << 24) + token + 1)).collect()
    }

    /// Runs a prompt with an answer of this many tokens.
    ///
    /// # Errors
    /// Why there is no such answer.
    pub(super) async fn answer(&self, prompt: Vec<u32>, tokens: u32) -> Result<TokenTimes> {
        match self {
            BenchTarget::Here(ready) => here(ready, prompt, tokens).await,
            BenchTarget::There(named) => there(&named.engine, &named.model, &prompt, tokens).await,
        }
    }

    /// Waits until its devices are free.
    pub(super) async fn end(self) {
        if let BenchTarget::Here(ready) = self {
            ready.end().await;
        }
    }
}

async fn here(ready: &ReadyModel, prompt: Vec<u32>, tokens: u32) -> Result<TokenTimes> {
    let number = PROMPTS.fetch_add(1, Ordering::Relaxed);
    let request = GenerateRequest::greedy(format!("bench-{number}"), prompt, tokens);
    let asked_s = ready.env.now().0;
    let updates = ready.engine.handle.submit(request).await?;
    let answer = CollectedAnswer::new(ready.model.text.tokenizer.stream(), false);
    let answer = answer.collect(updates, ready.env.clone()).await?;
    let times_s: Vec<f64> = answer.times_s.iter().map(|time_s| time_s - asked_s).collect();
    Ok(TokenTimes { tokens: mixfleet_hal::cast::to_u32(times_s.len()), times_s })
}

async fn there(engine: &HttpEngine, model: &str, prompt: &[u32], tokens: u32) -> Result<TokenTimes> {
    let body = json!({
        "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true,
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
    let asked = Instant::now();
    let mut stream = match engine.ask(&call).await? {
        EngineAnswer::Stream(stream) => stream,
        EngineAnswer::Refused { status, body, .. } => {
            bail!("the server refuses with status {status}: {}", String::from_utf8_lossy(&body))
        }
        _ => bail!("the server does not stream"),
    };
    let (mut times_s, mut usage) = (Vec::new(), None);
    while let Some(chunk) = stream.next().await {
        let chunk = chunk?;
        if chunk.has_token() || (chunk.data.is_some() && !chunk.ends_choice && chunk.usage.is_none()) {
            times_s.push(asked.elapsed().as_secs_f64());
        }
        usage = chunk.usage.or(usage);
    }
    let seen = mixfleet_hal::cast::to_u32(times_s.len());
    Ok(TokenTimes { times_s, tokens: usage.map_or(seen, |usage| usage.completion_tokens) })
}

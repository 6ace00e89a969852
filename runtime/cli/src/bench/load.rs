//! Load on a target: by clients that wait for their answers, or by a trace that does not.

use super::target::{BenchTarget, TokenTimes};
use super::wrong;
use anyhow::Result;
use indicatif::ProgressBar;
use mixfleet_hal::cast::to_usize;
use mixfleet_sim::simulate::{Distribution, Quantiles};
use mixfleet_sim::trace::Request;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

pub(super) enum BenchLoad {
    /// Number of clients, requests of all together, and lengths of prompt and answer.
    Clients(u32, u32, (u32, u32)),
    /// Requests at their times; prompts have blocks of this many tokens.
    Trace(Vec<Request>, u32),
}

/// What an answer must keep to count as goodput.
pub(super) struct BenchObjectives {
    pub(super) ttft_s: Option<f64>,
    pub(super) tbt_s: Option<f64>,
}

/// What a load took on a target.
pub(super) struct LoadOutcome {
    pub(super) target: String,
    took_s: f64,
    /// Answers in full, and those within all objectives.
    answered: usize,
    within: usize,
    tokens: u64,
    ttft_s: Distribution,
    tbt_s: Distribution,
    /// Errors, with their counts.
    failures: Vec<(String, usize)>,
}

impl BenchLoad {
    pub(super) fn of_clients(clients: u32, requests: u32, lengths: (u32, u32)) -> BenchLoad {
        BenchLoad::Clients(clients, requests, lengths)
    }

    pub(super) fn of_trace(requests: Vec<Request>, block_tokens: u32) -> BenchLoad {
        BenchLoad::Trace(requests, block_tokens)
    }

    /// Sends all requests to a target.
    ///
    /// # Errors
    /// When there is nothing to ask.
    pub(super) async fn put_on(
        &self,
        target: &Arc<BenchTarget>,
        objectives: &BenchObjectives,
    ) -> Result<LoadOutcome> {
        let count = match self {
            BenchLoad::Clients(_, requests, _) => *requests as usize,
            BenchLoad::Trace(requests, _) => requests.len(),
        };
        if count == 0 {
            return Err(wrong("the load has no requests"));
        }
        let bar = ProgressBar::new(count as u64);
        let began = Instant::now();
        let answers = match self {
            BenchLoad::Clients(clients, requests, (prompt_tokens, answer_tokens)) => {
                by_clients(target, *clients, *requests, *prompt_tokens, *answer_tokens, &bar).await
            }
            BenchLoad::Trace(requests, block_tokens) => by_trace(target, requests, *block_tokens, &bar).await,
        };
        bar.finish_and_clear();
        Ok(LoadOutcome::of(target.name(), began.elapsed(), answers, objectives))
    }
}

async fn by_clients(
    target: &Arc<BenchTarget>,
    clients: u32,
    requests: u32,
    prompt_tokens: u32,
    answer_tokens: u32,
    bar: &ProgressBar,
) -> Vec<Result<TokenTimes>> {
    let next = Arc::new(AtomicU32::new(0));
    let client = |_| {
        let (target, next, bar) = (target.clone(), next.clone(), bar.clone());
        tokio::spawn(async move {
            let mut answers = Vec::new();
            while next.fetch_add(1, Ordering::Relaxed) < requests {
                answers.push(target.answer(target.prompt(prompt_tokens), answer_tokens).await);
                bar.inc(1);
            }
            answers
        })
    };
    let clients: Vec<_> = (0..clients).map(client).collect();
    let mut all = Vec::new();
    for client in clients {
        all.extend(client.await.unwrap_or_else(|error| vec![Err(error.into())]));
    }
    all
}

async fn by_trace(
    target: &Arc<BenchTarget>,
    requests: &[Request],
    block_tokens: u32,
    bar: &ProgressBar,
) -> Vec<Result<TokenTimes>> {
    let began = tokio::time::Instant::now();
    let mut asked = Vec::new();
    for request in requests {
        tokio::time::sleep_until(began + Duration::from_secs_f64(request.at.0.max(0.0))).await;
        let (target, bar) = (target.clone(), bar.clone());
        let (prompt, tokens) = (prompt_of(&target, request, block_tokens), request.output_tokens);
        asked.push(tokio::spawn(async move {
            let answer = target.answer(prompt, tokens).await;
            bar.inc(1);
            answer
        }));
    }
    let mut all = Vec::new();
    for answer in asked {
        all.push(answer.await.unwrap_or_else(|error| Err(error.into())));
    }
    all
}

/// A prompt of a request's length that shares its beginning with others as the request does.
fn prompt_of(target: &BenchTarget, request: &Request, block_tokens: u32) -> Vec<u32> {
    let mut ids = target.prompt(request.prompt_tokens);
    for (block, tokens) in request.chain.iter().zip(ids.chunks_mut(to_usize(u64::from(block_tokens)))) {
        for (at, id) in tokens.iter_mut().enumerate() {
            *id = target.id(block.0.wrapping_add(at as u64));
        }
    }
    ids
}

impl LoadOutcome {
    fn of(
        target: String,
        took: Duration,
        answers: Vec<Result<TokenTimes>>,
        wanted: &BenchObjectives,
    ) -> LoadOutcome {
        let (mut ttft_s, mut tbt_s) = (Quantiles::default(), Quantiles::default());
        let (mut answered, mut within, mut tokens) = (0, 0, 0);
        let mut failures: Vec<(String, usize)> = Vec::new();
        for answer in answers {
            let timed = match answer.and_then(|timed| Ok((timed.first_s()?, timed))) {
                Ok((first_s, timed)) => (first_s, timed),
                Err(error) => {
                    let why = format!("{error:#}");
                    match failures.iter_mut().find(|(known, _)| *known == why) {
                        Some((_, times)) => *times += 1,
                        None => failures.push((why, 1)),
                    }
                    continue;
                }
            };
            let (first_s, timed) = timed;
            ttft_s.add(first_s);
            timed.times_s.windows(2).for_each(|pair| tbt_s.add(pair[1] - pair[0]));
            let mean_s = timed.tokens_per_s().map_or(0.0, |rate| 1.0 / rate);
            let keeps = |value: f64, most: Option<f64>| most.is_none_or(|most| value <= most);
            within += usize::from(keeps(first_s, wanted.ttft_s) && keeps(mean_s, wanted.tbt_s));
            answered += 1;
            tokens += u64::from(timed.tokens);
        }
        let (ttft_s, tbt_s) = (Distribution::from(&ttft_s), Distribution::from(&tbt_s));
        let took_s = took.as_secs_f64();
        LoadOutcome { target, took_s, answered, within, tokens, ttft_s, tbt_s, failures }
    }

    /// Names and values, for people.
    pub(super) fn rows(&self) -> Vec<[String; 2]> {
        let of = |distribution: &Distribution| {
            let Distribution { mean, p50, p90, p99, .. } = distribution;
            format!("{mean:.4} mean, {p50:.4} p50, {p90:.4} p90, {p99:.4} p99")
        };
        let failed: usize = self.failures.iter().map(|(_, times)| times).sum();
        let mut rows = vec![
            ["requests answered".to_owned(), format!("{} in {:.1} s", self.answered, self.took_s)],
            ["requests/s".to_owned(), format!("{:.3}", self.answered as f64 / self.took_s)],
            ["goodput, requests/s".to_owned(), format!("{:.3}", self.within as f64 / self.took_s)],
            ["tokens/s".to_owned(), format!("{:.2}", self.tokens as f64 / self.took_s)],
            ["TTFT, s".to_owned(), of(&self.ttft_s)],
            ["TBT, s".to_owned(), of(&self.tbt_s)],
            ["failed".to_owned(), failed.to_string()],
        ];
        rows.extend(self.failures.iter().map(|(why, times)| [format!("  {times} times"), why.clone()]));
        rows
    }

    pub(super) fn text(&self) -> String {
        let row = |[name, value]: [String; 2]| format!("{name:<22}{value}\n");
        format!("{}\n{}", self.target, self.rows().into_iter().map(row).collect::<String>())
    }

    pub(super) fn document(&self) -> Value {
        let failures: Vec<Value> =
            self.failures.iter().map(|(why, times)| json!({"error": why, "count": times})).collect();
        json!({
            "target": self.target, "took_s": self.took_s, "answered": self.answered, "within": self.within,
            "requests_per_s": self.answered as f64 / self.took_s,
            "goodput_requests_per_s": self.within as f64 / self.took_s,
            "tokens_per_s": self.tokens as f64 / self.took_s,
            "ttft_s": self.ttft_s, "tbt_s": self.tbt_s, "failures": failures,
        })
    }
}

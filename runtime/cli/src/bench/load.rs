//! Load on a target: by clients that wait for their answers, or by a trace that does not.

use super::target::{BenchTarget, TokenTimes};
use super::wrong;
use anyhow::Result;
use indicatif::ProgressBar;
use mixfleet_hal::cast::to_usize;
use mixfleet_report::html::Html;
use mixfleet_report::svg::{Chart, Limit, Mark, PlotAxis, Scale, Series};
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
    /// Number of clients, if they made the load.
    clients: Option<u32>,
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
        let clients = if let BenchLoad::Clients(clients, ..) = self { Some(*clients) } else { None };
        Ok(LoadOutcome { clients, ..LoadOutcome::of(target.name(), began.elapsed(), answers, objectives) })
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
        LoadOutcome { target, clients: None, took_s, answered, within, tokens, ttft_s, tbt_s, failures }
    }

    /// Number of requests without a whole answer.
    pub(super) fn failed(&self) -> usize {
        self.failures.iter().map(|(_, times)| times).sum()
    }

    fn requests_per_s(&self) -> f64 {
        self.answered as f64 / self.took_s
    }

    /// Its target and load.
    pub(super) fn title(&self) -> String {
        match self.clients {
            Some(clients) => format!("{}, {clients} clients", self.target),
            None => self.target.clone(),
        }
    }

    /// Names and values, for people.
    pub(super) fn rows(&self) -> Vec<[String; 2]> {
        let of = |distribution: &Distribution| {
            if distribution.count == 0 {
                return "-".to_owned();
            }
            let Distribution { mean, p50, p90, p99, .. } = distribution;
            format!("{mean:.4} mean, {p50:.4} p50, {p90:.4} p90, {p99:.4} p99")
        };
        let rate = |count: f64, decimals: usize| match self.answered {
            0 => "-".to_owned(),
            _ => format!("{:.decimals$}", count / self.took_s),
        };
        let mut rows = vec![
            ["requests answered".to_owned(), format!("{} in {:.1} s", self.answered, self.took_s)],
            ["requests/s".to_owned(), rate(self.answered as f64, 3)],
            ["goodput, requests/s".to_owned(), rate(self.within as f64, 3)],
            ["tokens/s".to_owned(), rate(self.tokens as f64, 2)],
            ["TTFT, s".to_owned(), of(&self.ttft_s)],
            ["TBT, s".to_owned(), of(&self.tbt_s)],
            ["failed".to_owned(), self.failed().to_string()],
        ];
        rows.extend(self.failures.iter().map(|(why, times)| [format!("  {times} times"), why.clone()]));
        rows
    }

    pub(super) fn text(&self) -> String {
        let row = |[name, value]: [String; 2]| format!("{name:<22}{value}\n");
        format!("{}\n{}", self.title(), self.rows().into_iter().map(row).collect::<String>())
    }

    pub(super) fn document(&self) -> Value {
        let failures: Vec<Value> =
            self.failures.iter().map(|(why, times)| json!({"error": why, "count": times})).collect();
        json!({
            "target": self.target, "clients": self.clients, "took_s": self.took_s, "answered": self.answered, "within": self.within,
            "requests_per_s": self.requests_per_s(),
            "goodput_requests_per_s": self.within as f64 / self.took_s,
            "tokens_per_s": self.tokens as f64 / self.took_s,
            "ttft_s": self.ttft_s, "tbt_s": self.tbt_s, "failures": failures,
        })
    }
}

/// Draws latency against load for each target that had several numbers of clients.
pub(super) fn curves(html: &mut Html, loads: &[LoadOutcome]) {
    let mut targets: Vec<&str> = loads.iter().map(|load| load.target.as_str()).collect();
    targets.sort_unstable();
    targets.dedup();
    for target in targets {
        let mut of: Vec<(f64, &LoadOutcome)> = loads
            .iter()
            .filter(|load| load.target == target && load.answered > 0)
            .filter_map(|load| Some((f64::from(load.clients?), load)))
            .collect();
        of.sort_by(|a, b| a.0.total_cmp(&b.0));
        if of.len() < 2 {
            continue;
        }
        html.heading(2, &format!("Latency against load: {target}"));
        let curve = |name: &str, value: fn(&LoadOutcome) -> f64| Series {
            name: name.to_owned(),
            points: of.iter().map(|(clients, load)| (*clients, value(load))).collect(),
            mark: Mark::Both,
        };
        let rates: Vec<(f64, f64)> =
            of.iter().map(|(clients, load)| (*clients, load.requests_per_s())).collect();
        let knee = knee(&rates);
        let limits: Vec<Limit> = knee.map(|clients| Limit::X(clients, "knee")).into_iter().collect();
        let x = PlotAxis { label: "concurrent clients", unit: "", scale: Scale::Binary };
        let y = PlotAxis { label: "latency", unit: "s", scale: Scale::Decimal };
        let series = [
            curve("TTFT, p50", |load| load.ttft_s.p50),
            curve("TTFT, p99", |load| load.ttft_s.p99),
            curve("TBT, p50", |load| load.tbt_s.p50),
            curve("TBT, p99", |load| load.tbt_s.p99),
        ];
        let caption = match knee {
            Some(clients) => format!(
                "The knee is where throughput over response time is largest: {clients} clients. Beyond it requests wait \
                 more than throughput gains."
            ),
            None => {
                "No knee: more clients still gain more throughput than they cost in response time.".to_owned()
            }
        };
        Chart { x, y, series: &series, roof: &[], limits: &limits }.draw(html, &caption);
        let y = PlotAxis { label: "requests per second", unit: "", scale: Scale::Linear };
        let series = [curve("answered", LoadOutcome::requests_per_s)];
        Chart { x, y, series: &series, roof: &[], limits: &limits }.draw(html, "Throughput.");
    }
}

/// The number of clients with the largest power, throughput over response time (Kleinrock 1979). By Little's
/// law that is rate² / clients. None if that is the largest load of all, behind which it may be.
fn knee(rates: &[(f64, f64)]) -> Option<f64> {
    let power = |(clients, rate): (f64, f64)| rate * rate / clients;
    let best = rates.iter().copied().max_by(|a, b| power(*a).total_cmp(&power(*b)))?;
    (Some(&best) != rates.last()).then_some(best.0)
}

#[cfg(test)]
mod tests {
    use super::knee;

    #[test]
    fn the_knee_is_where_more_clients_stop_to_pay() {
        // a server of four slots, one answer per second each
        let rates = [1.0, 2.0, 4.0, 8.0, 16.0].map(|clients: f64| (clients, clients.min(4.0)));
        assert_eq!(knee(&rates), Some(4.0));
        assert_eq!(knee(&rates[..3]), None, "it may be behind the largest load");
        assert_eq!(knee(&[]), None);
    }
}

//! Implements `mixfleet bench`: how fast a model answers, here or at any server with OpenAI's interface.

mod load;
mod target;

use crate::args::{DeviceRole, GenerateArgs, ModelArgs};
use crate::failure::{Failed, UsageError};
use crate::generate::ReadyModel;
use crate::numbers::{count, seconds};
use crate::output_files::{leave_no_empty, writable};
use crate::remote::RemoteArgs;
use crate::trace_file::ReplayArgs;
use crate::{machine, screen, server};
use anyhow::{Context, Result, bail};
use clap::Args;
use indicatif::ProgressBar;
use load::{BenchLoad, BenchObjectives, LoadOutcome};
use mixfleet_engines::EngineAddress;
use mixfleet_report::files::write_whole;
use mixfleet_report::html::{Html, TableCell, page};
use serde_json::{Value, json};
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use target::BenchTarget;

/// Name and version of the document.
const SCHEMA: &str = "mixfleet.bench/1";
/// Tokens of the prompt of a test that generates.
const SHORT: u32 = 16;

#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    remote: RemoteArgs,
    /// A device, or DEV=prefill, DEV=decode; repeatable [default: auto]
    #[arg(long, value_name = "DEV[=ROLE]")]
    device: Vec<DeviceRole>,
    /// A server with OpenAI's interface, http://HOST:PORT; alone, or with --model or --device in turns
    #[arg(long, value_name = "URL")]
    against: Option<EngineAddress>,
    /// Model name on the server [default: the first that it lists]
    #[arg(long, value_name = "NAME", requires = "against")]
    served_model: Option<String>,
    /// File with the server's API key
    #[arg(long, value_name = "FILE", requires = "against")]
    key_file: Option<PathBuf>,
    /// Lengths of prompts
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "512", value_parser = count::<u32>(1..=1 << 20))]
    prompt_tokens: Vec<u32>,
    /// Lengths of answers
    #[arg(long, value_name = "N,N", value_delimiter = ',', default_value = "128", value_parser = count::<u32>(1..=1 << 20))]
    answer_tokens: Vec<u32>,
    /// Repetitions of each test
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = crate::numbers::count::<u32>(1..=1000))]
    repeat: u32,
    /// Closed loop: N concurrent clients; several for a curve
    #[arg(long, value_name = "N,N", value_delimiter = ',', value_parser = count::<u32>(1..=4096))]
    clients: Vec<u32>,
    /// Requests of all clients together
    #[arg(long, value_name = "N", default_value_t = 64, requires = "clients", value_parser = count::<u32>(1..=u32::MAX.into()))]
    requests: u32,
    /// Load by a trace's requests, at their times, with its lengths and shared prefixes
    #[arg(long, value_name = "FILE", conflicts_with = "clients")]
    trace: Option<PathBuf>,
    #[command(flatten)]
    replay: ReplayArgs,
    /// Goodput objective: seconds to the first token of an answer
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    ttft_slo: Option<f64>,
    /// Goodput objective: mean seconds between tokens
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    tbt_slo: Option<f64>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Write a self-contained HTML page
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// A test of one target: prompts (`pp512`) or answers (`tg128`) of this many tokens.
struct Tested {
    target: String,
    test: String,
    tokens_per_s: Vec<f64>,
}

impl Tested {
    fn mean(&self) -> f64 {
        self.tokens_per_s.iter().sum::<f64>() / self.tokens_per_s.len() as f64
    }

    /// The standard deviation of a sample, as llama-bench has it.
    fn deviation(&self) -> f64 {
        let (mean, count) = (self.mean(), self.tokens_per_s.len() as f64);
        let squares = self.tokens_per_s.iter().map(|rate| (rate - mean).powi(2)).sum::<f64>();
        if count > 1.0 { (squares / (count - 1.0)).sqrt() } else { 0.0 }
    }
}

/// Results.
#[derive(Default)]
struct BenchOutcome {
    tested: Vec<Tested>,
    loads: Vec<LoadOutcome>,
}

pub(crate) fn run(args: &BenchArgs) -> Result<()> {
    if let Some(file) = &args.html {
        writable(file)?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let measured = runtime.block_on(async {
        let targets = targets(args).await?;
        let measured = measure(args, &targets).await;
        for target in targets {
            Arc::into_inner(target).context("all answers have ended")?.end().await;
        }
        measured
    });
    let outcome = measured.inspect_err(|_| leave_no_empty(args.html.as_deref()))?;
    if let Some(file) = &args.html {
        let text = page("mixfleet bench", &outcome.subtitle(), &outcome.html());
        write_whole(file, text.as_bytes()).with_context(|| format!("cannot write {}", file.display()))?;
    }
    let mut out = screen::output(args.json);
    match args.json {
        true => writeln!(out, "{:#}", outcome.document())?,
        false => write!(out, "{}", outcome.text())?,
    }
    match outcome.loads.iter().map(LoadOutcome::failed).sum() {
        0 => Ok(()),
        failed => bail!(Failed(format!("{failed} requests failed; the output has their errors"))),
    }
}

/// The model on devices of this process, and the server: the requested ones.
async fn targets(args: &BenchArgs) -> Result<Vec<Arc<BenchTarget>>> {
    let mut targets = Vec::new();
    if args.against.is_none() || args.model.model.is_some() || !args.device.is_empty() {
        let mut generate =
            GenerateArgs::of_devices(args.model.clone(), args.remote.clone(), args.device.clone());
        generate.batch = args.clients.iter().copied().max().unwrap_or(generate.batch);
        targets.push(Arc::new(BenchTarget::Here(Box::new(ReadyModel::checked(&generate, |_| Ok(()))?))));
    }
    if let Some(address) = &args.against {
        let named = server::open(address, args.key_file.as_deref(), args.served_model.clone()).await?;
        targets.push(Arc::new(BenchTarget::There(Box::new(named))));
    }
    Ok(targets)
}

async fn measure(args: &BenchArgs, targets: &[Arc<BenchTarget>]) -> Result<BenchOutcome> {
    let objectives = BenchObjectives { ttft_s: args.ttft_slo, tbt_s: args.tbt_slo };
    let loads = match &args.trace {
        Some(file) => {
            let mut trace = args.replay.open(file)?;
            let block_tokens = trace.block_tokens().unwrap_or(1).max(1);
            let requests: Result<Vec<_>, _> = args.replay.play(&mut trace, 0).collect();
            vec![BenchLoad::of_trace(requests?, block_tokens)]
        }
        None if args.clients.is_empty() => {
            let tested = test(args, targets).await?;
            return Ok(BenchOutcome { tested, loads: Vec::new() });
        }
        None => {
            let lengths = (args.prompt_tokens[0], args.answer_tokens[0]);
            let of = |&clients: &u32| BenchLoad::of_clients(clients, args.requests, lengths);
            args.clients.iter().map(of).collect()
        }
    };
    let mut outcomes = Vec::new();
    for load in &loads {
        for target in targets {
            outcomes.push(load.put_on(target, &objectives).await?);
        }
    }
    Ok(BenchOutcome { tested: Vec::new(), loads: outcomes })
}

/// Runs each test on each target, in turns, so that what disturbs one disturbs the other as well.
async fn test(args: &BenchArgs, targets: &[Arc<BenchTarget>]) -> Result<Vec<Tested>> {
    let prompts = args.prompt_tokens.iter().map(|&tokens| (format!("pp{tokens}"), tokens, 1));
    let answers = args.answer_tokens.iter().map(|&tokens| (format!("tg{tokens}"), SHORT, tokens + 1));
    let bar = ProgressBar::new(u64::from(args.repeat));
    let mut all = Vec::new();
    for (name, prompt_tokens, answer_tokens) in prompts.chain(answers) {
        let empty = |target: &Arc<BenchTarget>| Tested {
            target: target.name(),
            test: name.clone(),
            tokens_per_s: Vec::new(),
        };
        let mut tested: Vec<Tested> = targets.iter().map(empty).collect();
        bar.reset();
        // the first of each is not counted: pages are cold then, and buffers are allocated
        for repetition in 0..=args.repeat {
            for (target, tested) in targets.iter().zip(&mut tested) {
                let timed = target.answer(target.prompt(prompt_tokens), answer_tokens).await?;
                let rate = match answer_tokens {
                    1 => f64::from(prompt_tokens) / timed.first_s()?,
                    _ => timed.tokens_per_s().context("an answer ended at its first token")?,
                };
                if repetition > 0 {
                    tested.tokens_per_s.push(rate);
                }
            }
            bar.inc(1);
        }
        all.extend(tested);
    }
    bar.finish_and_clear();
    Ok(all)
}

impl BenchOutcome {
    fn subtitle(&self) -> String {
        let names =
            self.tested.iter().map(|tested| &tested.target).chain(self.loads.iter().map(|of| &of.target));
        let mut names: Vec<&str> = names.map(String::as_str).collect();
        names.sort_unstable();
        names.dedup();
        let cpu = machine::facts().into_iter().find(|fact| fact.name == "cpu model");
        let (machine, date) = (cpu.map_or("this machine".into(), |fact| fact.value), machine::now());
        format!("{}; measured on {machine}, {}", names.join(", "), &date[..10])
    }

    fn rows(&self) -> impl Iterator<Item = [String; 3]> {
        self.tested.iter().map(|tested| {
            let rate = format!("{:.2} ± {:.2}", tested.mean(), tested.deviation());
            [tested.target.clone(), tested.test.clone(), rate]
        })
    }

    fn text(&self) -> String {
        let mut text = String::new();
        if !self.tested.is_empty() {
            text += "| target | test | tokens/s |\n| --- | --- | ---: |\n";
        }
        for row in self.rows() {
            text += &format!("| {} |\n", row.join(" | "));
        }
        for load in &self.loads {
            text += &load.text();
        }
        text
    }

    fn document(&self) -> Value {
        let test = |tested: &Tested| {
            json!({
                "target": tested.target, "test": tested.test, "tokens_per_s": tested.mean(),
                "deviation": tested.deviation(), "samples": tested.tokens_per_s,
            })
        };
        let tests: Vec<Value> = self.tested.iter().map(test).collect();
        let loads: Vec<Value> = self.loads.iter().map(LoadOutcome::document).collect();
        json!({"schema": SCHEMA, "tests": tests, "loads": loads})
    }

    fn html(&self) -> Html {
        let mut html = Html::default();
        let rows: Vec<Vec<TableCell>> = self
            .rows()
            .map(|[target, test, rate]| {
                vec![TableCell::text(target), TableCell::text(test), TableCell::number(rate)]
            })
            .collect();
        if !rows.is_empty() {
            html.paragraph(
                "pp: tokens of a prompt until the first token; tg: tokens of an answer behind its first.",
            );
            html.table(&["target", "test", "tokens/s"], &rows);
        }
        load::curves(&mut html, &self.loads);
        for load in &self.loads {
            html.heading(2, &load.title());
            let rows = load
                .rows()
                .into_iter()
                .map(|[name, value]| vec![TableCell::text(name), TableCell::number(value)]);
            html.table(&["", "value"], &rows.collect::<Vec<_>>());
        }
        html
    }
}

/// A mistake in the arguments.
fn wrong(why: impl Into<String>) -> anyhow::Error {
    UsageError(why.into()).into()
}

//! The load of a plan: its requests, and its classes by size.

use super::args::PlanArgs;
use crate::failure::UsageError;
use anyhow::{Context, Result, anyhow};
use mixfleet_hal::cast::{to_u64, to_usize};
use mixfleet_hal::files::{self, TEXT_BYTES_MAX};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::kv::BlockHash;
use mixfleet_scheduler::models::KnownModel;
use mixfleet_scheduler::plan::bound::LoadSlots;
use mixfleet_scheduler::plan::load::{LoadTally, SizeClass};
use mixfleet_sim::trace::{Request, SteadyLoad, TOKENS_MAX};
use serde::Deserialize;
use serde_json::json;
use std::collections::HashSet;
use std::io::Write;
use std::path::Path;

/// Least number of requests that stand for a rate: one in a hundred may miss the objectives.
const REQUESTS_MIN: f64 = 1000.0;
/// Maximum number of requests: a run should not take minutes.
const REQUESTS_MAX: f64 = 50_000.0;
/// Least time that they span, and as a multiple of how long one may take: a fleet starts empty.
const SPAN_S_MIN: f64 = 120.0;
const SPAN_ANSWERS: f64 = 10.0;
/// A trace that spans less, as a multiple of how long one of its requests may take, is warned of.
const SPAN_ANSWERS_WARN: f64 = 5.0;
const HOUR_S: f64 = 3600.0;
/// Most hours that are planned each for itself.
const HOURS_MAX: usize = 9000;
/// Number of spans of a trace; the densest ones count in the lower bound.
const SLOTS: f64 = 64.0;

/// Requests, and what they come to.
pub(super) struct PlanLoad {
    pub(super) requests: Vec<Request>,
    /// Tokens in a block of their prefixes, where these are known.
    pub(super) block_tokens: Option<u32>,
    pub(super) classes: Vec<SizeClass>,
    /// For each hour the requests per second of each class; empty for less than two hours.
    pub(super) hours: Vec<Vec<f64>>,
    /// The requests of a trace in the order of time.
    pub(super) slots: Option<LoadSlots>,
    /// The hours of `--workload`.
    workload: Vec<WorkloadHour>,
    /// Requests per second.
    pub(super) rate: f64,
    /// Mean tokens of prompts and answers.
    pub(super) mean_tokens: [f64; 2],
    /// In words.
    pub(super) text: String,
}

/// Requests of one size in an hour.
#[derive(Clone, Debug, Deserialize)]
struct WorkloadHour {
    requests_per_s: f64,
    input_tokens: u32,
    output_tokens: u32,
}

/// Where the load of a model comes from.
#[derive(Clone, Copy)]
pub(super) enum PlanLoadSource<'a> {
    Trace(&'a Path),
    /// Loads by the hour.
    Workload(&'a Path),
    /// Requests per second, with the tokens of their prompts and answers.
    Rate(f64, [u32; 2]),
}

impl<'a> PlanLoadSource<'a> {
    /// The load of each model; one that is given once is that of all.
    pub(super) fn of(args: &'a PlanArgs) -> Result<Vec<Self>> {
        let models = args.model.len();
        let traces = for_each(models, "trace", &args.trace)?;
        let workloads = for_each(models, "workload", &args.workload)?;
        let rates = for_each(models, "rate", &args.rate)?;
        let input = for_each(models, "input-tokens", &args.input_tokens)?;
        let output = for_each(models, "output-tokens", &args.output_tokens)?;
        let of = |at: usize| match (traces.get(at), workloads.get(at), rates.get(at)) {
            (Some(path), ..) => Some(PlanLoadSource::Trace(path)),
            (_, Some(path), _) => Some(PlanLoadSource::Workload(path)),
            (_, _, Some(rate)) => Some(PlanLoadSource::Rate(**rate, [**input.get(at)?, **output.get(at)?])),
            _ => None,
        };
        let ways = "--trace, --workload, or --rate with --input-tokens and --output-tokens";
        let missing = || UsageError(format!("the load is missing: give {ways}")).into();
        (0..models).map(|at| of(at).ok_or_else(missing)).collect()
    }
}

/// A value per model, or one for all; nothing if it is not given.
fn for_each<'a, T>(models: usize, flag: &str, given: &'a [T]) -> Result<Vec<&'a T>> {
    match given {
        [] => Ok(Vec::new()),
        [all] => Ok(vec![all; models]),
        each if each.len() == models => Ok(each.iter().collect()),
        each => {
            let count = each.len();
            Err(UsageError(format!("--{flag}: {count} for {models} models; give one for all, or one each"))
                .into())
        }
    }
}

impl PlanLoad {
    /// Reads the load of a model, without requests of a trace that its context does not hold.
    ///
    /// # Errors
    /// When it cannot be read, and when all requests of a size are beyond the model's context.
    pub(super) fn read(args: &PlanArgs, source: PlanLoadSource<'_>, model: &KnownModel) -> Result<Self> {
        let load = match source {
            PlanLoadSource::Trace(path) => Self::of_trace(args, path, model)?,
            PlanLoadSource::Workload(path) => Self::of_workload(args, path)?,
            PlanLoadSource::Rate(rate, size) => Self::of_rate(args, rate, size),
        };
        let rows = load.workload.iter().map(|row| [row.input_tokens, row.output_tokens]);
        let first = load.requests.first().map(|request| [request.prompt_tokens, request.output_tokens]);
        match rows.chain(first).find(|size| is_beyond(model, *size)) {
            Some(size) => Err(UsageError(beyond(model, size)).into()),
            None => Ok(load),
        }
    }

    fn of_trace(args: &PlanArgs, path: &Path, model: &KnownModel) -> Result<Self> {
        let mut trace = args.replay.open(path)?;
        let mut requests: Vec<Request> = args.replay.play(&mut trace, 0).collect::<Result<_, _>>()?;
        let all = requests.len();
        let mut refused = None;
        requests.retain(|request| {
            let size = [request.prompt_tokens, request.output_tokens];
            let is_refused = is_beyond(model, size);
            refused = refused.or(is_refused.then_some(size));
            !is_refused
        });
        match refused {
            Some(size) if requests.is_empty() => return Err(UsageError(beyond(model, size)).into()),
            Some(size) => {
                let left_out = all - requests.len();
                eprintln!("warning: {left_out} of {all} requests are left out: {}", beyond(model, size));
            }
            None => {}
        }
        let block_tokens = trace.block_tokens();
        let Some(last) = requests.last() else {
            return Err(UsageError(format!("--trace {}: there is no request", path.display())).into());
        };
        let span = Seconds(last.at.0 - requests[0].at.0);
        let (mut tally, mut held) = (LoadTally::default(), HashSet::<BlockHash>::new());
        let (mut in_slots, slot_s) = (LoadTally::default(), (span.0 / SLOTS).max(1.0));
        for request in &requests {
            let blocks = request.chain.iter().take_while(|key| held.contains(key)).count();
            held.extend(&request.chain[blocks..]);
            let cached = request.reused_tokens(blocks, block_tokens.unwrap_or(0));
            let (at_s, size) =
                (request.at.0 - requests[0].at.0, [request.prompt_tokens, request.output_tokens, cached]);
            tally.add_many(to_usize(at_s / HOUR_S).min(HOURS_MAX), 1, size);
            in_slots.add_many(to_usize(at_s / slot_s), 1, size);
        }
        let (classes, counts) = tally.classes_by_hour(span, args.attain);
        let longest = requests.iter().map(|request| request.output_tokens).max().unwrap_or(0);
        let mut load = Self::new(requests, block_tokens, classes, path.display().to_string());
        load.slots = Some(LoadSlots {
            slot: Seconds(slot_s / (1.0 + args.headroom)),
            requests: in_slots.classes_by_hour(span, args.attain).1,
            answer: Seconds(args.ttft + f64::from(longest) * args.tbt),
        });
        let last_s = span.0 - HOUR_S * (counts.len() - 1) as f64;
        let whole = counts.len() - usize::from(last_s < 0.5 * HOUR_S);
        let span_s = |hour: usize| if hour + 1 == counts.len() { last_s.min(HOUR_S) } else { HOUR_S };
        if (2..HOURS_MAX).contains(&whole) {
            load.hours = (0..whole).map(|hour| rates(&counts[hour], span_s(hour))).collect();
        }
        Ok(load)
    }

    /// A load of hours; its requests are those of the hour chosen by [`PlanLoad::be_of_hour`].
    fn of_workload(args: &PlanArgs, path: &Path) -> Result<Self> {
        let workload = read_workload(path)?;
        let mut tally = LoadTally::default();
        for (hour, row) in workload.iter().enumerate() {
            // an hour with any load has a request, so that it has a fleet
            let requests =
                to_u64((row.requests_per_s * HOUR_S).round()).max((row.requests_per_s > 0.0).into());
            tally.add_many(hour, requests, [row.input_tokens, row.output_tokens, 0]);
        }
        let (classes, counts) = tally.classes_by_hour(Seconds(HOUR_S * workload.len() as f64), args.attain);
        let hours = counts.iter().map(|counts| rates(counts, HOUR_S)).collect();
        let load = Self::new(Vec::new(), None, classes, path.display().to_string());
        Ok(PlanLoad { hours, workload, ..load })
    }

    /// Makes this the load of an hour of `--workload`.
    pub(super) fn be_of_hour(&mut self, args: &PlanArgs, hour: usize) {
        let row = &self.workload[hour];
        let size = [row.input_tokens, row.output_tokens];
        let mut classes = self.classes.clone();
        classes.iter_mut().zip(&self.hours[hour]).for_each(|(class, rate)| class.rate = *rate);
        let (hours, all) = (self.hours.len(), self.text.clone());
        let text =
            format!("{all}, hour {hour} of {hours}: prompts of {} tokens, answers of {}", size[0], size[1]);
        let of_hour = Self::new(steady(args, row.requests_per_s, size), None, classes, text);
        self.requests = of_hour.requests;
        self.classes = of_hour.classes;
        self.rate = of_hour.rate;
        self.mean_tokens = of_hour.mean_tokens;
        self.text = of_hour.text;
    }

    fn of_rate(args: &PlanArgs, rate: f64, [prompt_tokens, output_tokens]: [u32; 2]) -> Self {
        let mut tally = LoadTally::default();
        tally.add(prompt_tokens, output_tokens, 0);
        let mut classes = tally.classes(Seconds(1.0), args.attain);
        classes.iter_mut().for_each(|class| class.rate = rate);
        let text =
            format!("{rate} requests/s, prompts of {prompt_tokens} tokens, answers of {output_tokens}");
        Self::new(steady(args, rate, [prompt_tokens, output_tokens]), None, classes, text)
    }

    fn new(requests: Vec<Request>, block_tokens: Option<u32>, classes: Vec<SizeClass>, text: String) -> Self {
        let rate = classes.iter().map(|class| class.rate).sum();
        let mean = |of: fn(&Request) -> u32| {
            requests.iter().map(|request| f64::from(of(request))).sum::<f64>() / requests.len().max(1) as f64
        };
        let mean_tokens = [mean(|request| request.prompt_tokens), mean(|request| request.output_tokens)];
        let (hours, workload, slots) = (Vec::new(), Vec::new(), None);
        PlanLoad { requests, block_tokens, classes, hours, slots, workload, rate, mean_tokens, text }
    }

    /// Warnings about the requests of a plan.
    pub(super) fn warning(&self, args: &PlanArgs) -> Option<String> {
        let (first, last) = (self.requests.first()?, self.requests.last()?);
        let (span_s, one_s) = (last.at.0 - first.at.0, args.ttft + self.mean_tokens[1] * args.tbt);
        (span_s < SPAN_ANSWERS_WARN * one_s).then(|| {
            format!(
                "the requests arrive within {span_s:.0} s, and one may take {one_s:.0} s: a fleet that starts empty \
                 may seem to carry more than it does; give a longer trace or a larger --limit"
            )
        })
    }

    /// Writes the requests as a log that `simulate --trace` reads.
    pub(super) fn write_log(&self, path: &Path) -> std::io::Result<()> {
        let mut file = std::io::BufWriter::new(std::fs::File::create(path)?);
        for request in &self.requests {
            let line = json!({
                "input_toks": request.prompt_tokens,
                "output_toks": request.output_tokens,
                "arrival_time": request.at.0,
            });
            writeln!(file, "{line}")?;
        }
        file.flush()
    }
}

/// Whether a request needs more tokens than the model's context holds, so that engines refuse it.
fn is_beyond(model: &KnownModel, [prompt, answer]: [u32; 2]) -> bool {
    u64::from(prompt) + u64::from(answer) > u64::from(model.context)
}

fn beyond(model: &KnownModel, [prompt, answer]: [u32; 2]) -> String {
    let (name, context) = (model.name, model.context);
    format!(
        "a prompt of {prompt} tokens and an answer of {answer} are beyond the context of {name}, {context} tokens"
    )
}

/// Requests per second of each class.
fn rates(requests: &[u64], span_s: f64) -> Vec<f64> {
    requests.iter().map(|count| *count as f64 / span_s).collect()
}

/// Number of requests at a steady rate that show whether a fleet holds.
fn steady(args: &PlanArgs, rate: f64, [prompt_tokens, output_tokens]: [u32; 2]) -> Vec<Request> {
    let answer_s = args.ttft + f64::from(output_tokens) * args.tbt;
    let wanted = rate * (SPAN_ANSWERS * answer_s).max(SPAN_S_MIN);
    let requests = to_u64(wanted.clamp(REQUESTS_MIN, REQUESTS_MAX));
    SteadyLoad { rate, requests, prompt_tokens, output_tokens, seed: 0 }.requests().collect()
}

fn read_workload(path: &Path) -> Result<Vec<WorkloadHour>> {
    let file = path.display();
    let bytes =
        files::read(path, TEXT_BYTES_MAX).with_context(|| format!("cannot read the workload in {file}"))?;
    let mut reader =
        csv::ReaderBuilder::new().trim(csv::Trim::All).comment(Some(b'#')).from_reader(&bytes[..]);
    let mut hours = Vec::new();
    for (at, row) in (1..).zip(reader.deserialize::<WorkloadHour>()) {
        let row = row.map_err(|error| {
            let columns = "requests_per_s, input_tokens and output_tokens, an hour in each row";
            anyhow!("{file}, hour {at}: expected the columns {columns}: {error}")
        })?;
        let tokens = [row.input_tokens, row.output_tokens];
        if !(0.0..=1e6).contains(&row.requests_per_s)
            || tokens.iter().any(|of| !(1..=TOKENS_MAX).contains(of))
        {
            return Err(anyhow!("{file}, hour {at}: up to 1e6 requests/s and from 1 to {TOKENS_MAX} tokens"));
        }
        hours.push(row);
    }
    match hours.iter().all(|row| row.requests_per_s == 0.0) || hours.len() > HOURS_MAX {
        true => Err(anyhow!("{file}: expected up to {HOURS_MAX} hours, with at least one request")),
        false => Ok(hours),
    }
}

//! The load of a plan: its requests, and its classes by size.

use super::PlanArgs;
use crate::Usage;
use anyhow::Result;
use mixfleet_hal::cast::to_u64;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::kv::BlockHash;
use mixfleet_scheduler::plan::load::{LoadTally, SizeClass};
use mixfleet_sim::trace::{Request, SteadyLoad};
use serde_json::json;
use std::collections::HashSet;
use std::io::Write;
use std::path::Path;

/// Least number of requests that stand for a rate: one in a hundred may miss the objectives.
const REQUESTS_MIN: f64 = 1000.0;
/// Most of them: a run should not take minutes.
const REQUESTS_MAX: f64 = 50_000.0;
/// Least time that they span, and as a multiple of how long one may take: a fleet starts empty.
const SPAN_S_MIN: f64 = 120.0;
const SPAN_ANSWERS: f64 = 10.0;

/// Requests, and what they come to.
pub(super) struct PlanLoad {
    pub(super) requests: Vec<Request>,
    /// Tokens in a block of their prefixes, where these are known.
    pub(super) block_tokens: Option<u32>,
    pub(super) classes: Vec<SizeClass>,
    /// Requests per second.
    pub(super) rate: f64,
    /// Mean tokens of prompts and answers.
    pub(super) mean_tokens: [f64; 2],
    /// In words.
    pub(super) text: String,
}

impl PlanLoad {
    pub(super) fn read(args: &PlanArgs) -> Result<Self> {
        match (&args.trace, args.rate, args.input_tokens, args.output_tokens) {
            (Some(path), ..) => Self::of_trace(args, path),
            (None, Some(rate), Some(input), Some(output)) => Ok(Self::of_rate(args, rate, [input, output])),
            _ => Err(Usage("give --trace, or --rate with --input-tokens and --output-tokens".into()).into()),
        }
    }

    fn of_trace(args: &PlanArgs, path: &Path) -> Result<Self> {
        let mut trace = args.replay.open(path)?;
        let requests: Vec<Request> = args.replay.play(&mut trace, 0).collect::<Result<_, _>>()?;
        let block_tokens = trace.block_tokens();
        let Some(last) = requests.last() else {
            return Err(Usage(format!("--trace {}: there is no request", path.display())).into());
        };
        let span = Seconds(last.at.0 - requests[0].at.0);
        let (mut tally, mut held) = (LoadTally::default(), HashSet::<BlockHash>::new());
        for request in &requests {
            let blocks = request.chain.iter().take_while(|key| held.contains(key)).count();
            held.extend(&request.chain[blocks..]);
            let cached = request.reused_tokens(blocks, block_tokens.unwrap_or(0));
            tally.add(request.prompt_tokens, request.output_tokens, cached);
        }
        Ok(Self::new(requests, block_tokens, tally.classes(span), path.display().to_string()))
    }

    fn of_rate(args: &PlanArgs, rate: f64, [prompt_tokens, output_tokens]: [u32; 2]) -> Self {
        let answer_s = args.ttft + f64::from(output_tokens) * args.tbt;
        let wanted = rate * (SPAN_ANSWERS * answer_s).max(SPAN_S_MIN);
        let requests = to_u64(wanted.clamp(REQUESTS_MIN, REQUESTS_MAX));
        let steady = SteadyLoad { rate, requests, prompt_tokens, output_tokens, seed: 0 };
        let mut tally = LoadTally::default();
        tally.add(prompt_tokens, output_tokens, 0);
        let mut classes = tally.classes(Seconds(1.0));
        classes.iter_mut().for_each(|class| class.rate = rate);
        let text =
            format!("{rate} requests/s, prompts of {prompt_tokens} tokens, answers of {output_tokens}");
        Self::new(steady.requests().collect(), None, classes, text)
    }

    fn new(requests: Vec<Request>, block_tokens: Option<u32>, classes: Vec<SizeClass>, text: String) -> Self {
        let rate = classes.iter().map(|class| class.rate).sum();
        let mean = |of: fn(&Request) -> u32| {
            requests.iter().map(|request| f64::from(of(request))).sum::<f64>() / requests.len() as f64
        };
        let mean_tokens = [mean(|request| request.prompt_tokens), mean(|request| request.output_tokens)];
        PlanLoad { requests, block_tokens, classes, rate, mean_tokens, text }
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

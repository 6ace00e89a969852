//! Implements `mixfleet trace generate`.

use super::usage;
use crate::numbers::{count, per_second, share_or_percent};
use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use mixfleet_sim::trace::generate::{Arrivals, GenerateOptions, Generator, Output, Preset, write_line};
use std::io::Write;
use std::path::{Path, PathBuf};

#[derive(Debug, Args)]
pub(crate) struct TraceGenerateArgs {
    /// Kind of load
    #[arg(long, value_enum, default_value_t = TracePreset::Conversation)]
    preset: TracePreset,
    /// Total number of requests
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = count::<u64>(0..=u64::MAX))]
    requests: u64,
    /// Mean requests per second [default: conversation 3.4, agentic 1, batch 1]
    #[arg(long, value_name = "R", value_parser = per_second)]
    rate: Option<f64>,
    /// Arrival of sessions: poisson, or bursty with a drifting load
    #[arg(long, value_enum, default_value_t = ArrivalProcess::Poisson)]
    arrivals: ArrivalProcess,
    /// Target hit rate of an infinite cache, 0 to 1, reached by the length of sessions
    #[arg(long, value_name = "SHARE", value_parser = hit_share)]
    hit_target: Option<f64>,
    /// Equal seeds give equal files
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Output file, compressed if named .zst or .gz [default: standard output]
    #[arg(long, short, value_name = "FILE")]
    out: Option<PathBuf>,
}

fn hit_share(text: &str) -> Result<f64, String> {
    share_or_percent(text).ok_or_else(|| "expected a share, as in 0.5 or 50%".into())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TracePreset {
    /// Chats and questions about documents (Mooncake's conversation trace)
    Conversation,
    /// Coding agents: long sessions and prompts with high prefix reuse
    Agentic,
    /// Independent document summaries
    Batch,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ArrivalProcess {
    Poisson,
    Bursty,
}

pub(crate) fn run(args: &TraceGenerateArgs) -> Result<()> {
    let preset = match args.preset {
        TracePreset::Conversation => Preset::Conversation,
        TracePreset::Agentic => Preset::Agentic,
        TracePreset::Batch => Preset::Batch,
    };
    let options = GenerateOptions {
        requests: args.requests,
        rate: args.rate.unwrap_or(preset.rate()),
        seed: args.seed,
        arrivals: match args.arrivals {
            ArrivalProcess::Poisson => Arrivals::Poisson,
            ArrivalProcess::Bursty => Arrivals::BURSTY,
        },
    };
    let generator = match args.hit_target {
        Some(target) => Generator::with_hit_target(preset.model(), options, target),
        None => Generator::new(preset.model(), options),
    };
    let generator = generator.map_err(usage)?;
    match &args.out {
        None => write(generator, std::io::stdout().lock(), Path::new(""), args.requests),
        Some(path) => {
            let place = || format!("cannot write {}", path.display());
            let file = std::fs::File::create(path).with_context(place)?;
            write(generator, file, path, args.requests).with_context(place)
        }
    }
}

fn write(mut generator: Generator, to: impl Write, name: &Path, requests: u64) -> Result<()> {
    let style = ProgressStyle::with_template("generating {wide_bar} {pos}/{len} {eta}");
    let bar = ProgressBar::new(requests).with_style(style.expect("a fixed template"));
    let mut output = Output::new(to, name)?;
    let (mut line, mut ids) = (Vec::new(), Vec::new());
    while let Some(request) = generator.advance(&mut ids) {
        line.clear();
        write_line(&mut line, &request, &ids);
        output.write_all(&line)?;
        if request.id.is_multiple_of(1024) {
            bar.set_position(request.id);
        }
    }
    output.finish()?;
    bar.finish_and_clear();
    Ok(())
}

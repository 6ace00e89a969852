//! Implements `mixfleet trace`: statistics of traces, and synthetic traces.

mod generate;
mod page;
mod stats;

use crate::failure::UsageError;
use anyhow::Result;
use clap::{Args, Subcommand};

#[derive(Debug, Args)]
pub(crate) struct TraceArgs {
    #[command(subcommand)]
    command: TraceCommand,
}

#[derive(Debug, Subcommand)]
enum TraceCommand {
    /// Analyse a trace: lengths, arrivals, prefix hits by cache size and policy
    Stats(stats::StatsArgs),
    /// Generate requests from published statistics, in Mooncake's format
    Generate(generate::TraceGenerateArgs),
}

pub(crate) fn run(args: &TraceArgs) -> Result<()> {
    match &args.command {
        TraceCommand::Stats(args) => stats::run(args),
        TraceCommand::Generate(args) => generate::run(args),
    }
}

/// A mistake in numbers that clap cannot detect.
fn usage(error: impl std::fmt::Display) -> anyhow::Error {
    UsageError(error.to_string()).into()
}

//! Implements `mixfleet explain`.

use crate::failure::UsageError;
use crate::screen;
use anyhow::Result;
use clap::Args;
use mixfleet_hal::catalog::closest_names;
use mixfleet_hwtests::profile::explain::{explain, metrics};
use std::io::Write;

#[derive(Debug, Args)]
pub(crate) struct ExplainArgs {
    /// A metric, or a point of a profile; without one, all are listed
    pub(crate) metric: Option<String>,
}

pub(crate) fn run(args: &ExplainArgs) -> Result<()> {
    let mut out = screen::output(false);
    let Some(name) = &args.metric else {
        for metric in metrics() {
            writeln!(out, "  {:<13} {}", metric.name, metric.meaning)?;
        }
        return Ok(());
    };
    let known: Vec<&str> = metrics().map(|metric| metric.name).collect();
    let unknown = || {
        let near = closest_names(name, known.iter().copied());
        let near = if near.is_empty() { known.clone() } else { near };
        UsageError(format!(
            "there is no metric '{name}'; near it: {}; all: mixfleet explain",
            near.join(", ")
        ))
    };
    let metric = explain(name).ok_or_else(unknown)?;
    write!(out, "{metric}")?;
    Ok(())
}

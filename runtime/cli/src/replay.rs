//! Implements `mixfleet replay`: runs the events that `mixfleet serve` logged through a new fleet machine.

use crate::failure::Failed;
use crate::screen;
use anyhow::{Context, Result};
use clap::Args;
use mixfleet_runtime::events::Replay;
use mixfleet_scheduler::batch::RequestId;
use serde_json::json;
use std::io::{BufReader, Write};
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct ReplayLogArgs {
    /// Log written by 'mixfleet serve --events'
    #[arg(value_name = "FILE.jsonl")]
    log: PathBuf,
    /// Explain the decision on this request, the number 'request' in the log
    #[arg(long, value_name = "ID")]
    request: Option<RequestId>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &ReplayLogArgs) -> Result<()> {
    let path = args.log.display();
    let log = mixfleet_hal::files::open(&args.log).with_context(|| format!("cannot open {path}"))?;
    let replay = Replay::of(BufReader::new(log), args.request).with_context(|| path.to_string())?;
    let mut out = screen::output(args.json);
    if args.json {
        writeln!(out, "{:#}", document(&replay))?;
    } else {
        write!(out, "{}", text(&replay, args.request))?;
    }
    if replay.differing > 0 {
        let Replay { differing, steps, .. } = replay;
        return Err(Failed(format!("{path}: {differing} of {steps} steps differ")).into());
    }
    Ok(())
}

fn document(replay: &Replay) -> serde_json::Value {
    let first = replay.first.as_ref();
    let first = first.map(|d| json!({"line": d.line, "logged": d.logged, "replayed": d.replayed}));
    let decisions = replay.decisions.iter();
    let decisions: Vec<_> =
        decisions.map(|(why, reason)| json!({"explanation": why, "rejected": reason})).collect();
    json!({
        "schema": "mixfleet.replay/1",
        "version": replay.version,
        "steps": replay.steps,
        "arrivals": replay.arrivals,
        "actions": replay.actions,
        "differing": replay.differing,
        "first_difference": first,
        "whole": replay.whole,
        "ended": replay.ended,
        "cut": replay.cut,
        "decisions": decisions,
    })
}

fn text(replay: &Replay, wanted: Option<RequestId>) -> String {
    let Replay { steps, arrivals, actions, differing, .. } = replay;
    let mut lines = vec![format!("{steps} steps, {arrivals} of them arrivals, {actions} actions")];
    match &replay.first {
        None => lines.push("every action is the same, byte by byte".into()),
        Some(first) => {
            lines.push(format!("{differing} steps differ; the first is line {}", first.line));
            lines.push(format!("  logged    ...{}...", first.logged));
            lines.push(format!("  replayed  ...{}...", first.replayed));
            if replay.version != env!("CARGO_PKG_VERSION") {
                lines
                    .push(format!("the log is of mixfleet {}, which may decide differently", replay.version));
            }
        }
    }
    match &replay.ended {
        Some(cause) => lines.push(format!("the log ended before serving did: {cause}")),
        None if !replay.whole => {
            let last = if replay.cut { "; its last line is incomplete and was left out" } else { "" };
            lines.push(format!("the log was not closed: the server was killed, or still runs{last}"));
        }
        None => {}
    }
    for (explanation, reason) in &replay.decisions {
        lines.push(explanation.to_string());
        lines.extend(reason.as_ref().map(|reason| format!("  turned away: {reason}")));
    }
    if let (Some(request), true) = (wanted, replay.decisions.is_empty()) {
        lines.push(format!("request {request} is not in the log"));
    }
    lines.push(String::new());
    lines.join("\n")
}

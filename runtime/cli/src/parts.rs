//! Implements `mixfleet parts`: the catalog.

use crate::failure::UsageError;
use crate::screen;
use anyhow::{Result, bail};
use clap::Args;
use mixfleet_hal::catalog::{self, Part, parts};
use mixfleet_hal::economics::reference_offer;
use serde_json::{Value, json};
use std::io::Write;

#[derive(Debug, Args)]
pub(crate) struct PartsArgs {
    /// Only parts whose name, memory or note contains this text, ignoring case
    filter: Option<String>,
    /// Print JSON, with links, power, sources and notes
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &PartsArgs) -> Result<()> {
    let wanted = args.filter.as_deref().unwrap_or_default().to_lowercase();
    let has_it = |part: &&Part| {
        let words = [part.id, part.memory.technology, part.note];
        words.iter().any(|words| words.to_lowercase().contains(&wanted))
    };
    let found: Vec<&Part> = parts().iter().filter(has_it).collect();
    if found.is_empty() {
        let near = catalog::closest(&wanted).join(", ");
        let near = if near.is_empty() { "all: mixfleet parts".into() } else { format!("near it: {near}") };
        bail!(UsageError(format!("no part has '{wanted}' in its name, memory or note; {near}")));
    }
    let mut out = screen::output(args.json);
    if args.json {
        let parts: Vec<Value> = found.into_iter().map(document).collect();
        writeln!(out, "{:#}", json!({"schema": "mixfleet.parts/1", "parts": parts}))?;
        return Ok(());
    }
    writeln!(
        out,
        "vendors' claims: dense, accumulated in f32; $/h: built-in ('-': no offer known), see 'mixfleet compare'"
    )?;
    writeln!(
        out,
        "A: sources agree; B: most agree, or it follows from cores and clock; C: one source, or they disagree"
    )?;
    writeln!(
        out,
        "{:<16}{:>6}{:>9}{:>9}{:>8}{:>7} {:<16}{:>6}{:>4}  note",
        "part", "year", "bf16 TF", "fp8 TF", "GB/s", "GB", "memory", "$/h", ""
    )?;
    for part in found {
        write_part(&mut out, part)?;
    }
    Ok(())
}

fn write_part(out: &mut impl Write, part: &Part) -> Result<()> {
    let tera = |rate: Option<f64>| rate.map_or_else(|| "-".into(), |rate| format!("{rate:.0}"));
    let price = reference_offer(part.id).map_or_else(|| "-".into(), |offer| format!("{:.2}", offer.price.0));
    let (bf16, fp8) = (tera(part.rates.bf16), tera(part.rates.fp8));
    let memory = part.memory;
    let line = format!(
        "{:<16}{:>6}{bf16:>9}{fp8:>9}{:>8.0}{:>7.0} {:<16}{price:>6}{:>4}  {}",
        part.id,
        part.year,
        memory.bandwidth_gb_s,
        memory.size_gb,
        memory.technology,
        format!("{:?}", part.confidence),
        part.note
    );
    writeln!(out, "{}", line.trim_end())?;
    Ok(())
}

fn document(part: &Part) -> Value {
    let mut document = json!(part);
    document["reached"] = json!(part.reached());
    document["reference_offer"] = json!(reference_offer(part.id));
    document
}

//! Implements `mixfleet profile import`: published tables of kernel times as a profile.

use crate::failure::UsageError;
use crate::output_files::writable;
use anyhow::{Context, Result, anyhow};
use clap::{Args, ValueEnum};
use mixfleet_hal::DType;
use mixfleet_hal::catalog::{self, Part};
use mixfleet_hal::profile::{DeviceProfile, Point};
use mixfleet_hal::units::{Bytes, GIB};
use mixfleet_report::files::write_whole;
use mixfleet_scheduler::models;
use mixfleet_sim::engine_profile::{EngineProfile, TableDirectory};
use mixfleet_sim::import::{
    HeldOut, KernelTables, TableChoice, TableOrigin, TableSet, device_profile, operations,
};
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write;
use std::path::{Path, PathBuf};

#[derive(Debug, Args)]
pub(super) struct ImportArgs {
    /// Source of the tables: aiconfigurator (a file or a directory of *_perf.parquet, .txt or .csv) or
    /// llmservingsim (a directory with dense.csv, per_sequence.csv and attention.csv)
    #[arg(long, value_name = "PROJECT", hide_possible_values = true)]
    from: ImportSource,
    /// The tables
    path: PathBuf,
    /// Where to write the profile, as JSON
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Write an 'engine' profile, for a pool of a fleet file, or a 'device' profile, for any command
    /// [default: engine for llmservingsim, device for aiconfigurator]
    #[arg(long = "as", value_name = "KIND", hide_possible_values = true)]
    kind: Option<ImportKind>,
    /// Take the rows of this device, of several in the tables
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// Take the rows of this engine, with or without its version
    #[arg(long, value_name = "NAME")]
    engine: Option<String>,
    /// Take the rows of this dtype of weights or keys [default: all]
    #[arg(long)]
    dtype: Option<DType>,
    /// The catalog's part whose datasheet is the roofline [default: by the device's name]
    #[arg(long, value_name = "PART")]
    part: Option<String>,
    /// Memory of a part outside the catalog
    #[arg(long, value_name = "GIB", value_parser = crate::numbers::gib)]
    memory_gib: Option<f64>,
    /// Devices that share the model, where llmservingsim has tables for several numbers (tp1/, tp2/, ...)
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = crate::numbers::count::<u32>(1..=u32::MAX.into()))]
    devices: u32,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ImportSource {
    Aiconfigurator,
    Llmservingsim,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ImportKind {
    Device,
    Engine,
}

/// A summary of the import, for the output.
struct Imported {
    text: String,
    device: String,
    engine: String,
    rows: u64,
    errors: Vec<HeldOut>,
    left_out: BTreeMap<String, u64>,
    not_read: Vec<String>,
    schema: &'static str,
}

pub(super) fn run(args: &ImportArgs) -> Result<()> {
    let out = args.out.display();
    if args.path.is_file() && same_file(&args.path, &args.out) {
        return Err(UsageError(format!("--out {out} is the table itself")).into());
    }
    let imported = match (args.from, args.kind) {
        (ImportSource::Aiconfigurator, Some(ImportKind::Engine)) => {
            let why = "aiconfigurator's tables are of kernels, not of an engine's steps; leave --as out";
            return Err(UsageError(why.into()).into());
        }
        (ImportSource::Aiconfigurator, _) => kernels(args)?,
        (ImportSource::Llmservingsim, kind) => engine(args, kind.unwrap_or(ImportKind::Engine))?,
    };
    writable(&args.out)?;
    write_whole(&args.out, imported.text.as_bytes()).with_context(|| format!("cannot write {out}"))?;
    let mut stdout = std::io::stdout().lock();
    if args.json {
        let Imported { device, engine, rows, errors, left_out, not_read, schema, .. } = &imported;
        let document = json!({
            "schema": "mixfleet.profile-import/1",
            "wrote": schema,
            "file": args.out,
            "device": device,
            "engine": engine,
            "rows": rows,
            "held_out": errors,
            "left_out": left_out,
            "not_read": not_read,
        });
        writeln!(stdout, "{document:#}")?;
    } else {
        write!(stdout, "{}", table(&imported))?;
        writeln!(stdout, "wrote {out} ({})", imported.schema)?;
    }
    Ok(())
}

fn same_file(a: &Path, b: &Path) -> bool {
    a.canonicalize().ok().zip(b.canonicalize().ok()).is_some_and(|(a, b)| a == b)
}

fn table(imported: &Imported) -> String {
    let Imported { device, engine, rows, errors, left_out, not_read, .. } = imported;
    let mut text = format!("{device}, {engine}: {rows} rows\n");
    if !errors.is_empty() {
        text.push_str("a quarter of the operations, predicted from the others:\n");
        let _ = writeln!(
            text,
            "  {:<14}{:<8}{:>7}{:>10}{:>8}{:>9}",
            "op", "dtype", "points", "held out", "MAPE", "bias"
        );
    }
    for HeldOut { op, dtype, points, held_out, error, bias } in errors {
        let (error, bias) = (100.0 * error, 100.0 * bias);
        let dtype = dtype.name();
        let _ = writeln!(text, "  {op:<14}{dtype:<8}{points:>7}{held_out:>10}{error:>7.1}%{bias:>+8.1}%");
    }
    for (reason, count) in left_out {
        let _ = writeln!(text, "left out: {reason} ({count})");
    }
    if !not_read.is_empty() {
        let _ = writeln!(text, "no tables of products or attention: {}", not_read.join(", "));
    }
    text
}

fn kernels(args: &ImportArgs) -> Result<Imported> {
    let mut tables = KernelTables::read(&args.path).map_err(|why| anyhow!(why))?;
    let choice =
        TableChoice { device: args.device.as_deref(), engine: args.engine.as_deref(), dtype: args.dtype };
    let TableSet { device, engine, rows, points } = tables.choose(choice).map_err(UsageError)?;
    let origin = TableOrigin { device: &device, engine: &engine, source: "aiconfigurator", rows };
    let (profile, errors) = of_points(args, points, origin)?;
    let text = serde_json::to_string_pretty(&profile)? + "\n";
    let KernelTables { left_out, not_read, .. } = tables;
    Ok(Imported { text, device, engine, rows, errors, left_out, not_read, schema: DeviceProfile::SCHEMA })
}

fn engine(args: &ImportArgs, kind: ImportKind) -> Result<Imported> {
    let path = args.path.display();
    for (flag, given) in [("--device", args.device.is_some()), ("--engine", args.engine.is_some())] {
        if given {
            return Err(
                UsageError(format!("{flag} chooses among aiconfigurator's tables; leave it out")).into()
            );
        }
    }
    let directory = TableDirectory::find(&args.path, args.devices);
    let mut profile = EngineProfile::read_directory(&directory).map_err(|why| anyhow!("{path}: {why}"))?;
    profile.check().map_err(|why| anyhow!("{path}: {why}"))?;
    let tables = profile.dense.values().chain(profile.per_sequence.values());
    let rows = (tables.map(Vec::len).sum::<usize>() + profile.attention.len()) as u64;
    let (device, engine) = (profile.device.clone(), profile.engine.clone());
    let (text, errors, schema) = if kind == ImportKind::Device {
        let name = profile.model.rsplit('/').next().unwrap_or_default();
        let model = models::find(name).map_err(|error| anyhow!("{path}: its model: {error}"))?;
        let shape = model.shape(args.dtype.unwrap_or(DType::Bf16));
        let points = operations(&profile, &shape).map_err(|why| anyhow!("{path}: {why}"))?;
        let origin = TableOrigin { device: &device, engine: &engine, source: "LLMServingSim", rows };
        let (profile, errors) = of_points(args, points, origin)?;
        (serde_json::to_string_pretty(&profile)?, errors, DeviceProfile::SCHEMA)
    } else {
        profile.provenance.tool =
            format!("mixfleet {}, import from LLMServingSim", env!("CARGO_PKG_VERSION"));
        (serde_json::to_string_pretty(&profile)?, Vec::new(), EngineProfile::SCHEMA)
    };
    let (text, left_out, not_read) = (text + "\n", BTreeMap::new(), Vec::new());
    Ok(Imported { text, device, engine, rows, errors, left_out, not_read, schema })
}

fn of_points(
    args: &ImportArgs,
    points: Vec<Point>,
    origin: TableOrigin,
) -> Result<(DeviceProfile, Vec<HeldOut>)> {
    let part = match &args.part {
        Some(id) => Some(catalog::named(id).map_err(|why| UsageError(format!("--part: {why}")))?),
        None => part_called(origin.device),
    };
    let memory = args.memory_gib.map(|gib| Bytes(gib * GIB as f64));
    device_profile(points, origin, part, memory).map_err(|why| UsageError(why).into())
}

/// What aiconfigurator calls the systems that are not called as their drivers or the catalog call them.
const SYSTEMS: [(&str, &str); 8] = [
    ("a100_sxm", "A100-SXM-80GB"),
    ("h100_sxm", "H100-SXM-80GB"),
    ("h200_sxm", "H200-SXM-141GB"),
    ("b200_sxm", "B200-SXM"),
    ("b300_sxm", "B300-SXM"),
    ("gb200", "GB200"),
    ("gb300", "GB300"),
    ("rtx_pro_6000_server", "RTX-PRO-6000-SE"),
];

/// The catalog's part that a table calls `name`.
fn part_called(name: &str) -> Option<&'static Part> {
    let system = SYSTEMS.iter().find(|(system, _)| system.eq_ignore_ascii_case(name));
    let id = system.map_or(name, |(_, id)| id);
    catalog::part(id).or_else(|| catalog::part_of_driver(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_system_is_in_the_catalog() {
        for (system, id) in SYSTEMS {
            assert_eq!(part_called(system).map(|part| part.id), Some(id));
        }
        assert_eq!(part_called("NVIDIA GeForce RTX 4090").map(|part| part.id), Some("RTX-4090"));
        assert!(part_called("").is_none() && part_called("abacus").is_none());
    }
}

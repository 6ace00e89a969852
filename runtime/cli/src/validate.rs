//! Implements `mixfleet validate` and its subcommands.

mod all;
mod beyond;
mod diff;
mod examine;
mod facts;
mod init;
mod options;
mod progress;
mod run_log;
mod selftest;
mod serving;
mod sign;
mod summary;

use crate::backends;
use crate::failure::{Failed, UsageError};
use crate::interrupt::cancel_on_interrupt;
use crate::machine;
use crate::screen;
use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use examine::{Examination, Examined};
use mixfleet_hal::catalog::closest_names;
use mixfleet_hwtests::validate::{
    MemoryAsked, PartFile, Processes, Settings, ValidationEffort, ValidationPlan, ValidationVerdict, child,
    groups,
};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct ValidateArgs {
    #[command(subcommand)]
    command: Option<ValidateCommand>,
    #[command(flatten)]
    run: RunArgs,
}

#[derive(Debug, Subcommand)]
enum ValidateCommand {
    /// Compare two reports: regressions, and changes beyond the spread
    Diff(diff::DiffArgs),
    /// Verify the signature of a report
    Verify(sign::VerifyArgs),
}

#[derive(Debug, Args)]
struct RunArgs {
    /// The device ('mixfleet devices' lists them), repeatable: several at once, a report each and a summary
    /// [default: the first that would serve]
    #[arg(long, value_name = "DEV")]
    device: Vec<String>,
    /// All devices at once, each part once
    #[arg(long, conflicts_with_all = ["device", "part", "resume", "self_test", "init_part"])]
    all_devices: bool,
    /// Highest level: 0 discovery, 1 conformance, 2 memory, 3 performance, 4 links, 6 serving; 5 is --soak
    #[arg(long, value_name = "N", default_value = "3", value_parser = options::level)]
    level: u8,
    /// All edge shapes and memory passes, 80 % of the memory, the longer profile
    #[arg(long)]
    full: bool,
    /// Only these groups or cases, such as l1.gemm or l2.*; the report is then partial
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    only: Vec<String>,
    /// Memory to test, such as 4GiB or 80% [default: 128MiB; 80% with --full]
    #[arg(long, value_name = "SIZE|PERCENT%", value_parser = options::memory)]
    memory: Option<MemoryAsked>,
    /// Soak the device for this long, such as 10m, verifying golden results
    #[arg(long, value_name = "TIME", value_parser = options::seconds)]
    soak: Option<f64>,
    /// The vendor's claims and waivers
    #[arg(long, value_name = "part.toml")]
    part: Option<PathBuf>,
    /// Write a part.toml to start from, by detection or --profile, and exit
    #[arg(long, value_name = "FILE", conflicts_with_all = ["part", "out", "resume", "soak", "full", "only", "sign"])]
    init_part: Option<PathBuf>,
    /// With --init-part: a profile of the part ('mixfleet profile --out')
    #[arg(long, value_name = "FILE", requires = "init_part")]
    profile: Option<PathBuf>,
    /// Sign the report's checksums with this minisign key
    #[arg(long, value_name = "KEYFILE")]
    sign: Option<PathBuf>,
    /// Folder for the report: JSON, JUnit, HTML, environment, log, checksums [default: a new one in
    /// the user's data directory]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Resume the run whose log is in --out
    #[arg(long, requires = "out")]
    resume: bool,
    /// Time without an answer after which a batch counts as hung
    #[arg(long, value_name = "TIME", value_parser = options::seconds, default_value = "30s", hide_short_help = true)]
    timeout: f64,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
    /// Inject faults into a device and show how many each level catches [default: the oracle]
    #[arg(long, conflicts_with_all = ["out", "part", "soak", "only", "full", "resume", "sign", "init_part"])]
    self_test: bool,
    /// Be a child: an assignment comes on standard input
    #[arg(long, hide = true)]
    child: bool,
}

pub(crate) fn run(args: &ValidateArgs) -> Result<()> {
    match &args.command {
        Some(ValidateCommand::Diff(args)) => return diff::run(args),
        Some(ValidateCommand::Verify(args)) => return sign::verify(args),
        None => {}
    }
    let args = &args.run;
    if args.child {
        let open = |selector: &str| backends::open(selector).map_err(|error| format!("{error:#}"));
        // no child holds the device after the parent's end, however it ends
        #[cfg(target_os = "linux")]
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
        let (input, output) = (&mut std::io::stdin().lock(), &mut std::io::stdout().lock());
        child::serve(input, output, &open, &beyond::run)?;
        return Ok(());
    }
    let device = match &args.device[..] {
        [] => None,
        [device] => Some(device.as_str()),
        several => {
            of_one_device(args)?;
            return all::run(args, several.to_vec());
        }
    };
    if args.self_test {
        return selftest::run(device, args.json);
    }
    if let Some(file) = &args.init_part {
        return init::run(file, device, args.profile.as_deref());
    }
    if args.all_devices { all::run(args, backends::default_selectors()) } else { validate(args, device) }
}

/// Refuses what concerns one device where several are named.
fn of_one_device(args: &RunArgs) -> Result<(), UsageError> {
    let given = [
        ("--part", args.part.is_some()),
        ("--resume", args.resume),
        ("--self-test", args.self_test),
        ("--init-part", args.init_part.is_some()),
    ];
    if let Some((option, _)) = given.iter().find(|(_, is_given)| *is_given) {
        return Err(UsageError(format!("{option} is for one device: name one --device")));
    }
    let again = args.device.iter().enumerate().find(|(at, device)| args.device[..*at].contains(device));
    match again {
        Some((_, device)) => Err(UsageError(format!("device '{device}' is named twice"))),
        None => Ok(()),
    }
}

/// The device that is named, or the first that would serve.
fn device_of(named: Option<&str>) -> Result<String> {
    match named {
        Some(device) => Ok(device.to_owned()),
        None => backends::first_selector(),
    }
}

fn validate(args: &RunArgs, named: Option<&str>) -> Result<()> {
    let began_at = machine::now();
    let part = args.part.as_deref().map(read_part).transpose()?;
    // the password is read before the run, and not hours later
    let signer = args.sign.as_deref().map(sign::Signer::open).transpose()?;
    let device = device_of(named)?;
    let plan = plan(args, &device, part.as_ref())?;
    let earlier = run_log::earlier(args, &plan)?;
    let cancelled = Arc::<AtomicBool>::default();
    let start = Processes { command: Box::new(child_command), cancelled: cancelled.clone() };
    let here = facts::HostFacts::read();
    let (part, signer) = (part.as_ref(), signer.as_ref());
    let examination = Examination { part, signer, here: &here, began_at: &began_at, one_of_several: false };
    let device = examination.look(plan, &start)?;
    let folder = args.out.clone().or_else(|| default_folder(&device.plan.device, &began_at));
    if let Some(folder) = folder.as_deref().filter(|_| args.out.is_none()) {
        eprintln!("the report goes to {}", folder.display());
    }
    cancel_on_interrupt(cancelled.clone(), "stopping, with a report of the completed cases");
    let Examined { report, signature } = examination.examine(&device, &start, &earlier, folder.as_deref())?;
    let mut out = screen::output(args.json);
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        write!(out, "{}", summary::text(&report))?;
        if let Some(signature) = signature {
            writeln!(out, "signature: {}", signature.display())?;
        }
    }
    let conclusion = summary::conclusion(&report, folder.as_deref());
    let is_good = matches!(
        report.verdict,
        ValidationVerdict::Pass | ValidationVerdict::PassedWithWaivers | ValidationVerdict::Partial
    );
    if !args.json && is_good {
        writeln!(out, "{conclusion}")?;
    }
    out.flush()?;
    if cancelled.load(Ordering::Relaxed) {
        let more = folder.map(|folder| format!(": continue it with --resume --out {}", folder.display()));
        bail!("the run was interrupted{}", more.unwrap_or_default());
    }
    // standard error is read last
    let remarks = report.remarks.join("; ");
    match report.verdict {
        _ if is_good => Ok(()),
        ValidationVerdict::Incomplete => bail!("validation is incomplete: {remarks}\n{conclusion}"),
        _ => bail!(Failed(format!("validation failed: {remarks}\n{conclusion}"))),
    }
}

fn read_part(file: &Path) -> Result<PartFile> {
    let text =
        mixfleet_hal::files::read_text(file).with_context(|| format!("cannot read {}", file.display()))?;
    PartFile::parse(&text).map_err(|error| UsageError(format!("{}: {error}", file.display())).into())
}

fn plan(args: &RunArgs, device: &str, part: Option<&PartFile>) -> Result<ValidationPlan> {
    let (effort, memory) = match args.full {
        true => (ValidationEffort::Full, MemoryAsked::Share(0.8)),
        false => (ValidationEffort::Quick, Settings::quick().memory),
    };
    let settings = Settings {
        effort,
        memory: args.memory.unwrap_or(memory),
        batch_timeout_s: args.timeout,
        soak_s: args.soak.unwrap_or(0.0),
        points: part
            .map(|part| part.claims.iter().map(|claim| claim.point.clone()).collect())
            .unwrap_or_default(),
        ..Settings::quick()
    };
    // A case is a few batches.
    let patience = Duration::from_secs_f64(4.0 * args.timeout);
    let plan = ValidationPlan {
        level: args.level,
        only: args.only.clone(),
        settings,
        patience,
        ..ValidationPlan::new(device)
    };
    if groups(&plan).is_empty() {
        let (only, level) = (args.only.join(","), args.level);
        let all = groups(&ValidationPlan { only: Vec::new(), ..plan });
        let near = args.only.iter().flat_map(|name| closest_names(name, all.iter().map(String::as_str)));
        let near: Vec<&str> = near.collect();
        let near = if near.is_empty() { String::new() } else { format!("near it: {}; ", near.join(", ")) };
        bail!(UsageError(format!(
            "--only {only} names nothing up to level {level}; {near}groups: {}",
            all.join(", ")
        )));
    }
    Ok(plan)
}

/// A new folder for a run without --out; none if this user has no data directory.
fn default_folder(device: &str, began_at: &str) -> Option<PathBuf> {
    let base = std::env::var_os("XDG_DATA_HOME").map(PathBuf::from);
    let base = base.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".local/share")))?;
    Some(base.join("mixfleet/reports").join(folder_name(&format!("{device}-{began_at}"))))
}

/// A name of a folder that every file system takes.
fn folder_name(text: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
    text.chars().map(plain).collect()
}

/// The command that runs this program as a child.
fn child_command() -> Command {
    // If its own path is unknown, it is found by name.
    let program = std::env::current_exe().unwrap_or_else(|_| PathBuf::from("mixfleet"));
    let mut command = Command::new(program);
    backends::loaded().for_each(|file| {
        command.arg("--backend").arg(file);
    });
    // they are named already
    command.env_remove("MIXFLEET_BACKENDS");
    command.args(["validate", "--child"]);
    command
}

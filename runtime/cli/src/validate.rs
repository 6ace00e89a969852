//! Implements `mixfleet validate`.

mod beyond;
mod facts;
mod options;
mod selftest;
mod serving;
mod summary;

use crate::interrupt::cancel_on_interrupt;
use crate::profile::machine;
use crate::screen;
use crate::{Failed, Usage, backends, built};
use anyhow::{Context, Result, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use mixfleet_hal::DeviceInfo;
use mixfleet_hwtests::validate::package::{self, JOURNAL};
use mixfleet_hwtests::validate::protocol::ChildMessage;
use mixfleet_hwtests::validate::runner::{self, header};
use mixfleet_hwtests::validate::{
    CaseStatus, Environment, MemoryAsked, PartFile, Plan, Processes, Record, Settings, Validation,
    ValidationEffort, ValidationVerdict, child, groups,
};
use std::cell::Cell;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

#[derive(Debug, Args)]
pub(crate) struct ValidateArgs {
    /// The device ('mixfleet devices' lists them) [default: the first that would serve]
    #[arg(long, value_name = "DEV")]
    device: Option<String>,
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
    /// Folder for the report: JSON, JUnit, HTML, environment, log, checksums [default: a new one among
    /// this user's data]
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
    #[arg(long, conflicts_with_all = ["out", "part", "soak", "only", "full", "resume"])]
    self_test: bool,
    /// Be a child: an assignment comes on standard input
    #[arg(long, hide = true)]
    child: bool,
}

pub(crate) fn run(args: &ValidateArgs) -> Result<()> {
    if args.child {
        let open = |selector: &str| backends::open(selector).map_err(|error| format!("{error:#}"));
        // whatever ends the parent, no child holds the device after it
        #[cfg(target_os = "linux")]
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
        let (input, output) = (&mut std::io::stdin().lock(), &mut std::io::stdout().lock());
        child::serve(input, output, &open, &beyond::run)?;
        return Ok(());
    }
    if args.self_test {
        return selftest::run(args.device.as_deref(), args.json);
    }
    validate(args)
}

fn validate(args: &ValidateArgs) -> Result<()> {
    let began_at = machine::now();
    let part = args.part.as_deref().map(read_part).transpose()?;
    let mut plan = plan(args, part.as_ref())?;
    let earlier = earlier(args, &plan)?;
    let cancelled = Arc::<AtomicBool>::default();
    let start = Processes { command: Box::new(child_command), cancelled: cancelled.clone() };
    // A child opens the device first, so that a driver that crashes does not end this process.
    let identity = Plan { level: 0, only: vec!["l0.identity".to_owned()], ..plan.clone() };
    let looked = runner::run(&identity, &start, &[], &mut |_| {});
    if let (None, [case]) = (&looked.device, &looked.cases[..])
        && case.status == CaseStatus::NotRun
        // a child has seen that this does not crash, and why is told here in its own kind
        && let Err(error) = backends::open(&plan.device)
    {
        return Err(error);
    }
    let looked = looked.device;
    let here = facts::Here::read();
    if let Some(info) = &looked {
        if groups(&plan).iter().any(|group| group != "l0.discover") {
            backends::must_compute(info)?;
        }
        plan.settings.facts = here.about(info);
        if let Some(part) = &part {
            part.is_about(&info.name, here.pci_id(info).as_deref()).map_err(Usage)?;
        }
    }
    let folder = args.out.clone().or_else(|| default_folder(&plan.device, &began_at));
    if let Some(folder) = folder.as_deref().filter(|_| args.out.is_none()) {
        eprintln!("the report goes to {}", folder.display());
    }
    let mut journal = Journal::open(folder.as_deref(), &plan, earlier.is_empty())?;
    let progress = Bar::new(&plan);
    cancel_on_interrupt(cancelled.clone(), "stopping, with a report of what was run");
    let outcome = runner::run(&plan, &start, &earlier, &mut |record| {
        progress.see(record);
        journal.add(record);
    });
    progress.bar.finish_and_clear();
    journal.finish()?;
    let today = began_at.get(..10).unwrap_or_default();
    let report = Validation::new(&plan, outcome, part.as_ref(), today);
    if let Some(folder) = &folder {
        let environment = environment(&report, &here, looked.as_ref(), began_at.clone());
        package::write(folder, &report, &environment).context("cannot write the report")?;
    }
    let mut out = screen::output(args.json);
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&report)?)?;
    } else {
        write!(out, "{}", summary::text(&report, folder.as_deref()))?;
    }
    out.flush()?;
    if cancelled.load(Ordering::Relaxed) {
        let more = folder.map(|folder| format!(": it goes on with --resume --out {}", folder.display()));
        bail!("the run was interrupted{}", more.unwrap_or_default());
    }
    match report.verdict {
        ValidationVerdict::Pass | ValidationVerdict::PassedWithWaivers | ValidationVerdict::Partial => Ok(()),
        ValidationVerdict::Fail => bail!(Failed(format!("validation failed: {}", report.remarks.join("; ")))),
        ValidationVerdict::Incomplete => bail!("validation is incomplete: {}", report.remarks.join("; ")),
    }
}

fn read_part(file: &Path) -> Result<PartFile> {
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    PartFile::parse(&text).map_err(|error| Usage(format!("{}: {error}", file.display())).into())
}

fn plan(args: &ValidateArgs, part: Option<&PartFile>) -> Result<Plan> {
    let device = match &args.device {
        Some(device) => device.clone(),
        None => backends::default_selectors().into_iter().next().context("no device was found")?,
    };
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
    let plan = Plan { level: args.level, only: args.only.clone(), settings, patience, ..Plan::new(&device) };
    if groups(&plan).is_empty() {
        let all = groups(&Plan { only: Vec::new(), ..plan });
        bail!(Usage(format!(
            "--only {} names nothing up to level {}; groups: {}",
            args.only.join(","),
            args.level,
            all.join(", ")
        )));
    }
    Ok(plan)
}

/// A folder of its own for a run without --out; none where this user has no place for data.
fn default_folder(device: &str, began_at: &str) -> Option<PathBuf> {
    let base = std::env::var_os("XDG_DATA_HOME").map(PathBuf::from);
    let base = base.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".local/share")))?;
    let plain = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' };
    let name: String = format!("{device}-{began_at}").chars().map(plain).collect();
    Some(base.join("mixfleet/reports").join(name))
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

/// The log of the run that is resumed; empty for a new run.
fn earlier(args: &ValidateArgs, plan: &Plan) -> Result<Vec<Record>> {
    let Some(folder) = &args.out else { return Ok(Vec::new()) };
    let file = folder.join(JOURNAL);
    if !args.resume {
        if file.exists() {
            let what = format!(
                "{} is there already: carry it on with --resume, or name another folder",
                file.display()
            );
            bail!(Usage(what));
        }
        return Ok(Vec::new());
    }
    let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let mut records = Vec::new();
    for line in text.lines() {
        match serde_json::from_str(line) {
            Ok(record) => records.push(record),
            // The last line may be incomplete.
            Err(_) => break,
        }
    }
    if records.first() != Some(&header(plan)) {
        let what = format!(
            "{} is of another device, version or other settings: it cannot be carried on",
            file.display()
        );
        bail!(Usage(what));
    }
    Ok(records)
}

/// The log on disk, written line by line, so that a crash of the machine loses one line.
struct Journal {
    file: Option<std::fs::File>,
    error: Option<std::io::Error>,
}

impl Journal {
    fn open(folder: Option<&Path>, plan: &Plan, fresh: bool) -> Result<Journal> {
        let Some(folder) = folder else { return Ok(Journal { file: None, error: None }) };
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let path = folder.join(JOURNAL);
        let file = std::fs::OpenOptions::new().create(true).append(true).open(&path);
        let file = file.with_context(|| format!("cannot write {}", path.display()))?;
        let mut journal = Journal { file: Some(file), error: None };
        if fresh {
            journal.add(&header(plan));
        } else {
            // This ends an incomplete line.
            journal.write("");
        }
        Ok(journal)
    }

    fn add(&mut self, record: &Record) {
        match serde_json::to_string(record) {
            Ok(text) => self.write(&text),
            Err(error) => self.error = Some(error.into()),
        }
    }

    fn write(&mut self, text: &str) {
        if let Some(file) = &mut self.file
            && let Err(error) = writeln!(file, "{text}")
        {
            self.error = Some(error);
        }
    }

    fn finish(self) -> Result<()> {
        self.error.map_or(Ok(()), |error| Err(error).context("the log could not be written in full"))
    }
}

/// The progress of a run, on standard error.
struct Bar {
    bar: ProgressBar,
    terminal: bool,
    /// Cases of the group at hand that have ended.
    cases: Cell<u64>,
}

impl Bar {
    fn new(plan: &Plan) -> Bar {
        let terminal = std::io::stderr().is_terminal();
        let bar = if terminal { ProgressBar::new(groups(plan).len() as u64) } else { ProgressBar::hidden() };
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {wide_msg}");
        bar.set_style(style.expect("a fixed template"));
        Bar { bar, terminal, cases: Cell::new(0) }
    }

    fn see(&self, record: &Record) {
        match record {
            Record::Start { .. } => self.cases.set(0),
            Record::Line { line: ChildMessage::Case(_), .. } => self.cases.set(self.cases.get() + 1),
            _ => {}
        }
        match record {
            Record::Start { group, .. } if !self.terminal => eprintln!("validate: {group}"),
            Record::Start { group, .. } => self.bar.set_message(group.clone()),
            Record::Line { line: ChildMessage::Begin(id), .. } => {
                self.bar.set_message(format!("{id} (after {} of its group)", self.cases.get()));
            }
            Record::Line { line: ChildMessage::Case(case), .. }
                if case.status.is_wrong() || case.status == CaseStatus::NotRun =>
            {
                let reason = case.reason.as_deref().unwrap_or_default();
                self.bar.suspend(|| eprintln!("{} {}: {reason}", case.status.word(), case.id));
            }
            Record::Line { line: ChildMessage::Sample(sample), .. } => {
                self.bar.set_message(format!("soak, {:.0} s", sample.t_s));
            }
            Record::Done { .. } => self.bar.inc(1),
            _ => {}
        }
    }
}

fn environment(
    report: &Validation,
    here: &facts::Here,
    device: Option<&DeviceInfo>,
    began_at: String,
) -> Environment {
    let commit = built::COMMIT;
    Environment {
        commit: commit.map(|commit| commit.trim_end_matches("-dirty").to_owned()),
        dirty: commit.map(|commit| commit.ends_with("-dirty")),
        features: built::features().into_iter().map(str::to_owned).collect(),
        command: std::env::args().collect(),
        began_at,
        ended_at: machine::now(),
        host: here.host(),
        device: device.map(|info| here.about(info)).unwrap_or_default(),
        ..Environment::of(report)
    }
}

//! Implements `mixfleet validate` of several devices.

use super::examine::{Examination, Examined};
use super::{RunArgs, child_command, default_folder, facts, folder_name, plan, sign};
use crate::failure::{Failed, UsageError};
use crate::interrupt::cancel_on_interrupt;
use crate::machine;
use crate::screen;
use anyhow::{Context, Result, bail};
use mixfleet_hwtests::validate::{MeasuringTurns, Processes, Start, Validation, ValidationVerdict};
use mixfleet_report::files::write_whole;
use mixfleet_report::html::{Html, TableCell, Tone, page};
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// One device and its outcome: a report, or why there is none.
struct DeviceOutcome {
    device: String,
    folder: PathBuf,
    outcome: Result<Validation, String>,
}

impl DeviceOutcome {
    fn verdict(&self) -> &str {
        self.outcome.as_ref().map_or("no report", |report| report.verdict.word())
    }

    fn is_wrong(&self) -> bool {
        self.outcome.as_ref().is_ok_and(|report| report.verdict == ValidationVerdict::Fail)
    }

    /// The first failure, or why something could not run.
    fn remark(&self) -> String {
        match &self.outcome {
            Ok(report) => report.first_failure().unwrap_or_else(|| report.remarks.join("; ")),
            Err(error) => error.clone(),
        }
    }

    fn name(&self) -> &str {
        let device = self.outcome.as_ref().ok().and_then(|report| report.device.as_ref());
        device.map_or("", |device| &device.name)
    }
}

pub(super) fn run(args: &RunArgs, devices: Vec<String>) -> Result<()> {
    let began_at = machine::now();
    let signer = args.sign.as_deref().map(sign::Signer::open).transpose()?;
    if devices.is_empty() {
        bail!("no device was found");
    }
    let plans = devices.iter().map(|device| plan(args, device, None)).collect::<Result<Vec<_>>>()?;
    let folder = args.out.clone().or_else(|| default_folder("all", &began_at));
    let folder = folder.context("this user has no data directory: name one with --out")?;
    if folder.exists() {
        bail!(UsageError(format!("{} exists already: name another folder", folder.display())));
    }
    eprintln!("the reports of {} go to {}", devices.join(", "), folder.display());
    let cancelled = Arc::<AtomicBool>::default();
    cancel_on_interrupt(cancelled.clone(), "stopping, with reports of the completed cases");
    let here = facts::HostFacts::read();
    let examination = Examination {
        part: None,
        signer: signer.as_ref(),
        here: &here,
        began_at: &began_at,
        one_of_several: true,
    };
    let start = |_: &String| {
        let start = Processes { command: Box::new(child_command), cancelled: cancelled.clone() };
        Box::new(start) as Box<dyn Start + Send>
    };
    let turns = MeasuringTurns::among(devices.iter().map(start).collect(), &cancelled);
    let rows: Vec<DeviceOutcome> = std::thread::scope(|scope| {
        let each = devices.iter().zip(plans).zip(turns).map(|((device, plan), start)| {
            let folder = folder.join(folder_name(device));
            let examination = &examination;
            scope.spawn(move || {
                let looked = examination.look(plan, &start);
                let done = looked.and_then(|looked| examination.examine(&looked, &start, &[], Some(&folder)));
                let outcome =
                    done.map(|Examined { report, .. }| report).map_err(|error| format!("{error:#}"));
                DeviceOutcome { device: device.clone(), folder, outcome }
            })
        });
        let running: Vec<_> = each.collect();
        running.into_iter().filter_map(|thread| thread.join().ok()).collect()
    });
    write_files(&folder, &rows, &began_at)?;
    let mut out = screen::output(args.json);
    if args.json {
        writeln!(out, "{:#}", document(&rows, &began_at))?;
    } else {
        for row in &rows {
            writeln!(out, "{}: {}: {}", row.device, row.verdict().to_uppercase(), row.remark())?;
        }
        writeln!(out, "summary: {}", folder.join("index.html").display())?;
    }
    out.flush()?;
    verdict(&rows, devices.len(), cancelled.load(Ordering::Relaxed))
}

fn verdict(rows: &[DeviceOutcome], devices: usize, interrupted: bool) -> Result<()> {
    let named =
        |rows: &[&DeviceOutcome]| rows.iter().map(|row| row.device.as_str()).collect::<Vec<_>>().join(", ");
    let wrong: Vec<&DeviceOutcome> = rows.iter().filter(|row| row.is_wrong()).collect();
    let short = |row: &&DeviceOutcome| match &row.outcome {
        Ok(report) => report.verdict == ValidationVerdict::Incomplete,
        Err(_) => true,
    };
    let short: Vec<&DeviceOutcome> = rows.iter().filter(short).collect();
    if interrupted {
        bail!("the run was interrupted");
    }
    if !wrong.is_empty() {
        bail!(Failed(format!("validation failed: {}", named(&wrong))));
    }
    if !short.is_empty() || rows.len() < devices {
        bail!("validation is incomplete: {}", named(&short));
    }
    Ok(())
}

fn document(rows: &[DeviceOutcome], began_at: &str) -> Value {
    let row = |row: &DeviceOutcome| {
        let folder = row.folder.file_name().unwrap_or_default().to_string_lossy();
        let report = row.outcome.as_ref().ok().map(|_| format!("{folder}/results.json"));
        json!({"device": row.device, "name": row.name(), "verdict": row.verdict(), "remark": row.remark(),
            "report": report})
    };
    let rows: Vec<Value> = rows.iter().map(row).collect();
    json!({"schema": "mixfleet.validation-summary/1", "began_at": began_at, "devices": rows})
}

fn write_files(folder: &Path, rows: &[DeviceOutcome], began_at: &str) -> Result<()> {
    let text = format!("{:#}\n", document(rows, began_at));
    for (name, text) in [("summary.json", text), ("index.html", summary_page(rows, began_at))] {
        let file = folder.join(name);
        let written = std::fs::create_dir_all(folder).and_then(|()| write_whole(&file, text.as_bytes()));
        written.with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(())
}

fn summary_page(rows: &[DeviceOutcome], began_at: &str) -> String {
    let mut body = Html::default();
    let wrong = rows.iter().filter(|row| row.is_wrong()).count();
    match wrong {
        0 => body.note(Tone::Plain, &format!("No failures on {} devices.", rows.len())),
        wrong => body.note(Tone::Bad, &format!("Failures on {wrong} of {} devices.", rows.len())),
    }
    let line = |row: &DeviceOutcome| {
        let tone = match &row.outcome {
            Ok(report) if report.verdict == ValidationVerdict::Pass => Tone::Good,
            Ok(report) if report.verdict == ValidationVerdict::Fail => Tone::Bad,
            _ => Tone::Warn,
        };
        let folder = row.folder.file_name().unwrap_or_default().to_string_lossy();
        let report = match row.outcome {
            Ok(_) => TableCell::link("report", format!("{folder}/report.html")),
            Err(_) => TableCell::text("none"),
        };
        vec![
            TableCell::text(&row.device),
            TableCell::text(row.name()),
            TableCell::badge(row.verdict(), tone),
            report,
            TableCell::text(row.remark()),
        ]
    };
    body.table(
        &["device", "part", "verdict", "report", "remark"],
        &rows.iter().map(line).collect::<Vec<_>>(),
    );
    body.paragraph("All devices ran concurrently, except while one of them was measured (L3 to L5).");
    page("Validation of all devices", began_at, &body)
}

//! The log of a run on disk.

use super::RunArgs;
use crate::failure::UsageError;
use anyhow::{Context, Result, bail};
use mixfleet_hwtests::validate::package::JOURNAL;
use mixfleet_hwtests::validate::runner::header;
use mixfleet_hwtests::validate::{Record, ValidationPlan};
use std::io::Write;
use std::path::Path;

/// The log of the run that is resumed; empty for a new run.
pub(super) fn earlier(args: &RunArgs, plan: &ValidationPlan) -> Result<Vec<Record>> {
    let Some(folder) = &args.out else { return Ok(Vec::new()) };
    let file = folder.join(JOURNAL);
    if !args.resume {
        if file.exists() {
            let what = format!(
                "{} exists already: continue it with --resume, or name another folder",
                file.display()
            );
            bail!(UsageError(what));
        }
        return Ok(Vec::new());
    }
    let text =
        mixfleet_hal::files::read_text(&file).with_context(|| format!("cannot read {}", file.display()))?;
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
            "{} is of another device, version or other settings: it cannot be continued",
            file.display()
        );
        bail!(UsageError(what));
    }
    Ok(records)
}

/// The log on disk, written line by line, so that a crash of the machine loses one line.
pub(super) struct RunLog {
    file: Option<std::fs::File>,
    error: Option<std::io::Error>,
}

impl RunLog {
    pub(super) fn open(folder: Option<&Path>, plan: &ValidationPlan, fresh: bool) -> Result<RunLog> {
        let Some(folder) = folder else { return Ok(RunLog { file: None, error: None }) };
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let path = folder.join(JOURNAL);
        let file = std::fs::OpenOptions::new().create(true).append(true).open(&path);
        let file = file.with_context(|| format!("cannot write {}", path.display()))?;
        let mut log = RunLog { file: Some(file), error: None };
        if fresh {
            log.add(&header(plan));
        } else {
            // This ends an incomplete line.
            log.write("");
        }
        Ok(log)
    }

    pub(super) fn add(&mut self, record: &Record) {
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

    pub(super) fn finish(self) -> Result<()> {
        self.error.map_or(Ok(()), |error| Err(error).context("the log could not be written in full"))
    }
}

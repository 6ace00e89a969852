//! Implements `mixfleet validate diff`.

use crate::failure::{Failed, UsageError};
use crate::screen;
use anyhow::{Context, Result, bail};
use clap::Args;
use mixfleet_hwtests::validate::{ReadReport, ValidationDiff, diff_page};
use mixfleet_report::files::write_whole;
use std::io::Write;
use std::path::{Path, PathBuf};

#[derive(Debug, Args)]
pub(super) struct DiffArgs {
    /// Folder of the earlier report, or its results.json
    a: PathBuf,
    /// Folder of the later report, or its results.json
    b: PathBuf,
    /// Write an HTML page
    #[arg(long, value_name = "FILE.html")]
    html: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Compares two reports; only what passed and is wrong now makes it fail.
pub(super) fn run(args: &DiffArgs) -> Result<()> {
    let read = |path: &Path| ReadReport::open(path).map_err(UsageError);
    let diff = ValidationDiff::new(&read(&args.a)?, &read(&args.b)?);
    if let Some(file) = &args.html {
        let cannot_write = || format!("cannot write {}", file.display());
        write_whole(file, diff_page(&diff).as_bytes()).with_context(cannot_write)?;
    }
    let mut out = screen::output(args.json);
    if args.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&diff)?)?;
    } else {
        write!(out, "{diff}")?;
    }
    out.flush()?;
    match &diff.broke[..] {
        [] => Ok(()),
        [first, ..] => {
            bail!(Failed(format!("{} passed before and fail now; the first: {}", diff.broke.len(), first.id)))
        }
    }
}

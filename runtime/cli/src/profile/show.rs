//! Implements `mixfleet profile show`.

use super::read;
use crate::screen;
use anyhow::{Context, Result};
use clap::Args;
use mixfleet_hwtests::profile::{ProfileDocument, card, page, points};
use mixfleet_report::files::write_whole;
use std::io::Write;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(super) struct ShowArgs {
    /// A profile, as 'mixfleet profile --out FILE' writes it
    file: PathBuf,
    /// List every point below the card, with its samples' distribution
    #[arg(long)]
    points: bool,
    /// Write a self-contained HTML page
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

pub(super) fn run(args: &ShowArgs) -> Result<()> {
    let document = read(&args.file)?;
    write!(screen::output(false), "{}", text(&document, args.points))?;
    if let Some(file) = &args.html {
        let written = write_whole(file, page(&document).as_bytes());
        written.with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(())
}

/// The card, and with `every_point` what each point took.
pub(super) fn text(document: &ProfileDocument, every_point: bool) -> String {
    let listed = if every_point { points(document) } else { String::new() };
    card(document) + &listed
}

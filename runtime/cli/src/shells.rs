//! Implements `mixfleet completions` and `mixfleet man`.

use anyhow::{Context, Result};
use clap::{Args, Command};
use clap_complete::Shell;
use std::io::Write;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell: bash, zsh, fish, elvish or powershell
    shell: Shell,
}

#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Folder for the pages, such as ~/.local/share/man/man1
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

/// Prints the completions of a shell.
pub(crate) fn completions(args: &CompletionsArgs, mut program: Command) -> Result<()> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut program, "mixfleet", &mut text);
    Ok(std::io::stdout().lock().write_all(&text)?)
}

/// Writes a page of each command.
pub(crate) fn man(args: &ManArgs, program: Command) -> Result<()> {
    let cannot = || format!("cannot write {}", args.folder.display());
    std::fs::create_dir_all(&args.folder).with_context(cannot)?;
    clap_mangen::generate_to(program, &args.folder).with_context(cannot)?;
    let first = args.folder.join("mixfleet.1");
    writeln!(std::io::stdout().lock(), "{} and one page of each command are there", first.display())?;
    Ok(())
}

//! Implements `mixfleet completions` and `mixfleet man`.

use crate::help::{COMMANDS, program};
use anyhow::{Context, Result};
use clap::builder::PossibleValuesParser;
use clap::{Args, Command};
use clap_complete::Shell;
use clap_mangen::Man;
use mixfleet_hal::catalog::parts;
use mixfleet_scheduler::models::models;
use std::io::Write;
use std::path::{Path, PathBuf};

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

/// Commands and their arguments that name parts of the catalog.
const PARTS: [(&str, &str); 4] =
    [("compare", "parts"), ("fit", "device"), ("plan", "parts"), ("parts", "filter")];
/// Commands and their arguments that name known models.
const MODELS: [(&str, &str); 4] =
    [("compare", "model"), ("fit", "models"), ("plan", "model"), ("models", "name")];

/// Prints the completions of a shell, which offer parts, models and files.
pub(crate) fn completions(args: &CompletionsArgs) -> Result<()> {
    let parts: Vec<String> = parts().iter().map(|part| part.id.to_lowercase()).collect();
    let models: Vec<String> = models().map(|model| model.name.to_owned()).collect();
    let offered = |places: [(&'static str, &'static str); 4], names: Vec<String>| {
        places.map(|(command, argument)| (command, argument, names.clone()))
    };
    let mut program = program(true);
    for (command, argument, names) in offered(PARTS, parts).into_iter().chain(offered(MODELS, models)) {
        program = program.mut_subcommand(command, |command| {
            command.mut_arg(argument, |arg| arg.value_parser(PossibleValuesParser::new(names)))
        });
    }
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut program, "mixfleet", &mut text);
    Ok(std::io::stdout().lock().write_all(&text)?)
}

/// Writes a page of each command.
pub(crate) fn man(args: &ManArgs) -> Result<()> {
    let cannot = || format!("cannot write {}", args.folder.display());
    std::fs::create_dir_all(&args.folder).with_context(cannot)?;
    let mut program = program(true).disable_help_subcommand(true);
    program.build();
    write_pages(&program, "", &args.folder).with_context(cannot)?;
    let first = args.folder.join("mixfleet.1");
    writeln!(std::io::stdout().lock(), "{} and one page of each command are there", first.display())?;
    Ok(())
}

/// Writes the page of a command, called by the names of the commands above it, and those of its subcommands.
fn write_pages(command: &Command, name: &str, folder: &Path) -> std::io::Result<()> {
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        let name = format!("{name} {}", below.get_name());
        write_pages(below, name.trim_start(), folder)?;
    }
    let file = command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned();
    let page = Man::new(command.clone());
    let mut text = Vec::new();
    page.render_title(&mut text)?;
    page.render_name_section(&mut text)?;
    page.render_synopsis_section(&mut text)?;
    page.render_description_section(&mut text)?;
    page.render_options_section(&mut text)?;
    if command.has_subcommands() {
        page.render_subcommands_section(&mut text)?;
    }
    let examples = COMMANDS.iter().find(|help| help.command == name).map_or(&[][..], |help| help.examples);
    if !examples.is_empty() {
        let lines: String = examples.iter().map(|example| roff(example) + "\n").collect();
        write!(text, ".SH EXAMPLES\n.nf\n{lines}.fi\n")?;
    }
    let codes = "0: done. 1: the thing tested failed. 2: usage. 3: could not run.";
    write!(text, ".SH \"EXIT STATUS\"\n{codes}\n")?;
    std::fs::write(folder.join(format!("{file}.1")), text)
}

/// A line of a page as it stands.
fn roff(line: &str) -> String {
    line.replace('\\', "\\\\").replace('-', "\\-").replace('\'', "\\(aq")
}

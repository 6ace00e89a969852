//! The `mixfleet` binary: the only place that picks backends.
//!
//! Exit codes: 0 ok, 1 the thing tested failed, 2 usage, 3 could not run.

#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![forbid(unsafe_code)]

mod affinity;
mod args;
mod backends;
mod bench;
mod built;
mod cache;
mod calibration;
mod chat;
mod check_files;
mod command_line;
mod compare;
mod connections;
mod devices;
mod digest;
#[cfg(feature = "epp")]
mod epp;
mod explain;
mod failure;
mod fit;
#[cfg(feature = "fleet")]
mod fleet;
mod generate;
mod groups;
mod help;
mod hub;
mod interrupt;
mod links;
mod logs;
mod machine;
mod model;
mod model_shape;
mod models;
mod notation;
mod numbers;
#[cfg_attr(not(feature = "otlp"), path = "otlp_absent.rs")]
mod otlp;
mod output_files;
mod own_devices;
mod parts;
mod plan;
mod predictions;
mod prices;
mod profile;
mod profiles;
mod remote;
mod replay;
mod scheduling;
mod screen;
mod serve;
mod server;
mod settings;
mod shells;
mod simulate;
mod sizes;
mod start;
mod tiers;
mod tls;
#[cfg(feature = "fleet")]
mod token;
mod topo;
mod trace;
mod trace_file;
mod trials;
mod validate;
mod worker_engines;

use command_line::{Cli, CliCommand};
use failure::{Failed, UsageError, with_causes};
use mixfleet_hal::printable::printable_lines;
use std::process::ExitCode;

/// Ends this process when the reader of its output has gone, as `head` does: printing would panic then.
fn end_with_the_reader() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let text = info.payload().downcast_ref::<String>().map_or("", String::as_str);
        if text.starts_with("failed printing to std") && text.contains("Broken pipe") {
            std::process::exit(0);
        }
        usual(info);
    }));
}

/// Starts this program again with `XDG_RUNTIME_DIR`, if it is not set: Mesa, under every use of Vulkan,
/// writes a warning about it to standard error, even if nothing is displayed.
#[cfg(unix)]
fn keep_mesa_quiet() {
    use std::os::unix::process::CommandExt;
    const NAME: &str = "XDG_RUNTIME_DIR";
    let is_there = |value: std::ffi::OsString| std::path::Path::new(&value).is_absolute();
    if std::env::var_os(NAME).is_some_and(is_there) {
        return;
    }
    let mut words = std::env::args_os();
    let (Ok(program), Some(name)) = (std::env::current_exe(), words.next()) else { return };
    // returns only where it cannot be started; then it goes on as it is
    let _ = std::process::Command::new(program).arg0(name).args(words).env(NAME, "/nonexistent").exec();
}

#[cfg(not(unix))]
fn keep_mesa_quiet() {}

fn run(cli: Cli, settings: &settings::ServeSettings) -> anyhow::Result<()> {
    if !cli.command.serves() {
        end_with_the_reader();
    }
    backends::load(&cli.backend)?;
    match cli.command {
        CliCommand::Devices(args) => devices::run(&args),
        CliCommand::Topo(args) => topo::run(&args),
        CliCommand::Profile(args) => profile::run(&args),
        CliCommand::Explain(args) => explain::run(&args),
        CliCommand::Validate(args) => validate::run(&args),
        CliCommand::Compare(args) => compare::run(&args),
        CliCommand::Fit(args) => fit::run(&args),
        CliCommand::Parts(args) => parts::run(&args),
        CliCommand::Models(args) => models::run(&args),
        CliCommand::Trace(args) => trace::run(&args),
        CliCommand::Simulate(args) => simulate::run(&args),
        CliCommand::Plan(args) => plan::run(&args),
        CliCommand::Serve(args) => serve::run(*args, settings),
        #[cfg(feature = "epp")]
        CliCommand::Epp(args) => epp::run(*args),
        #[cfg(feature = "fleet")]
        CliCommand::Router(args) => fleet::router(args),
        #[cfg(feature = "fleet")]
        CliCommand::Worker(args) => fleet::worker(args),
        #[cfg(feature = "fleet")]
        CliCommand::Fleet(args) => fleet::look(args),
        #[cfg(feature = "fleet")]
        CliCommand::Member(args) => fleet::member(&args),
        CliCommand::Replay(args) => replay::run(&args),
        CliCommand::Generate(args) => generate::run(args),
        CliCommand::Bench(args) => bench::run(&args),
        CliCommand::Chat(args) => chat::run(args),
        CliCommand::CheckFiles(args) => check_files::run(&args, &models::check),
        CliCommand::Completions(args) => shells::completions(&args),
        CliCommand::Man(args) => shells::man(&args),
    }
}

fn main() -> ExitCode {
    if let Some(ended) = trials::asked() {
        return ended;
    }
    keep_mesa_quiet();
    let parsed = settings::parse(std::env::args_os().collect());
    let result = parsed.and_then(|(cli, settings)| run(cli, &settings));
    let code = exit_code(result);
    logs::flush();
    code
}

/// Tells the error, if there is one, and returns the exit code.
fn exit_code(result: anyhow::Result<()>) -> ExitCode {
    let Err(error) = result else { return ExitCode::SUCCESS };
    let broken_pipe =
        error.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe);
    if broken_pipe {
        // The reader of the output has closed it.
        return ExitCode::SUCCESS;
    }
    logs::say(&format!("mixfleet: {}", printable_lines(&with_causes(&error))));
    ExitCode::from(match () {
        () if error.is::<Failed>() => 1,
        () if error.is::<UsageError>() => 2,
        () => 3,
    })
}

//! The command line as a whole: each command with its arguments.

use crate::args::{DevicesArgs, GenerateArgs, ServeArgs, TopoArgs};
use crate::compare::CompareArgs;
use crate::explain::ExplainArgs;
use crate::fit::FitArgs;
use crate::models::ModelsArgs;
use crate::parts::PartsArgs;
use crate::plan::PlanArgs;
use crate::profile::ProfileArgs;
use crate::replay::ReplayLogArgs;
use crate::simulate::SimulateArgs;
use crate::trace::TraceArgs;
use crate::validate::ValidateArgs;
use clap::{Parser, Subcommand};
use std::path::PathBuf;

/// Serve large language models on the cheapest mix of hardware.
#[derive(Debug, Parser)]
#[command(version, long_version = crate::built::version(), max_term_width = 100, after_help = guides())]
pub(crate) struct Cli {
    /// Load a third-party backend library, or every one in a folder; repeatable. It runs in this process
    #[arg(
        long,
        value_name = "FILE",
        env = "MIXFLEET_BACKENDS",
        value_delimiter = ':',
        hide_env_values = true
    )]
    pub(crate) backend: Vec<PathBuf>,
    #[command(subcommand)]
    pub(crate) command: CliCommand,
}

/// Where the repository is, if its manifest says so.
const REPOSITORY: &str = env!("CARGO_PKG_REPOSITORY");

/// Where all pages of documentation are.
fn guides() -> String {
    let place = if REPOSITORY.is_empty() { "the source" } else { REPOSITORY };
    let guides =
        format!("Guides: docs/ of {place}; the Debian package has them in /usr/share/doc/mixfleet/docs");
    let lacking = crate::help::lacking().map(|line| line + "\n").unwrap_or_default();
    format!("{lacking}All options of a command: mixfleet COMMAND --help --all\n{guides}")
}

/// Where the page of a command is.
fn guide(page: &str) -> String {
    match REPOSITORY {
        "" => format!("Guide: docs/{page}"),
        place => format!("Guide: docs/{page} of {place}"),
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum CliCommand {
    /// List the devices of this machine, and why others are unavailable
    #[command(after_help = guide("how-to/what-runs-here.md"))]
    Devices(DevicesArgs),
    /// Show sockets, memory, PCI links, and the distance from each GPU to each NIC
    #[command(after_help = guide("how-to/measure-links.md"))]
    Topo(TopoArgs),
    /// Measure a device: matrix products, attention, memory, copies, launches, long runs
    #[command(after_help = guide("how-to/measure-a-device.md"))]
    Profile(ProfileArgs),
    /// Explain a measured number: its meaning, method and use
    #[command(after_help = guide("how-to/measure-a-device.md"))]
    Explain(ExplainArgs),
    /// Test a device for conformance, memory, vendor claims and soak, and write a report
    #[command(after_help = guide("how-to/validate-your-part.md"))]
    Validate(ValidateArgs),
    /// Compare parts: performance per dollar, best use of each, break-even prices
    #[command(after_help = guide("reference/compare.md"))]
    Compare(CompareArgs),
    /// Show which models a device holds, and how fast it would serve them
    #[command(after_help = guide("how-to/what-runs-here.md"))]
    Fit(FitArgs),
    /// List the parts of the catalog
    #[command(after_help = guide("reference/compare.md"))]
    Parts(PartsArgs),
    /// List known models: parameters, KV, weights by dtype, sources
    #[command(after_help = guide("reference/models.md"))]
    Models(ModelsArgs),
    /// Analyse a request trace, or generate one
    #[command(after_help = guide("reference/traces.md"))]
    Trace(TraceArgs),
    /// Simulate a trace on a fleet: latencies, hits, cost
    #[command(after_help = guide("how-to/simulate-a-fleet.md"))]
    Simulate(SimulateArgs),
    /// Find the cheapest fleet for a model, a load and objectives
    Plan(PlanArgs),
    /// Serve a model over the OpenAI HTTP API
    Serve(Box<ServeArgs>),
    /// Pick endpoints for an Envoy or a Kubernetes inference gateway in front of model servers
    #[cfg(feature = "epp")]
    #[command(after_help = guide("how-to/behind-a-gateway.md"))]
    Epp(Box<crate::epp::EppArgs>),
    /// Run a router of a fleet, which serves clients and places their requests on workers
    #[cfg(feature = "fleet")]
    #[command(after_help = guide("how-to/run-a-fleet.md"))]
    Router(crate::fleet::RouterArgs),
    /// Run a worker of a fleet, which serves routers with this machine's devices
    #[cfg(feature = "fleet")]
    #[command(after_help = guide("how-to/run-a-fleet.md"))]
    Worker(crate::fleet::WorkerArgs),
    /// Inspect a fleet
    #[cfg(feature = "fleet")]
    #[command(after_help = guide("how-to/run-a-fleet.md"))]
    Fleet(crate::fleet::FleetArgs),
    /// Lend a device to an instance of another process, which names it as remote:HOST:PORT
    #[cfg(feature = "fleet")]
    #[command(after_help = guide("reference/devices.md"))]
    Member(crate::fleet::MemberArgs),
    /// Replay a log of 'serve --events' and compare the decisions, or explain one
    #[command(after_help = guide("how-to/serve.md"))]
    Replay(ReplayLogArgs),
    /// Complete one prompt on standard output
    #[command(after_help = guide("how-to/serve.md"))]
    Generate(GenerateArgs),
    /// Measure how fast a model answers, here or at a server, alone or under load
    #[command(after_help = guide("how-to/measure-a-device.md"))]
    Bench(crate::bench::BenchArgs),
    /// Talk with a model in the terminal
    #[command(after_help = guide("how-to/serve.md"))]
    Chat(crate::chat::ChatArgs),
    /// Use each file of a checkpoint once, under limits: other commands run it before they load a checkpoint
    #[command(hide = true)]
    CheckFiles(crate::check_files::CheckFilesArgs),
    /// Generate shell completions
    Completions(crate::shells::CompletionsArgs),
    /// Write manual pages
    Man(crate::shells::ManArgs),
}

impl CliCommand {
    /// Whether it runs until it is stopped, even if its output is not read.
    pub(crate) fn serves(&self) -> bool {
        match self {
            CliCommand::Serve(_) => true,
            #[cfg(feature = "epp")]
            CliCommand::Epp(_) => true,
            #[cfg(feature = "fleet")]
            CliCommand::Router(_) | CliCommand::Worker(_) | CliCommand::Member(_) => true,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(words: &[&str]) -> String {
        crate::help::program(false)
            .try_get_matches_from(["mixfleet"].iter().chain(words))
            .unwrap_err()
            .to_string()
    }

    /// Checks at the width that clap uses without a terminal.
    #[test]
    fn help_fits_a_screen() {
        let mut names = vec![
            "serve", "generate", "profile", "compare", "parts", "models", "explain", "plan", "simulate",
            "chat", "bench",
        ];
        if cfg!(feature = "epp") {
            names.push("epp");
        }
        if cfg!(feature = "fleet") {
            names.extend(["router", "worker", "fleet", "member"]);
        }
        for name in names {
            for flag in ["-h", "--help"] {
                let help = error(&[name, flag]);
                assert!(help.lines().count() <= 40, "{name} {flag}: {} lines\n{help}", help.lines().count());
            }
        }
        let generate = error(&["generate", "--help"]);
        assert!(generate.contains("schema") && generate.contains("joules_per_token"), "{generate}");
    }

    #[test]
    fn each_command_names_a_guide_that_is_there() {
        let docs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
        let of_none = ["check-files", "completions", "man"];
        for mut command in crate::help::program(false).get_subcommands().cloned() {
            let help = command.render_long_help().to_string();
            let page = help.rsplit("docs/").next().filter(|rest| *rest != help).unwrap_or_default();
            let page: String =
                page.chars().take_while(|c| c.is_ascii_alphanumeric() || "./-".contains(*c)).collect();
            let is_there = !page.is_empty() && docs.join(page.trim_end_matches('.')).is_file();
            assert!(is_there || of_none.contains(&command.get_name()), "{page:?}: {help}");
        }
    }

    #[test]
    fn a_ratio_that_decides_nothing_is_a_usage_error() {
        for ratio in ["nan", "inf", "-inf", "-0.5", "0"] {
            let error = error(&["profile", "compare", "a", "b", "--fail-below", ratio]);
            assert!(error.contains("expected a ratio above 0"), "{ratio}: {error}");
        }
        assert!(
            Cli::try_parse_from(["mixfleet", "profile", "compare", "a", "b", "--fail-below", "0.9"]).is_ok()
        );
    }

    #[test]
    fn prices_are_refused_in_their_own_words() {
        let compare = |price| error(&["compare", "--model", "m", "--usd-per-hour", price]);
        assert!(compare("0.3").contains("expected PART=USD"), "{}", compare("0.3"));
        assert!(compare("L4=1e-300").contains("below 0.000001 $/h"), "{}", compare("L4=1e-300"));
        // the command itself reports a bad price, not as an unknown flag
        assert!(Cli::try_parse_from(["mixfleet", "profile", "--usd-per-hour", "-1"]).is_ok());
    }
}

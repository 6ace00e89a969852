//! Help beyond what clap derives: groups, rare options, examples, and commands that this build lacks.

use crate::command_line::Cli;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory};
use mixfleet_hal::catalog::is_near;
use std::ffi::OsString;

/// Shows rare options too, beside `--help`.
const ALL: &str = "--all";

/// What the help of a command has beside its options.
pub(crate) struct CommandHelp {
    /// The command, with spaces between the names of subcommands.
    pub(crate) command: &'static str,
    pub(crate) examples: &'static [&'static str],
    groups: &'static [OptionGroup],
    /// Ids of options that only `--help --all` shows, with spaces between.
    rare: &'static str,
}

/// A heading, and the ids of its options with spaces between; other options are below `Options`.
struct OptionGroup(&'static str, &'static str);

impl CommandHelp {
    const fn examples(command: &'static str, examples: &'static [&'static str]) -> Self {
        CommandHelp { command, examples, groups: &[], rare: "" }
    }
}

/// Options for devices of other processes.
const OF_PROCESSES: &str = "token_file tls_ca tls_cert tls_key tls_name";

const MODEL: OptionGroup = OptionGroup("Model", "model random_weights activations kv_dtype kv_memory chunk");
const DEVICES: OptionGroup = OptionGroup(
    "Devices",
    "device usd_per_hour sequences attn_split kv_dram kv_ssd kv_ssd_gib profile recalibrate no_pin worker_engine \
     kv_exchange kv_canary",
);
const CLIENTS: OptionGroup = OptionGroup(
    "Clients",
    "listen host port name api_key api_keys hide_cached_tokens health_listen allow_host allow_origin drain_s",
);
const PLACEMENT: OptionGroup = OptionGroup(
    "Limits and placement",
    "ttft_slo tbt_slo flex_deadline_s requests policy threshold admit drop_late wait_usd_per_s kv_weight \
     trial_share seed flexible rebalance_high rebalance_low rebalance_hold_s replicate_gb_per_s no_pull",
);
const LOAD: OptionGroup = OptionGroup(
    "Load and objectives",
    "model dtype trace workload rate input_tokens output_tokens ttft tbt attain",
);
const OFFERS: OptionGroup =
    OptionGroup("Offers", "prices marketplaces estimates inventory links spot have parts");
const OUTPUT: OptionGroup = OptionGroup("Output", "budget_s out html json");

pub(crate) const COMMANDS: &[CommandHelp] = &[
    CommandHelp::examples("devices", &["mixfleet devices", "mixfleet devices --watch --device cuda:0"]),
    CommandHelp::examples("topo", &["mixfleet topo"]),
    CommandHelp {
        rare: "trusted_fabric tls_ca tls_cert tls_key tls_name",
        ..CommandHelp::examples("profile", &["mixfleet profile --device cuda:0 --out h100.json"])
    },
    CommandHelp::examples("explain", &["mixfleet explain ttft"]),
    CommandHelp::examples(
        "validate",
        &["mixfleet validate --device cuda:0", "mixfleet --backend part.so validate --device part:0"],
    ),
    CommandHelp::examples(
        "compare",
        &["mixfleet compare --model qwen3-8b l40s rtx-4090", "mixfleet compare --model qwen3-8b mine.json"],
    ),
    CommandHelp::examples("fit", &["mixfleet fit", "mixfleet fit --device rtx-4090 qwen3-8b"]),
    CommandHelp::examples("parts", &["mixfleet parts h100"]),
    CommandHelp::examples("models", &["mixfleet models qwen3-8b", "mixfleet models --check ./checkpoint"]),
    CommandHelp::examples("trace stats", &["mixfleet trace stats trace.jsonl"]),
    CommandHelp::examples("trace generate", &["mixfleet trace generate --requests 1k --out trace.jsonl"]),
    CommandHelp::examples("simulate", &["mixfleet simulate --fleet fleet.toml --trace trace.jsonl"]),
    CommandHelp {
        command: "plan",
        examples: &["mixfleet plan --model qwen3-8b --trace trace.jsonl --ttft 2s --tbt 50ms"],
        groups: &[LOAD, OFFERS, OUTPUT],
        rare: "links expert_skew nic spares dram dram_usd kv_nodes ssd ssd_usd speedup limit jitter",
    },
    CommandHelp {
        command: "serve",
        examples: &[
            "mixfleet serve --model Qwen/Qwen3-0.6B --port 8001",
            "mixfleet serve --worker-engine vllm:http://10.0.0.7:8000",
        ],
        groups: &[MODEL, DEVICES, CLIENTS, PLACEMENT],
        rare: "activations chunk sequences attn_split kv_ssd kv_ssd_gib profile recalibrate health_listen \
               allow_origin drain_s flex_deadline_s admit no_pull",
    },
    CommandHelp::examples("epp", &["mixfleet epp --pool endpoints.yaml"]),
    CommandHelp {
        command: "router",
        examples: &["mixfleet router --etcd http://10.0.0.2:2379 --model ./checkpoint"],
        groups: &[MODEL, CLIENTS, PLACEMENT],
        rare: "activations chunk kv_memory allow_origin drain_s flex_deadline_s admit no_pull",
    },
    CommandHelp {
        rare: "chunk activations attn_split recalibrate trusted_fabric rdma_devices",
        ..CommandHelp::examples(
            "worker",
            &["mixfleet worker --etcd http://10.0.0.2:2379 --model ./m --device cuda:0"],
        )
    },
    CommandHelp::examples("fleet status", &["mixfleet fleet status --etcd http://10.0.0.2:2379"]),
    CommandHelp::examples("member", &["mixfleet member --device cuda:1"]),
    CommandHelp::examples("replay", &["mixfleet replay events.jsonl"]),
    CommandHelp::examples("generate", &["mixfleet generate --prompt 'The capital of France is'"]),
    CommandHelp {
        rare: OF_PROCESSES,
        ..CommandHelp::examples(
            "bench",
            &["mixfleet bench --device cuda:0", "mixfleet bench --against http://10.0.0.7:8000 --clients 8"],
        )
    },
    CommandHelp {
        rare: OF_PROCESSES,
        ..CommandHelp::examples(
            "chat",
            &["mixfleet chat --model ./checkpoint", "mixfleet chat --against http://10.0.0.7:8000"],
        )
    },
    CommandHelp::examples("completions", &["mixfleet completions bash > /etc/bash_completion.d/mixfleet"]),
    CommandHelp::examples("man", &["mixfleet man ~/.local/share/man/man1"]),
];

/// Commands that need a feature, with the feature.
const OF_FEATURES: [(&str, &str, bool); 5] = [
    ("router", "fleet", cfg!(feature = "fleet")),
    ("worker", "fleet", cfg!(feature = "fleet")),
    ("fleet", "fleet", cfg!(feature = "fleet")),
    ("member", "fleet", cfg!(feature = "fleet")),
    ("epp", "epp", cfg!(feature = "epp")),
];

/// Options that processes use among themselves.
const INTERNAL: [&str; 1] = ["child"];

/// The whole command line, with rare options shown or hidden.
pub(crate) fn program(with_rare: bool) -> Command {
    let mut program = Cli::command();
    for help in COMMANDS {
        let names: Vec<&str> = help.command.split(' ').collect();
        program = changed(program, &names, &|command| laid_out(command, help, with_rare));
    }
    if with_rare { unhidden(program) } else { program }
}

/// Changes one command below another, if the build has it.
fn changed(command: Command, names: &[&str], change: &dyn Fn(Command) -> Command) -> Command {
    match names {
        [] => change(command),
        [first, rest @ ..] if command.find_subcommand(first).is_some() => {
            command.mut_subcommand(first, |below| changed(below, rest, change))
        }
        _ => command,
    }
}

fn laid_out(mut command: Command, help: &CommandHelp, with_rare: bool) -> Command {
    for OptionGroup(heading, ids) in help.groups {
        for id in ids.split_whitespace() {
            command = command.mut_arg(id, |arg| arg.help_heading(*heading));
        }
    }
    for id in help.rare.split_whitespace() {
        command = command.mut_arg(id, |arg| arg.hide(true));
    }
    let has_more = command.get_arguments().any(|arg| arg.is_hide_set() && !is_internal(arg));
    let mut text: String = help.examples.iter().map(|example| format!("  {example}\n")).collect();
    text.insert_str(0, "Examples:\n");
    if has_more && !with_rare {
        text.push_str(&format!("All options: mixfleet {} --help {ALL}\n", help.command));
    }
    if let Some(guide) = command.get_after_help() {
        text.push_str(&guide.to_string());
    }
    command.after_help(text.trim_end().to_owned())
}

fn is_internal(arg: &clap::Arg) -> bool {
    INTERNAL.contains(&arg.get_id().as_str())
}

fn unhidden(command: Command) -> Command {
    let command = command.mut_args(|arg| if is_internal(&arg) { arg } else { arg.hide(false) });
    command.mut_subcommands(unhidden)
}

/// The words without `--all`, and whether it was among them beside a request for help.
pub(crate) fn without_all(mut words: Vec<OsString>) -> (Vec<OsString>, bool) {
    let asks = |word: &OsString| word == "--help" || word == "-h";
    let wants_help = words.iter().any(asks) || words.get(1).is_some_and(|word| word == "help");
    let before = words.len();
    if wants_help {
        words.retain(|word| word != ALL);
    }
    let has_all = words.len() < before;
    (words, has_all)
}

/// What a build lacks, as a line of help; none if it has all.
pub(crate) fn lacking() -> Option<String> {
    let absent: Vec<String> = OF_FEATURES
        .iter()
        .filter(|(_, _, is_built)| !is_built)
        .map(|(name, feature, _)| format!("{name} (feature {feature})"))
        .collect();
    (!absent.is_empty()).then(|| format!("Not in this build: {}", absent.join(", ")))
}

/// How to get a command of a feature.
fn build_with(name: &str, feature: &str) -> String {
    format!(
        "'{name}' is a command of builds with the feature '{feature}': cargo install --locked --path runtime/cli \
         --features {feature}, or the Debian package or image, which have all features"
    )
}

/// Adds the correct usage to an error of clap, where clap cannot know it, and takes out suggestions that are
/// not near.
pub(crate) fn with_hint(mut error: clap::Error) -> clap::Error {
    let text = |error: &clap::Error, kind| match error.get(kind) {
        Some(ContextValue::String(word)) => word.clone(),
        _ => String::new(),
    };
    let suggest = |error: &mut clap::Error, hint: String| {
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![hint.into()]));
    };
    let unknown = text(&error, ContextKind::InvalidArg);
    if error.kind() == ErrorKind::UnknownArgument && unknown == "--backend" {
        error.remove(ContextKind::SuggestedArg);
        suggest(
            &mut error,
            "'--backend FILE' goes before the command: mixfleet --backend FILE devices".into(),
        );
        return error;
    }
    let command = text(&error, ContextKind::InvalidSubcommand);
    let absent = OF_FEATURES.iter().find(|(name, _, is_built)| *name == command && !is_built);
    if let Some((name, feature, _)) = absent {
        error.remove(ContextKind::SuggestedSubcommand);
        suggest(&mut error, build_with(name, feature));
        return error;
    }
    for (kind, given) in [
        (ContextKind::SuggestedArg, unknown),
        (ContextKind::SuggestedSubcommand, command),
        (ContextKind::SuggestedValue, text(&error, ContextKind::InvalidValue)),
    ] {
        let near = match error.get(kind) {
            Some(ContextValue::String(known)) => is_near(&given, known),
            Some(ContextValue::Strings(known)) => known.iter().any(|known| is_near(&given, known)),
            _ => continue,
        };
        if !near {
            error.remove(kind);
        }
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(words: &[&str]) -> String {
        let (words, all) = without_all(["mixfleet"].iter().chain(words).map(OsString::from).collect());
        with_hint(program(all).try_get_matches_from(words).unwrap_err()).to_string()
    }

    #[test]
    fn each_command_has_examples_that_parse() {
        for help in COMMANDS {
            for example in help.examples {
                let line = example.split(" > ").next().unwrap();
                let mut words: Vec<String> = Vec::new();
                for (at, part) in line.split('\'').enumerate() {
                    match at % 2 {
                        0 => words.extend(part.split_whitespace().map(str::to_owned)),
                        _ => words.push(part.to_owned()),
                    }
                }
                let is_built =
                    program(false).find_subcommand(help.command.split(' ').next().unwrap()).is_some();
                let parsed = program(false).try_get_matches_from(&words);
                assert!(parsed.is_ok() || !is_built, "{example}: {}", parsed.unwrap_err());
                assert!(example.starts_with("mixfleet ") && example.contains(help.command), "{example}");
            }
        }
        let has = |name: &str| COMMANDS.iter().any(|help| help.command.split(' ').next() == Some(name));
        let of_none = ["check-files", "help"];
        for command in program(false).get_subcommands() {
            assert!(
                has(command.get_name()) || of_none.contains(&command.get_name()),
                "{}",
                command.get_name()
            );
        }
    }

    /// An id of no option would become an option of its own.
    #[test]
    fn the_tables_name_options_that_are_there() {
        for command in Cli::command().get_subcommands() {
            let ids = |of: &Command| {
                let mut ids: Vec<String> = of.get_arguments().map(|arg| arg.get_id().to_string()).collect();
                ids.sort();
                ids
            };
            let changed = program(false);
            let changed = changed.find_subcommand(command.get_name()).unwrap();
            assert_eq!(ids(command), ids(changed), "{}", command.get_name());
        }
    }

    #[test]
    fn rare_options_are_shown_where_all_are_asked_for() {
        let [short, all] = [&["serve", "--help"][..], &["serve", "--help", "--all"]].map(error);
        assert!(
            !short.contains("--rebalance-high") && short.contains("mixfleet serve --help --all"),
            "{short}"
        );
        assert!(all.contains("--rebalance-high") && !all.contains("--help --all"), "{all}");
        for heading in ["Model:", "Devices:", "Clients:", "Limits and placement:", "Examples:"] {
            assert!(short.contains(heading), "{heading}: {short}");
        }
        assert!(!error(&["validate", "--help", "--all"]).contains("--child"));
        assert!(error(&["help", "plan", "--all"]).contains("--estimates"));
    }

    #[test]
    fn only_near_words_are_suggested() {
        assert!(error(&["serve", "--polcy", "random"]).contains("a similar argument exists: '--policy'"));
        assert!(error(&["simulat"]).contains("'simulate'"));
        for far in [&["serve", "--model-path", "x"][..], &["run"], &["serve", "--tp", "2"]] {
            let error = error(far);
            assert!(!error.contains("similar") && !error.contains("tip"), "{error}");
        }
    }

    #[test]
    fn commands_of_absent_features_say_which_build_has_them() {
        let said = build_with("worker", "fleet");
        assert!(said.contains("--features fleet") && said.contains("'worker'"), "{said}");
        for (name, feature, is_built) in OF_FEATURES {
            let error = error(&[name, "--surely-not-an-option"]);
            assert_eq!(error.contains(&build_with(name, feature)), !is_built, "{error}");
        }
    }
}

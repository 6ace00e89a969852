//! Settings of `serve` and `simulate` from a fleet file: a flag on the command line overrides the file.
//!
//! A key of the file is turned into its flag, so that each value is parsed, checked and defaulted in one
//! place.

use crate::command_line::{Cli, CliCommand};
use crate::failure::UsageError;
use crate::help::{program, with_hint, without_all};
use crate::own_devices;
use crate::scheduling::SchedulingArgs;
use crate::screen;
use anyhow::{Context, Result};
use clap::parser::ValueSource;
use clap::{ArgMatches, FromArgMatches};
use mixfleet_sim::fleet_file::VERSION;
use serde_json::{Value as Json, json};
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// Keys that `simulate` reads itself, with the flags of `serve` that they set.
const SHARED: [(&str, &str, &str); 8] = [
    ("slo", "ttft_s", "ttft-slo"),
    ("slo", "tbt_s", "tbt-slo"),
    ("engine", "max_batched_tokens", "chunk"),
    ("engine", "max_sequences", "sequences"),
    ("kv", "replicate_gb_per_s", "replicate-gb-per-s"),
    ("rebalance", "high", "rebalance-high"),
    ("rebalance", "low", "rebalance-low"),
    ("rebalance", "hold_s", "rebalance-hold-s"),
];

/// Flags of both commands, which are keys of `[scheduling]`.
const SCHEDULING: [&str; 8] =
    ["policy", "threshold", "admit", "drop-late", "wait-usd-per-s", "kv-weight", "trial-share", "seed"];

/// Flags of `serve` alone, which are keys of `[serve]`.
const SERVE: [&str; 35] = [
    "model",
    "activations",
    "kv-dtype",
    "kv-memory",
    "device",
    "worker-engine",
    "usd-per-hour",
    "attn-split",
    "kv-dram",
    "kv-ssd",
    "kv-ssd-gib",
    "kv-exchange",
    "kv-canary",
    "profile",
    "no-pin",
    "token-file",
    "tls-ca",
    "tls-cert",
    "tls-key",
    "tls-crl",
    "tls-name",
    "listen",
    "name",
    "api-keys",
    "hide-cached-tokens",
    "health-listen",
    "allow-host",
    "allow-origin",
    "drain-s",
    "flex-deadline-s",
    "flexible",
    "no-pull",
    "requests",
    "events",
    "json",
];

/// Flags of `serve` without a key, with the reason.
#[cfg(test)]
const WITHOUT_KEY: [(&str, &str); 8] = [
    ("host", "a part of listen"),
    ("port", "a part of listen"),
    ("random-weights", "an order for one start"),
    ("api-key", "a secret: api_keys names the file that has it"),
    ("recalibrate", "an order for one start"),
    ("fleet", "names the file"),
    ("dry-run", "an order for one start"),
    ("help", "prints the help"),
];

/// Tables that describe hardware, clients and events of a simulation.
const SIMULATED: [&str; 6] = ["model", "pool", "link", "class", "routers", "slowdown"];

/// The table and key of a flag of `serve`.
fn key_of(flag: &str) -> Option<(&'static str, String)> {
    let shared = SHARED.iter().find(|(_, _, of)| *of == flag).map(|(table, key, _)| (*table, (*key).into()));
    let own =
        |table: &'static str, flags: &[&str]| flags.contains(&flag).then(|| (table, flag.replace('-', "_")));
    shared.or_else(|| own("scheduling", &SCHEDULING)).or_else(|| own("serve", &SERVE))
}

/// The flag of a key.
fn flag_of(table: &str, key: &str) -> Option<&'static str> {
    let shared = SHARED.iter().find(|(t, k, _)| (*t, *k) == (table, key)).map(|(_, _, flag)| *flag);
    let of =
        |flags: &'static [&'static str]| flags.iter().copied().find(|flag| flag.replace('-', "_") == key);
    match table {
        "scheduling" => of(&SCHEDULING),
        "serve" => of(&SERVE),
        _ => shared,
    }
}

/// The settings in force, and where each comes from.
#[derive(Debug, Default)]
pub(crate) struct ServeSettings {
    all: Vec<Setting>,
    /// Keys of the file that this command does not use.
    unused: Vec<String>,
}

#[derive(Debug)]
struct Setting {
    flag: String,
    key: Option<String>,
    value: Json,
    origin: &'static str,
}

/// Parses the command line, and fills in from the fleet file what it leaves open.
pub(crate) fn parse(words: Vec<OsString>) -> Result<(Cli, ServeSettings)> {
    let (words, all) = without_all(words);
    let matches = program(all).try_get_matches_from(&words);
    let matches = matches.unwrap_or_else(|error| with_hint(error).exit());
    let mut each = Vec::new();
    let (matches, from_file) = match matches.subcommand() {
        Some((command @ ("serve" | "simulate"), given)) => {
            let paths: Vec<PathBuf> =
                given.get_many::<PathBuf>("fleet").into_iter().flatten().cloned().collect();
            match &paths[..] {
                [] => (matches, FromFile::default()),
                [path] => filled(words, command, given, path)?,
                several => {
                    for path in several {
                        let (matches, _) = filled(words.clone(), command, given, path)?;
                        let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
                        each.extend(scheduling_of(cli));
                    }
                    (matches, FromFile::default())
                }
            }
        }
        _ => (matches, FromFile::default()),
    };
    let settings = match matches.subcommand() {
        Some(("serve", given)) => settings(given, from_file),
        _ => ServeSettings::default(),
    };
    let mut cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    match &mut cli.command {
        CliCommand::Simulate(args) => args.scheduling_of_each = each,
        CliCommand::Serve(args) => args.front.place(),
        #[cfg(feature = "fleet")]
        CliCommand::Router(args) => args.front.place(),
        _ => {}
    }
    Ok((cli, settings))
}

fn scheduling_of(cli: Cli) -> Option<SchedulingArgs> {
    match cli.command {
        CliCommand::Simulate(args) => Some(args.scheduling),
        _ => None,
    }
}

/// What a fleet file contributes to a command line.
#[derive(Default)]
struct FromFile {
    words: Vec<String>,
    flags: Vec<&'static str>,
    unused: Vec<String>,
}

fn filled(
    mut words: Vec<OsString>,
    command: &str,
    given: &ArgMatches,
    path: &Path,
) -> Result<(ArgMatches, FromFile)> {
    let text =
        mixfleet_hal::files::read_text(path).with_context(|| format!("cannot read {}", path.display()))?;
    let file = from_file(&text, path, command, given)?;
    words.extend(file.words.iter().map(OsString::from));
    let matches = program(false).try_get_matches_from(words).map_err(|error| {
        let error = error.to_string();
        let flag = file.flags.iter().find(|flag| error.contains(&format!("--{flag} ")));
        let key = flag.and_then(|flag| key_of(flag)).map(|(table, key)| format!(": [{table}] {key}"));
        UsageError(format!("{}{}: {error}", path.display(), key.unwrap_or_default()))
    })?;
    Ok((matches, file))
}

fn from_file(text: &str, path: &Path, command: &str, given: &ArgMatches) -> Result<FromFile> {
    let wrong = |cause: String| UsageError(format!("{}: {cause}", path.display()));
    let file: Table = text.parse().map_err(|error: toml::de::Error| wrong(error.to_string()))?;
    let mut from = FromFile::default();
    for (table, value) in &file {
        match (table.as_str(), value) {
            ("version", Value::Integer(version)) if *version == i64::from(VERSION) => {}
            ("version", _) => {
                return Err(wrong(format!("version is not {VERSION}, which this program reads")).into());
            }
            ("slo" | "engine" | "kv" | "rebalance", _) if command == "simulate" => {}
            ("slo" | "engine" | "kv" | "rebalance" | "scheduling" | "serve", Value::Table(keys)) => {
                for (key, value) in keys {
                    match flag_of(table, key) {
                        Some(_) if command == "simulate" && table == "serve" => {}
                        Some(flag) => {
                            from.take(flag, value, given, &format!("[{table}] {key}")).map_err(wrong)?
                        }
                        None if matches!(table.as_str(), "scheduling" | "serve") => {
                            return Err(wrong(format!("[{table}] {key}: there is no such key")).into());
                        }
                        None => from.unused.push(format!("[{table}] {key}")),
                    }
                }
            }
            (known, _) if SIMULATED.contains(&known) => from.unused.push(match value {
                Value::Array(_) => format!("[[{known}]]"),
                _ => format!("[{known}]"),
            }),
            _ => return Err(wrong(format!("{table}: there is no such table")).into()),
        }
    }
    if command == "serve" {
        if !file.contains_key("version") {
            return Err(wrong(format!("version is missing; this program reads {VERSION}")).into());
        }
        let pools = file.get("pool").and_then(Value::as_array);
        let flexible = |pool: &Value| pool.get("flexible").and_then(Value::as_bool).unwrap_or(false);
        if let Some(pools) = pools {
            // what only a simulation uses is checked too
            own_devices::parse_fleet(text, path.parent().unwrap_or(Path::new("")))
                .map_err(|error| wrong(error.to_string()))?;
            if pools.iter().any(flexible) && !from.flags.contains(&"flexible") {
                from.take("flexible", &Value::Boolean(true), given, "[[pool]] flexible").map_err(wrong)?;
            }
        }
    }
    Ok(from)
}

impl FromFile {
    /// Adds a flag with its value, unless the command line has it.
    fn take(
        &mut self,
        flag: &'static str,
        value: &Value,
        given: &ArgMatches,
        place: &str,
    ) -> Result<(), String> {
        let source = given.value_source(&flag.replace('-', "_"));
        if matches!(source, Some(ValueSource::CommandLine | ValueSource::EnvVariable)) {
            return Ok(());
        }
        let word = |value: &Value| match value {
            Value::String(text) => Ok(format!("--{flag}={text}")),
            Value::Integer(number) => Ok(format!("--{flag}={number}")),
            Value::Float(number) => Ok(format!("--{flag}={number}")),
            _ => {
                let kind = value.type_str();
                Err(format!("{place}: is of the type {kind}; expected a number, a text or a list of texts"))
            }
        };
        match value {
            Value::Boolean(true) => self.words.push(format!("--{flag}")),
            Value::Boolean(false) => {}
            Value::Array(values) => {
                for value in values {
                    self.words.push(word(value)?);
                }
            }
            value => self.words.push(word(value)?),
        }
        self.flags.push(flag);
        Ok(())
    }
}

fn settings(given: &ArgMatches, file: FromFile) -> ServeSettings {
    let command = program(false);
    let serve = command.find_subcommand("serve").expect("there is the command serve");
    let flags =
        serve.get_arguments().filter(|flag| !["fleet", "dry_run", "help"].contains(&flag.get_id().as_str()));
    let setting = |flag: &clap::Arg| {
        let (id, long) = (flag.get_id().as_str(), flag.get_long().unwrap_or_default());
        let is_secret = long == "api-key";
        let texts = given.get_raw(id).into_iter().flatten().map(|text| text.to_string_lossy().into_owned());
        let texts: Vec<Json> =
            texts.map(|text| if is_secret { json!("(secret)") } else { read_text(&text) }).collect();
        let many = matches!(flag.get_action(), clap::ArgAction::Append);
        let value = match texts.len() {
            _ if many => Json::Array(texts),
            0 => Json::Null,
            _ => texts[0].clone(),
        };
        let origin = match given.value_source(id) {
            _ if file.flags.contains(&long) => "file",
            Some(ValueSource::CommandLine) => "flag",
            Some(ValueSource::EnvVariable) => "environment",
            _ => "default",
        };
        let key = key_of(long).map(|(table, key)| format!("[{table}] {key}"));
        Setting { flag: format!("--{long}"), key, value, origin }
    };
    ServeSettings { all: flags.map(setting).collect(), unused: file.unused }
}

/// A number or a truth value as JSON has it, or else the text.
fn read_text(text: &str) -> Json {
    match serde_json::from_str(text) {
        Ok(value @ (Json::Number(_) | Json::Bool(_))) => value,
        _ => Json::String(text.to_owned()),
    }
}

impl ServeSettings {
    /// Prints every setting in force with its origin.
    pub(crate) fn print(&self, as_json: bool) -> Result<()> {
        let mut out = screen::output(as_json);
        if as_json {
            let settings: Vec<Json> = self
                .all
                .iter()
                .map(|s| json!({"flag": s.flag, "key": s.key, "value": s.value, "origin": s.origin}))
                .collect();
            let document =
                json!({"schema": "mixfleet.settings/1", "settings": settings, "not_used": self.unused});
            writeln!(out, "{document:#}")?;
            return Ok(());
        }
        for Setting { flag, key, value, origin } in &self.all {
            let value = match value {
                Json::Null => "-".to_owned(),
                Json::String(text) => text.clone(),
                Json::Array(values) if values.is_empty() => "-".to_owned(),
                other => other.to_string(),
            };
            writeln!(out, "{flag:<22} {:<28} {origin:<12} {value}", key.as_deref().unwrap_or("-"))?;
        }
        for key in &self.unused {
            writeln!(out, "{key} does not apply to serve")?;
        }
        Ok(())
    }

    /// Logs the keys of the file that do not apply.
    pub(crate) fn say_unused(&self) {
        if !self.unused.is_empty() {
            tracing::warn!(keys = self.unused.join(", "), "these keys of --fleet do not apply to serve");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Vec<OsString> {
        ["mixfleet"].iter().chain(words).map(OsString::from).collect()
    }

    /// The result of a command line with a fleet file of this text.
    fn parsed(name: &str, text: &str, line: &[&str]) -> Result<(Cli, ServeSettings)> {
        let path = std::env::temp_dir().join(format!("mixfleet-settings-{}-{name}.toml", std::process::id()));
        std::fs::write(&path, text)?;
        let parsed = parse(words(&[line, &["--fleet", path.to_str().unwrap()]].concat()));
        std::fs::remove_file(path)?;
        parsed
    }

    fn of(settings: &ServeSettings, flag: &str) -> (Json, &'static str) {
        let setting = settings.all.iter().find(|setting| setting.flag == flag).unwrap();
        (setting.value.clone(), setting.origin)
    }

    #[test]
    fn every_flag_of_serve_has_a_key_or_a_reason_to_have_none() {
        let command = program(false);
        let serve = command.find_subcommand("serve").unwrap();
        let flags: Vec<&str> = serve.get_arguments().filter_map(|flag| flag.get_long()).collect();
        for flag in &flags {
            let without = WITHOUT_KEY.iter().any(|(other, _)| other == flag);
            assert!(key_of(flag).is_some() != without, "--{flag} needs a key of FLEET.toml, or a reason");
        }
        let known = SHARED.iter().map(|(_, _, flag)| flag).chain(&SCHEDULING).chain(&SERVE);
        for flag in known {
            assert!(flags.contains(flag), "serve has no --{flag}");
            let (table, key) = key_of(flag).unwrap();
            assert_eq!(flag_of(table, &key), Some(*flag));
        }
        let simulate = command.find_subcommand("simulate").unwrap();
        for flag in SCHEDULING {
            let of = |command: &clap::Command| {
                let argument = command.get_arguments().find(|argument| argument.get_long() == Some(flag));
                argument.map(|argument| argument.get_default_values().to_vec())
            };
            assert!(of(simulate).is_some() && of(simulate) == of(serve), "--{flag}: unlike defaults");
        }
    }

    #[test]
    fn the_file_sets_what_the_command_line_leaves_open() {
        let text = "version = 1\n[slo]\nttft_s = 2.5\ntbt_metric = 'mean'\n[engine]\nmax_sequences = 7\n\
                    max_batched_tokens = 128\n[scheduling]\npolicy = 'random'\nseed = 3\n[routers]\ncount = 2\n\
                    [serve]\ndevice = ['cpu=prefill', 'cpu@1=decode']\nno_pull = true\nflexible = false\n";
        let (cli, settings) = parsed("sets", text, &["serve", "--chunk", "64"]).unwrap();
        let crate::command_line::CliCommand::Serve(args) = cli.command else { panic!("not serve") };
        assert_eq!((args.model.chunk, args.instances.sequences), (Some(64), Some(7)));
        assert_eq!((args.front.ttft_slo, args.front.no_pull, args.front.flexible), (Some(2.5), true, false));
        assert_eq!(args.instances.device.len(), 2);
        assert_eq!(of(&settings, "--chunk"), (json!(64), "flag"));
        assert_eq!(of(&settings, "--sequences"), (json!(7), "file"));
        assert_eq!(of(&settings, "--policy"), (json!("random"), "file"));
        assert_eq!(of(&settings, "--requests"), (json!(512), "default"));
        assert_eq!(settings.unused, ["[routers]", "[slo] tbt_metric"]);
    }

    #[test]
    fn host_and_port_replace_their_parts_of_the_address() {
        let listen =
            |line: &[&str]| match parsed("listen", "version = 1\n[serve]\nlisten = '10.0.0.1:80'\n", line) {
                Ok((Cli { command: CliCommand::Serve(args), .. }, _)) => args.front.listen,
                other => panic!("{other:?}"),
            };
        assert_eq!(listen(&["serve", "--port", "81"]), "10.0.0.1:81");
        assert_eq!(listen(&["serve", "--host", "::1"]), "[::1]:80");
        assert_eq!(
            listen(&["serve", "--listen", "localhost:9", "--host", "0.0.0.0", "--port", "0"]),
            "0.0.0.0:0"
        );
    }

    #[test]
    fn a_wrong_key_or_value_is_refused_by_its_name() {
        let cases = [
            ("version = 2", "version is not 1"),
            ("[serve]\nname = 'm'", "version is missing"),
            ("version = 1\n[serve]\nsequence = 3", "[serve] sequence: there is no such key"),
            ("version = 1\n[server]\nname = 'm'", "server: there is no such table"),
            ("version = 1\n[serve]\nname = { a = 1 }", "[serve] name: is of the type table"),
            ("version = 1\n[engine]\nmax_sequences = 0", "[engine] max_sequences: "),
            ("version = 1\n[scheduling]\npolicy = 'fastest'", "[scheduling] policy: "),
        ];
        for (at, (text, expected)) in cases.iter().enumerate() {
            let error = parsed(&format!("wrong{at}"), text, &["serve"]).unwrap_err();
            assert!(error.is::<UsageError>() && error.to_string().contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn simulate_reads_the_scheduling_of_the_file_too() {
        let text = "version = 1\n[scheduling]\nseed = 11\nadmit = 'none'\n[serve]\nname = 'm'\n";
        let line = ["simulate", "--trace", "t", "--admit", "early"];
        let (cli, _) = parsed("simulate", text, &line).unwrap();
        let crate::command_line::CliCommand::Simulate(args) = cli.command else { panic!("not simulate") };
        let choices = args.scheduling.choices().unwrap();
        assert_eq!(choices.seed, 11);
        assert_eq!(choices.admission, mixfleet_scheduler::fleet::Admission::EarlyRejection);
    }
}

//! What commands show on screens of 80 and 120 columns, kept in `screens/`. Where a change is meant, run the
//! test with `MIXFLEET_UPDATE_SCREENS=1` and read what git says has changed.

use crate::common::{mixfleet, scratch};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Commands whose output depends only on the program, the files below, and the command before.
const SHOWN: [&str; 22] = [
    "parts h100",
    "models llama-3.1-8b",
    "explain",
    "explain ttft",
    "compare --model llama-3.1-8b H100-SXM-80GB RTX-4090",
    "trace generate --requests 40 --seed 1 --out trace.jsonl",
    "trace stats trace.jsonl",
    "simulate --fleet fleet.toml --trace trace.jsonl",
    "plan --model llama-3.1-8b --ttft 2 --tbt 0.05 --trace trace.jsonl --parts rtx-4090",
    "topo --from machine.json",
    "profile check trace.jsonl",
    "profile --device nope",
    "explain ttfd",
    "simulate --fleet absent.toml --trace trace.jsonl",
    "serve --polcy per-dollar",
    "devices --backend loops.so",
    "profile show profile.json",
    "profile show --points profile.json",
    "profile compare profile.json profile.json",
    "validate --init-part part.toml --profile profile.json",
    "validate --device sim:rtx-4090,compute,dilation:1 --only l1.fill,l2.random --memory 1MiB --out good",
    "validate --device sim:rtx-4090,compute,dilation:1,faults:plan.json --only l1.fill --out bad",
];

/// Commands whose numbers depend on the machine or the day, and are masked.
const MASKED: [&str; 4] = [
    "validate diff good bad",
    "generate --device cpu --activations f32 --prompt hello --max-tokens 8",
    "bench --device cpu --prompt-tokens 8 --answer-tokens 4 --repeat 2",
    "bench --device cpu --prompt-tokens 8 --answer-tokens 4 --clients 2 --requests 4",
];

/// Text in which every number is a `#`.
fn masked(text: &str) -> String {
    let mut shown = String::new();
    let mut chars = text.chars().peekable();
    while let Some(char) = chars.next() {
        // digits of a name stay, digits of a date do not
        let is_of_name = shown.ends_with(|before: char| before.is_alphanumeric())
            || shown.ends_with('-') && !shown.ends_with("#-");
        if !char.is_ascii_digit() || is_of_name {
            shown.push(char);
            continue;
        }
        while chars.next_if(|char| char.is_ascii_digit() || *char == '.').is_some() {}
        shown.push('#');
    }
    shown
}

fn screen(words: &[&str], columns: usize, folder: &Path) -> String {
    let mut command = mixfleet();
    command.args(words).current_dir(folder).env("COLUMNS", columns.to_string()).env_remove("RUST_LOG");
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let mut shown = format!("$ mixfleet {}\n", words.join(" "));
    let printed = text(&output.stdout);
    for line in printed.lines() {
        // a word cannot be folded, and clap folds no usage
        let is_whole = !line.trim_start().contains(' ') || line.starts_with("Usage: ");
        assert!(line.chars().count() <= columns || is_whole, "{columns} columns: {line}");
    }
    shown.push_str(&printed);
    shown.push_str(&text(&output.stderr));
    if let Some(code) = output.status.code().filter(|code| *code != 0) {
        let _ = writeln!(shown, "[exit status {code}]");
    }
    shown
}

/// The commands that a command's help lists.
fn subcommands(help: &str) -> Vec<String> {
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let listed = listed.take_while(|line| !line.is_empty());
    let name = |line: &str| Some(line.strip_prefix("  ")?.split(' ').next()?.to_owned());
    listed.filter_map(name).filter(|name| !name.is_empty() && name != "help").collect()
}

/// The help of a command and of its subcommands.
fn help(words: &[&str], columns: usize, folder: &Path, all: &mut Vec<String>) {
    let shown = screen(&[words, &["--help"]].concat(), columns, folder);
    let below = subcommands(&shown);
    all.push(shown);
    for name in &below {
        help(&[words, &[name]].concat(), columns, folder, all);
    }
}

fn holds(columns: usize) {
    let folder = scratch(&format!("screens-{columns}"));
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::fs::copy(repository.join("docs/results/fleets/mixed-8b.toml"), folder.join("fleet.toml")).unwrap();
    let machine = r#"{"schema": "mixfleet.machine/1", "files": {}, "links": {}}"#;
    std::fs::write(folder.join("machine.json"), machine).unwrap();
    std::fs::write(folder.join("profile.json"), include_str!("screens/profile.json")).unwrap();
    let plan = r#"{"seed": 1, "rules": [{"fault": "bit_flip", "probability": 1.0}]}"#;
    std::fs::write(folder.join("plan.json"), plan).unwrap();
    let mut screens = Vec::new();
    help(&[], columns, &folder, &mut screens);
    assert!(screens.len() > 20, "{screens:?}");
    let words = |line: &'static str| line.split(' ').collect::<Vec<_>>();
    screens.extend(SHOWN.iter().map(|line| screen(&words(line), columns, &folder)));
    for line in MASKED {
        let shown = screen(&words(line), columns, &folder);
        let (command, rest) = shown.split_once('\n').unwrap();
        screens.push(format!("{command}\n{}", masked(rest)));
    }
    let shown = screens.join("\n");
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/screens/{columns}.txt"));
    if std::env::var_os("MIXFLEET_UPDATE_SCREENS").is_some() {
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, &shown).unwrap();
    }
    let kept = std::fs::read_to_string(&file).unwrap_or_default();
    let differs = shown.lines().zip(kept.lines()).position(|(shown, kept)| shown != kept);
    let at = differs.unwrap_or_else(|| shown.lines().count().min(kept.lines().count()));
    let line = |text: &str| text.lines().nth(at).map(str::to_owned);
    let (is, was) = (line(&shown), line(&kept));
    assert!(shown == kept, "{}:{}: shown {is:?}, kept {was:?}", file.display(), at + 1);
}

#[test]
fn commands_show_what_they_showed_on_80_columns() {
    holds(80);
}

#[test]
fn commands_show_what_they_showed_on_120_columns() {
    holds(120);
}

//! Chooses the measured points from which the catalog predicts, out of the published tables of kernel times
//! (`../shared/data/measured`), and writes them into `hal/src/catalog/laws`. Run `cargo run --release -p
//! mixfleet-hal --example laws [-- [--check] [PART...]]`. `--check` compares them bit for bit with the
//! existing files and writes nothing. With parts, only these are processed.

#![allow(clippy::print_stdout, clippy::print_stderr)]

#[path = "../tests/published/tables.rs"]
mod tables;

use mixfleet_hal::catalog::{self, Part};
use std::path::Path;
use std::process::ExitCode;
use std::thread;

fn main() -> ExitCode {
    let (options, parts): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|word| word.starts_with('-'));
    let known = |part: &&String| catalog::LAW_FILES.iter().any(|(id, _)| id == part);
    let wrong = options.iter().find(|word| *word != "--check").or(parts.iter().find(|part| !known(part)));
    if let Some(word) = wrong {
        let known: Vec<&str> = catalog::LAW_FILES.iter().map(|(id, _)| *id).collect();
        eprintln!("'{word}' is neither --check nor a part with laws; those are {}", known.join(", "));
        return ExitCode::from(2);
    }
    let check = !options.is_empty();
    let Some(mut tables) = tables::by_part() else { return ExitCode::FAILURE };
    tables.retain(|(id, _)| parts.is_empty() || parts.iter().any(|part| part == id));
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/catalog/laws");
    let one = |id: &'static str, tables: Vec<tables::Table>| {
        let file = folder.join(format!("{}.txt", id.to_ascii_lowercase()));
        let text = text_of(catalog::part(id).expect("a part of the catalog"), &tables);
        if check {
            let same = std::fs::read_to_string(&file).is_ok_and(|known| known == text);
            println!("{id}: {}", if same { "the same" } else { "DIFFERS" });
            return same;
        }
        std::fs::write(&file, text).expect("a folder that can be written");
        println!("{id}: {} laws", tables.len());
        true
    };
    let same = thread::scope(|scope| {
        let started: Vec<_> =
            tables.into_iter().map(|(id, tables)| scope.spawn(move || one(id, tables))).collect();
        started.into_iter().all(|running| running.join().expect("a choice"))
    });
    if same { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// The text of a part's laws.
fn text_of(part: &Part, tables: &[tables::Table]) -> String {
    let head = format!(
        "# {}: points of published kernel times, from which mixfleet predicts. Written, not typed:\n\
         # cargo run --release -p mixfleet-hal --example laws\n",
        part.id
    );
    tables.iter().fold(head, |text, table| format!("{text}{}", tables::law_of(part, table)))
}

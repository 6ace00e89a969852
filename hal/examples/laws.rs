//! Chooses the measured points from which the catalog predicts, out of the published tables of kernel times
//! (`../shared/data/measured`), and writes them into `hal/src/catalog/laws`:
//! `cargo run --release -p mixfleet-hal --example laws`. With `--check` it compares them with what is there,
//! bit for bit, and writes nothing.

#![allow(clippy::print_stdout)]

#[path = "../tests/published/tables.rs"]
mod tables;

use mixfleet_hal::catalog::{self, Part};
use std::path::Path;
use std::process::ExitCode;
use std::thread;

fn main() -> ExitCode {
    let check = std::env::args().any(|word| word == "--check");
    let Some(tables) = tables::by_part() else { return ExitCode::FAILURE };
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

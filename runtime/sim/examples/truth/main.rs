//! Measures how far predictions of whole engines are off, on published runs and figures: each is predicted by
//! a fit that has seen no run on its part. `cargo run --release -p mixfleet-sim --example truth [-- [--check]
//! [WORDS]]`; with `--check`, exits with 1 if the scheduler's engine profiles differ from those fitted to all
//! runs; with WORDS, predicts only the groups and figures whose names contain them. `TRUTH_EVERY=5` predicts
//! every fifth run of a group, `TRUTH_RUNS=1` lists each.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "it prints tables")]

mod fit;
mod points;
mod predict;
mod published;
mod report;
mod rows;
mod runs;

use fit::{Costs, Terms};
use mixfleet_scheduler::engines;
use report::Report;
use runs::{Group, Run, Runs};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;

const RUNS: &str = "../shared/data/measured/e2e-silicon-dev.csv.zst";
const PAGES: &str = "../shared/data/measured/e2e-public-dev.csv";
const MLPERF: &str = "../shared/data/measured/mlperf-inference-v6.0-dev.csv";

fn main() -> ExitCode {
    let (mut check, mut words) = (false, String::new());
    for argument in std::env::args().skip(1) {
        match argument.as_str() {
            "--check" => check = true,
            other if other.starts_with('-') || !words.is_empty() => {
                eprintln!("truth: unknown argument '{other}'; there are --check and a part of groups' names");
                return ExitCode::from(2);
            }
            other => words = other.to_owned(),
        }
    }
    match truth(check, &words) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("truth: {error}");
            ExitCode::from(3)
        }
    }
}

fn truth(check: bool, words: &str) -> Result<bool, String> {
    let Runs { together: runs, split, others } = runs::read(Path::new(RUNS))?;
    let (together, apart) = (runs.len(), split.len());
    println!(
        "{together} runs, and {apart} disaggregated ones; {others} others are of models, parts or modes that are not \
         predicted\n"
    );
    let mut costs = Costs::default();
    let terms: Vec<(&Run, Terms)> = runs.iter().map(|run| (run, Terms::of(run, &mut costs))).collect();
    let mut same = true;
    Report::head();
    let mut report = Report::default();
    for engine in engines::engines() {
        let of: Vec<(&Run, &Terms)> =
            terms.iter().filter(|(run, _)| run.engine == engine).map(|(run, terms)| (*run, terms)).collect();
        let mut groups: BTreeMap<Group, Vec<&Run>> = BTreeMap::new();
        of.iter().for_each(|(run, _)| groups.entry(run.group()).or_default().push(run));
        for (group, members) in groups.into_iter().filter(|(group, _)| group.to_string().contains(words)) {
            let rest: Vec<_> =
                of.iter().copied().filter(|(run, _)| run.is_usable() && run.part != group.part).collect();
            report.group(&group, &members, fit::fit(engine, &rest))?;
        }
        let all: Vec<_> = of.iter().copied().filter(|(run, _)| run.is_usable()).collect();
        if !all.is_empty() && fit::fit(engine, &all) != engine.cost {
            same = false;
            eprintln!(
                "{} is {:?} in the scheduler; all runs give {:?}",
                engine.name,
                engine.cost,
                fit::fit(engine, &all)
            );
        }
    }
    report.end();
    report::split(&split, words)?;
    for set in [published::pages(Path::new(PAGES))?, published::mlperf(Path::new(MLPERF))?] {
        report.published(&set, words, |figure| {
            let of = terms.iter().filter(|(run, _)| run.engine == figure.engine && run.is_usable());
            let rest: Vec<_> = of.filter(|(run, _)| run.part != figure.part.id).collect();
            let seen = terms.iter().any(|(run, _)| run.part == figure.part.id);
            seen.then(|| {
                fit::fit(figure.engine, &rest.iter().map(|(run, terms)| (*run, terms)).collect::<Vec<_>>())
            })
        })?;
    }
    report.rows.print();
    points::print()?;
    Ok(same || !check)
}

//! Errors of predictions, row by row, and their tables by class, part and engine.

use crate::runs::Run;
use mixfleet_hal::catalog::{self, Part};
use mixfleet_hal::profile::EvidenceBasis;
use mixfleet_hal::{DType, StoredAs, WeightFormat};
use mixfleet_scheduler::models::KnownModel;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// What was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Figure {
    /// Seconds between two tokens.
    Tpot,
    /// Tokens of answers per second.
    TokensPerS,
    /// The same with the prompts'.
    AllTokensPerS,
    /// Seconds of the whole run.
    Duration,
    /// Tokens per second of one sequence.
    DecodeAlone,
    /// Tokens per second of one prompt.
    PromptAlone,
}

impl Figure {
    /// Whether it is a time between tokens, or its inverse; the others are rates, or are compared as such.
    pub(crate) fn is_tpot(self) -> bool {
        matches!(self, Figure::Tpot | Figure::DecodeAlone)
    }

    /// Whether it is the inverse of what its error is of.
    pub(crate) fn is_time_of_rate(self) -> bool {
        matches!(self, Figure::Duration | Figure::DecodeAlone)
    }
}

/// One compared figure.
pub(crate) struct ComparedFigure {
    pub(crate) set: &'static str,
    pub(crate) part: &'static str,
    pub(crate) engine: &'static str,
    pub(crate) classes: Vec<&'static str>,
    pub(crate) is_tpot: bool,
    /// predicted / measured - 1; of rates, of the rate.
    pub(crate) off: f64,
    /// The stated error.
    pub(crate) stated: Option<f64>,
}

/// All compared figures.
#[derive(Default)]
pub(crate) struct Rows(pub(crate) Vec<ComparedFigure>);

/// The classes of a prediction's error: dense or mixture, 4-bit, and the source of the part's profile.
pub(crate) fn classes(model: &KnownModel, stored: StoredAs, part: &Part) -> Vec<&'static str> {
    let is_four =
        stored.format().is_some_and(|format| ![WeightFormat::Fp8, WeightFormat::Int8].contains(&format));
    let model = if model.experts.is_some() { "mixture" } else { "dense" };
    [model].into_iter().chain(is_four.then_some("4-bit")).chain([basis(part)]).collect()
}

/// The source of a part's bf16 rates. Kept in a table, since a profile is slow to build.
fn basis(part: &Part) -> &'static str {
    static KNOWN: Mutex<BTreeMap<&str, &str>> = Mutex::new(BTreeMap::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    known.entry(part.id).or_insert_with(|| {
        let evidence = part.best_profile().provenance.evidence;
        match evidence.iter().find(|evidence| evidence.dtype == DType::Bf16).map(|evidence| &evidence.basis) {
            Some(EvidenceBasis::Measured) => "measured part",
            Some(EvidenceBasis::Borrowed { .. }) => "borrowed part",
            _ => "datasheet part",
        }
    })
}

impl Rows {
    /// Adds the errors of a run's time between tokens and of its rate.
    pub(crate) fn of_run(&mut self, run: &Run, tpot: f64, rate: f64, stated: Option<f64>) {
        let part = catalog::part(run.part).expect("a part of the catalog");
        let of = |(is_tpot, off)| ComparedFigure {
            set: "runs",
            part: run.part,
            engine: run.engine.name,
            classes: classes(run.model, run.stored, part),
            is_tpot,
            off,
            stated,
        };
        self.0.extend([(true, tpot), (false, rate)].map(of));
    }

    /// Prints the tables.
    pub(crate) fn print(&self) {
        let sets = |row: &ComparedFigure| vec![row.set.to_owned(), "all".to_owned()];
        self.table("set", sets);
        self.table("class", |row| row.classes.iter().map(ToString::to_string).collect());
        self.table("engine", |row| vec![row.engine.to_owned()]);
        self.table("part", |row| vec![row.part.to_owned()]);
    }

    fn table(&self, title: &str, keys: impl Fn(&ComparedFigure) -> Vec<String>) {
        println!(
            "\n| {title} | TPOT: figures | error | bias | rate: figures | error | bias | covered | median band |\n\
             |---|---|---|---|---|---|---|---|---|"
        );
        let mut groups: BTreeMap<String, Vec<&ComparedFigure>> = BTreeMap::new();
        for row in &self.0 {
            keys(row).into_iter().for_each(|key| groups.entry(key).or_default().push(row));
        }
        for (key, rows) in groups {
            let errors = |tpot: bool| {
                let of: Vec<f64> = rows.iter().filter(|row| row.is_tpot == tpot).map(|row| row.off).collect();
                let count = of.len() as f64;
                let error = 100.0 * of.iter().map(|off| off.abs()).sum::<f64>() / count.max(1.0);
                let bias = 100.0 * of.iter().sum::<f64>() / count.max(1.0);
                format!("{count} | {error:.1} | {bias:+.1}")
            };
            let covered = rows.iter().filter(|row| row.stated.is_some_and(|stated| row.off.abs() <= stated));
            let covered = 100.0 * covered.count() as f64 / rows.len() as f64;
            let mut bands: Vec<f64> = rows.iter().map(|row| row.stated.unwrap_or(0.0)).collect();
            bands.sort_by(f64::total_cmp);
            let median = 100.0 * bands[bands.len() / 2];
            println!("| {key} | {} | {} | {covered:.0} | {median:.0} |", errors(true), errors(false));
        }
    }
}

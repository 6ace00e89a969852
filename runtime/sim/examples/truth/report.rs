//! How far predictions of groups of runs are off.

use crate::fit::{self, Costs, Terms};
use crate::predict::{Predicted, predict, predict_published, predict_split, tokens_per_s};
use crate::published::{Published, Set};
use crate::rows::{ComparedFigure, Rows, classes};
use crate::runs::{Group, Run, SplitRun};
use mixfleet_scheduler::cost::{CostModel, EngineCost};
use std::collections::BTreeMap;

/// Share of its measured time that a run takes on devices that reach their datasheet in full, beyond which no
/// device can have computed all of its prompts.
const POSSIBLE: f64 = 0.8;

/// Errors of a number of runs.
#[derive(Default)]
struct Errors {
    runs: f64,
    tpot: f64,
    bias: f64,
    rate: f64,
    /// Runs whose stated error is at least their own.
    covered: f64,
}

impl Errors {
    fn add(&mut self, tpot: f64, rate: f64, stated: f64) {
        self.runs += 1.0;
        self.tpot += tpot.abs();
        self.bias += tpot;
        self.rate += rate.abs();
        self.covered += f64::from(u8::from(tpot.abs() <= stated));
    }

    fn join(&mut self, other: &Errors) {
        self.runs += other.runs;
        self.tpot += other.tpot;
        self.bias += other.bias;
        self.rate += other.rate;
        self.covered += other.covered;
    }

    fn text(&self) -> String {
        if self.runs == 0.0 {
            return "0 | | | | |".into();
        }
        let [tpot, bias, rate, covered] =
            [self.tpot, self.bias, self.rate, self.covered].map(|sum| 100.0 * sum / self.runs);
        format!("{} | {tpot:.1} | {bias:+.1} | {rate:.1} | {covered:.0} |", self.runs)
    }
}

/// The errors of groups, and of all runs that are possible.
#[derive(Default)]
pub(crate) struct Report {
    /// Of dense models on the H100 and the H200, on other parts, and in 4 bits; of mixtures of experts.
    sums: [Errors; 4],
    best: Option<Costs>,
    pub(crate) rows: Rows,
}

impl Report {
    pub(crate) fn head() {
        println!(
            "| group | runs | TPOT | bias | tokens/s | covered | of these possible | TPOT | bias | tokens/s | covered |"
        );
        println!("|---|---|---|---|---|---|---|---|---|---|---|");
    }

    /// Predicts a group with an engine that was `fitted` to others.
    pub(crate) fn group(
        &mut self,
        group: &Group,
        members: &[&Run],
        fitted: EngineCost,
    ) -> Result<(), String> {
        let (mut all, mut possible) = (Errors::default(), Errors::default());
        let verbose = std::env::var_os("TRUTH_RUNS").is_some();
        let best = self.best.get_or_insert_with(Costs::at_best);
        let (mut costs, mut seen) =
            (BTreeMap::<String, CostModel>::new(), BTreeMap::<String, Predicted>::new());
        let every = std::env::var("TRUTH_EVERY").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
        for run in members.iter().step_by(every.max(1)) {
            let split = format!("{} {} {}", run.devices, run.stored, run.kv.name());
            let load = format!("{split} {:?} {:?} {}", run.prompt, run.answer, run.clients);
            let cost = costs.entry(split).or_insert_with(|| fit::cost(run, fitted));
            if !seen.contains_key(&load) {
                let Some(predicted) = predict(run, cost.clone())? else {
                    continue;
                };
                seen.insert(load.clone(), predicted);
            }
            let got = &seen[&load];
            let least_s = Terms::of(run, best).with(&EngineCost::FUSED);
            let tpot = got.tpot_s / run.tpot_s - 1.0;
            let measured = tokens_per_s(run, run.ttft_s, run.tpot_s);
            let rate = tokens_per_s(run, got.ttft_s, got.tpot_s) / measured - 1.0;
            let stated = got.likely_error.unwrap_or(0.0);
            all.add(tpot, rate, stated);
            let is_possible = least_s <= POSSIBLE * run.tpot_s;
            if is_possible {
                possible.add(tpot, rate, stated);
                self.rows.of_run(run, tpot, rate, got.likely_error);
            }
            if verbose {
                let ms = |s: f64| 1e3 * s;
                let (ttft, between) = (ms(run.ttft_s), ms(run.tpot_s));
                eprintln!(
                    "{group} x{} {:?} {:?} {} clients: {ttft:.0} {between:.2} ms; {:.0} {:.2} ms, {tpot:+.3} {rate:+.3} of {stated:.2} {}",
                    run.devices,
                    run.prompt,
                    run.answer,
                    run.clients,
                    ms(got.ttft_s),
                    ms(got.tpot_s),
                    if is_possible { "" } else { "impossible" }
                );
            }
        }
        println!("| {group} | {} {}", all.text(), possible.text());
        let is_mixture = members.iter().any(|run| run.model.experts.is_some());
        let is_hopper = ["H100-SXM-80GB", "H200-SXM-141GB"].contains(&group.part);
        let is_known = members.iter().all(|run| run.is_known());
        let sum = match (is_mixture, is_known) {
            (true, _) => 3,
            (false, false) => 2,
            (false, true) => usize::from(!is_hopper),
        };
        self.sums[sum].join(&possible);
        Ok(())
    }

    /// Predicts a set of figures, each with the engine that `fitted` gives for its part, if that was seen.
    pub(crate) fn published(
        &mut self,
        set: &Set,
        words: &str,
        fitted: impl Fn(&Published) -> Option<EngineCost>,
    ) -> Result<(), String> {
        let mut skipped = set.skipped.clone();
        for figure in set.figures.iter().filter(|figure| figure.name.contains(words)) {
            let got = match predict_published(figure, fitted(figure)) {
                Ok(got) => got,
                Err(error) => {
                    *skipped.entry(error).or_default() += 1;
                    continue;
                }
            };
            let Published { part, engine, model, stored, name, .. } = figure;
            for ((what, measured), predicted) in figure.measured.iter().zip(&got.figures) {
                let ratio = predicted / measured;
                let off = if what.is_time_of_rate() { 1.0 / ratio } else { ratio } - 1.0;
                if std::env::var_os("TRUTH_RUNS").is_some() {
                    eprintln!(
                        "{} {name} {} {} {}: {what:?} {measured:.4} {predicted:.4} {off:+.3} of {:.2}",
                        figure.set,
                        part.id,
                        engine.name,
                        stored.name(),
                        got.likely_error.unwrap_or(0.0)
                    );
                }
                self.rows.0.push(ComparedFigure {
                    set: figure.set,
                    part: part.id,
                    engine: engine.name,
                    classes: classes(model, *stored, part),
                    is_tpot: what.is_tpot(),
                    off,
                    stated: got.likely_error,
                });
            }
        }
        for (why, count) in skipped {
            println!("{count} skipped: {why}");
        }
        Ok(())
    }

    pub(crate) fn end(&self) {
        for (name, sum) in
            ["H100 and H200, dense", "other parts, dense", "dense in 4 bits", "mixtures of experts"]
                .iter()
                .zip(&self.sums)
        {
            println!("| **all on {name}** | | | | | | {}", sum.text());
        }
    }
}

/// Predicts disaggregated runs, on which nothing is fitted, of groups whose names contain `words`.
pub(crate) fn split(runs: &[SplitRun], words: &str) -> Result<(), String> {
    let verbose = std::env::var_os("TRUTH_RUNS").is_some();
    let mut groups: BTreeMap<Group, Errors> = BTreeMap::new();
    for split in runs {
        let SplitRun { run, prefill, decode } = split;
        if !format!("disaggregated {}", run.group()).contains(words) {
            continue;
        }
        let Some(got) = predict_split(split)? else { continue };
        let tpot = got.tpot_s / run.tpot_s - 1.0;
        let measured = tokens_per_s(run, run.ttft_s, run.tpot_s);
        let rate = tokens_per_s(run, got.ttft_s, got.tpot_s) / measured - 1.0;
        groups.entry(run.group()).or_default().add(tpot, rate, got.likely_error.unwrap_or(0.0));
        if verbose {
            let [ttft, between, ttft_got, between_got] =
                [run.ttft_s, run.tpot_s, got.ttft_s, got.tpot_s].map(|s| 1e3 * s);
            eprintln!(
                "{} {prefill:?} {decode:?} {:?} {:?} {} clients: {ttft:.0} {between:.2} ms; {ttft_got:.0} \
                 {between_got:.2} ms, {tpot:+.3} {rate:+.3}",
                run.group(),
                run.prompt,
                run.answer,
                run.clients
            );
        }
    }
    println!("\n| disaggregated | runs | TPOT | bias | tokens/s | covered |\n|---|---|---|---|---|---|");
    let mut all = Errors::default();
    for (group, errors) in &groups {
        println!("| {group} | {}", errors.text());
        all.join(errors);
    }
    println!("| **all** | {}", all.text());
    Ok(())
}

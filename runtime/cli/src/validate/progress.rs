//! What is told while a validation runs.

use indicatif::{ProgressBar, ProgressStyle};
use mixfleet_hwtests::validate::protocol::ChildMessage;
use mixfleet_hwtests::validate::{CaseStatus, Plan, Record, groups};
use std::cell::Cell;
use std::io::IsTerminal;

/// The progress of a run, on standard error.
pub(super) struct Bar {
    bar: ProgressBar,
    /// Whether there is a bar; else a line is written for each group.
    drawn: bool,
    /// What lines begin with.
    name: String,
    /// Cases of the group at hand that have ended.
    cases: Cell<u64>,
}

impl Bar {
    /// Shows the progress of a plan: by a bar on a terminal, by lines elsewhere and for one of several
    /// devices.
    pub(super) fn new(plan: &Plan, one_of_several: bool) -> Bar {
        let drawn = std::io::stderr().is_terminal() && !one_of_several;
        let bar = if drawn { ProgressBar::new(groups(plan).len() as u64) } else { ProgressBar::hidden() };
        let name = if one_of_several { format!("{}: ", plan.device) } else { String::new() };
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {wide_msg}");
        bar.set_style(style.expect("a fixed template"));
        Bar { bar, drawn, name, cases: Cell::new(0) }
    }

    pub(super) fn see(&self, record: &Record) {
        match record {
            Record::Start { .. } => self.cases.set(0),
            Record::Line { line: ChildMessage::Case(_), .. } => self.cases.set(self.cases.get() + 1),
            _ => {}
        }
        match record {
            Record::Start { group, .. } if !self.drawn => eprintln!("validate: {}{group}", self.name),
            Record::Start { group, .. } => self.bar.set_message(group.clone()),
            Record::Line { line: ChildMessage::Begin(id), .. } => {
                self.bar.set_message(format!("{id} (after {} of its group)", self.cases.get()));
            }
            Record::Line { line: ChildMessage::Case(case), .. }
                if case.status.is_wrong() || case.status == CaseStatus::NotRun =>
            {
                let reason = case.reason.as_deref().unwrap_or_default();
                self.bar.suspend(|| eprintln!("{}{} {}: {reason}", self.name, case.status.word(), case.id));
            }
            Record::Line { line: ChildMessage::Sample(sample), .. } => {
                self.bar.set_message(format!("soak, {:.0} s", sample.t_s));
            }
            Record::Done { .. } => self.bar.inc(1),
            _ => {}
        }
    }

    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

//! Progress messages of a validation.

use indicatif::{ProgressBar, ProgressStyle};
use mixfleet_hal::cast::to_u32;
use mixfleet_hwtests::validate::protocol::ChildMessage;
use mixfleet_hwtests::validate::{CaseStatus, Record, ValidationPlan, cases_of, groups};
use std::cell::Cell;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

/// The progress of a run, on standard error.
pub(super) struct Bar {
    bar: ProgressBar,
    /// Whether there is a bar; else a line is written for each group.
    drawn: bool,
    /// What lines begin with.
    name: String,
    /// Cases of the group at hand that have ended.
    cases: Cell<u32>,
    /// When it began.
    began: Cell<Instant>,
    /// Cases of level 3.
    points: u32,
}

/// The running case, how many of its group have ended out of how many, and the remaining time at the average
/// so far.
fn under_way(id: &str, ended: u32, of: Option<u32>, elapsed: Duration) -> String {
    let Some(of) = of.filter(|of| *of >= ended) else {
        return format!("{id} (after {ended} of its group)");
    };
    let left = match ended {
        0 => String::new(),
        ended => format!(", {:.0} s left", (elapsed / ended * (of - ended)).as_secs_f64()),
    };
    format!("{id} ({ended} of {of}{left})")
}

impl Bar {
    /// Shows the progress of a plan: by a bar on a terminal, by lines elsewhere and for one of several
    /// devices.
    pub(super) fn new(plan: &ValidationPlan, one_of_several: bool) -> Bar {
        let drawn = std::io::stderr().is_terminal() && !one_of_several;
        let bar = if drawn { ProgressBar::new(groups(plan).len() as u64) } else { ProgressBar::hidden() };
        let name = if one_of_several { format!("{}: ", plan.device) } else { String::new() };
        let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {elapsed} {wide_msg}");
        bar.set_style(style.expect("a fixed template"));
        let points = cases_of(plan, "l3.profile").map_or(0, |count| to_u32(count as u64));
        Bar { bar, drawn, name, cases: Cell::new(0), began: Cell::new(Instant::now()), points }
    }

    pub(super) fn see(&self, record: &Record) {
        match record {
            Record::Start { .. } => {
                self.cases.set(0);
                self.began.set(Instant::now());
            }
            Record::Line { line: ChildMessage::Case(_), .. } => self.cases.set(self.cases.get() + 1),
            _ => {}
        }
        match record {
            Record::Start { group, .. } if !self.drawn => eprintln!("validate: {}{group}", self.name),
            Record::Start { group, .. } => self.bar.set_message(group.clone()),
            Record::Line { line: ChildMessage::Begin(id), .. } => {
                let of = id.starts_with("l3.").then_some(self.points);
                self.bar.set_message(under_way(id, self.cases.get(), of, self.began.get().elapsed()));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn level_3_counts_its_cases_and_what_is_left() {
        let after = Duration::from_secs(30);
        assert_eq!(under_way("l3.a", 0, Some(40), after), "l3.a (0 of 40)");
        assert_eq!(under_way("l3.a", 10, Some(40), after), "l3.a (10 of 40, 90 s left)");
        assert_eq!(under_way("l3.a", 40, Some(40), after), "l3.a (40 of 40, 0 s left)");
        assert_eq!(under_way("l1.a", 10, None, after), "l1.a (after 10 of its group)");
        assert_eq!(under_way("l3.a", 41, Some(40), after), "l3.a (after 41 of its group)", "tried again");
    }

    #[test]
    fn the_number_of_cases_is_known_before_they_run() {
        let named = |only: &[&str]| ValidationPlan {
            level: 3,
            only: only.iter().map(|name| (*name).to_owned()).collect(),
            ..ValidationPlan::new("cpu")
        };
        assert_eq!(cases_of(&named(&["l3.memory_read.4MiB"]), "l3.profile"), Some(1));
        assert!(cases_of(&named(&[]), "l3.profile") > cases_of(&named(&["l3.memory_read"]), "l3.profile"));
        assert_eq!(cases_of(&named(&[]), "l1.gemm"), None);
    }
}

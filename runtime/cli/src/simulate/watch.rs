//! Observers of a run: the progress bar, the table and the page.

use super::history::RunHistory;
use super::timeline::TimelineFile;
use super::unmet::Unmet;
use crate::trace_file::FileBar;
use mixfleet_scheduler::fleet::{Action, Event};
use mixfleet_sim::capacity::Goal;
use mixfleet_sim::simulate::{AnswerTimes, Observer, Sample, Setup};

pub(super) struct RunWatch {
    pub(super) bar: FileBar,
    pub(super) timeline: Option<TimelineFile>,
    pub(super) history: Option<RunHistory>,
    pub(super) interval_s: f64,
    /// The run ends once this is out of reach.
    pub(super) goal: Option<Goal>,
    /// The times of all answers, if an output needs them.
    pub(super) answers: Option<Vec<AnswerTimes>>,
    pub(super) unmet: Unmet,
}

impl RunWatch {
    /// Watches a run on `setup` for its results alone.
    pub(super) fn new(bar: FileBar, setup: &Setup) -> Self {
        let slo = setup.classes.is_empty().then_some(setup.slo);
        let (timeline, history, goal, answers) = (None, None, None, None);
        RunWatch { bar, timeline, history, interval_s: f64::INFINITY, goal, answers, unmet: Unmet::new(slo) }
    }
}

impl Observer for RunWatch {
    fn arrived(&mut self, now_s: f64, _: u64) {
        self.bar.tick_at(now_s);
    }

    fn told(&mut self, _: f64, event: &Event) {
        self.unmet.told(event);
    }

    fn decided(&mut self, _: f64, action: &Action) {
        self.unmet.decided(action);
    }

    fn finished(&mut self, _: f64, answer: &AnswerTimes) {
        self.unmet.finished(answer);
        if let Some(history) = &mut self.history {
            history.finished(answer);
        }
        if let Some(answers) = &mut self.answers {
            answers.push(*answer);
        }
    }

    fn is_decided(&self, missed: u64) -> bool {
        self.goal.is_some_and(|goal| goal.is_out_of_reach(missed))
    }

    fn interval_s(&self) -> Option<f64> {
        (self.timeline.is_some() || self.history.is_some()).then_some(self.interval_s)
    }

    fn sampled(&mut self, sample: &Sample) {
        if let Some(timeline) = &mut self.timeline {
            timeline.add(sample);
        }
        if let Some(history) = &mut self.history {
            history.add(sample);
        }
    }
}

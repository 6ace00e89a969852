//! Observers of a run: the progress bar, the table and the page.

use super::history::History;
use super::timeline::TimelineFile;
use crate::trace::FileBar;
use mixfleet_sim::capacity::Goal;
use mixfleet_sim::simulate::{AnswerTimes, Observer, Sample};

pub(super) struct Watch {
    pub(super) bar: FileBar,
    pub(super) timeline: Option<TimelineFile>,
    pub(super) history: Option<History>,
    pub(super) interval_s: f64,
    /// The run ends once this is out of reach.
    pub(super) goal: Option<Goal>,
    /// The times of all answers, if something asks for them.
    pub(super) answers: Option<Vec<AnswerTimes>>,
}

impl Observer for Watch {
    fn arrived(&mut self, now_s: f64, _: u64) {
        self.bar.tick_at(now_s);
    }

    fn finished(&mut self, _: f64, answer: &AnswerTimes) {
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

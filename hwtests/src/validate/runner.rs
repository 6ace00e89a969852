//! Runs groups in child processes: a crash, a hang or a lost device costs the current case, not the report.

use super::case::{CaseResult, CaseStatus, selects};
use super::protocol::{Assignment, ChildMessage, Settings};
use super::soak::{self, Baseline, SoakSample};
use super::start::{Heard, Start};
use super::{conformance, memory, performance};
use mixfleet_hal::DeviceInfo;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Number of children that a group may lose before the rest of it is abandoned.
const LOSSES_MAX: u32 = 3;

/// Groups of level 4: the transports, and the device's own copies.
pub const LINKS: [&str; 5] = ["memory", "shm", "tcp", "verbs", "copy"];

/// What to run.
#[derive(Clone, Debug, PartialEq)]
pub struct ValidationPlan {
    /// Selector of the device.
    pub device: String,
    /// The highest level; a soak is added if the settings have one.
    pub level: u8,
    /// Patterns of groups or cases; empty means all.
    pub only: Vec<String>,
    /// Settings for the children.
    pub settings: Settings,
    /// Silence after which a child is killed; longer than a batch's timeout.
    pub patience: Duration,
}

impl ValidationPlan {
    /// Plans levels 0 to 3 of `device`, quick and without a soak.
    pub fn new(device: &str) -> ValidationPlan {
        let settings = Settings::quick();
        // a case is a handful of batches; memory patterns and profiles send signs of life
        let patience = Duration::from_secs_f64(settings.batch_timeout_s * 4.0);
        ValidationPlan { device: device.to_owned(), level: 3, only: Vec::new(), settings, patience }
    }
}

/// One line of the journal `log.jsonl`, which allows an interrupted run to be resumed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Record {
    /// The start of the run, which a resumed run must match.
    Run {
        /// Selector of the device.
        device: String,
        /// Version of the suite.
        version: String,
        /// Settings of the children, without the facts, which may change.
        settings: Settings,
    },
    /// A child begins a group.
    Start {
        /// Name of the group.
        group: String,
        /// Number of children lost before it.
        losses: u32,
    },
    /// A child sent a message.
    Line {
        /// Name of the group.
        group: String,
        /// The message.
        line: ChildMessage,
    },
    /// A child was lost.
    Lost {
        /// Name of the group.
        group: String,
        /// Description of how it was lost.
        how: String,
    },
    /// A group is complete.
    Done {
        /// Name of the group.
        group: String,
    },
}

/// The outcome of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RunOutcome {
    /// The device as it described itself; `None` if it never opened.
    #[schemars(with = "Option<super::document::DeviceRecord>")]
    pub device: Option<DeviceInfo>,
    /// Results of all cases, in order.
    pub cases: Vec<CaseResult>,
    /// Readings of the soak.
    pub samples: Vec<SoakSample>,
}

/// Returns the groups of a plan, in order.
pub fn groups(plan: &ValidationPlan) -> Vec<String> {
    let mut all = vec!["l0.discover".to_owned()];
    if plan.level >= 1 {
        all.extend(conformance::groups().iter().map(|name| format!("l1.{name}")));
    }
    if plan.level >= 2 {
        all.extend(memory::groups().map(|name| format!("l2.{name}")));
    }
    if plan.level >= 3 {
        all.push("l3.profile".to_owned());
    }
    if plan.level >= 4 {
        all.extend(LINKS.iter().map(|name| format!("l4.{name}")));
    }
    if plan.settings.soak_s > 0.0 {
        all.push("l5.soak".to_owned());
    }
    if plan.level >= 6 {
        all.push("l6.serving".to_owned());
    }
    all.retain(|group| plan.only.is_empty() || plan.only.iter().any(|only| may_hold(only, group)));
    all
}

/// Returns how many cases the group that takes longest has, `l3.profile`; `None` for others.
pub fn cases_of(plan: &ValidationPlan, group: &str) -> Option<usize> {
    // how large pages are changes no number of points
    const PAGE_TOKENS: u32 = 16;
    if group != "l3.profile" {
        return None;
    }
    let wanted = |id: &str| plan.only.is_empty() || plan.only.iter().any(|only| selects(only, id));
    let (_, open, claimed) = performance::planned(&plan.settings, PAGE_TOKENS, &wanted);
    Some(open.len() + claimed.len())
}

/// Whether a group may contain cases that `pattern` selects. Levels 0, 3, 5 and 6 have one group each.
fn may_hold(pattern: &str, group: &str) -> bool {
    let level = group.split('.').next().unwrap_or(group);
    let one_group = matches!(level, "l0" | "l3" | "l5" | "l6");
    let stem: Vec<&str> = pattern.split('.').collect();
    let head = stem[..stem.len().min(if one_group { 1 } else { 2 })].join(".");
    selects(&head, if one_group { level } else { group })
}

/// Returns the first line of a journal.
pub fn header(plan: &ValidationPlan) -> Record {
    let settings = Settings { facts: Vec::new(), ..plan.settings.clone() };
    let version = env!("CARGO_PKG_VERSION").to_owned();
    Record::Run { device: plan.device.clone(), version, settings }
}

/// Runs `plan`, passing every event to `journal` as it comes. `earlier` is the journal of an interrupted run,
/// whose results are not repeated. After a cancellation, remaining cases are marked as cancelled in the
/// outcome, and absent from the journal.
pub fn run(
    plan: &ValidationPlan,
    start: &dyn Start,
    earlier: &[Record],
    journal: &mut dyn FnMut(&Record),
) -> RunOutcome {
    let mut outcome = RunOutcome::default();
    let mut cancelled = false;
    for group in groups(plan) {
        let mut state = GroupRun::new(&group, plan);
        earlier.iter().for_each(|record| state.recall(record));
        if !state.done {
            cancelled = cancelled || state.run(start, journal);
            if cancelled {
                let id = state.current.take().unwrap_or_else(|| group.clone());
                state.cases.push(CaseResult::new(
                    id,
                    CaseStatus::NotRun,
                    "the run was interrupted".to_owned(),
                ));
            } else {
                journal(&Record::Done { group: group.clone() });
            }
        }
        if group == "l5.soak" {
            let set_up_s = state.baseline.as_ref().map(|baseline| baseline.set_up_s);
            state.cases.extend(soak::judge(&state.samples, plan.settings.soak_s, set_up_s));
        }
        outcome.device = outcome.device.or(state.device);
        outcome.cases.append(&mut state.cases);
        outcome.samples.append(&mut state.samples);
    }
    outcome
}

/// A group in progress.
struct GroupRun<'a> {
    name: &'a str,
    plan: &'a ValidationPlan,
    device: Option<DeviceInfo>,
    cases: Vec<CaseResult>,
    /// The child's current case.
    current: Option<String>,
    baseline: Option<Baseline>,
    samples: Vec<SoakSample>,
    losses: u32,
    done: bool,
}

/// How a child ended.
enum ChildEnd {
    /// It completed.
    Complete,
    /// A case made the device unusable; the next child continues after it.
    DeviceGone,
    /// The child died or was killed; the flag says whether it had opened the device.
    Lost(CaseStatus, String, bool),
    /// The run is to end.
    Cancelled,
}

impl<'a> GroupRun<'a> {
    fn new(name: &'a str, plan: &'a ValidationPlan) -> Self {
        let (cases, samples) = Default::default();
        GroupRun {
            name,
            plan,
            device: None,
            cases,
            current: None,
            baseline: None,
            samples,
            losses: 0,
            done: false,
        }
    }

    /// Restores what an earlier run knew.
    fn recall(&mut self, record: &Record) {
        match record {
            Record::Line { group, line } if group == self.name => self.take(line.clone()),
            Record::Done { group } if group == self.name => self.done = true,
            _ => {}
        }
        self.current = None;
    }

    fn take(&mut self, line: ChildMessage) {
        match line {
            ChildMessage::Opened(info) => self.device = Some(info),
            ChildMessage::Begin(id) => self.current = Some(id),
            ChildMessage::Case(result) => {
                self.current = None;
                self.cases.push(result);
            }
            ChildMessage::Baseline(baseline) => self.baseline = Some(baseline),
            ChildMessage::Sample(sample) => self.samples.push(sample),
            ChildMessage::CannotOpen(_) | ChildMessage::Alive | ChildMessage::End => {}
        }
    }

    /// Runs the group; whether the run is to end.
    fn run(&mut self, start: &dyn Start, journal: &mut dyn FnMut(&Record)) -> bool {
        loop {
            journal(&Record::Start { group: self.name.to_owned(), losses: self.losses });
            match self.child(start, journal) {
                ChildEnd::Complete => return false,
                ChildEnd::Cancelled => return true,
                ChildEnd::DeviceGone => {}
                ChildEnd::Lost(status, how, opened) => {
                    journal(&Record::Lost { group: self.name.to_owned(), how: how.clone() });
                    let id = self.current.take().unwrap_or_else(|| self.name.to_owned());
                    let place = if opened { "" } else { "while the device was opened: " };
                    self.settle(CaseResult::new(id, status, format!("{place}{how}")), journal);
                    if !opened {
                        return false;
                    }
                }
            }
            self.losses += 1;
            if self.losses >= LOSSES_MAX {
                let reason = format!("the rest was abandoned after {LOSSES_MAX} lost processes");
                let id = format!("{}.rest", self.name);
                self.settle(CaseResult::new(id, CaseStatus::NotRun, reason), journal);
                return false;
            }
        }
    }

    /// Adds a result of the parent's own, also to the journal.
    fn settle(&mut self, result: CaseResult, journal: &mut dyn FnMut(&Record)) {
        journal(&Record::Line { group: self.name.to_owned(), line: ChildMessage::Case(result.clone()) });
        self.cases.push(result);
    }

    fn assignment(&self) -> Assignment {
        let ran_s = self.samples.iter().map(|sample| sample.t_s).fold(0.0, f64::max);
        Assignment {
            device: self.plan.device.clone(),
            group: self.name.to_owned(),
            settings: self.plan.settings.clone(),
            only: self.plan.only.clone(),
            done: self.cases.iter().map(|case| case.id.clone()).collect(),
            soak: self.baseline.clone().map(|baseline| (baseline, ran_s)),
        }
    }

    /// Follows one child until it ends.
    fn child(&mut self, start: &dyn Start, journal: &mut dyn FnMut(&Record)) -> ChildEnd {
        let mut child = match start.start(&self.assignment()) {
            Ok(child) => child,
            Err(error) => {
                let reason = format!("no process could be started: {error}");
                self.settle(CaseResult::new(self.name, CaseStatus::NotRun, reason), journal);
                return ChildEnd::Complete;
            }
        };
        let (mut device_gone, mut opened) = (false, false);
        loop {
            let line = match child.next(self.plan.patience) {
                Heard::Line(line) => *line,
                Heard::Silence => {
                    let seconds = self.plan.patience.as_secs_f64();
                    return ChildEnd::Lost(
                        CaseStatus::Timeout,
                        format!("no output for {seconds} s; the process was killed"),
                        opened,
                    );
                }
                Heard::Cancelled => return ChildEnd::Cancelled,
                Heard::Gone(_) if device_gone => return ChildEnd::DeviceGone,
                Heard::Gone(how) => return ChildEnd::Lost(CaseStatus::Crash, how, opened),
            };
            if line != ChildMessage::Alive {
                journal(&Record::Line { group: self.name.to_owned(), line: line.clone() });
            }
            match &line {
                ChildMessage::End => return ChildEnd::Complete,
                ChildMessage::CannotOpen(reason) => {
                    let reason = format!("the device could not be opened: {reason}");
                    self.settle(CaseResult::new(self.name, CaseStatus::NotRun, reason), journal);
                    return ChildEnd::Complete;
                }
                ChildMessage::Opened(_) => opened = true,
                ChildMessage::Case(result) => device_gone |= result.status.ends_the_device(),
                _ => {}
            }
            self.take(line);
        }
    }
}

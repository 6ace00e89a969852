//! The log of all inputs and outputs of the fleet machine, as JSON lines that can be replayed on a fresh
//! machine.
//!
//! ```text
//! {"schema":"mixfleet.events/1","version":...,"fleet":FleetConfig}
//! {"now":seconds,"event":Event,"actions":[Action]}      one for each step
//! {"end":null}                                          or why the log ends before serving does
//! ```
//!
//! Floats are written so that they read back the same. A log without its last line was cut: the writing
//! process was killed.

mod finite;
mod log;
mod replay;

pub use log::{EventLog, Writer};
pub use replay::{Difference, Replay, ReplayError};

use crate::metrics::{Metrics, Noted};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::fleet::{Action, Event, Fleet, FleetConfig};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// Name and version of the format.
pub const SCHEMA: &str = "mixfleet.events/1";

#[derive(Serialize, Deserialize)]
struct Head<'a> {
    schema: Cow<'a, str>,
    /// Of the program: another one may decide otherwise.
    version: Cow<'a, str>,
    fleet: Cow<'a, FleetConfig>,
}

#[derive(Serialize)]
struct LoggedStep<'a> {
    now: Seconds,
    event: &'a Event,
    actions: &'a [Action],
}

#[derive(Serialize, Deserialize)]
struct End<'a> {
    end: Option<Cow<'a, str>>,
}

fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("plain data, in memory")
}

/// The fleet machine, with an optional log of its inputs and outputs, and the log's cost.
pub(crate) struct LoggedFleet {
    machine: Fleet,
    log: Option<EventLog>,
    metrics: Metrics,
}

impl LoggedFleet {
    pub(crate) fn new(config: FleetConfig, mut log: Option<EventLog>, metrics: Metrics) -> Self {
        if let Some(log) = &mut log {
            let (schema, version) = (SCHEMA.into(), env!("CARGO_PKG_VERSION").into());
            log.write(&Head { schema, version, fleet: Cow::Borrowed(&config) });
        }
        LoggedFleet { machine: Fleet::new(config), log, metrics }
    }

    /// The machine, to be asked.
    pub(crate) fn machine(&self) -> &Fleet {
        &self.machine
    }

    /// What the machine answers to `event`.
    pub(crate) fn step(&mut self, now: Seconds, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        let logged = self.log.as_mut().map(|log| (log, event.clone()));
        let noted = Noted::of(&event, &self.machine);
        self.machine.step(now, event, &mut actions);
        if let Some(noted) = noted {
            self.metrics.note(now, noted, &actions);
        }
        if let Some((log, event)) = logged {
            log.write(&LoggedStep { now, event: &event, actions: &actions });
        }
        actions
    }
}

//! Feeding a log to a fresh machine.

use super::{End, Head, LoggedStep, SCHEMA, json};
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::batch::RequestId;
use mixfleet_scheduler::fleet::{Action, Event, Explanation, Fleet, RejectReason};
use serde::Deserialize;
use std::io::{self, BufRead};

/// Bytes shown around the first difference.
const AROUND: usize = 80;

/// Why a log cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The file cannot be read.
    #[error("line {line}: {error}")]
    Read {
        /// Where, from 1.
        line: u64,
        /// What the system says.
        error: io::Error,
    },
    /// A line is not what the format says.
    #[error("line {line}: {message}")]
    Malformed {
        /// Where, from 1.
        line: u64,
        /// The fault.
        message: String,
    },
}

/// Where a fresh machine and the logged one part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The line, from 1.
    pub line: u64,
    /// The log from a little before the first byte that differs,
    pub logged: String,
    /// and what the replay gives there.
    pub replayed: String,
}

/// What a replay found.
#[derive(Clone, Debug, Default)]
pub struct Replay {
    /// Version of the program that wrote the log.
    pub version: String,
    /// Steps that were replayed.
    pub steps: u64,
    /// Number of arrivals.
    pub arrivals: u64,
    /// Actions that they gave.
    pub actions: u64,
    /// Steps whose line came out otherwise.
    pub differing: u64,
    /// The first one.
    pub first: Option<Difference>,
    /// The log says that it is whole.
    pub whole: bool,
    /// Why it is not, if the entry says so.
    pub ended: Option<String>,
    /// Its last line is incomplete and was left out.
    pub cut: bool,
    /// Decisions on the requested request, in order, with the reason if it was rejected.
    pub decisions: Vec<(Box<Explanation>, Option<RejectReason>)>,
}

/// Input of a step; the actions are compared as text.
#[derive(Deserialize)]
struct Told {
    now: Seconds,
    event: Event,
}

/// The next line without its end, and whether that is missing; `None` at the end of the log.
fn next<'a>(
    log: &mut impl BufRead,
    number: u64,
    line: &'a mut Vec<u8>,
) -> Result<Option<(&'a [u8], bool)>, ReplayError> {
    line.clear();
    let read = log.read_until(b'\n', line).map_err(|error| ReplayError::Read { line: number, error })?;
    let line = line.as_slice();
    let whole = line.strip_suffix(b"\n");
    Ok((read > 0).then(|| (whole.unwrap_or(line), whole.is_none())))
}

fn parse<'a, T: Deserialize<'a>>(line: &'a [u8], number: u64) -> Result<T, ReplayError> {
    let malformed = |e: serde_json::Error| ReplayError::Malformed { line: number, message: e.to_string() };
    serde_json::from_slice(line).map_err(malformed)
}

impl Replay {
    /// Feeds the events of `log` at their times to a fresh machine, and compares what it answers byte by
    /// byte. Keeps the decisions on `wanted`.
    ///
    /// # Errors
    /// When the log cannot be read, or a line but the last is no step.
    pub fn of(mut log: impl BufRead, wanted: Option<RequestId>) -> Result<Replay, ReplayError> {
        let (mut number, mut buffer) = (1, Vec::new());
        let empty = || ReplayError::Malformed { line: 1, message: "the log is empty".into() };
        let (line, _) = next(&mut log, number, &mut buffer)?.ok_or_else(empty)?;
        let Head { schema, version, fleet } = parse(line, 1)?;
        if schema != SCHEMA {
            let message = format!("the log is of '{schema}'; this program reads '{SCHEMA}'");
            return Err(ReplayError::Malformed { line: 1, message });
        }
        let mut replay = Replay { version: version.into_owned(), ..Replay::default() };
        let mut fleet = Fleet::new(fleet.into_owned());
        loop {
            number += 1;
            let Some((line, cut)) = next(&mut log, number, &mut buffer)? else { return Ok(replay) };
            if replay.whole || replay.ended.is_some() {
                let message = "the log goes on behind its end".into();
                return Err(ReplayError::Malformed { line: number, message });
            }
            if cut {
                replay.cut = true;
                return Ok(replay);
            }
            if line.starts_with(br#"{"end":"#) {
                let End { end } = parse(line, number)?;
                (replay.whole, replay.ended) = (end.is_none(), end.map(|cause| cause.into_owned()));
                continue;
            }
            let Told { now, event } = parse(line, number)?;
            replay.step(&mut fleet, (now, event), (line, number), wanted);
        }
    }

    fn step(
        &mut self,
        fleet: &mut Fleet,
        (now, event): (Seconds, Event),
        (line, number): (&[u8], u64),
        wanted: Option<RequestId>,
    ) {
        let mut actions = Vec::new();
        fleet.step(now, event.clone(), &mut actions);
        self.steps += 1;
        self.actions += actions.len() as u64;
        self.arrivals += u64::from(matches!(event, Event::Arrived(_)));
        let replayed = json(&LoggedStep { now, event: &event, actions: &actions });
        if replayed != line {
            self.differing += 1;
            self.first.get_or_insert_with(|| Difference::between(number, line, &replayed));
        }
        for action in actions {
            match action {
                Action::Place { request, explanation, .. } if Some(request) == wanted => {
                    self.decisions.push((explanation, None));
                }
                Action::Reject { request, explanation, reason, .. } if Some(request) == wanted => {
                    self.decisions.push((explanation, Some(reason)));
                }
                _ => {}
            }
        }
    }
}

impl Difference {
    fn between(line: u64, logged: &[u8], replayed: &[u8]) -> Self {
        let same = logged.iter().zip(replayed).take_while(|(a, b)| a == b).count();
        let around = |text: &[u8]| {
            let (from, to) = (same.saturating_sub(AROUND / 2), (same + AROUND).min(text.len()));
            String::from_utf8_lossy(text.get(from..to).unwrap_or_default()).into_owned()
        };
        Difference { line, logged: around(logged), replayed: around(replayed) }
    }
}

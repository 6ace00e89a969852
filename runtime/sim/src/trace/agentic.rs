//! Sessions of agents, one per line: `{block_size, reqs: [{t, in, out, api, think, h: [[first, len],
//! ...]}]}`.
//!
//! Times and block ids are local to a session, so sessions are started one after another at a fixed interval
//! and their ids are keyed by the session's number. Sessions overlap: the running ones are kept in memory, as
//! runs of ids, and merged by time.

use super::read::{Lengths, Repairs, Sorter};
use super::{ConversationTurn, Request, TIME_S_MAX, TraceError};
use mixfleet_hal::cast::to_u32;
use mixfleet_hal::random::bits;
use mixfleet_hal::units::Seconds;
use mixfleet_scheduler::kv::BlockHash;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Distinguishes these keys from those of other sources.
const KEY_SEED: u64 = 0x61_6765_6e74_6963;

#[derive(Deserialize)]
struct SessionLine {
    block_size: u32,
    #[serde(default)]
    model: Option<Arc<str>>,
    reqs: Vec<Entry>,
}

/// A call of the model, or a sub-agent with its own calls.
#[derive(Deserialize)]
struct Entry {
    t: f64,
    #[serde(rename = "in")]
    prompt: Option<u64>,
    out: Option<u64>,
    /// Duration of the answer, if known.
    api: Option<f64>,
    /// Time from the last answer whose end is known to this call.
    think: Option<f64>,
    #[serde(default)]
    h: Vec<(u64, u64)>,
    /// Calls of the sub-agent, with times from its start.
    sub: Option<Vec<Entry>>,
}

/// A call at its position in the session.
struct AgentStep {
    /// Time from the session's start.
    at: Seconds,
    lengths: Lengths,
    runs: Box<[(u64, u64)]>,
    /// The call that must end before this one.
    after: Option<usize>,
    think: Seconds,
}

/// A session in progress.
struct AgentSession {
    number: u64,
    start: Seconds,
    model: Option<Arc<str>>,
    steps: Vec<AgentStep>,
    /// Steps in order of time, and the number of steps that are done.
    order: Vec<usize>,
    done: usize,
    /// Request ids of the steps that are done.
    ids: Vec<u64>,
}

pub(super) struct Agentic {
    pub(super) block_tokens: u32,
    every: Seconds,
    /// Number of sessions started.
    count: u64,
    /// Sessions in progress, by the time of the next step (see [`ordered`]), then by number.
    running: BTreeMap<(u64, u64), AgentSession>,
}

impl Agentic {
    /// Of a file that begins with the line `first`, whose block size holds for all.
    pub(super) fn new(first: &[u8], every: Seconds) -> Result<Self, String> {
        let line: SessionLine = serde_json::from_slice(first).map_err(|cause| cause.to_string())?;
        if line.block_size == 0 {
            return Err("block_size is 0".into());
        }
        Ok(Agentic { block_tokens: line.block_size, every, count: 0, running: BTreeMap::new() })
    }

    /// The start of the next session to be read.
    fn start(&self) -> Seconds {
        self.every * self.count as f64
    }

    fn put(&mut self, running: AgentSession) {
        if let Some(at) = running.next_at() {
            self.running.insert((ordered(at), running.number), running);
        }
    }

    fn steps(&self, line: &SessionLine, repairs: &mut Repairs) -> Result<Vec<AgentStep>, String> {
        if line.block_size != self.block_tokens {
            return Err(format!(
                "blocks of {} tokens in a trace with blocks of {}",
                line.block_size, self.block_tokens
            ));
        }
        let mut steps = Vec::new();
        self.flatten(&line.reqs, Seconds::ZERO, None, &mut steps, repairs)?;
        Ok(steps)
    }

    /// Appends the calls of one agent, which starts at `start` after `parent`, and those of its sub-agents.
    fn flatten(
        &self,
        entries: &[Entry],
        start: Seconds,
        parent: Option<Answer>,
        steps: &mut Vec<AgentStep>,
        repairs: &mut Repairs,
    ) -> Result<(), String> {
        let mut before = parent;
        for entry in entries {
            let at = start + Seconds(checked("t", entry.t)?);
            if let Some(calls) = &entry.sub {
                self.flatten(
                    calls,
                    at,
                    before.map(|before| Answer { same_agent: false, ..before }),
                    steps,
                    repairs,
                )?;
                continue;
            }
            let (Some(prompt), Some(out)) = (entry.prompt, entry.out) else {
                return Err(format!("the request at t = {} has no 'in' and 'out', and no 'sub'", entry.t));
            };
            let lengths = Lengths::new(prompt, out)?;
            self.check_runs(entry, lengths.prompt)?;
            // A call cannot come before the one it follows.
            let at = before.map_or(at, |before| at.max(steps[before.step].at));
            let think = match before {
                Some(before) => before.think(entry, at - steps[before.step].at, repairs)?,
                None => Seconds::ZERO,
            };
            let took = entry.api.map(|api| checked("api", api)).transpose()?.map(Seconds);
            let after = before.map(|before| before.step);
            before = Some(Answer { step: steps.len(), took, same_agent: true });
            steps.push(AgentStep { at, lengths, runs: entry.h.as_slice().into(), after, think });
        }
        Ok(())
    }

    fn check_runs(&self, entry: &Entry, prompt_tokens: u32) -> Result<(), String> {
        let blocks_max = u64::from(prompt_tokens.div_ceil(self.block_tokens));
        let blocks = entry.h.iter().try_fold(0u64, |sum, &(first, count)| {
            first.checked_add(count).and_then(|_| sum.checked_add(count))
        });
        match blocks {
            Some(blocks) if blocks <= blocks_max => Ok(()),
            _ => Err(format!(
                "the request at t = {} has more block ids than the {blocks_max} blocks of {} that {prompt_tokens} tokens fill",
                entry.t, self.block_tokens
            )),
        }
    }
}

impl Sorter for Agentic {
    fn wants_line(&self) -> bool {
        self.running.first_key_value().is_none_or(|((at, _), _)| *at >= ordered(self.start()))
    }

    fn read(&mut self, line: &[u8], repairs: &mut Repairs) -> Result<(), String> {
        let line: SessionLine = serde_json::from_slice(line).map_err(|cause| cause.to_string())?;
        let steps = self.steps(&line, repairs)?;
        let mut order: Vec<usize> = (0..steps.len()).collect();
        order.sort_by(|&a, &b| steps[a].at.0.total_cmp(&steps[b].at.0));
        let (number, start, ids) = (self.count, self.start(), vec![0; steps.len()]);
        self.put(AgentSession { number, start, model: line.model, steps, order, done: 0, ids });
        self.count += 1;
        Ok(())
    }

    fn next(&mut self, id: u64, repairs: &mut Repairs) -> Result<Option<Request>, TraceError> {
        let Some((_, mut running)) = self.running.pop_first() else { return Ok(None) };
        let request = running.step(id, repairs);
        self.put(running);
        Ok(Some(request))
    }
}

/// The answer that a call follows.
#[derive(Clone, Copy)]
struct Answer {
    step: usize,
    took: Option<Seconds>,
    /// Whether the caller is the agent that made the previous call, and not a sub-agent that starts.
    same_agent: bool,
}

impl Answer {
    /// Think time of `entry`, which arrives `gap` after the call of this answer. The file counts it from the
    /// agent's last answer whose end is known. If that is another answer, the think time follows from the
    /// gap; where the end of this answer is unknown it is the whole gap, an upper bound.
    fn think(self, entry: &Entry, gap: Seconds, repairs: &mut Repairs) -> Result<Seconds, String> {
        let told = entry.think.map(|think| checked("think", think)).transpose()?;
        match (told, self.took) {
            (Some(think), Some(_)) if self.same_agent => Ok(Seconds(think)),
            (_, took) => {
                repairs.unknown_thinks += u64::from(self.same_agent || took.is_none());
                Ok((gap - took.unwrap_or_default()).max(Seconds::ZERO))
            }
        }
    }
}

impl AgentSession {
    fn next_at(&self) -> Option<Seconds> {
        self.order.get(self.done).map(|&step| self.start + self.steps[step].at)
    }

    /// Takes the next step, as the request with id `id`.
    fn step(&mut self, id: u64, repairs: &mut Repairs) -> Request {
        let index = self.order[self.done];
        self.done += 1;
        self.ids[index] = id;
        let step = &mut self.steps[index];
        let key = bits(KEY_SEED, self.number);
        let runs = std::mem::take(&mut step.runs);
        let blocks = runs.iter().flat_map(|&(first, count)| first..first + count);
        Request {
            id,
            at: self.start + step.at,
            prompt_tokens: step.lengths.prompt,
            output_tokens: step.lengths.repaired_output(repairs),
            chain: blocks.map(|block| BlockHash(bits(key, block))).collect(),
            session: Some(ConversationTurn {
                id: self.number,
                after: step.after.map(|after| self.ids[after]),
                think: step.think,
                left: Some(to_u32(self.order.len() - self.done)),
            }),
            class: self.model.clone(),
        }
    }
}

fn checked(what: &str, seconds: f64) -> Result<f64, String> {
    let right = (0.0..=TIME_S_MAX).contains(&seconds);
    right.then_some(seconds).ok_or_else(|| format!("{what} = {seconds} is not a time in seconds"))
}

/// The bits of a time, which sort like the time from 0 on.
fn ordered(at: Seconds) -> u64 {
    at.0.to_bits()
}

//! Queues: tickets, their times and failures, and recorded batches.

use crate::pool::{ThreadJob, ThreadPool};
use crate::program::CpuProgram;
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::command::ClockKind;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Cmd, Elapsed, Error, ErrorKind, Graph, MeetingSeat, Queue, Result, Ticket};
use std::any::Any;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Number of tickets whose times are kept.
const TIMES_KEPT: usize = 1 << 16;

/// The history of one queue.
#[derive(Debug, Default)]
pub(crate) struct CpuQueueTimeline {
    state: Mutex<CpuQueueProgress>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct CpuQueueProgress {
    /// Number of completed batches, including failed ones.
    done: u64,
    /// Durations in seconds of the last `TIMES_KEPT` batches.
    times: VecDeque<f64>,
    /// The first failed batch and its error.
    failure: Option<(u64, Error)>,
    /// The earliest batch that a thread waits for; completing an earlier one wakes no thread.
    awaited: Option<u64>,
}

impl CpuQueueTimeline {
    fn state(&self) -> MutexGuard<'_, CpuQueueProgress> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the failure that every later batch inherits.
    pub(crate) fn error(&self) -> Option<Error> {
        self.state().failure.as_ref().map(|(_, error)| error.clone())
    }

    /// Completes batch `ticket`, the next in order.
    pub(crate) fn settle(&self, ticket: u64, result: Result<f64>) {
        let mut state = self.state();
        state.done = ticket;
        if state.times.len() == TIMES_KEPT {
            state.times.pop_front();
        }
        state.times.push_back(*result.as_ref().unwrap_or(&0.0));
        if let (Err(error), None) = (result, &state.failure) {
            state.failure = Some((ticket, error));
        }
        let wakes = state.awaited.is_some_and(|awaited| awaited <= ticket);
        if wakes {
            // threads that wait for later batches register again
            state.awaited = None;
        }
        drop(state);
        if wakes {
            self.changed.notify_all();
        }
    }

    fn wait(&self, ticket: u64, timeout: Duration) -> Result<Elapsed> {
        let deadline = Instant::now().checked_add(timeout);
        let mut state = self.state();
        while state.done < ticket {
            state.awaited = Some(state.awaited.map_or(ticket, |other| other.min(ticket)));
            let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
            state = match left {
                Some(Duration::ZERO) => {
                    let message = format!("cpu: batch {ticket} is not done after {timeout:?}");
                    return Err(Error::new(ErrorKind::Timeout, message));
                }
                Some(left) => {
                    self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
        if let Some((failed, error)) = &state.failure
            && ticket >= *failed
        {
            return Err(error.clone());
        }
        let age = to_usize(state.done - ticket);
        let index = state.times.len().checked_sub(age + 1);
        let seconds = index.and_then(|i| state.times.get(i)).copied().ok_or_else(|| {
            Error::invalid(format!(
                "ticket {ticket}: only the times of the last {TIMES_KEPT} batches are kept"
            ))
        })?;
        Ok(Elapsed { time: Seconds(seconds), clock: ClockKind::Host })
    }
}

/// A queue of one device.
pub(crate) struct CpuQueue {
    pool: Arc<ThreadPool>,
    timeline: Arc<CpuQueueTimeline>,
    submitted: u64,
}

/// A recorded batch of one queue.
struct CpuGraph {
    program: Arc<CpuProgram>,
    timeline: Arc<CpuQueueTimeline>,
}

impl Graph for CpuGraph {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn memory_bytes(&self) -> u64 {
        0
    }
}

impl CpuQueue {
    pub(crate) fn new(pool: Arc<ThreadPool>) -> Self {
        CpuQueue { pool, timeline: Arc::default(), submitted: 0 }
    }

    fn prepare(&self, cmds: &[Cmd]) -> Result<Arc<CpuProgram>> {
        Ok(Arc::new(CpuProgram::new(cmds, self.pool.isa(), self.pool.workers())?))
    }

    fn run(&mut self, program: Arc<CpuProgram>, seat: Option<MeetingSeat>) -> Ticket {
        self.submitted += 1;
        let ticket = self.submitted;
        self.pool.submit(ThreadJob { program, timeline: self.timeline.clone(), ticket, seat });
        Ticket(ticket)
    }
}

impl Queue for CpuQueue {
    fn submit(&mut self, cmds: &[Cmd]) -> Result<Ticket> {
        let program = self.prepare(cmds)?;
        Ok(self.run(program, None))
    }

    fn can_meet(&self) -> bool {
        true
    }

    fn submit_then_meet(&mut self, cmds: &[Cmd], seat: MeetingSeat) -> Result<Ticket> {
        let program = self.prepare(cmds)?;
        Ok(self.run(program, Some(seat)))
    }

    fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<Elapsed> {
        if ticket.0 == 0 || ticket.0 > self.submitted {
            return Err(Error::invalid(format!("ticket {} was not issued by this queue", ticket.0)));
        }
        self.timeline.wait(ticket.0, timeout)
    }

    fn record(&mut self, cmds: &[Cmd]) -> Result<Arc<dyn Graph>> {
        Ok(Arc::new(CpuGraph { program: self.prepare(cmds)?, timeline: self.timeline.clone() }))
    }

    fn replay(&mut self, graph: &Arc<dyn Graph>) -> Result<Ticket> {
        let graph = graph.as_any().downcast_ref::<CpuGraph>();
        let own = graph.filter(|g| Arc::ptr_eq(&g.timeline, &self.timeline));
        let own = own.ok_or_else(|| Error::invalid("the graph was recorded on another queue"))?;
        Ok(self.run(own.program.clone(), None))
    }
}

//! Schedules batches in simulated time.

use crate::clock::SimulatedClock;
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::command::ClockKind;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Elapsed, Error, ErrorKind, Result, Ticket};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Number of tickets whose times are kept.
const KEPT_MAX: usize = 1 << 16;
/// Factor by which the host's work may exceed the simulated time without a warning.
const SLOWER_MAX: f64 = 1.1;
/// Simulated time before which the host is not judged.
const JUDGED_AFTER: Seconds = Seconds(1.0);

/// Resources that a batch uses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchWork {
    /// Time to launch it on an idle queue.
    pub(crate) launch: Seconds,
    /// Time of its commands.
    pub(crate) time: Seconds,
    /// Time that it takes from other batches: all of it, or only memory time for a batch that just moves
    /// bytes.
    pub(crate) takes: Seconds,
    /// Whether it only moves bytes, which engines for copies do while others compute.
    pub(crate) only_moves: bool,
}

/// The work of a device over all its queues. It computes one batch at a time.
#[derive(Debug, Default)]
struct BusyTime {
    /// When all that was submitted is done.
    until: Seconds,
    /// Simulated time of the judged batches, and what the host took on the same clock.
    simulated: Seconds,
    host: Seconds,
    warned: bool,
}

/// A device's schedule.
pub(crate) struct Schedule {
    id: String,
    clock: Arc<dyn SimulatedClock>,
    load: Mutex<BusyTime>,
}

impl Schedule {
    pub(crate) fn new(id: &str, clock: Arc<dyn SimulatedClock>) -> Arc<Self> {
        Arc::new(Schedule { id: id.to_owned(), clock, load: Mutex::default() })
    }

    pub(crate) fn clock(&self) -> &dyn SimulatedClock {
        &*self.clock
    }

    /// Appends a batch that arrived at `arrived` on a queue whose earlier ones end at `before`, and returns
    /// its end. Its launch overlaps with the batches before it. A batch that only moves bytes waits for those
    /// of its own queue; the memory time that it takes is added to the batches after it.
    fn append(&self, arrived: Seconds, work: BatchWork, before: Seconds) -> Seconds {
        let BatchWork { launch, time, takes, only_moves } = work;
        let mut load = self.load.lock().unwrap_or_else(PoisonError::into_inner);
        load.until = (arrived + launch).max(load.until) + takes;
        if only_moves { (arrived + launch).max(before) + time } else { load.until }
    }

    /// Takes memory time from later batches.
    pub(crate) fn lend_memory(&self, time: Seconds) {
        let mut load = self.load.lock().unwrap_or_else(PoisonError::into_inner);
        load.until = load.until.max(self.clock.now()) + time;
    }

    /// Records that the host took `host` of simulated time for a batch of `time`, and warns once if the host
    /// is too slow, because clients then see times other than the profile's.
    fn judge(&self, host: Seconds, time: Seconds) {
        let mut load = self.load.lock().unwrap_or_else(PoisonError::into_inner);
        load.host += host;
        load.simulated += time;
        let slower = load.host / load.simulated.max(JUDGED_AFTER);
        if !load.warned && load.simulated.0 > JUDGED_AFTER.0 && slower > SLOWER_MAX {
            load.warned = true;
            let dilation = (self.clock.dilation() * slower * SLOWER_MAX).ceil();
            tracing::warn!(
                device = %self.id,
                slower,
                "the host is slower than the part that it simulates, so that clients see longer times than \
                 the profile's; a slower clock for all devices (',dilation:{dilation}') keeps them true"
            );
        }
    }
}

/// One queue's batches.
pub(crate) struct SimulatedTimeline {
    schedule: Arc<Schedule>,
    /// Ends and times of the last `KEPT_MAX` batches.
    batches: VecDeque<(Seconds, Seconds)>,
    submitted: u64,
    /// The first batch that failed, with its error.
    failure: Option<(u64, Error)>,
}

impl SimulatedTimeline {
    pub(crate) fn new(schedule: Arc<Schedule>) -> Self {
        SimulatedTimeline { schedule, batches: VecDeque::new(), submitted: 0, failure: None }
    }

    pub(crate) fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Returns why the batch of `ticket`, or an earlier one, failed.
    pub(crate) fn failure(&self, ticket: Ticket) -> Option<&Error> {
        self.failure.as_ref().filter(|(failed, _)| ticket.0 >= *failed).map(|(_, error)| error)
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Adds a batch that arrived at `arrived`; its ticket reports the time of its commands.
    pub(crate) fn push(&mut self, arrived: Seconds, work: BatchWork) -> Ticket {
        let before = self.batches.back().map_or(Seconds::ZERO, |&(end, _)| end);
        let end = self.schedule.append(arrived, work, before);
        self.submitted += 1;
        if self.batches.len() == KEPT_MAX {
            self.batches.pop_front();
        }
        self.batches.push_back((end, work.time));
        Ticket(self.submitted)
    }

    /// Fails the batch of `ticket` and all later ones.
    pub(crate) fn fail(&mut self, ticket: Ticket, error: Error) {
        self.failure.get_or_insert((ticket.0, error));
    }

    /// Records that the host took `host` of simulated time for the batch of `ticket`.
    pub(crate) fn judge(&self, ticket: Ticket, host: Seconds) -> Result<()> {
        let (_, time) = self.batches[self.index(ticket)?];
        self.schedule.judge(host, time);
        Ok(())
    }

    /// # Errors
    /// `Invalid` for a ticket of another queue, or one that is too old.
    pub(crate) fn check(&self, ticket: Ticket) -> Result<()> {
        self.index(ticket).map(drop)
    }

    /// Returns the index of `ticket` among the kept batches.
    fn index(&self, ticket: Ticket) -> Result<usize> {
        if ticket.0 == 0 || ticket.0 > self.submitted {
            return Err(Error::invalid(format!("ticket {} was not issued by this queue", ticket.0)));
        }
        let age = to_usize(self.submitted - ticket.0);
        self.batches.len().checked_sub(age + 1).ok_or_else(|| {
            Error::invalid(format!("ticket {}: only the last {KEPT_MAX} batches are kept", ticket.0))
        })
    }

    /// Waits for the end of `ticket`'s batch, for at most `timeout` of simulated time.
    pub(crate) fn wait(&self, ticket: Ticket, timeout: Duration) -> Result<Elapsed> {
        let (end, time) = self.batches[self.index(ticket)?];
        let clock = self.schedule.clock();
        let deadline = clock.now() + Seconds(timeout.as_secs_f64());
        clock.wait_until(end.min(deadline));
        if end.0 > deadline.0 {
            let message = format!("{}: batch {} is not done after {timeout:?}", self.schedule.id, ticket.0);
            return Err(Error::new(ErrorKind::Timeout, message));
        }
        Ok(Elapsed { time, clock: ClockKind::Device })
    }
}

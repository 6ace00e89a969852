//! KV that comes and goes while a step runs, from and to other instances, and from lower tiers.
//!
//! A device that copies beside a step has a second queue for it, and the worker handles peers' messages while
//! it waits for a step that sends nothing itself. Slots thus return to senders during a long step, not once
//! per step. Each of several devices has such a queue, and messages are handled whenever one of them is
//! waited for, in steps that send too (`sender.rs`).
//!
//! Steps and copies are not ordered against each other, which is right because they touch different pages:
//!
//! - Pages are given out only while the instance machine is idle (`Event::Idle`), which it asserts is never
//!   during a step. Pages released during a step therefore have no new owner before the step ended, and those
//!   of the sequences in it are released after it.
//! - A block from lower tiers is written only to pages of a sequence that waits for it (`Phase::Loading`),
//!   which is in no step, from the end of its cached prefix on.
//! - A piece is written only to pages of a sequence that waits for KV (`Phase::Receiving`), which is in no
//!   step, and only from the end of its cached prefix on, where pages are its own: nobody finds them before
//!   they are published, and it joins a step at the next idle event at the earliest.
//! - A piece is read from tokens that are computed, of lent pages or of a prompt: a step writes others only.
//! - What is evicted is copied to lower tiers before its page is written, and the worker waits for that.
//!
//! The worker waits for each copy before it does anything else, so nothing is copied while a step is
//! recorded, or while its results are read.
//!
//! Only bytes move during a step. What changes a sequence's state (all its KV is here, a prompt was handed or
//! taken over, a verdict, a lost peer) takes effect after it, in the order in which it came: nothing can join
//! a step that runs, and the simulator's instances handle such messages between steps too.

use super::fault;
use super::handoff::SEND_POLL_INTERVAL;
use super::loading::LoadProgress;
use super::messages::KvMessage;
use super::worker::Worker;
use crate::env::yield_now;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Error, ErrorKind, Result, Ticket};
use mixfleet_scheduler::batch::RequestId;
use mixfleet_scheduler::fleet::InstanceId;
use std::collections::VecDeque;
use std::time::Duration;

/// Part of a step's time so far after which peers' messages are looked at again. They take microseconds to
/// look at, and a sender with a few slots uses them many times per step.
const LOOKS_PER_WAIT: u32 = 64;

/// The time after which peers' messages are looked at again, where was `waited` so long for a step.
pub(super) fn next_look(waited: Duration) -> Duration {
    SEND_POLL_INTERVAL.max(waited / LOOKS_PER_WAIT)
}

/// What is left to do after a step.
enum AfterStep {
    /// KV of this sequence came.
    Settle(RequestId),
    /// A message that came.
    Handle(InstanceId, KvMessage),
}

/// What came during a step and takes effect after it, in its order.
#[derive(Default)]
pub(super) struct Postponed {
    waiting: VecDeque<AfterStep>,
    /// Whether a message is being handled during a step.
    active: bool,
}

impl Postponed {
    /// Whether settling this sequence is postponed.
    pub(super) fn takes(&mut self, request: RequestId) -> bool {
        if self.active {
            self.settle_later(request);
        }
        self.active
    }

    /// Forgets everything.
    pub(super) fn clear(&mut self) {
        *self = Postponed::default();
    }

    /// Leaves for after the step what follows on KV that came.
    pub(super) fn settle_later(&mut self, request: RequestId) {
        self.waiting.push_back(AfterStep::Settle(request));
    }

    /// Leaves a message for after the step.
    pub(super) fn handle_later(&mut self, peer: InstanceId, word: KvMessage) {
        self.waiting.push_back(AfterStep::Handle(peer, word));
    }

    /// Whether a message only moves bytes. What comes from a peer after it was lost waits too.
    pub(super) fn moves_only(&self, peer: InstanceId, word: &KvMessage) -> bool {
        let lost = |after: &AfterStep| matches!(after, AfterStep::Handle(it, KvMessage::Down) if *it == peer);
        let moves = match word {
            KvMessage::Landed(_)
            | KvMessage::Credit { .. }
            | KvMessage::Lent { .. }
            | KvMessage::Lost { .. } => true,
            KvMessage::HandedOver { .. }
            | KvMessage::Verdict { .. }
            | KvMessage::TakenOver { .. }
            | KvMessage::Down => false,
        };
        moves && !self.waiting.iter().any(lost)
    }
}

impl Worker {
    /// Waits for a step that sends nothing. KV of other sequences comes and goes meanwhile.
    pub(super) async fn await_step(&mut self, ticket: Ticket) -> Result<()> {
        let (mut waited, mut last_load) = (Duration::ZERO, Seconds::ZERO);
        let mut progress = LoadProgress::Moved;
        loop {
            let left = self.step_timeout.saturating_sub(waited);
            let loads = !self.copies.is_empty() && self.has_loads();
            let timeout = match self.kv_moves() || loads {
                false => left,
                true if (loads && progress == LoadProgress::Moved) || !self.words.is_empty() => {
                    Duration::ZERO
                }
                true => next_look(waited).min(left),
            };
            match self.queue.wait(ticket, timeout) {
                Ok(_) => {
                    // the step ended during the last copy, on average half-way through
                    self.waited += last_load * 0.5;
                    return Ok(());
                }
                Err(error) if error.kind == ErrorKind::Timeout && timeout < left => waited += timeout,
                Err(error) => return Err(error),
            }
            // One message at a time, so that a step that ended waits for one at most.
            if let Ok((peer, word)) = self.words.try_recv() {
                self.handle_beside(peer, word).map_err(of_instance)?;
            }
            if loads {
                let began = self.env.now();
                progress = self.load_block(Duration::ZERO).map_err(of_instance)?;
                last_load = (self.env.now() - began).max(Seconds::ZERO);
                waited += Duration::from_secs_f64(last_load.0);
            }
            self.settle_sends(Duration::ZERO).and_then(|()| self.send_waiting()).map_err(of_instance)?;
            yield_now().await;
        }
    }

    /// Whether KV may come or go beside the running step.
    fn kv_moves(&self) -> bool {
        !self.copies.is_empty() && (!self.sender.outgoing.is_empty() || !self.incoming.is_empty())
    }

    /// Handles a message of a peer during a step as far as bytes are concerned.
    fn handle_beside(&mut self, peer: InstanceId, word: KvMessage) -> Result<()> {
        if !self.postponed.moves_only(peer, &word) {
            self.postponed.handle_later(peer, word);
            return Ok(());
        }
        self.postponed.active = true;
        let handled = self.handle_kv_message(peer, word);
        self.postponed.active = false;
        handled
    }

    /// Does after a step what its messages left to do.
    pub(super) fn catch_up(&mut self) -> Result<()> {
        while let Some(after) = self.postponed.waiting.pop_front() {
            match after {
                AfterStep::Settle(request) => self.settle_incoming(request)?,
                AfterStep::Handle(peer, word) => self.handle_kv_message(peer, word)?,
            }
        }
        Ok(())
    }
}

/// An error that ends the instance, and not just the step during which it came up.
pub(super) fn of_instance(error: Error) -> Error {
    match fault::concerns_step_only(&error) {
        true => Error::new(ErrorKind::Other, error.detail),
        false => error,
    }
}

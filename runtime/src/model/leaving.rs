//! KV that leaves the members of an instance while they run a step.

use mixfleet_hal::{Cmd, ErrorKind, Queue, Result, Ticket};
use std::time::Duration;

/// KV that leaves layer by layer while members run a step. Members, the batches of the step and the layers of
/// each member are numbered from 0.
pub trait LayerKv {
    /// Whether KV of a batch leaves.
    fn leaves(&self, batch: usize) -> bool;

    /// Returns the commands that gather the KV of a layer on a member, to be run behind the commands that
    /// write it. They may overwrite the gathered KV of an earlier layer that `leave` has reported.
    ///
    /// # Errors
    /// Errors of the member's device.
    fn gather(&mut self, member: usize, batch: usize, layer: usize) -> Result<Vec<Cmd>>;

    /// Begins to send the gathered KV of a layer, once all members that run the layer have done so.
    /// `member` is the first of these members.
    ///
    /// # Errors
    /// Errors of the members' devices.
    fn leave(&mut self, member: usize, batch: usize, layer: usize) -> Result<()>;

    /// Makes progress while members run, after a wait of `waited`, without blocking; returns the time after
    /// which there may be more to do, if any.
    ///
    /// # Errors
    /// Errors of the members' devices.
    fn go_on(&mut self, waited: Duration) -> Result<Option<Duration>>;
}

/// Waits until `ticket` is done, for `timeout` at most; KV leaves meanwhile.
pub(super) fn wait_beside(
    queue: &mut dyn Queue,
    ticket: Ticket,
    timeout: Duration,
    kv: &mut dyn LayerKv,
) -> Result<()> {
    let mut waited = Duration::ZERO;
    loop {
        let left = timeout.saturating_sub(waited);
        let patience = kv.go_on(waited)?.map_or(left, |soon| soon.min(left));
        match queue.wait(ticket, patience) {
            Err(error) if error.kind == ErrorKind::Timeout && patience < left => waited += patience,
            ended => return ended.map(drop),
        }
    }
}

/// No KV leaves.
pub struct KvStays;

impl LayerKv for KvStays {
    fn leaves(&self, _: usize) -> bool {
        false
    }

    fn gather(&mut self, _: usize, _: usize, _: usize) -> Result<Vec<Cmd>> {
        Ok(Vec::new())
    }

    fn leave(&mut self, _: usize, _: usize, _: usize) -> Result<()> {
        Ok(())
    }

    fn go_on(&mut self, _: Duration) -> Result<Option<Duration>> {
        Ok(None)
    }
}

//! A device that reports the time its work would take on a part of round numbers, independently of real time,
//! for tests that need an undisturbed clock.

use mixfleet_hal::command::ClockKind;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Cmd, Device, Elapsed, Error, Graph, OpSig, Queue, Result, Ticket};
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Rate of the simulated part, so slow that few runs make a sample. A batch has no fixed cost, so one cut
/// short by a fault takes no longer.
const FLOP_PER_S: f64 = 1e7;
const BYTES_PER_S: f64 = 1e6;

/// A device with a computed clock.
pub struct Metered(
    /// The device that computes.
    pub Arc<dyn Device>,
);

struct MeteredQueue {
    inner: Box<dyn Queue>,
    times: BTreeMap<Ticket, f64>,
}

struct MeteredRecording(Vec<Cmd>);

impl Graph for MeteredRecording {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn memory_bytes(&self) -> u64 {
        0
    }
}

impl Device for Metered {
    mixfleet_hal::forward_device!(self => self.0; info, limits, support, alloc, import, reaches, write, read, pin, memory_free, health);

    fn queue(&self) -> Result<Box<dyn Queue>> {
        Ok(Box::new(MeteredQueue { inner: self.0.queue()?, times: BTreeMap::new() }))
    }
}

fn seconds(sig: &OpSig) -> f64 {
    (sig.flops() / FLOP_PER_S).max(sig.bytes() / BYTES_PER_S)
}

impl Queue for MeteredQueue {
    fn submit(&mut self, cmds: &[Cmd]) -> Result<Ticket> {
        let ticket = self.inner.submit(cmds)?;
        self.times.insert(ticket, cmds.iter().map(|cmd| seconds(cmd.sig())).sum());
        Ok(ticket)
    }
    fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<Elapsed> {
        self.inner.wait(ticket, timeout)?;
        let time = self.times.get(&ticket);
        let time = time.ok_or_else(|| Error::invalid(format!("{ticket:?} is not of this queue")))?;
        Ok(Elapsed { time: Seconds(*time), clock: ClockKind::Device })
    }
    fn record(&mut self, cmds: &[Cmd]) -> Result<Arc<dyn Graph>> {
        Ok(Arc::new(MeteredRecording(cmds.to_vec())))
    }
    fn replay(&mut self, graph: &Arc<dyn Graph>) -> Result<Ticket> {
        let recorded = graph.as_any().downcast_ref::<MeteredRecording>();
        let recorded = recorded.ok_or_else(|| Error::invalid("the graph belongs to another device"))?;
        self.submit(&recorded.0)
    }
}

//! The queue of both kinds of simulated device: one type does the work, and the profile determines the time.

use crate::costs::CostCache;
use crate::kernels;
use crate::memory::{SharedStore, lock};
use crate::timeline::{BatchWork, Schedule, SimulatedTimeline};
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Cmd, Elapsed, Error, Graph, OpSig, Queue, Result, Ticket};
use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

/// Executes the batches of a queue.
pub(crate) trait BatchRunner: Send {
    /// Executes a batch, or starts to. An error fails its ticket. Tickets count from 1, without gaps until
    /// the first failure.
    fn start(&mut self, cmds: &[Cmd]) -> Result<()>;

    /// Blocks until the batch of `ticket` is done or `timeout` of real time has passed, and returns the real
    /// time that it took, if `start` did not do it all.
    fn finish(&mut self, ticket: Ticket, timeout: Duration) -> Result<Option<Seconds>>;
}

/// Computes digests before `submit` returns, so a read that does not wait for a ticket sees results early.
pub(crate) struct Digests(pub(crate) SharedStore);

impl BatchRunner for Digests {
    fn start(&mut self, cmds: &[Cmd]) -> Result<()> {
        let mut store = lock(&self.0);
        cmds.iter().try_for_each(|cmd| kernels::run(&mut store, cmd))
    }

    fn finish(&mut self, _: Ticket, _: Duration) -> Result<Option<Seconds>> {
        Ok(None)
    }
}

/// Whether an operation only moves bytes.
fn moves(sig: &OpSig) -> bool {
    matches!(sig, OpSig::Copy { .. } | OpSig::KvGather { .. } | OpSig::KvScatter { .. })
}

/// A queue on simulated time.
pub(crate) struct SimQueue<W> {
    work: W,
    costs: Arc<CostCache>,
    timeline: SimulatedTimeline,
    /// Identifies the queue by its address.
    own: Arc<Own>,
}

/// Not zero-sized, since addresses of such values may coincide.
struct Own(#[expect(dead_code, reason = "gives it an address")] u8);

/// A batch with the queue that it belongs to.
struct SimulatedRecording {
    cmds: Vec<Cmd>,
    queue: Arc<Own>,
}

impl Graph for SimulatedRecording {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn memory_bytes(&self) -> u64 {
        0
    }
}

impl<W: BatchRunner> SimQueue<W> {
    pub(crate) fn new(work: W, costs: Arc<CostCache>, schedule: Arc<Schedule>) -> Self {
        SimQueue { work, costs, timeline: SimulatedTimeline::new(schedule), own: Arc::new(Own(0)) }
    }
}

impl<W: BatchRunner> Queue for SimQueue<W> {
    fn submit(&mut self, cmds: &[Cmd]) -> Result<Ticket> {
        let arrived = self.timeline.schedule().clock().now();
        if self.timeline.has_failed() {
            let (launch, time, takes) = (Seconds::ZERO, Seconds::ZERO, Seconds::ZERO);
            let none = BatchWork { launch, time, takes, only_moves: false };
            return Ok(self.timeline.push(arrived, none));
        }
        let result = self.work.start(cmds);
        let (launch, time) = (self.costs.launch(cmds), self.costs.work(cmds));
        let only_moves = cmds.iter().all(|cmd| moves(cmd.sig()));
        let takes = if only_moves { self.costs.memory(cmds) } else { time };
        let ticket = self.timeline.push(arrived, BatchWork { launch, time, takes, only_moves });
        match result {
            Ok(()) => self.timeline.judge(ticket, self.timeline.schedule().clock().now() - arrived)?,
            Err(error) => self.timeline.fail(ticket, error),
        }
        Ok(ticket)
    }

    fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<Elapsed> {
        self.timeline.check(ticket)?;
        if let Some(error) = self.timeline.failure(ticket) {
            return Err(error.clone());
        }
        let clock = self.timeline.schedule().clock();
        let (start, dilation) = (clock.now(), clock.dilation());
        let real = Duration::try_from_secs_f64(timeout.as_secs_f64() * dilation).unwrap_or(Duration::MAX);
        if let Some(host) = self.work.finish(ticket, real)? {
            self.timeline.judge(ticket, host / dilation)?;
        }
        let spent = self.timeline.schedule().clock().now() - start;
        let spent = Duration::try_from_secs_f64(spent.0).unwrap_or_default();
        self.timeline.wait(ticket, timeout.saturating_sub(spent))
    }

    fn record(&mut self, cmds: &[Cmd]) -> Result<Arc<dyn Graph>> {
        Ok(Arc::new(SimulatedRecording { cmds: cmds.to_vec(), queue: self.own.clone() }))
    }

    fn replay(&mut self, graph: &Arc<dyn Graph>) -> Result<Ticket> {
        let graph = graph.as_any().downcast_ref::<SimulatedRecording>();
        let own = graph.filter(|graph| Arc::ptr_eq(&graph.queue, &self.own));
        let own = own.ok_or_else(|| Error::invalid("the graph was recorded on another queue"))?;
        self.submit(&own.cmds)
    }
}

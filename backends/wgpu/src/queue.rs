//! An in-order queue: prepares bind groups, encodes a batch, submits it, and waits by polling.
//!
//! All queues of a device share wgpu's single queue, which keeps the order of submission and inserts barriers
//! between dependent dispatches.

use crate::bindings::Bound;
use crate::counts::count;
use crate::device::WgpuDeviceState;
use crate::memory::WgpuMemory;
use crate::pipelines::CompiledPipeline;
use crate::plan::{MemoryWindow, OperandLocation, Planner, WgpuStep};
use crate::readback::{Readback, Readbacks};
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::command::ClockKind;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Buffer as _, Cmd, Elapsed, Error, ErrorKind, Graph, Queue, Result, Slice, Ticket};
use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use wgpu::{
    BindGroup, Buffer, CommandEncoder, CommandEncoderDescriptor, ComputePassDescriptor, PollError,
    PollStatus, PollType, SubmissionIndex,
};

/// Number of batches whose times are kept for a late `wait`.
const BATCHES_KEPT: usize = 4096;
/// Number of batches in flight beyond which `submit` checks for completed ones, to reuse their timestamps.
const BATCHES_UNCHECKED: usize = 32;
/// Number of batches whose timestamps stay on the device once they are over, for a wait for an earlier one.
const BATCHES_TIMED: usize = 64;
/// Maximum single wait, since wgpu counts nanoseconds in 64 bits.
const WAIT_MAX: Duration = Duration::from_secs(1 << 24);

/// A submitted batch.
enum WgpuBatch {
    /// Batches in flight.
    Running {
        index: SubmissionIndex,
        since: Instant,
        over: Arc<AtomicBool>,
        /// Number of the change of memory that it is.
        change: u64,
        readback: Option<Readback>,
    },
    /// An empty batch, which ends with the one before it.
    Empty(Option<SubmissionIndex>),
    Done(Elapsed),
}

/// A unit of work with everything that encoding needs.
enum EncoderStep {
    Dispatch { pipeline: Arc<CompiledPipeline>, group: BindGroup, words: Vec<u32>, grid: (u32, u32) },
    Copy { from: (Buffer, u64), to: (Buffer, u64), bytes: u64 },
}

/// A recorded batch.
struct WgpuRecording {
    steps: Vec<EncoderStep>,
}

impl Graph for WgpuRecording {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn memory_bytes(&self) -> u64 {
        0
    }
}

/// A queue of one device.
pub(crate) struct WgpuQueue {
    shared: Arc<WgpuDeviceState>,
    readbacks: Readbacks,
    /// Copied inputs and intermediate results, which all commands share because they run in order.
    aside: Option<WgpuMemory>,
    scratch: Option<WgpuMemory>,
    batches: VecDeque<WgpuBatch>,
    /// Ticket of the first batch in `batches`.
    first: u64,
    last: Option<SubmissionIndex>,
    /// The first failure, as the ticket and its error.
    failed: Option<(u64, Error)>,
}

impl WgpuQueue {
    pub(crate) fn new(shared: Arc<WgpuDeviceState>) -> WgpuQueue {
        WgpuQueue {
            readbacks: Readbacks::new(shared.tick_ns),
            shared,
            aside: None,
            scratch: None,
            batches: VecDeque::new(),
            first: 0,
            last: None,
            failed: None,
        }
    }

    /// Checks and prepares a batch; nothing is submitted if any of this fails.
    fn resolve(&mut self, cmds: &[Cmd]) -> Result<Vec<EncoderStep>> {
        for slice in cmds.iter().flat_map(Cmd::args) {
            WgpuMemory::of(slice)?;
        }
        let mut planner = Planner::new(self.shared.demands);
        cmds.iter().try_for_each(|cmd| planner.add(cmd))?;
        let link = &self.shared.link;
        count(&link.counters.planned, cmds.len() as u64);
        for (memory, bytes) in
            [(&mut self.aside, planner.aside_bytes), (&mut self.scratch, planner.scratch_bytes)]
        {
            if bytes > 0 && memory.as_ref().is_none_or(|memory| memory.size_bytes() < bytes + 32) {
                *memory = None;
                *memory = Some(WgpuMemory::new(link, (bytes + 32).next_multiple_of(1 << 16))?);
            }
        }
        let mut pipelines = Vec::with_capacity(planner.works.len());
        for work in &planner.works {
            if let WgpuStep::Dispatch { kernel, bindings, .. } = work {
                let numbers: Vec<u32> = bindings.iter().map(|(number, _)| *number).collect();
                pipelines.push(self.shared.pipelines.get(link, kernel, &numbers)?);
            }
        }
        let mut pipelines = pipelines.into_iter();
        let prepared = link.guard("preparing commands", || {
            planner.works.iter().map(|work| self.step(work, &mut pipelines)).collect::<Result<_>>()
        });
        // one that could not be made is kept as well
        prepared.inspect_err(|_| link.groups.clear())?
    }

    fn step(
        &self,
        work: &WgpuStep,
        pipelines: &mut impl Iterator<Item = Arc<CompiledPipeline>>,
    ) -> Result<EncoderStep> {
        match work {
            WgpuStep::Copy { from, to } => Ok(EncoderStep::Copy {
                from: (self.memory(from)?.buffer().clone(), from.offset),
                to: (self.memory(to)?.buffer().clone(), to.offset),
                bytes: to.bytes,
            }),
            WgpuStep::Dispatch { bindings, words, grid, .. } => {
                let pipeline = pipelines.next().ok_or_else(|| bug("a dispatch without a pipeline"))?;
                let bound = bindings.iter().map(|(number, window)| {
                    let (memory, offset, bytes) = (self.memory(window)?, window.offset, window.bytes);
                    let (memory, buffer) = (memory.number(), memory.buffer());
                    Ok(Bound { number: *number, memory, buffer, offset, bytes })
                });
                let bound: Vec<Bound<'_>> = bound.collect::<Result<_>>()?;
                let link = &self.shared.link;
                let group =
                    link.groups.get(&link.device, &link.counters, pipeline.number, &pipeline.layout, &bound);
                Ok(EncoderStep::Dispatch { pipeline, group, words: words.clone(), grid: *grid })
            }
        }
    }

    fn memory<'a>(&'a self, window: &'a MemoryWindow) -> Result<&'a WgpuMemory> {
        match &window.place {
            OperandLocation::Buffer(slice) => WgpuMemory::of(slice),
            OperandLocation::Aside => self.aside.as_ref().ok_or_else(|| bug("nothing to copy aside to")),
            OperandLocation::Scratch => self.scratch.as_ref().ok_or_else(|| bug("no scratch memory")),
        }
    }

    /// Encodes and submits a batch, whose `results` are read next; a failure here fails the queue.
    fn run(&mut self, steps: &[EncoderStep], results: &[Slice]) -> Result<Ticket> {
        if let Some((_, error)) = &self.failed {
            return Err(error.clone());
        }
        self.shared.link.faults.alive()?;
        let ticket = self.first + self.batches.len() as u64;
        let batch = if steps.is_empty() {
            Ok(WgpuBatch::Empty(self.last.clone()))
        } else {
            self.hand_over(steps, results)
        };
        match batch {
            Ok(batch) => self.batches.push_back(batch),
            Err(error) => {
                self.failed = Some((ticket, error.clone()));
                return Err(error);
            }
        }
        self.tidy()?;
        Ok(Ticket(ticket))
    }

    fn hand_over(&mut self, steps: &[EncoderStep], results: &[Slice]) -> Result<WgpuBatch> {
        let shared = self.shared.clone();
        let link = &shared.link;
        let readback = self.readbacks.take(link, results)?;
        let change = link.change();
        let over = Arc::new(AtomicBool::new(false));
        let flag = over.clone();
        let since = Instant::now();
        let dispatches =
            steps.iter().filter(|step| matches!(step, EncoderStep::Dispatch { .. })).count() as u64;
        count(&link.counters.submissions, 1);
        count(&link.counters.dispatches, dispatches);
        count(&link.counters.copies, steps.len() as u64 - dispatches);
        let index = link.guard("submitting", || {
            let mut encoder = link.device.create_command_encoder(&CommandEncoderDescriptor::default());
            if let Some(readback) = &readback {
                readback.start(&mut encoder);
            }
            encode(&mut encoder, steps);
            if let Some(readback) = &readback {
                readback.stop(&mut encoder);
            }
            let index = link.queue.submit([encoder.finish()]);
            link.queue.on_submitted_work_done(move || flag.store(true, Ordering::Release));
            index
        })?;
        self.last = Some(index.clone());
        Ok(WgpuBatch::Running { index, since, over, change, readback })
    }

    /// Notes completed batches, and forgets the oldest.
    fn tidy(&mut self) -> Result<()> {
        let running = |batch: &&WgpuBatch| matches!(batch, WgpuBatch::Running { over, .. } if !over.load(Ordering::Acquire));
        if self.batches.iter().rev().take_while(running).count() >= BATCHES_UNCHECKED {
            let link = &self.shared.link;
            // an error of the poll shows up in the next wait
            let _ = link.guard("polling", || link.device.poll(PollType::Poll))?;
        }
        for at in 0..self.batches.len().saturating_sub(BATCHES_TIMED) {
            match &self.batches[at] {
                WgpuBatch::Running { over, .. } if over.load(Ordering::Acquire) => self.settle(at)?,
                WgpuBatch::Running { .. } => break,
                _ => {}
            }
        }
        while self.batches.len() > BATCHES_KEPT && !matches!(self.batches[0], WgpuBatch::Running { .. }) {
            self.batches.pop_front();
            self.first += 1;
        }
        Ok(())
    }

    /// Collects the time and results of a completed batch.
    fn settle(&mut self, at: usize) -> Result<()> {
        let Some(batch) = self.batches.get_mut(at) else { return Ok(()) };
        let WgpuBatch::Running { since, readback, change, .. } = batch else { return Ok(()) };
        let host = Elapsed { time: Seconds(since.elapsed().as_secs_f64()), clock: ClockKind::Host };
        let link = &self.shared.link;
        let told = match readback.take() {
            Some(readback) => {
                let (time, results) = self.readbacks.read(link, readback)?;
                link.keep(*change, results);
                time
            }
            None => None,
        };
        *batch = WgpuBatch::Done(told.map_or(host, |time| Elapsed { time, clock: ClockKind::Device }));
        Ok(())
    }

    /// Waits for a submission.
    fn finish(&mut self, ticket: Ticket, index: &SubmissionIndex, timeout: Duration) -> Result<()> {
        let link = &self.shared.link;
        let start = Instant::now();
        loop {
            let left = timeout.saturating_sub(start.elapsed());
            let poll =
                PollType::Wait { submission_index: Some(index.clone()), timeout: Some(left.min(WAIT_MAX)) };
            let error = match link.guard("waiting", || link.device.poll(poll)) {
                Ok(Ok(PollStatus::QueueEmpty | PollStatus::WaitSucceeded)) => return Ok(()),
                Ok(Ok(PollStatus::Poll) | Err(PollError::Timeout)) if start.elapsed() < timeout => continue,
                Ok(Ok(PollStatus::Poll) | Err(PollError::Timeout)) => {
                    let message = format!("wgpu: {ticket:?} is not done after {timeout:?}");
                    return Err(Error::new(ErrorKind::Timeout, message));
                }
                Ok(Err(error)) => Error::new(ErrorKind::Other, format!("wgpu: waiting: {error}")),
                Err(error) => error,
            };
            self.failed.get_or_insert((ticket.0, error.clone()));
            return Err(error);
        }
    }
}

fn bug(what: &str) -> Error {
    Error::new(ErrorKind::Other, format!("wgpu: {what}: a bug of this backend"))
}

fn encode(encoder: &mut CommandEncoder, steps: &[EncoderStep]) {
    let mut steps = steps.iter().peekable();
    while let Some(step) = steps.peek() {
        if let EncoderStep::Copy { from, to, bytes } = step {
            encoder.copy_buffer_to_buffer(&from.0, from.1, &to.0, to.1, *bytes);
            steps.next();
            continue;
        }
        let mut pass = encoder.begin_compute_pass(&ComputePassDescriptor::default());
        while let Some(EncoderStep::Dispatch { pipeline, group, words, grid }) = steps.peek() {
            pass.set_pipeline(&pipeline.pipeline);
            pass.set_bind_group(0, group, &[]);
            pass.set_immediates(0, bytemuck::cast_slice(words));
            pass.dispatch_workgroups(grid.0, grid.1, 1);
            steps.next();
        }
    }
}

impl Queue for WgpuQueue {
    fn submit(&mut self, cmds: &[Cmd]) -> Result<Ticket> {
        let steps = self.resolve(cmds)?;
        self.run(&steps, &[])
    }

    fn submit_for(&mut self, cmds: &[Cmd], results: &[Slice]) -> Result<Ticket> {
        let steps = self.resolve(cmds)?;
        self.run(&steps, results)
    }

    fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<Elapsed> {
        if let Some((from, error)) = &self.failed
            && ticket.0 >= *from
        {
            return Err(error.clone());
        }
        self.shared.link.faults.alive()?;
        let at = ticket.0.checked_sub(self.first).map(|at| to_usize(at));
        let Some((at, batch)) = at.and_then(|at| Some((at, self.batches.get_mut(at)?))) else {
            let message = format!("wgpu: {ticket:?} is not one of this queue's last {BATCHES_KEPT}");
            return Err(Error::invalid(message));
        };
        match batch {
            WgpuBatch::Done(elapsed) => return Ok(*elapsed),
            WgpuBatch::Empty(before) => {
                if let Some(before) = before.clone() {
                    self.finish(ticket, &before, timeout)?;
                }
                return Ok(Elapsed { time: Seconds::ZERO, clock: ClockKind::Host });
            }
            WgpuBatch::Running { index, readback, .. } => {
                let (index, link) = (index.clone(), &self.shared.link);
                readback
                    .as_mut()
                    .map(|readback| link.guard("mapping", || readback.fetch(link)))
                    .transpose()?;
                self.finish(ticket, &index, timeout)?;
            }
        }
        self.settle(at)?;
        match self.batches.get(at) {
            Some(WgpuBatch::Done(elapsed)) => Ok(*elapsed),
            _ => Err(bug("a batch that is over has no time")),
        }
    }

    fn record(&mut self, cmds: &[Cmd]) -> Result<Arc<dyn Graph>> {
        Ok(Arc::new(WgpuRecording { steps: self.resolve(cmds)? }))
    }

    fn replay(&mut self, graph: &Arc<dyn Graph>) -> Result<Ticket> {
        let recorded = graph.as_any().downcast_ref::<WgpuRecording>();
        let recorded = recorded.ok_or_else(|| Error::invalid("wgpu: the graph belongs to another device"))?;
        self.run(&recorded.steps, &[])
    }
}

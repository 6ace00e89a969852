//! An in-order queue: prepares bind groups, encodes a batch, submits it, and waits by polling.
//!
//! All queues of a device share wgpu's single queue, which keeps the order of submission and inserts barriers
//! between dependent dispatches.

use crate::clock::{Clock, Clocks};
use crate::device::Shared;
use crate::memory::Memory;
use crate::pipelines::Pipeline;
use crate::plan::{OperandLocation, Planner, Window, Work};
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::command::ClockKind;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Cmd, Elapsed, Error, ErrorKind, Graph, Queue, Result, Ticket};
use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use wgpu::{
    BindGroup, BindGroupDescriptor, BindGroupEntry, BindingResource, Buffer, BufferBinding, BufferSize,
    BufferUsages, CommandEncoder, CommandEncoderDescriptor, ComputePassDescriptor, PollError, PollStatus,
    PollType, SubmissionIndex,
};

/// Number of batches whose times are kept for a late `wait`.
const BATCHES_KEPT: usize = 4096;
/// Number of batches in flight beyond which `submit` checks for completed ones, to reuse their timestamps.
const BATCHES_UNCHECKED: usize = 32;
/// Maximum single wait, since wgpu counts nanoseconds in 64 bits.
const WAIT_MAX: Duration = Duration::from_secs(1 << 24);

/// A submitted batch.
enum Batch {
    /// Under way.
    Running {
        index: SubmissionIndex,
        since: Instant,
        over: Arc<AtomicBool>,
        clock: Option<Clock>,
    },
    /// An empty batch, which ends with the one before it.
    Empty(Option<SubmissionIndex>),
    Done(Elapsed),
}

/// A unit of work with everything that encoding needs.
enum EncoderStep {
    Dispatch { pipeline: Arc<Pipeline>, group: BindGroup, words: Vec<u32>, grid: (u32, u32) },
    Copy { from: (Buffer, u64), to: (Buffer, u64), bytes: u64 },
}

/// A recorded batch.
struct Recorded {
    steps: Vec<EncoderStep>,
}

impl Graph for Recorded {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn memory_bytes(&self) -> u64 {
        0
    }
}

/// A queue of one device.
pub(crate) struct WgpuQueue {
    shared: Arc<Shared>,
    clocks: Clocks,
    /// Copied inputs and intermediate results, which all commands share because they run in order.
    aside: Option<Buffer>,
    scratch: Option<Buffer>,
    batches: VecDeque<Batch>,
    /// Ticket of the first batch in `batches`.
    first: u64,
    last: Option<SubmissionIndex>,
    /// The first failure, as the ticket and its error.
    failed: Option<(u64, Error)>,
}

impl WgpuQueue {
    pub(crate) fn new(shared: Arc<Shared>) -> WgpuQueue {
        WgpuQueue {
            clocks: Clocks::new(shared.tick_ns),
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
            Memory::of(slice)?;
        }
        let mut planner = Planner::new(self.shared.demands);
        cmds.iter().try_for_each(|cmd| planner.add(cmd))?;
        let link = &self.shared.link;
        for (memory, bytes) in
            [(&mut self.aside, planner.aside_bytes), (&mut self.scratch, planner.scratch_bytes)]
        {
            if bytes > 0 && memory.as_ref().is_none_or(|memory| memory.size() < bytes + 32) {
                let usage = BufferUsages::STORAGE | BufferUsages::COPY_DST | BufferUsages::COPY_SRC;
                let size = (bytes + 32).next_multiple_of(1 << 16);
                *memory = None;
                *memory = Some(link.buffer("scratch memory", size, usage)?);
            }
        }
        let mut pipelines = Vec::with_capacity(planner.works.len());
        for work in &planner.works {
            if let Work::Dispatch { kernel, bindings, .. } = work {
                let numbers: Vec<u32> = bindings.iter().map(|(number, _)| *number).collect();
                pipelines.push(self.shared.pipelines.get(link, kernel, &numbers)?);
            }
        }
        let mut pipelines = pipelines.into_iter();
        link.guard("preparing commands", || {
            planner.works.iter().map(|work| self.step(work, &mut pipelines)).collect::<Result<_>>()
        })?
    }

    fn step(&self, work: &Work, pipelines: &mut impl Iterator<Item = Arc<Pipeline>>) -> Result<EncoderStep> {
        match work {
            Work::Copy { from, to } => Ok(EncoderStep::Copy {
                from: (self.buffer(from)?.clone(), from.offset),
                to: (self.buffer(to)?.clone(), to.offset),
                bytes: to.bytes,
            }),
            Work::Dispatch { bindings, words, grid, .. } => {
                let pipeline = pipelines.next().ok_or_else(|| bug("a dispatch without a pipeline"))?;
                let mut entries = Vec::with_capacity(bindings.len());
                for (binding, window) in bindings {
                    let buffer = BufferBinding {
                        buffer: self.buffer(window)?,
                        offset: window.offset,
                        size: BufferSize::new(window.bytes),
                    };
                    entries.push(BindGroupEntry {
                        binding: *binding,
                        resource: BindingResource::Buffer(buffer),
                    });
                }
                let descriptor =
                    BindGroupDescriptor { label: None, layout: &pipeline.layout, entries: &entries };
                let group = self.shared.link.device.create_bind_group(&descriptor);
                Ok(EncoderStep::Dispatch { pipeline, group, words: words.clone(), grid: *grid })
            }
        }
    }

    fn buffer<'a>(&'a self, window: &'a Window) -> Result<&'a Buffer> {
        match &window.place {
            OperandLocation::Buffer(slice) => Ok(Memory::of(slice)?.buffer()),
            OperandLocation::Aside => self.aside.as_ref().ok_or_else(|| bug("nothing to copy aside to")),
            OperandLocation::Scratch => self.scratch.as_ref().ok_or_else(|| bug("no scratch memory")),
        }
    }

    /// Encodes and submits a batch; a failure here fails the queue.
    fn run(&mut self, steps: &[EncoderStep]) -> Result<Ticket> {
        if let Some((_, error)) = &self.failed {
            return Err(error.clone());
        }
        self.shared.link.faults.alive()?;
        let ticket = self.first + self.batches.len() as u64;
        let batch =
            if steps.is_empty() { Ok(Batch::Empty(self.last.clone())) } else { self.hand_over(steps) };
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

    fn hand_over(&mut self, steps: &[EncoderStep]) -> Result<Batch> {
        let shared = self.shared.clone();
        let link = &shared.link;
        let clock = self.clocks.take(link)?;
        let over = Arc::new(AtomicBool::new(false));
        let flag = over.clone();
        let since = Instant::now();
        let index = link.guard("submitting", || {
            let mut encoder = link.device.create_command_encoder(&CommandEncoderDescriptor::default());
            if let Some(clock) = &clock {
                clock.start(&mut encoder);
            }
            encode(&mut encoder, steps);
            if let Some(clock) = &clock {
                clock.stop(&mut encoder);
            }
            let index = link.queue.submit([encoder.finish()]);
            if let Some(clock) = &clock {
                clock.fetch();
            }
            link.queue.on_submitted_work_done(move || flag.store(true, Ordering::Release));
            index
        })?;
        self.last = Some(index.clone());
        Ok(Batch::Running { index, since, over, clock })
    }

    /// Notes completed batches, and forgets the oldest.
    fn tidy(&mut self) -> Result<()> {
        let running = |batch: &&Batch| matches!(batch, Batch::Running { .. });
        if self.batches.iter().rev().take_while(running).count() >= BATCHES_UNCHECKED {
            let link = &self.shared.link;
            // an error of the poll shows up in the next wait
            let _ = link.guard("polling", || link.device.poll(PollType::Poll))?;
        }
        for at in 0..self.batches.len() {
            match &self.batches[at] {
                Batch::Running { over, .. } if over.load(Ordering::Acquire) => self.settle(at)?,
                Batch::Running { .. } => break,
                _ => {}
            }
        }
        while self.batches.len() > BATCHES_KEPT && !matches!(self.batches[0], Batch::Running { .. }) {
            self.batches.pop_front();
            self.first += 1;
        }
        Ok(())
    }

    /// Collects the time of a completed batch.
    fn settle(&mut self, at: usize) -> Result<()> {
        let Some(batch) = self.batches.get_mut(at) else { return Ok(()) };
        let Batch::Running { since, clock, .. } = batch else { return Ok(()) };
        let host = Elapsed { time: Seconds(since.elapsed().as_secs_f64()), clock: ClockKind::Host };
        let told =
            clock.take().map(|clock| self.clocks.read(&self.shared.link, clock)).transpose()?.flatten();
        *batch = Batch::Done(told.map_or(host, |time| Elapsed { time, clock: ClockKind::Device }));
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
        self.run(&steps)
    }

    fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<Elapsed> {
        if let Some((from, error)) = &self.failed
            && ticket.0 >= *from
        {
            return Err(error.clone());
        }
        self.shared.link.faults.alive()?;
        let at = ticket.0.checked_sub(self.first).map(|at| to_usize(at));
        let Some((at, batch)) = at.and_then(|at| Some((at, self.batches.get(at)?))) else {
            let message = format!("wgpu: {ticket:?} is not one of this queue's last {BATCHES_KEPT}");
            return Err(Error::invalid(message));
        };
        match batch {
            Batch::Done(elapsed) => return Ok(*elapsed),
            Batch::Empty(before) => {
                if let Some(before) = before.clone() {
                    self.finish(ticket, &before, timeout)?;
                }
                return Ok(Elapsed { time: Seconds::ZERO, clock: ClockKind::Host });
            }
            Batch::Running { index, .. } => {
                let index = index.clone();
                self.finish(ticket, &index, timeout)?;
            }
        }
        (0..=at).try_for_each(|at| self.settle(at))?;
        match self.batches.get(at) {
            Some(Batch::Done(elapsed)) => Ok(*elapsed),
            _ => Err(bug("a batch that is over has no time")),
        }
    }

    fn record(&mut self, cmds: &[Cmd]) -> Result<Arc<dyn Graph>> {
        Ok(Arc::new(Recorded { steps: self.resolve(cmds)? }))
    }

    fn replay(&mut self, graph: &Arc<dyn Graph>) -> Result<Ticket> {
        let recorded = graph.as_any().downcast_ref::<Recorded>();
        let recorded = recorded.ok_or_else(|| Error::invalid("wgpu: the graph belongs to another device"))?;
        self.run(&recorded.steps)
    }
}

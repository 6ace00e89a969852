//! An in-order OpenCL queue, which waits by polling the last event.

use crate::device::{NO_EVENTS, OpenclDeviceState, failure};
use crate::kernels::{self, Arg, OpenclStep, ProgramKey};
use crate::memory::OpenclMemory;
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::command::ClockKind;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Cmd, Elapsed, Error, ErrorKind, Graph, OperandAccess, Queue, Result, Slice, Ticket};
use ocl::core::{
    self, ArgVal, CommandQueue, CommandQueueProperties, Event, Kernel, ProfilingInfo, ProfilingInfoResult,
};
use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Number of batches whose times are kept for a late `wait`.
const BATCHES_KEPT: usize = 4096;
/// How often a wait polls before it sleeps, and for how long: a batch of a small model takes milliseconds,
/// and waking a thread about 50 us.
const POLLS_AWAKE: u32 = 200;
const NAP: Duration = Duration::from_micros(50);

/// A submitted batch.
enum OpenclBatch {
    /// In flight: its first and last events; none if it had nothing to do.
    Running(Option<(Event, Event)>),
    Done(Elapsed),
}

/// A queue of one device.
pub(crate) struct OpenClQueue {
    shared: Arc<OpenclDeviceState>,
    number: u64,
    commands: CommandQueue,
    kernels: HashMap<(ProgramKey, &'static str), Kernel>,
    batches: VecDeque<OpenclBatch>,
    /// Ticket of the first batch in `batches`.
    first: u64,
    /// The first failure, as the ticket and its error.
    failed: Option<(u64, Error)>,
}

/// A recorded batch: commands resolved to kernels, with the buffers that they use.
struct OpenclRecording {
    works: Vec<OpenclStep>,
    buffers: Vec<Slice>,
}

impl Graph for OpenclRecording {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn memory_bytes(&self) -> u64 {
        0
    }
}

impl OpenClQueue {
    pub(crate) fn new(shared: Arc<OpenclDeviceState>, number: u64) -> Result<OpenClQueue> {
        let properties = Some(CommandQueueProperties::PROFILING_ENABLE);
        let commands = core::create_command_queue(&shared.context, shared.id, properties)
            .map_err(|e| failure("clCreateCommandQueue", &e))?;
        Ok(OpenClQueue {
            shared,
            number,
            commands,
            kernels: HashMap::new(),
            batches: VecDeque::new(),
            first: 0,
            failed: None,
        })
    }

    /// Checks and resolves a batch and builds its kernels; nothing is enqueued if any of this fails.
    fn resolve(&mut self, cmds: &[Cmd]) -> Result<OpenclRecording> {
        let mut recorded = OpenclRecording { works: Vec::with_capacity(cmds.len()), buffers: Vec::new() };
        for cmd in cmds {
            for (operand, slice) in cmd.sig().operands().iter().zip(cmd.args()) {
                let memory = OpenclMemory::of(slice)?;
                if operand.access != OperandAccess::Read {
                    memory.writable()?;
                }
            }
            for work in kernels::plan(cmd, self.shared.tuning) {
                if let OpenclStep::Launch { program, kernel, .. } = &work {
                    self.kernel(program, kernel)?;
                }
                recorded.works.push(work);
            }
            recorded.buffers.extend(cmd.args().iter().cloned());
        }
        recorded.buffers.sort_by_key(|slice| Arc::as_ptr(&slice.buffer).cast::<u8>() as usize);
        recorded.buffers.dedup_by(|a, b| Arc::ptr_eq(&a.buffer, &b.buffer));
        Ok(recorded)
    }

    fn kernel(&mut self, program: &ProgramKey, name: &'static str) -> Result<&Kernel> {
        let key = (program.clone(), name);
        if !self.kernels.contains_key(&key) {
            let built = self.shared.program(program)?;
            let kernel = core::create_kernel(&built, name).map_err(|e| failure(name, &e))?;
            self.kernels.insert(key.clone(), kernel);
        }
        Ok(&self.kernels[&key])
    }

    fn run(&mut self, recorded: &OpenclRecording) -> Result<Ticket> {
        if let Some((_, error)) = &self.failed {
            return Err(error.clone());
        }
        let ticket = self.first + self.batches.len() as u64;
        let mut ends: Option<(Event, Event)> = None;
        let last = recorded.works.len().saturating_sub(1);
        for (i, work) in recorded.works.iter().enumerate() {
            let mut event = Event::null();
            let asked = (i == 0 || i == last).then_some(&mut event);
            if let Err(error) = self.enqueue(work, asked) {
                // earlier commands of the batch may run, so the queue's state is unknown
                self.failed = Some((ticket, error.clone()));
                return Err(error);
            }
            if i == 0 {
                ends = Some((event.clone(), event));
            } else if let (true, Some((_, end))) = (i == last, &mut ends) {
                *end = event;
            }
        }
        core::flush(&self.commands).map_err(|e| failure("clFlush", &e))?;
        if let Some((_, end)) = &ends {
            for slice in &recorded.buffers {
                OpenclMemory::of(slice)?.used_by(self.number, end);
            }
        }
        self.batches.push_back(OpenclBatch::Running(ends));
        self.forget();
        Ok(Ticket(ticket))
    }

    /// Forgets old batches that succeeded, waited for or not.
    fn forget(&mut self) {
        while self.batches.len() > BATCHES_KEPT {
            let ended = match &self.batches[0] {
                OpenclBatch::Done(_) | OpenclBatch::Running(None) => true,
                OpenclBatch::Running(Some((_, last))) => Self::status(last).is_ok_and(|status| status == 0),
            };
            if !ended {
                break;
            }
            self.batches.pop_front();
            self.first += 1;
        }
    }

    fn enqueue(&mut self, work: &OpenclStep, event: Option<&mut Event>) -> Result<()> {
        let commands = self.commands.clone();
        match work {
            OpenclStep::Copy { from, to } => {
                let (source, target) = (OpenclMemory::of(from)?.mem(), OpenclMemory::of(to)?.mem());
                let (start, end, len) = (to_usize(from.offset), to_usize(to.offset), to_usize(to.bytes));
                core::enqueue_copy_buffer::<u8, _, _, _>(
                    &commands, source, target, start, end, len, NO_EVENTS, event,
                )
                .map_err(|e| failure("copy", &e))
            }
            OpenclStep::Fill { to, word } => {
                // counted in words, like the pattern
                let (offset, len) = (to_usize(to.offset) / 4, to_usize(to.bytes) / 4);
                let target = OpenclMemory::of(to)?.mem();
                let version = Some(&self.shared.version);
                core::enqueue_fill_buffer(&commands, target, *word, offset, len, NO_EVENTS, event, version)
                    .map_err(|e| failure("fill", &e))
            }
            OpenclStep::Launch { program, kernel: name, args, global, local } => {
                let kernel = self.kernel(program, name)?;
                set_args(kernel, args)?;
                // SAFETY: the arguments match the kernel's signature (`kernels::plan` and the .cl file
                // are written side by side, and the driver checks count and sizes); `Cmd` checked that
                // each operand lies inside its buffer, and kernels check every index that they load.
                // The driver retains kernel and buffers until the command is done.
                unsafe {
                    core::enqueue_kernel(&commands, kernel, 3, None, global, Some(*local), NO_EVENTS, event)
                }
                .map_err(|e| failure(name, &e))
            }
        }
    }

    /// Returns the state of an event: 0 complete, positive in flight, negative failed.
    fn status(event: &Event) -> Result<i32> {
        let mut status = 0i32;
        // SAFETY: the event is alive, and the call writes one i32 into `status`.
        let code = unsafe {
            ocl::ffi::clGetEventInfo(
                *event.as_ptr_ref(),
                ocl::ffi::CL_EVENT_COMMAND_EXECUTION_STATUS,
                size_of::<i32>(),
                (&raw mut status).cast(),
                std::ptr::null_mut(),
            )
        };
        match code {
            0 => Ok(status),
            code => Err(Error::new(ErrorKind::DeviceLost, format!("opencl: clGetEventInfo: {code}"))),
        }
    }
}

fn set_args(kernel: &Kernel, args: &[Arg]) -> Result<()> {
    let mut index = 0;
    let mut set = |value: ArgVal<'_>| {
        index += 1;
        core::set_kernel_arg(kernel, index - 1, value).map_err(|e| failure("clSetKernelArg", &e))
    };
    for arg in args {
        match arg {
            Arg::Elements(slice, at) => {
                set(ArgVal::mem(OpenclMemory::of(slice)?.mem()))?;
                set(ArgVal::scalar(at))?;
            }
            Arg::U32(value) => set(ArgVal::scalar(value))?,
            Arg::U64(value) => set(ArgVal::scalar(value))?,
            Arg::F32(value) => set(ArgVal::scalar(value))?,
        }
    }
    Ok(())
}

/// Returns the device time between the start of one command and the end of another.
fn device_time(first: &Event, last: &Event) -> Option<Seconds> {
    let nanoseconds = |event, question| match core::get_event_profiling_info(event, question) {
        Ok(ProfilingInfoResult::Start(ns) | ProfilingInfoResult::End(ns)) => Some(ns),
        _ => None,
    };
    let (start, end) = (nanoseconds(first, ProfilingInfo::Start)?, nanoseconds(last, ProfilingInfo::End)?);
    Some(Seconds(end.checked_sub(start)? as f64 * 1e-9))
}

impl Queue for OpenClQueue {
    fn submit(&mut self, cmds: &[Cmd]) -> Result<Ticket> {
        let recorded = self.resolve(cmds)?;
        self.run(&recorded)
    }

    fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<Elapsed> {
        if let Some((from, error)) = &self.failed
            && ticket.0 >= *from
        {
            return Err(error.clone());
        }
        let index = ticket.0.checked_sub(self.first).map(|i| to_usize(i));
        let Some(batch) = index.and_then(|i| self.batches.get_mut(i)) else {
            let message = format!("opencl: {ticket:?} is not one of this queue's last {BATCHES_KEPT}");
            return Err(Error::invalid(message));
        };
        let (first, last) = match batch {
            OpenclBatch::Done(elapsed) => return Ok(*elapsed),
            OpenclBatch::Running(None) => {
                // an empty batch ends with the ones before it
                let before = (0..index.unwrap_or(0)).rev().find_map(|i| match &self.batches[i] {
                    OpenclBatch::Running(Some(ends)) => Some(ends.clone()),
                    _ => None,
                });
                if let Some((_, last)) = before {
                    self.finish(ticket, &last, timeout)?;
                }
                return Ok(Elapsed { time: Seconds::ZERO, clock: ClockKind::Host });
            }
            OpenclBatch::Running(Some((first, last))) => (first.clone(), last.clone()),
        };
        let start = Instant::now();
        self.finish(ticket, &last, timeout)?;
        if let Err(error) = self.shared.check_imports() {
            self.failed = Some((ticket.0, error.clone()));
            return Err(error);
        }
        let elapsed = match device_time(&first, &last) {
            Some(time) => Elapsed { time, clock: ClockKind::Device },
            None => Elapsed { time: Seconds(start.elapsed().as_secs_f64()), clock: ClockKind::Host },
        };
        if let Some(batch) = index.and_then(|i| self.batches.get_mut(i)) {
            *batch = OpenclBatch::Done(elapsed);
        }
        Ok(elapsed)
    }

    fn record(&mut self, cmds: &[Cmd]) -> Result<Arc<dyn Graph>> {
        Ok(Arc::new(self.resolve(cmds)?))
    }

    fn replay(&mut self, graph: &Arc<dyn Graph>) -> Result<Ticket> {
        let recorded = graph.as_any().downcast_ref::<OpenclRecording>();
        self.run(recorded.ok_or_else(|| Error::invalid("opencl: the graph belongs to another device"))?)
    }
}

impl OpenClQueue {
    /// Waits for an event of `ticket`'s batch.
    fn finish(&mut self, ticket: Ticket, event: &Event, timeout: Duration) -> Result<()> {
        let start = Instant::now();
        for poll in 0u32.. {
            match Self::status(event)? {
                0 => break,
                code if code < 0 => {
                    // drivers fail commands this way if they find no memory for a deferred allocation (-4,
                    // -6), or else if a kernel faults or the device is gone
                    let kind =
                        if matches!(code, -4 | -6) { ErrorKind::OutOfMemory } else { ErrorKind::DeviceLost };
                    let error =
                        Error::new(kind, format!("opencl: a command of {ticket:?} ended with {code}"));
                    self.failed.get_or_insert((ticket.0, error.clone()));
                    return Err(error);
                }
                _ if start.elapsed() >= timeout => {
                    let message = format!("opencl: {ticket:?} is not done after {timeout:?}");
                    return Err(Error::new(ErrorKind::Timeout, message));
                }
                _ if poll < POLLS_AWAKE => std::thread::yield_now(),
                _ => std::thread::sleep(NAP),
            }
        }
        Ok(())
    }
}

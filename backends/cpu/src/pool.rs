//! The worker threads of a device.
//!
//! The first worker leads: it takes a batch, locks its buffers and wakes the others; all walk the batch's
//! steps and meet at its barriers; then the leader settles the ticket.

use crate::isa::Isa;
use crate::kernels::{self, AlignedScratch, KernelWorker};
use crate::memory::AtMeeting;
use crate::program::CpuProgram;
use crate::queue::CpuQueueTimeline;
use crate::sync::{Barrier, Epoch};
use crate::topology;
use mixfleet_hal::{Error, ErrorKind, HostMemory, MeetingSeat, Result};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLockReadGuard, RwLockWriteGuard, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

/// A batch to run, with its ticket, and the meeting to go to afterwards.
pub(crate) struct ThreadJob {
    pub(crate) program: Arc<CpuProgram>,
    pub(crate) timeline: Arc<CpuQueueTimeline>,
    pub(crate) ticket: u64,
    pub(crate) seat: Option<MeetingSeat>,
}

impl ThreadJob {
    /// Goes to the meeting if the batch is done, and ends it if not.
    fn meet(&self, result: Result<f64>) -> Result<f64> {
        let Some(MeetingSeat { meeting, member }) = &self.seat else { return result };
        let met = result.and_then(|seconds| {
            let at = AssertUnwindSafe(|| meeting.meet(*member, &AtMeeting));
            let met = catch_unwind(at).unwrap_or_else(|_| {
                Err(Error::new(ErrorKind::DeviceLost, "cpu: an exchange between two batches panicked"))
            });
            met.map(|()| seconds)
        });
        if met.is_err() {
            meeting.end();
        }
        met
    }
}

/// One run of a program, visible to all workers.
struct ProgramRun {
    program: Arc<CpuProgram>,
    claims: Vec<AtomicUsize>,
    shared: SharedScratch,
    failed: AtomicBool,
    error: Mutex<Option<Error>>,
}

/// The address of the device's shared scratch.
#[derive(Clone, Copy)]
struct SharedScratch(*mut f32);
// SAFETY: an address; steps that touch the memory are ordered by barriers.
unsafe impl Send for SharedScratch {}
// SAFETY: as above.
unsafe impl Sync for SharedScratch {}

/// State shared by the workers of a device.
struct WorkerPoolState {
    isa: Isa,
    workers: usize,
    jobs: Mutex<Jobs>,
    /// Signals the leader that there is a job, or that it should end.
    wake: Condvar,
    /// Signals the other workers; advances once per run, and to end them.
    call: Epoch,
    current: Mutex<Option<Arc<ProgramRun>>>,
    barrier: Barrier,
    /// Imported host memory that the device's buffers use in place.
    imports: Mutex<Vec<Weak<dyn HostMemory>>>,
}

impl WorkerPoolState {
    /// Checks that everything the batch read, or later ones may read, is unchanged. A device that has lost
    /// its weights is useless for any batch, so it fails as a whole until its imports are dropped.
    fn check(&self, program: &CpuProgram) -> Result<()> {
        program.buffers().try_for_each(|(buffer, _)| buffer.check())?;
        let mut imports = lock(&self.imports);
        imports.retain(|memory| memory.strong_count() > 0);
        imports.iter().filter_map(Weak::upgrade).try_for_each(|memory| memory.check())
    }
}

#[derive(Default)]
struct Jobs {
    waiting: VecDeque<ThreadJob>,
    closed: bool,
}

/// The threads, which end on drop, after the submitted jobs.
pub(crate) struct ThreadPool {
    shared: Arc<WorkerPoolState>,
    threads: Vec<JoinHandle<()>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ThreadPool {
    /// Starts one pinned worker per core.
    ///
    /// # Errors
    /// `Other` if the system refuses a thread.
    pub(crate) fn new(cores: &[usize], isa: Isa) -> Result<Self> {
        let shared = Arc::new(WorkerPoolState {
            isa,
            workers: cores.len(),
            jobs: Mutex::default(),
            wake: Condvar::new(),
            call: Epoch::default(),
            current: Mutex::new(None),
            barrier: Barrier::new(cores.len()),
            imports: Mutex::default(),
        });
        let mut pool = ThreadPool { shared: shared.clone(), threads: Vec::new() };
        // the leader last, so that if a thread is missing, the others still end by `Drop`
        for (index, &core) in cores.iter().enumerate().rev() {
            let shared = shared.clone();
            let body = move || {
                // a thread that is refused its core runs anywhere
                let _ = topology::bind_thread(&[core]);
                if index == 0 { lead(&shared) } else { follow(&shared, index) }
            };
            let thread = std::thread::Builder::new().name(format!("cpu@{core}")).spawn(body);
            let thread = thread.map_err(|e| {
                Error::new(ErrorKind::Other, format!("cpu: cannot start a worker thread: {e}"))
            })?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }

    /// Submits a batch.
    pub(crate) fn submit(&self, job: ThreadJob) {
        lock(&self.shared.jobs).waiting.push_back(job);
        self.shared.wake.notify_one();
    }

    /// Makes batches fail once `memory` has lost its bytes.
    pub(crate) fn depend_on(&self, memory: &Arc<dyn HostMemory>) {
        lock(&self.shared.imports).push(Arc::downgrade(memory));
    }

    /// Returns the number of workers.
    pub(crate) fn workers(&self) -> usize {
        self.shared.workers
    }

    /// Returns the instruction level.
    pub(crate) fn isa(&self) -> Isa {
        self.shared.isa
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        lock(&self.shared.jobs).closed = true;
        self.shared.wake.notify_one();
        if self.threads.len() < self.shared.workers {
            self.shared.call.advance(); // no leader was started: dismiss the others from here
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join(); // a worker catches its panics, so there is nothing to report
        }
    }
}

/// Runs the first worker, which takes jobs until the pool is closed and none is left.
fn lead(shared: &WorkerPoolState) {
    let (mut scratch, mut common) = (AlignedScratch::default(), AlignedScratch::default());
    loop {
        let job = {
            let mut jobs = lock(&shared.jobs);
            loop {
                if let Some(job) = jobs.waiting.pop_front() {
                    break Some(job);
                }
                if jobs.closed {
                    break None;
                }
                jobs = shared.wake.wait(jobs).unwrap_or_else(PoisonError::into_inner);
            }
        };
        let Some(job) = job else {
            shared.call.advance();
            return;
        };
        if let Some(error) = job.timeline.error() {
            let result = job.meet(Err(error));
            job.timeline.settle(job.ticket, result);
            continue;
        }
        let result = job.meet(run_job(shared, &job.program, &mut scratch, &mut common));
        let ThreadJob { program, timeline, ticket, .. } = job;
        // the buffers can be freed now if there are no other references
        drop(program);
        timeline.settle(ticket, result);
    }
}

/// Runs one batch on all workers and returns the seconds that it took.
fn run_job(
    shared: &WorkerPoolState,
    program: &Arc<CpuProgram>,
    scratch: &mut AlignedScratch,
    common: &mut AlignedScratch,
) -> Result<f64> {
    let run = Arc::new(ProgramRun {
        program: program.clone(),
        claims: program.steps.iter().map(|_| AtomicUsize::new(0)).collect(),
        shared: SharedScratch(common.words(program.shared_words)),
        failed: AtomicBool::new(false),
        error: Mutex::new(None),
    });
    let guards = Guards::lock(program);
    let start = Instant::now();
    let steps = program.steps.iter().any(|step| !step.solo);
    if steps && shared.workers > 1 {
        *lock(&shared.current) = Some(run.clone());
        shared.call.advance();
        walk(shared, &run, 0, scratch);
        shared.barrier.wait();
        *lock(&shared.current) = None;
    } else {
        walk_alone(shared, &run, scratch);
    }
    let seconds = start.elapsed().as_secs_f64();
    drop(guards);
    // before anyone uses the result, since the weights may read as zeros by now
    shared.check(program)?;
    let error = lock(&run.error).take();
    error.map_or(Ok(seconds), Err)
}

/// Runs any other worker: one run per call.
fn follow(shared: &WorkerPoolState, index: usize) {
    let mut scratch = AlignedScratch::default();
    let mut seen = 0;
    loop {
        shared.call.wait_past(seen);
        seen = shared.call.now();
        let Some(run) = lock(&shared.current).clone() else {
            return;
        };
        walk(shared, &run, index, &mut scratch);
        drop(run);
        shared.barrier.wait();
    }
}

/// Executes one worker's share of every step.
fn walk(shared: &WorkerPoolState, run: &ProgramRun, index: usize, scratch: &mut AlignedScratch) {
    for at in 0..run.program.steps.len() {
        let step = &run.program.steps[at];
        if step.barrier {
            shared.barrier.wait();
        }
        match (step.solo, index) {
            (true, 0) => run.step(at, shared.isa, 0, 1, scratch),
            (true, _) => {}
            (false, _) => run.step(at, shared.isa, index, shared.workers, scratch),
        }
    }
}

/// Executes all steps on the leader alone.
fn walk_alone(shared: &WorkerPoolState, run: &ProgramRun, scratch: &mut AlignedScratch) {
    for at in 0..run.program.steps.len() {
        run.step(at, shared.isa, 0, 1, scratch);
    }
}

impl ProgramRun {
    /// Runs a share of one step, unless the run has failed. A failure or panic becomes the run's error.
    fn step(&self, at: usize, isa: Isa, index: usize, count: usize, scratch: &mut AlignedScratch) {
        if self.failed.load(Ordering::Relaxed) {
            return;
        }
        let step = &self.program.steps[at];
        let mut worker =
            KernelWorker { index, count, isa, scratch, shared: self.shared.0, claims: &self.claims[at] };
        let args = &step.args;
        // SAFETY: `Program::new` resolved the operands of a checked command; the leader holds the locks
        // of their buffers and sized the shared scratch; barriers separate steps that conflict.
        let result = catch_unwind(AssertUnwindSafe(|| unsafe {
            kernels::run(&step.sig, args, step.phase, &mut worker)
        }));
        let result = result.unwrap_or_else(|_| {
            let message = format!("cpu: a worker panicked in {:?}; this is a bug of the backend", step.sig);
            Err(Error::new(ErrorKind::DeviceLost, message))
        });
        if let Err(error) = result {
            lock(&self.error).get_or_insert(error);
            self.failed.store(true, Ordering::Relaxed);
        }
    }
}

/// The locks of a program's buffers.
#[allow(dead_code, reason = "held for their drop")]
enum BufferLock<'a> {
    Read(RwLockReadGuard<'a, ()>),
    Write(RwLockWriteGuard<'a, ()>),
}

#[allow(dead_code, reason = "held for their drop")]
struct Guards<'a>(Vec<BufferLock<'a>>);

impl<'a> Guards<'a> {
    /// Takes all locks in an order common to all programs, which prevents deadlock.
    fn lock(program: &'a CpuProgram) -> Self {
        let take = |(buffer, write): (&'a crate::memory::CpuBuffer, bool)| {
            if write {
                BufferLock::Write(buffer.lock.write().unwrap_or_else(PoisonError::into_inner))
            } else {
                BufferLock::Read(buffer.lock.read().unwrap_or_else(PoisonError::into_inner))
            }
        };
        Guards(program.buffers().map(take).collect())
    }
}

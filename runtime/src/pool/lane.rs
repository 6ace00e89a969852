//! A thread per disk, so that users of the disk wait for it only for a bounded time.
//!
//! A disk that does not answer in time is *out*: the pool forgets its blocks and stops waiting for it. Its
//! thread may hang in the operating system for good; there is one per disk, and it is not replaced. Once the
//! disk answers, it is opened again, after a pause that doubles as long as the disk goes out again.
//!
//! A job may also be begun and polled later, so that a slow disk delays only the reader of its blocks.

use super::disk::Disk;
use super::{Pool, SsdConfig, WeakPool};
use crate::env::SharedEnv;
use futures_util::future::BoxFuture;
use mixfleet_hal::units::Seconds;
use std::io::{Error, ErrorKind, Result};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot::error::TryRecvError;
use tokio::sync::{mpsc, oneshot};

/// Jobs that may wait for the thread: each user of a disk waits for one at a time, and there are few users.
const QUEUE: usize = 8;
/// Timeout of a sync, which writes out everything that the operating system has cached.
pub(super) const SYNC_TIMEOUT: Duration = Duration::from_secs(20);
/// Timeouts after which a disk that was out is tried again for the first time.
const PAUSE_MIN: u32 = 4;
/// Maximum of that number, for a disk that goes out again and again.
const PAUSE_MAX: u32 = 256;

/// A job for the disk's thread. It returns false if the disk was taken out in between.
type Work = Box<dyn FnOnce(&dyn Disk) -> bool + Send>;

/// Access to a disk, through its thread if it has one.
pub(super) struct DiskAccess {
    disk: Arc<dyn Disk>,
    /// The disk's thread; without one, calls run on the caller's thread for as long as they take.
    lane: OnceLock<Lane>,
}

struct Lane {
    env: SharedEnv,
    timeout: Duration,
    work: mpsc::Sender<Work>,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    /// Time for which the disk was waited for in this turn.
    waited: Duration,
    /// The end of the last job.
    answered_at: Seconds,
    out: Option<String>,
}

impl State {
    fn of(state: &Mutex<State>) -> MutexGuard<'_, State> {
        state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the disk out for not having answered within `limit`.
    fn take_out(&mut self, limit: Duration) -> Error {
        let why = format!("it did not answer within {} ms", limit.as_millis());
        self.out.get_or_insert_with(|| why.clone());
        Error::new(ErrorKind::TimedOut, why)
    }
}

/// A job that was begun without waiting for it.
pub(super) struct DiskJob<T> {
    answer: oneshot::Receiver<DiskAnswer<T>>,
    began: Seconds,
}

/// A result of the disk, and the time that it took for it.
pub(super) type DiskAnswer<T> = (Result<T>, Seconds);

impl Lane {
    fn state(&self) -> MutexGuard<'_, State> {
        State::of(&self.state)
    }

    /// Queues a job. None if the queue is full.
    fn begin<T: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn Disk) -> Result<T> + Send + 'static,
    ) -> Option<DiskJob<T>> {
        let (tell, answer) = oneshot::channel();
        let (state, env) = (self.state.clone(), self.env.clone());
        let work: Work = Box::new(move |disk| {
            let start = env.now();
            // a job whose caller has left is not done
            let result = (!tell.is_closed()).then(|| work(disk));
            let end = env.now();
            let mut state = State::of(&state);
            state.answered_at = end;
            result.map(|result| tell.send((result, end - start)));
            state.out.is_none()
        });
        self.work.try_send(work).ok()?;
        Some(DiskJob { answer, began: self.env.now() })
    }

    /// Waits until a job is done, but no longer than `limit`.
    fn await_answer<T: Send>(&self, job: &mut DiskJob<T>, limit: Duration) -> Option<DiskAnswer<T>> {
        let mut answered = None;
        self.env.block_on(Box::pin(async { answered = (&mut job.answer).await.ok() }), limit);
        answered
    }

    fn run<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce(&dyn Disk) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        if self.state().out.is_some() {
            return Err(ErrorKind::TimedOut.into());
        }
        let start = self.env.now();
        let mut job = self.begin(work);
        let answered = job.as_mut().and_then(|job| self.await_answer(job, limit));
        let waited = self.env.now() - start;
        let mut state = self.state();
        state.waited += Duration::from_secs_f64(waited.0.max(0.0));
        // it may have been done since
        let answered = answered.or_else(|| job?.answer.try_recv().ok());
        answered.map_or_else(|| Err(state.take_out(limit)), |(result, _)| result)
    }

    fn poll<T: Send>(&self, job: &mut DiskJob<T>, wait: Duration) -> Option<DiskAnswer<T>> {
        let mut answered = job.answer.try_recv();
        if matches!(answered, Err(TryRecvError::Empty)) && !wait.is_zero() {
            answered = self.await_answer(job, wait).ok_or(TryRecvError::Empty);
        }
        let mut state = self.state();
        let silent = self.env.now() - job.began.max(state.answered_at);
        match answered {
            Ok(answer) => Some(answer),
            Err(TryRecvError::Empty) if state.out.is_none() && silent.0 < self.timeout.as_secs_f64() => None,
            Err(_) => Some((Err(state.take_out(self.timeout)), Seconds::ZERO)),
        }
    }
}

impl DiskAccess {
    pub(super) fn new(disk: Arc<dyn Disk>) -> Self {
        DiskAccess { disk, lane: OnceLock::new() }
    }

    /// Runs `work` on the disk, within this turn's time.
    ///
    /// # Errors
    /// Those of `work`; `TimedOut` if the disk is out.
    pub(super) fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn Disk) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let Some(lane) = self.lane.get() else { return work(&*self.disk) };
        let left = (lane.timeout * 2).saturating_sub(lane.state().waited);
        lane.run(lane.timeout.min(left), work)
    }

    /// Runs `work` on the disk for at most the timeout of a sync.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub(super) fn run_long<T: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn Disk) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        match self.lane.get() {
            Some(lane) => lane.run(SYNC_TIMEOUT.max(lane.timeout), work),
            None => work(&*self.disk),
        }
    }

    /// Begins `work` on the disk, which is done at once if the disk has no thread. None if its queue is full.
    pub(super) fn begin<T: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn Disk) -> Result<T> + Send + 'static,
    ) -> Option<DiskJob<T>> {
        if let Some(lane) = self.lane.get() {
            return lane.begin(work);
        }
        let (tell, answer) = oneshot::channel();
        _ = tell.send((work(&*self.disk), Seconds::ZERO));
        Some(DiskJob { answer, began: Seconds::ZERO })
    }

    /// The result of a job, for which this waits no longer than `wait`; none if it is not done yet. The disk
    /// is out if it has done no job for its timeout.
    pub(super) fn poll<T: Send>(&self, job: &mut DiskJob<T>, wait: Duration) -> Option<DiskAnswer<T>> {
        match self.lane.get() {
            Some(lane) => lane.poll(job, wait),
            None => job.answer.try_recv().ok(),
        }
    }

    /// Whether this turn has time left for the disk.
    pub(super) fn has_time(&self) -> bool {
        self.lane.get().is_none_or(|lane| lane.state().waited < lane.timeout)
    }

    /// Begins a turn, with new time for the disk.
    pub(super) fn begin_turn(&self) {
        if let Some(lane) = self.lane.get() {
            lane.state().waited = Duration::ZERO;
        }
    }

    /// Why the disk is out, if it is.
    pub(super) fn out(&self) -> Option<String> {
        self.lane.get()?.state().out.clone()
    }

    /// Makes a thread do the work from now on, and returns the queue of its jobs.
    fn begin_lane(&self, env: &SharedEnv, timeout: Duration) -> mpsc::Receiver<Work> {
        let (work, todo) = mpsc::channel(QUEUE);
        _ = self.lane.set(Lane { env: env.clone(), timeout, work, state: Arc::default() });
        todo
    }
}

/// The task of a disk's thread.
pub(super) struct DiskTask {
    pub(super) pool: WeakPool,
    pub(super) ssd: SsdConfig,
    pub(super) env: SharedEnv,
    pub(super) name: String,
}

impl DiskTask {
    /// Runs jobs for as long as the pool exists.
    pub(super) async fn start_disk(self, namespace: BoxFuture<'static, Option<u64>>) {
        let Some(namespace) = namespace.await else { return };
        let DiskTask { pool, ssd, env, name } = self;
        let (least, most) = (ssd.timeout * PAUSE_MIN, ssd.timeout * PAUSE_MAX);
        let mut pause = least;
        loop {
            let start = env.now();
            match open_disk(&pool, &ssd, namespace, &env) {
                None => return,
                Some(Ok(todo)) => {
                    tracing::info!(name, "the KV pool's disk is in use");
                    run_jobs(&*ssd.disk, todo).await;
                }
                Some(Err(error)) => {
                    tracing::warn!(name, %error, "the KV pool's disk cannot be used; it goes on without and tries again");
                }
            }
            if (env.now() - start).0 > most.as_secs_f64() {
                pause = least;
            }
            if pool.upgrade().is_none() {
                return;
            }
            env.sleep(pause).await;
            pause = (pause * 2).min(most);
        }
    }
}

/// Opens the disk for the pool, unless that is done already. None if the pool no longer exists.
fn open_disk(
    pool: &WeakPool,
    ssd: &SsdConfig,
    namespace: u64,
    env: &SharedEnv,
) -> Option<std::result::Result<mpsc::Receiver<Work>, super::PoolError>> {
    let pool: Pool = pool.upgrade()?;
    let begin = |access: &DiskAccess| access.begin_lane(env, ssd.timeout);
    if let Some(frames) = pool.frames() {
        return Some(Ok(begin(&frames.access)));
    }
    let todo = pool.attach_by(ssd.clone(), namespace, begin);
    if let Err(error) = &todo {
        pool.note_out(&error.to_string());
    }
    Some(todo)
}

/// Runs jobs until the disk answers too late, or is no longer used.
async fn run_jobs(disk: &dyn Disk, mut todo: mpsc::Receiver<Work>) {
    while let Some(work) = todo.recv().await {
        if !work(disk) {
            return;
        }
    }
}

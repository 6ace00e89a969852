//! A disk's own thread: whoever uses the disk waits for it only so long.
//!
//! A disk that does not answer in time is *out*: the pool forgets what lies there, and nobody waits for it again. Its thread may hang in
//! the operating system for good; there is one a disk, and it is not replaced. Once it answers, the disk is opened anew, after a pause that
//! doubles as long as the disk goes out again.

use super::disk::Disk;
use super::{Pool, SsdConfig, WeakPool};
use crate::env::SharedEnv;
use futures_util::future::BoxFuture;
use std::io::{Error, ErrorKind, Result};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// Pieces of work that wait for the thread: who uses a disk waits for one at a time, and few do.
const QUEUE: usize = 8;
/// Syncing writes out whatever the operating system has collected.
pub(super) const SYNC_TIMEOUT: Duration = Duration::from_secs(20);
/// A disk that was out is tried again after so many timeouts,
const PAUSE_MIN: u32 = 4;
/// and after so many if it goes out again and again.
const PAUSE_MAX: u32 = 256;

/// A piece of work. False: nobody waits for its result any more.
type Work = Box<dyn FnOnce(&dyn Disk) -> bool + Send>;

/// The way to a disk.
pub(super) struct Access {
    disk: Arc<dyn Disk>,
    /// None: the caller's own thread, for as long as it takes.
    lane: OnceLock<Lane>,
}

struct Lane {
    env: SharedEnv,
    timeout: Duration,
    work: mpsc::Sender<Work>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// What the disk was waited for in this turn.
    waited: Duration,
    out: Option<String>,
}

impl Lane {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce(&dyn Disk) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        if self.state().out.is_some() {
            return Err(ErrorKind::TimedOut.into());
        }
        let (tell, answer) = oneshot::channel();
        let work: Work = Box::new(move |disk| tell.send(work(disk)).is_ok());
        let start = self.env.now();
        let mut result = None;
        if self.work.try_send(work).is_ok() {
            self.env.block_on(Box::pin(async { result = answer.await.ok() }), limit);
        }
        let waited = self.env.now() - start;
        let mut state = self.state();
        state.waited += Duration::from_secs_f64(waited.0.max(0.0));
        result.unwrap_or_else(|| {
            let why = format!("it did not answer within {} ms", limit.as_millis());
            state.out.get_or_insert(why.clone());
            Err(Error::new(ErrorKind::TimedOut, why))
        })
    }
}

impl Access {
    pub(super) fn new(disk: Arc<dyn Disk>) -> Self {
        Access { disk, lane: OnceLock::new() }
    }

    /// Works on the disk, in this turn's time.
    ///
    /// # Errors
    /// Those of `work`; `TimedOut` where the disk is out.
    pub(super) fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn Disk) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let Some(lane) = self.lane.get() else { return work(&*self.disk) };
        let left = (lane.timeout * 2).saturating_sub(lane.state().waited);
        lane.run(lane.timeout.min(left), work)
    }

    /// Works on the disk for as long as a sync may take.
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

    /// Whether more may be asked of the disk in this turn.
    pub(super) fn has_time(&self) -> bool {
        self.lane.get().is_none_or(|lane| lane.state().waited < lane.timeout)
    }

    /// A turn begins, in which the disk may be waited for anew.
    pub(super) fn begin_turn(&self) {
        if let Some(lane) = self.lane.get() {
            lane.state().waited = Duration::ZERO;
        }
    }

    /// Why the disk is out, if it is.
    pub(super) fn out(&self) -> Option<String> {
        self.lane.get()?.state().out.clone()
    }

    /// From now on a thread does the work. Returns what it is to do.
    fn begin_lane(&self, env: &SharedEnv, timeout: Duration) -> mpsc::Receiver<Work> {
        let (work, todo) = mpsc::channel(QUEUE);
        _ = self.lane.set(Lane { env: env.clone(), timeout, work, state: Mutex::default() });
        todo
    }
}

/// The disk of a pool, and the task of the thread that it has.
pub(super) struct Attendant {
    pub(super) pool: WeakPool,
    pub(super) ssd: SsdConfig,
    pub(super) env: SharedEnv,
    pub(super) name: String,
}

impl Attendant {
    /// Works for as long as there is the pool.
    pub(super) async fn attend(self, namespace: BoxFuture<'static, Option<u64>>) {
        let Some(namespace) = namespace.await else { return };
        let Attendant { pool, ssd, env, name } = self;
        let (least, most) = (ssd.timeout * PAUSE_MIN, ssd.timeout * PAUSE_MAX);
        let mut pause = least;
        loop {
            let start = env.now();
            match take_up(&pool, &ssd, namespace, &env) {
                None => return,
                Some(Ok(todo)) => {
                    tracing::info!(name, "the KV pool's disk is in use");
                    work_off(&*ssd.disk, todo).await;
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

/// Opens the disk for the pool, unless it has it already. None: there is no pool any more.
fn take_up(
    pool: &WeakPool,
    ssd: &SsdConfig,
    namespace: u64,
    env: &SharedEnv,
) -> Option<std::result::Result<mpsc::Receiver<Work>, super::PoolError>> {
    let pool: Pool = pool.upgrade()?;
    let begin = |access: &Access| access.begin_lane(env, ssd.timeout);
    if let Some(frames) = pool.frames() {
        return Some(Ok(begin(&frames.access)));
    }
    let todo = pool.attach_by(ssd.clone(), namespace, begin);
    if let Err(error) = &todo {
        pool.note_out(&error.to_string());
    }
    Some(todo)
}

/// Until the disk answered too late, or is not used any more.
async fn work_off(disk: &dyn Disk, mut todo: mpsc::Receiver<Work>) {
    while let Some(work) = todo.recv().await {
        if !work(disk) {
            return;
        }
    }
}

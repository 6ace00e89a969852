//! Work that would hold up other requests if it ran where they are served: a few threads do it, and few wait for them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::{Mutex, mpsc, oneshot};

use super::encode::Stopped;
use super::errors::ApiError;
use crate::env::SharedEnv;

/// A body up to this long is read in place: at 5 MB/s its text is tokenised in less than a millisecond.
const IN_PLACE_BYTES_MAX: usize = 4 << 10;

type Job = Box<dyn FnOnce() + Send>;

/// Threads that read requests, started when they are first needed, and those who wait for one.
pub(crate) struct Pool {
    env: SharedEnv,
    jobs: mpsc::Sender<Job>,
    waiting: Arc<Mutex<mpsc::Receiver<Job>>>,
    threads: AtomicUsize,
    threads_max: usize,
}

impl Pool {
    pub(crate) fn new(env: SharedEnv, threads_max: usize, waiting_max: usize) -> Self {
        let (jobs, waiting) = mpsc::channel(waiting_max.max(1));
        let waiting = Arc::new(Mutex::new(waiting));
        Pool { env, jobs, waiting, threads: AtomicUsize::new(0), threads_max: threads_max.max(1) }
    }

    /// The result of `work` on a body of so many bytes. `held` is what the request holds meanwhile: it comes back with the
    /// result, and is let go only when the work has really ended, whether or not somebody still waits for it. Work whose
    /// client has left does not begin, and is told so when it has begun.
    pub(crate) async fn run<T: Send + 'static, H: Send + 'static>(
        &self,
        bytes: usize,
        held: H,
        work: impl FnOnce(Stopped<'_>) -> T + Send + 'static,
    ) -> Result<(T, H), ApiError> {
        let failed = || ApiError::server("the request could not be read");
        if bytes <= IN_PLACE_BYTES_MAX {
            let result = catch_unwind(AssertUnwindSafe(|| work(&|| false)));
            return result.map(|result| (result, held)).map_err(|_| failed());
        }
        self.start_thread()?;
        let (sender, receiver) = oneshot::channel();
        let job = move || {
            if sender.is_closed() {
                return;
            }
            // A library that panics must not take the thread with it; the client gets a 500.
            let result = catch_unwind(AssertUnwindSafe(|| work(&|| sender.is_closed())));
            if let Ok(result) = result {
                drop(sender.send((result, held)));
            }
        };
        self.jobs.try_send(Box::new(job)).map_err(|_| {
            let message = format!("{} large requests wait to be read already", self.jobs.max_capacity());
            ApiError::overloaded(message, 1)
        })?;
        receiver.await.map_err(|_| failed())
    }

    /// One more thread, unless there are enough.
    fn start_thread(&self) -> Result<(), ApiError> {
        let more = |threads| (threads < self.threads_max).then_some(threads + 1);
        let Ok(threads) = self.threads.fetch_update(Ordering::AcqRel, Ordering::Acquire, more) else {
            return Ok(());
        };
        let waiting = self.waiting.clone();
        let work = async move {
            loop {
                let job = waiting.lock().await.recv().await;
                let Some(job) = job else { break };
                job();
            }
        };
        if let Err(error) = self.env.spawn_worker(&format!("reader-{threads}"), Box::pin(work)) {
            tracing::warn!(%error, "no thread could be started to read a request");
            // Another thread will do, if there is one.
            if self.threads.fetch_sub(1, Ordering::AcqRel) == 1 {
                return Err(ApiError::unavailable("no_thread", "no thread is free to read the request", 1));
            }
        }
        Ok(())
    }
}

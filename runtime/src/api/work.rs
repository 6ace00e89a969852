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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::{RealEnv, SeededEnv, yield_now};
    use axum::http::StatusCode;
    use futures_util::FutureExt;
    use std::collections::HashSet;
    use std::sync::mpsc::channel;
    use tokio::sync::Semaphore;

    const LARGE: usize = IN_PLACE_BYTES_MAX + 1;

    fn seeded<T: Send + 'static, F: Future<Output = T> + Send + 'static>(
        threads: usize,
        waiting: usize,
        test: impl FnOnce(SeededEnv, Arc<Pool>) -> F + Send + 'static,
    ) -> T {
        let env = SeededEnv::new(1);
        let pool = Arc::new(Pool::new(Arc::new(env.clone()), threads, waiting));
        env.clone().run(async move { test(env, pool).await })
    }

    fn on_threads<T>(threads: usize, test: impl AsyncFnOnce(Arc<Pool>) -> T) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let env = Arc::new(RealEnv::new(runtime.handle().clone()));
        runtime.block_on(test(Arc::new(Pool::new(env, threads, 64))))
    }

    #[test]
    fn work_whose_client_has_left_never_begins() {
        seeded(1, 4, async |_, pool| {
            let began = Arc::new(AtomicUsize::new(0));
            let count = began.clone();
            let mut left = Box::pin(pool.run(LARGE, (), move |_| count.fetch_add(1, Ordering::Relaxed)));
            assert!(left.as_mut().now_or_never().is_none(), "it waits for a thread");
            drop(left);
            let stays = pool.run(LARGE, (), |_| 5).await.ok().unwrap();
            assert_eq!((stays.0, began.load(Ordering::Relaxed)), (5, 0));
        });
    }

    #[test]
    fn those_who_wait_are_few_and_the_next_one_gets_a_429_with_retry_after() {
        seeded(1, 2, async |_, pool| {
            let mut waiting: Vec<_> = (0..2).map(|at| Box::pin(pool.run(LARGE, at, |_| ()))).collect();
            for one in &mut waiting {
                assert!(one.as_mut().now_or_never().is_none());
            }
            let refused = pool.run(LARGE, 2, |_| ()).await.err().unwrap();
            assert_eq!((refused.status, refused.retry_after_s()), (StatusCode::TOO_MANY_REQUESTS, Some(1)));
            assert!(pool.run(1, 3, |_| ()).await.is_ok(), "a small one needs no thread");
            for (at, one) in waiting.into_iter().enumerate() {
                assert_eq!(one.await.ok().unwrap().1, at);
            }
            assert!(pool.run(LARGE, 4, |_| ()).await.is_ok());
        });
    }

    #[test]
    fn no_thread_is_a_503_and_another_one_will_do() {
        seeded(2, 4, async |env, pool| {
            env.refuse_threads(true);
            let refused = pool.run(LARGE, (), |_| ()).await.err().unwrap();
            assert_eq!((refused.status, refused.retry_after_s()), (StatusCode::SERVICE_UNAVAILABLE, Some(1)));
            env.refuse_threads(false);
            assert!(pool.run(LARGE, (), |_| ()).await.is_ok());
            env.refuse_threads(true);
            assert!(pool.run(LARGE, (), |_| ()).await.is_ok(), "the first thread does the work");
        });
    }

    #[test]
    fn work_that_panics_is_a_500_and_its_thread_goes_on() {
        seeded(1, 4, async |_, pool| {
            for bytes in [1, LARGE] {
                let failed = pool.run(bytes, (), |_| panic!("as a library may")).await;
                assert_eq!(failed.err().map(|error| error.status), Some(StatusCode::INTERNAL_SERVER_ERROR));
            }
            assert!(pool.run(LARGE, (), |_| ()).await.is_ok());
            yield_now().await;
        });
    }

    #[test]
    fn what_a_request_holds_comes_back_when_its_work_has_really_ended() {
        on_threads(1, async |pool| {
            let places = Arc::new(Semaphore::new(1));
            let permit = places.clone().try_acquire_owned().unwrap();
            let ((begun, has_begun), (go_on, may_go_on)) = (channel(), channel::<()>());
            let (told, was_told) = channel();
            let mut run = Box::pin(pool.run(LARGE, permit, move |stopped| {
                begun.send(()).unwrap();
                may_go_on.recv().unwrap();
                told.send(stopped()).unwrap();
            }));
            assert!(run.as_mut().now_or_never().is_none());
            has_begun.recv().unwrap();
            drop(run);
            assert_eq!(places.available_permits(), 0, "the client has left and its work goes on");
            go_on.send(()).unwrap();
            assert!(was_told.recv().unwrap(), "the work sees that its client has left");
            drop(places.acquire().await);
        });
    }

    #[test]
    fn so_many_threads_work_and_no_more() {
        let names = on_threads(2, async |pool| {
            let name = |_: Stopped<'_>| std::thread::current().name().map(str::to_string);
            let all: Vec<_> = (0..40).map(|_| pool.run(LARGE, (), name)).collect();
            let names = futures_util::future::join_all(all).await;
            names.into_iter().map(|result| result.ok().unwrap().0.unwrap()).collect::<HashSet<_>>()
        });
        assert!(names.iter().all(|name| ["reader-0", "reader-1"].contains(&name.as_str())), "{names:?}");
    }
}

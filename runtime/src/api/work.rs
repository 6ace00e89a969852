//! A small thread pool for parsing and tokenising, which would delay other requests on the threads that serve
//! them.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::{Semaphore, oneshot};

use super::encode::Stopped;
use super::errors::ApiError;
use crate::budget::{Party, share};
use crate::env::SharedEnv;

/// A body up to this length is processed in place: at 5 MB/s its text is tokenised in less than a
/// millisecond.
const IN_PLACE_BYTES_MAX: usize = 4 << 10;

/// The length to declare for work that may take long regardless of its size.
pub(super) const NEVER_IN_PLACE: usize = usize::MAX;

type Job = Box<dyn FnOnce() + Send>;

/// Threads that parse requests, started when they are first needed, and the jobs that wait for them.
pub(crate) struct WorkPool {
    env: SharedEnv,
    /// Names its threads.
    name: &'static str,
    waiting: Arc<Waiting>,
    threads: AtomicUsize,
    threads_max: usize,
}

/// Jobs that no thread has begun.
struct Waiting {
    jobs_max: usize,
    queues: Mutex<Queues>,
    /// A permit for each job; closed with the pool.
    jobs: Semaphore,
}

/// One queue per party; queues take turns, so that a party with many jobs delays only itself.
#[derive(Default)]
struct Queues {
    /// The queues that are not empty.
    of: HashMap<Party, VecDeque<Job>>,
    turns: VecDeque<Party>,
    jobs: usize,
}

impl Waiting {
    fn push(&self, party: Party, job: Job) -> Result<(), ApiError> {
        let full = |whose: &str, most: usize| {
            ApiError::overloaded(format!("{most} requests{whose} already wait to be read"), 1)
        };
        let mut queues = self.lock();
        let own = queues.of.get(&party).map_or(0, VecDeque::len);
        if queues.jobs >= self.jobs_max {
            return Err(full("", self.jobs_max));
        }
        if own >= share(self.jobs_max) {
            return Err(full(" of this key or address", own));
        }
        queues.jobs += 1;
        queues.of.entry(party.clone()).or_default().push_back(job);
        if own == 0 {
            queues.turns.push_back(party);
        }
        drop(queues);
        self.jobs.add_permits(1);
        Ok(())
    }

    /// The next job; none when there will be no more.
    async fn pop(&self) -> Option<Job> {
        self.jobs.acquire().await.ok()?.forget();
        let mut queues = self.lock();
        let party = queues.turns.pop_front()?;
        let queue = queues.of.get_mut(&party)?;
        let job = queue.pop_front();
        match queue.is_empty() {
            true => drop(queues.of.remove(&party)),
            false => queues.turns.push_back(party),
        }
        queues.jobs -= 1;
        job
    }

    fn lock(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for WorkPool {
    fn drop(&mut self) {
        self.waiting.jobs.close();
    }
}

impl WorkPool {
    pub(crate) fn new(env: SharedEnv, name: &'static str, threads_max: usize, waiting_max: usize) -> Self {
        let waiting =
            Waiting { jobs_max: waiting_max.max(1), queues: Mutex::default(), jobs: Semaphore::new(0) };
        WorkPool {
            env,
            name,
            waiting: Arc::new(waiting),
            threads: AtomicUsize::new(0),
            threads_max: threads_max.max(1),
        }
    }

    /// Runs `work` on a body of `bytes` bytes that `party` sent. `held` is returned with the result; it is
    /// released only when the work has ended, whether or not a caller still waits. Work whose client has left
    /// does not begin; work that has begun is notified.
    pub(crate) async fn run<T: Send + 'static, H: Send + 'static>(
        &self,
        bytes: usize,
        party: Party,
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
            // A library that panics must not end the thread; the client gets a 500.
            let result = catch_unwind(AssertUnwindSafe(|| work(&|| sender.is_closed())));
            if let Ok(result) = result {
                drop(sender.send((result, held)));
            }
        };
        self.waiting.push(party, Box::new(job))?;
        receiver.await.map_err(|_| failed())
    }

    /// Starts one more thread, unless there are enough.
    fn start_thread(&self) -> Result<(), ApiError> {
        let more = |threads| (threads < self.threads_max).then_some(threads + 1);
        let Ok(threads) = self.threads.fetch_update(Ordering::AcqRel, Ordering::Acquire, more) else {
            return Ok(());
        };
        let waiting = self.waiting.clone();
        let work = async move {
            while let Some(job) = waiting.pop().await {
                job();
            }
        };
        if let Err(error) = self.env.spawn_worker(&format!("{}-{threads}", self.name), Box::pin(work)) {
            tracing::warn!(%error, "no thread could be started to read a request");
            // Another thread will do the work, if there is one.
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

    const LARGE: usize = IN_PLACE_BYTES_MAX + 1;

    fn party(last: u8) -> Party {
        Party::Address([10, 0, 0, last].into())
    }

    fn seeded<T: Send + 'static, F: Future<Output = T> + Send + 'static>(
        threads: usize,
        waiting: usize,
        test: impl FnOnce(SeededEnv, Arc<WorkPool>) -> F + Send + 'static,
    ) -> T {
        let env = SeededEnv::new(1);
        let pool = Arc::new(WorkPool::new(Arc::new(env.clone()), "reader", threads, waiting));
        env.clone().run(async move { test(env, pool).await })
    }

    fn on_threads<T>(threads: usize, test: impl AsyncFnOnce(Arc<WorkPool>) -> T) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let env = Arc::new(RealEnv::new(runtime.handle().clone()));
        runtime.block_on(test(Arc::new(WorkPool::new(env, "reader", threads, 128))))
    }

    #[test]
    fn work_whose_client_has_left_never_begins() {
        seeded(1, 4, async |_, pool| {
            let began = Arc::new(AtomicUsize::new(0));
            let count = began.clone();
            let mut left =
                Box::pin(pool.run(LARGE, party(1), (), move |_| count.fetch_add(1, Ordering::Relaxed)));
            assert!(left.as_mut().now_or_never().is_none(), "it waits for a thread");
            drop(left);
            let stays = pool.run(LARGE, party(1), (), |_| 5).await.ok().unwrap();
            assert_eq!((stays.0, began.load(Ordering::Relaxed)), (5, 0));
        });
    }

    #[test]
    fn those_who_wait_are_few_and_the_next_one_gets_a_429_with_retry_after() {
        seeded(1, 2, async |_, pool| {
            let parties = [party(1), party(2), party(3)];
            let mut waiting: Vec<_> =
                (0..2).map(|at| Box::pin(pool.run(LARGE, parties[at].clone(), at, |_| ()))).collect();
            for one in &mut waiting {
                assert!(one.as_mut().now_or_never().is_none());
            }
            let refused = pool.run(LARGE, parties[2].clone(), 2, |_| ()).await.err().unwrap();
            assert_eq!((refused.status, refused.retry_after_s()), (StatusCode::TOO_MANY_REQUESTS, Some(1)));
            assert!(pool.run(1, parties[2].clone(), 3, |_| ()).await.is_ok(), "a small one needs no thread");
            for (at, one) in waiting.into_iter().enumerate() {
                assert_eq!(one.await.ok().unwrap().1, at);
            }
            assert!(pool.run(LARGE, parties[2].clone(), 4, |_| ()).await.is_ok());
        });
    }

    #[test]
    fn one_party_fills_half_of_the_queue_and_another_one_still_finds_a_place() {
        seeded(1, 4, async |_, pool| {
            let (greedy, other) = (party(1), party(2));
            let mut waiting: Vec<_> =
                (0..2).map(|_| Box::pin(pool.run(LARGE, greedy.clone(), (), |_| ()))).collect();
            for one in &mut waiting {
                assert!(one.as_mut().now_or_never().is_none());
            }
            let refused = pool.run(LARGE, greedy.clone(), (), |_| ()).await.err().unwrap();
            assert_eq!((refused.status, refused.retry_after_s()), (StatusCode::TOO_MANY_REQUESTS, Some(1)));
            assert!(pool.run(LARGE, other, (), |_| ()).await.is_ok());
            futures_util::future::join_all(waiting).await;
            assert!(pool.run(LARGE, greedy.clone(), (), |_| ()).await.is_ok(), "its places came back");
        });
    }

    #[test]
    fn whoever_sends_much_waits_and_the_next_party_is_served_in_turn() {
        seeded(1, 16, async |_, pool| {
            let order = Arc::new(Mutex::new(Vec::new()));
            let parties = [party(1), party(2)];
            let mut all: Vec<_> = [0, 0, 0, 0, 1, 1]
                .into_iter()
                .map(|from: usize| {
                    let order = order.clone();
                    Box::pin(
                        pool.run(LARGE, parties[from].clone(), (), move |_| order.lock().unwrap().push(from)),
                    )
                })
                .collect();
            for one in &mut all {
                assert!(one.as_mut().now_or_never().is_none());
            }
            futures_util::future::join_all(all).await;
            assert_eq!(*order.lock().unwrap(), [0, 1, 0, 1, 0, 0]);
            let queues = pool.waiting.lock();
            assert!(queues.of.is_empty() && queues.turns.is_empty() && queues.jobs == 0);
        });
    }

    #[test]
    fn no_thread_is_a_503_and_another_one_will_do() {
        seeded(2, 4, async |env, pool| {
            env.refuse_threads(true);
            let refused = pool.run(LARGE, party(1), (), |_| ()).await.err().unwrap();
            assert_eq!((refused.status, refused.retry_after_s()), (StatusCode::SERVICE_UNAVAILABLE, Some(1)));
            env.refuse_threads(false);
            assert!(pool.run(LARGE, party(1), (), |_| ()).await.is_ok());
            env.refuse_threads(true);
            assert!(pool.run(LARGE, party(1), (), |_| ()).await.is_ok(), "the first thread does the work");
        });
    }

    #[test]
    fn work_that_panics_is_a_500_and_its_thread_goes_on() {
        seeded(1, 4, async |_, pool| {
            for bytes in [1, LARGE] {
                let failed = pool.run(bytes, party(1), (), |_| panic!("as a library may")).await;
                assert_eq!(failed.err().map(|error| error.status), Some(StatusCode::INTERNAL_SERVER_ERROR));
            }
            assert!(pool.run(LARGE, party(1), (), |_| ()).await.is_ok());
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
            let mut run = Box::pin(pool.run(LARGE, party(1), permit, move |stopped| {
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
            let all: Vec<_> = (0..40).map(|_| pool.run(LARGE, party(1), (), name)).collect();
            let names = futures_util::future::join_all(all).await;
            names.into_iter().map(|result| result.ok().unwrap().0.unwrap()).collect::<HashSet<_>>()
        });
        assert!(names.iter().all(|name| ["reader-0", "reader-1"].contains(&name.as_str())), "{names:?}");
    }
}

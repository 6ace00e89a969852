//! The deterministic environment: one thread, virtual time, one seed.

use super::baton::{Turn, WorkerThread};
use super::{Connection, Env, Listener, Task};
use futures_util::future::BoxFuture;
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::{Ordered, Seconds};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;
use tokio::sync::mpsc;

/// Bytes that an in-memory connection buffers in each direction.
const CONNECTION_BYTES: usize = 64 * 1024;
/// Polls without progress of virtual time after which a run counts as a livelock.
const POLLS_MAX: u64 = 50_000_000;

type Incoming = mpsc::UnboundedSender<(Box<dyn Connection>, SocketAddr)>;

#[derive(Default)]
struct World {
    now: Ordered,
    tasks: BTreeMap<u64, Task>,
    workers: BTreeMap<u64, Worker>,
    /// Tasks that are being polled, and whether they were woken during the poll.
    polled: BTreeMap<u64, bool>,
    spawned: u64,
    /// Timers, by deadline and order of creation.
    timers: BTreeMap<(Ordered, u64), Waker>,
    timers_made: u64,
    listeners: HashMap<String, Incoming>,
    /// Whether new threads are refused.
    threads_refused: bool,
}

/// A task with a thread of its own.
struct Worker {
    thread: WorkerThread,
    /// The time until which it blocks in the middle of its work.
    blocked_until: Option<Ordered>,
    /// Whether waking it also ends the block.
    or_woken: bool,
    /// Whether it was woken while it blocked.
    woken: bool,
}

/// Tasks that can run, in the order in which they were woken.
#[derive(Default)]
struct Ready(Mutex<VecDeque<u64>>);

impl Ready {
    fn add(&self, task: u64) {
        let mut tasks = lock(&self.0);
        if !tasks.contains(&task) {
            tasks.push_back(task);
        }
    }
}

struct TaskWaker {
    task: u64,
    ready: Arc<Ready>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.ready.add(self.task);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// The deterministic environment. Clones share one world.
#[derive(Clone)]
pub struct SeededEnv {
    seed: u64,
    /// Whether workers have threads of their own.
    threads: bool,
    world: Arc<Mutex<World>>,
    ready: Arc<Ready>,
    random: Arc<Mutex<Stream>>,
    schedule: Arc<Mutex<Stream>>,
}

impl std::fmt::Debug for SeededEnv {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SeededEnv(seed {})", self.seed)
    }
}

impl SeededEnv {
    /// An environment that is determined by `seed`.
    pub fn new(seed: u64) -> Self {
        SeededEnv {
            seed,
            threads: false,
            world: Arc::default(),
            ready: Arc::default(),
            random: Arc::new(Mutex::new(Stream::new(seed))),
            schedule: Arc::new(Mutex::new(Stream::new(!seed))),
        }
    }

    /// An environment in which workers may block until a time by [`SeededEnv::block_until`], as they do for
    /// devices. It is slower, since workers take turns by threads. Messages take no virtual time, so tasks
    /// run in the order in which they were woken: a message that passes through fewer tasks arrives first, as
    /// it would if each took some time. The seed decides only random values.
    pub fn with_blocking_workers(seed: u64) -> Self {
        SeededEnv { threads: true, ..SeededEnv::new(seed) }
    }

    /// Refuses new workers from now on, as a host without threads left would, or stops refusing them.
    pub fn refuse_threads(&self, refused: bool) {
        lock(&self.world).threads_refused = refused;
    }

    /// Returns at virtual time `time`. On a worker's thread others run in between; elsewhere, as before
    /// anything runs, time just passes.
    pub fn block_until(&self, time: Seconds) {
        if time <= self.now() || WorkerThread::block_own(time, false) {
            return;
        }
        let mut world = lock(&self.world);
        world.now = world.now.max(Ordered(time.0));
    }

    /// Runs all tasks until `main` is done.
    ///
    /// # Panics
    /// When nothing can run any more and no timer is set (a deadlock), or time does not advance (a livelock).
    /// The message holds the seed.
    pub fn run<T: Send + 'static>(&self, main: impl Future<Output = T> + Send + 'static) -> T {
        let result = Arc::new(Mutex::new(None));
        let slot = result.clone();
        self.spawn(Box::pin(async move {
            let value = main.await;
            *lock(&slot) = Some(value);
        }));
        let mut polls = 0;
        loop {
            if let Some(value) = lock(&result).take() {
                return value;
            }
            if self.poll_one() {
                polls += 1;
                assert!(polls < POLLS_MAX, "livelock with seed {}", self.seed);
            } else {
                polls = 0;
                assert!(self.advance(), "deadlock with seed {}: no task can run", self.seed);
            }
        }
    }

    /// Ends the environment: drops every task that has no thread, and every timer. Tasks and environment
    /// refer to each other, so without this call they stay in memory.
    pub fn end(&self) {
        let (tasks, timers) = {
            let mut world = lock(&self.world);
            (std::mem::take(&mut world.tasks), std::mem::take(&mut world.timers))
        };
        // Dropped outside the lock, since they may access the environment.
        drop((tasks, timers));
    }

    /// Polls one ready task: the seed's choice, or the first one woken where workers block. False if none is
    /// ready.
    fn poll_one(&self) -> bool {
        let task = {
            let mut ready = lock(&self.ready.0);
            let nth = match ready.len() as u64 {
                0 => return false,
                _ if self.threads => 0,
                count => to_usize(lock(&self.schedule).below(count)),
            };
            ready.remove(nth).expect("in range")
        };
        let future = lock(&self.world).tasks.remove(&task);
        let Some(mut future) = future else {
            self.run_worker(task);
            return true;
        };
        lock(&self.world).polled.insert(task, false);
        let ended = future.as_mut().poll(&mut Context::from_waker(&self.waker(task))).is_ready();
        let mut world = lock(&self.world);
        let woken = world.polled.remove(&task) == Some(true);
        if !ended {
            world.tasks.insert(task, future);
        }
        if woken && !ended {
            self.ready.add(task);
        }
        true
    }

    fn waker(&self, task: u64) -> Waker {
        Waker::from(Arc::new(TaskWaker { task, ready: self.ready.clone() }))
    }

    /// Gives a turn to a worker with a thread, unless it is blocked or gone.
    fn run_worker(&self, task: u64) {
        let thread = {
            let mut world = lock(&self.world);
            let now = world.now;
            // A worker that blocks without a thread is in the middle of its own turn.
            if let Some(woken) = world.polled.get_mut(&task) {
                *woken = true;
            }
            let Some(worker) = world.workers.get_mut(&task) else { return };
            if worker.blocked_until.is_some_and(|until| until > now) {
                worker.woken = true;
                if !worker.or_woken {
                    return;
                }
            }
            worker.blocked_until = None;
            worker.thread.clone()
        };
        let turn = thread.run();
        let mut world = lock(&self.world);
        match turn {
            Turn::Pending => {
                let woken = world.workers.get_mut(&task).is_some_and(|w| std::mem::take(&mut w.woken));
                if woken {
                    self.ready.add(task);
                }
            }
            Turn::Done => {
                world.workers.remove(&task);
            }
            Turn::Blocked { until, or_woken } => {
                let until = Ordered(until.0);
                if let Some(worker) = world.workers.get_mut(&task) {
                    (worker.blocked_until, worker.or_woken) = (Some(until), or_woken);
                }
                world.timer(until, self.waker(task));
            }
            Turn::Panicked(panic) => {
                drop(world);
                std::panic::resume_unwind(panic);
            }
        }
    }

    /// Advances time to the next timer. False if there is none.
    fn advance(&self) -> bool {
        let mut world = lock(&self.world);
        let Some(((deadline, _), waker)) = world.timers.pop_first() else { return false };
        world.now = world.now.max(deadline);
        drop(world);
        waker.wake();
        true
    }

    /// Opens an in-memory connection to a listener of this environment.
    pub fn connect(&self, address: &str) -> io::Result<Box<dyn Connection>> {
        self.connect_from(Ipv4Addr::LOCALHOST.into(), address)
    }

    /// Opens an in-memory connection from the address `party`.
    pub fn connect_from(&self, party: IpAddr, address: &str) -> io::Result<Box<dyn Connection>> {
        let (ours, theirs) = tokio::io::duplex(CONNECTION_BYTES);
        let world = lock(&self.world);
        let listener = world.listeners.get(address).ok_or(io::ErrorKind::ConnectionRefused)?;
        let sent = listener.send((Box::new(theirs), SocketAddr::new(party, 0)));
        sent.map_err(|_| io::Error::from(io::ErrorKind::ConnectionRefused))?;
        Ok(Box::new(ours))
    }
}

impl World {
    fn timer(&mut self, deadline: Ordered, waker: Waker) -> u64 {
        let order = self.timers_made;
        self.timers.insert((deadline, order), waker);
        self.timers_made += 1;
        order
    }
}

impl Env for SeededEnv {
    fn now(&self) -> Seconds {
        Seconds(lock(&self.world).now.0)
    }

    fn unix_time(&self) -> Seconds {
        // A fixed day, 2026-01-01, so that runs are equal.
        self.now() + Seconds(1_767_225_600.0)
    }

    fn sleep(&self, span: Duration) -> Task {
        let deadline = Ordered(lock(&self.world).now.0 + span.as_secs_f64());
        Box::pin(Sleep { deadline, timer: None, world: self.world.clone() })
    }

    fn spawn(&self, task: Task) {
        let mut world = lock(&self.world);
        let id = world.spawned;
        world.spawned += 1;
        world.tasks.insert(id, task);
        self.ready.add(id);
    }

    fn spawn_worker(&self, name: &str, task: Task) -> io::Result<()> {
        if lock(&self.world).threads_refused {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        if !self.threads {
            self.spawn(task);
            return Ok(());
        }
        let mut world = lock(&self.world);
        let id = world.spawned;
        world.spawned += 1;
        let thread = WorkerThread::spawn(name, task, self.waker(id))?;
        world.workers.insert(id, Worker { thread, blocked_until: None, or_woken: false, woken: false });
        self.ready.add(id);
        Ok(())
    }

    fn block_on(&self, mut done: BoxFuture<'_, ()>, limit: Duration) -> bool {
        let deadline = self.now() + Seconds(limit.as_secs_f64());
        let own = WorkerThread::own_waker();
        // Without a thread of its own, the worker runs the other tasks itself and polls `done` after each.
        let waker = own.clone().unwrap_or_else(|| Waker::noop().clone());
        let mut alarm = self.sleep(limit);
        if own.is_none() {
            _ = alarm.as_mut().poll(&mut Context::from_waker(&waker));
        }
        loop {
            if done.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
                return true;
            }
            if self.now() >= deadline {
                return false;
            }
            if own.is_some() {
                WorkerThread::block_own(deadline, true);
            } else if !self.poll_one() {
                assert!(self.advance(), "deadlock with seed {}: no task can run", self.seed);
            }
        }
    }

    fn random(&self) -> u64 {
        lock(&self.random).next_u64()
    }

    fn listen(&self, address: &str) -> BoxFuture<'static, io::Result<Box<dyn Listener>>> {
        let (sender, incoming) = mpsc::unbounded_channel();
        let address = address.to_string();
        lock(&self.world).listeners.insert(address.clone(), sender);
        let listener: Box<dyn Listener> = Box::new(MemoryListener { address, incoming });
        Box::pin(std::future::ready(Ok(listener)))
    }
}

struct Sleep {
    deadline: Ordered,
    /// The creation order of its one timer: polling a sleep for other reasons must not add timers that wake
    /// its task.
    timer: Option<u64>,
    world: Arc<Mutex<World>>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        let mut world = lock(&this.world);
        if world.now >= this.deadline {
            return Poll::Ready(());
        }
        let waker = context.waker().clone();
        match this.timer {
            None => this.timer = Some(world.timer(this.deadline, waker)),
            Some(order) => _ = world.timers.insert((this.deadline, order), waker),
        }
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(order) = self.timer {
            lock(&self.world).timers.remove(&(self.deadline, order));
        }
    }
}

struct MemoryListener {
    address: String,
    incoming: mpsc::UnboundedReceiver<(Box<dyn Connection>, SocketAddr)>,
}

impl Listener for MemoryListener {
    fn accept(&mut self) -> BoxFuture<'_, io::Result<(Box<dyn Connection>, SocketAddr)>> {
        Box::pin(
            async move { self.incoming.recv().await.ok_or_else(|| io::ErrorKind::ConnectionAborted.into()) },
        )
    }

    fn address(&self) -> String {
        self.address.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::yield_now;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    fn interleaving(seed: u64) -> Vec<u32> {
        let env = SeededEnv::new(seed);
        let order = Arc::new(Mutex::new(Vec::new()));
        for name in 0..4u32 {
            let (env2, order) = (env.clone(), order.clone());
            env.spawn(Box::pin(async move {
                for round in 0..3 {
                    lock(&order).push(name);
                    if round == 1 {
                        env2.sleep(Duration::from_millis(u64::from(name % 2))).await;
                    }
                    yield_now().await;
                }
            }));
        }
        let env2 = env.clone();
        env.run(async move { env2.sleep(Duration::from_secs(3600)).await });
        assert_eq!(env.now(), Seconds(3600.0));
        std::mem::take(&mut *lock(&order))
    }

    #[test]
    fn a_seed_decides_the_order_and_an_hour_takes_no_time() {
        assert_eq!(interleaving(1), interleaving(1));
        assert!((2..10).any(|seed| interleaving(seed) != interleaving(1)));
    }

    /// Runs two workers side by side whose devices take 3 s and 2 s for a piece of work.
    fn side_by_side(seed: u64) -> Vec<(&'static str, f64)> {
        let env = SeededEnv::with_blocking_workers(seed);
        let seen = Arc::new(Mutex::new(Vec::new()));
        let mut ends = Vec::new();
        for (name, takes_s) in [("slow", 3.0), ("quick", 2.0)] {
            let (sender, mut inbox) = mpsc::unbounded_channel::<()>();
            let (env2, seen) = (env.clone(), seen.clone());
            env.spawn_worker(
                name,
                Box::pin(async move {
                    while inbox.recv().await.is_some() {
                        env2.block_until(env2.now() + Seconds(takes_s));
                        lock(&seen).push((name, env2.now().0));
                    }
                }),
            )
            .unwrap();
            ends.push(sender);
        }
        let env2 = env.clone();
        env.run(async move {
            for at in 0..2 {
                env2.sleep(Duration::from_secs(at)).await;
                // The second message comes while both are blocked, and must not be lost.
                ends.iter().for_each(|end| end.send(()).unwrap());
            }
            env2.sleep(Duration::from_secs(10)).await;
        });
        std::mem::take(&mut *lock(&seen))
    }

    #[test]
    fn who_blocks_delays_nobody_else_and_loses_no_message() {
        for seed in 0..20 {
            let mut seen = side_by_side(seed);
            seen.retain(|(_, at_s)| *at_s != 6.0);
            let expected = [("quick", 2.0), ("slow", 3.0), ("quick", 4.0)];
            assert_eq!(seen, expected, "seed {seed}");
        }
    }

    /// Has a worker wait for at most 2 s for an answer that comes after `answer_s`; returns whether it came,
    /// when the wait ended, and whether another task ran during it.
    fn waited(env: &SeededEnv, answer_s: u64) -> (bool, f64, bool) {
        let (tell, told) = tokio::sync::oneshot::channel::<()>();
        let (result, seen) = tokio::sync::oneshot::channel();
        let ran = Arc::new(Mutex::new(false));
        let (env2, other, ran2) = (env.clone(), env.clone(), ran.clone());
        let (wake, mut woken) = mpsc::unbounded_channel::<()>();
        let waits = async move {
            // It is woken while it waits for something else, and must not miss that afterwards.
            let mut both = Box::pin(async {
                let came = env2.block_on(Box::pin(async { _ = told.await }), Duration::from_secs(2));
                (came, env2.now().0)
            });
            let early = std::future::poll_fn(|context| {
                assert!(woken.poll_recv(context).is_pending());
                both.as_mut().poll(context)
            });
            let (came, at) = early.await;
            woken.recv().await.unwrap();
            result.send((came, at)).unwrap();
        };
        env.spawn_worker("waits", Box::pin(waits)).unwrap();
        env.spawn(Box::pin(async move {
            other.sleep(Duration::from_secs(1)).await;
            *lock(&ran2) = true;
            wake.send(()).unwrap();
            other.sleep(Duration::from_secs(answer_s - 1)).await;
            _ = tell.send(());
            other.sleep(Duration::from_secs(60)).await;
        }));
        let (came, at) = env.run(async move { seen.await.unwrap() });
        (came, at, *lock(&ran))
    }

    #[test]
    fn who_waits_for_an_answer_gets_it_or_goes_on_in_time_and_others_run() {
        for seed in 0..20 {
            for env in [SeededEnv::new(seed), SeededEnv::with_blocking_workers(seed)] {
                assert_eq!(waited(&env, 1), (true, 1.0, true), "{env:?}");
            }
            for env in [SeededEnv::new(seed), SeededEnv::with_blocking_workers(seed)] {
                assert_eq!(waited(&env, 3), (false, 2.0, true), "{env:?}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "deadlock with seed 7")]
    fn a_deadlock_is_reported_with_its_seed() {
        SeededEnv::new(7).run(std::future::pending::<()>());
    }

    #[test]
    fn connections_carry_bytes_both_ways() {
        let env = SeededEnv::new(3);
        let world = env.clone();
        let reply = env.run(async move {
            let mut listener = world.listen("server:80").await.unwrap();
            world.spawn(Box::pin(async move {
                let (mut connection, _) = listener.accept().await.unwrap();
                let mut word = [0; 4];
                connection.read_exact(&mut word).await.unwrap();
                connection.write_all(&[word, *b"pong"].concat()).await.unwrap();
            }));
            assert!(world.connect("elsewhere:80").is_err());
            let mut connection = world.connect("server:80").unwrap();
            connection.write_all(b"ping").await.unwrap();
            let mut reply = [0; 8];
            connection.read_exact(&mut reply).await.unwrap();
            reply
        });
        assert_eq!(&reply, b"pingpong");
    }
}

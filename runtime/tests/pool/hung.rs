//! Disks that do not respond, or respond late.

use super::support::{Follower, config, open, put, served, ssd, tokens};
use futures_util::future::BoxFuture;
use mixfleet_hal::fault::{Fault, FaultPlan};
use mixfleet_hal::units::Seconds;
use mixfleet_runtime::env::{Env, RealEnv, SeededEnv, SharedEnv};
use mixfleet_runtime::pool::disk::{Disk, SimDisk};
use mixfleet_runtime::pool::{Lease, NextBlock, Pool, SsdConfig};
use mixfleet_scheduler::kv::BlockHash;
use std::future::ready;
use std::io;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_millis(100);
/// On a busy machine a thread may have to wait.
const REAL_TIMEOUT: Duration = Duration::from_secs(1);
const OPERATION: Duration = Duration::from_millis(1);
const DRAM_BLOCKS: u64 = 2;
const SSD_BLOCKS: u64 = 40;

fn ssd_config(disk: &SimDisk) -> SsdConfig {
    SsdConfig { timeout: TIMEOUT, ..ssd(disk.clone(), SSD_BLOCKS) }
}

/// A disk whose operations take virtual time; one that hangs responds after `hang`.
fn timed(env: &SeededEnv, hang: Duration) -> SimDisk {
    let disk = SimDisk::default();
    let world = env.clone();
    disk.takes(OPERATION, hang, move |span| {
        world.block_until(world.now() + Seconds(span.as_secs_f64()));
    });
    disk
}

fn start_disk(pool: &Pool, disk: &SimDisk, env: &SeededEnv) {
    let shared: SharedEnv = Arc::new(env.clone());
    pool.start_disk(ssd_config(disk), Box::pin(ready(Some(5))), "disk", &shared).expect("a thread");
}

/// The result of `work`, run by a worker of a separate environment.
fn at_work<T: Send + 'static>(
    seed: u64,
    work: impl FnOnce(SeededEnv) -> BoxFuture<'static, T> + Send + 'static,
) -> T {
    let env = SeededEnv::with_blocking_workers(seed);
    let (tell, told) = tokio::sync::oneshot::channel();
    let world = env.clone();
    env.spawn_worker("test", Box::pin(async move { _ = tell.send(work(world).await) })).expect("a thread");
    let result = env.run(async move { told.await.expect("the worker ends") });
    env.end();
    result
}

/// A pool with the blocks 0 to 7 on a disk that has a thread.
async fn filled(env: &SeededEnv, disk: &SimDisk) -> (Pool, Follower) {
    let pool = open(config(DRAM_BLOCKS, Some(ssd_config(disk)))).expect("a new pool");
    start_disk(&pool, disk, env);
    env.sleep(TIMEOUT).await;
    let follower = Follower::new(&pool.begin_to_follow());
    for key in 0..10 {
        pool.begin_turn();
        put(&pool, key);
    }
    (pool, follower)
}

/// What `poll_next` says in the end, how often it said that the block is awaited, and the time until then.
fn polled(env: &SeededEnv, lease: &mut Lease) -> (NextBlock, u32, f64) {
    let (start, mut awaited) = (env.now(), 0);
    loop {
        match lease.poll_next(Duration::from_millis(2)) {
            NextBlock::Awaited => awaited += 1,
            next => return (next, awaited, (env.now() - start).0),
        }
    }
}

#[test]
fn a_read_that_nobody_waits_for_ends_once_the_disk_is_silent_for_its_timeout() {
    at_work(3, |env| {
        Box::pin(async move {
            let disk = timed(&env, Duration::from_secs(5));
            let (pool, _) = filled(&env, &disk).await;
            let lease = |key: u64| pool.begin_lease(&[BlockHash(key)], &tokens(key));
            let (next, _, waited_s) = polled(&env, &mut lease(2));
            assert!(next == NextBlock::Leased && waited_s <= 5.0 * OPERATION.as_secs_f64(), "{waited_s} s");
            // a reader that left does not take the disk out, and is not read for
            let before = disk.operations();
            for _ in 0..6 {
                assert_eq!(lease(4).poll_next(Duration::ZERO), NextBlock::Awaited);
            }
            assert_eq!(polled(&env, &mut lease(5)).0, NextBlock::Leased);
            // a read, and what host memory writes for it
            assert!(disk.operations() - before <= 5, "{}", disk.operations() - before);

            hang_once(&disk);
            let (next, awaited, waited_s) = polled(&env, &mut lease(3));
            assert_eq!(next, NextBlock::Missing);
            assert!(awaited >= 40 && (0.1..0.11).contains(&waited_s), "{awaited} times, {waited_s} s");
            assert!(!pool.has_disk());
            env.sleep(Duration::from_secs(10)).await;
            assert!(pool.has_disk() && (pool.stats().ssd_outages, pool.stats().bad) == (1, 0));
            assert!(served(&pool, 3));
        })
    });
}

/// Makes the next operation hang.
fn hang_once(disk: &SimDisk) {
    let next = disk.operations();
    disk.set_plan(FaultPlan::exactly(Fault::Hang, next, next + 1));
}

fn agree(pool: &Pool, follower: &mut Follower) {
    follower.follow(&pool.take_events());
    follower.assert_agrees(&pool.snapshot());
}

#[test]
fn a_disk_that_hangs_holds_a_turn_up_once_is_out_and_comes_back_when_it_answers() {
    let history = |seed| {
        at_work(seed, |env| {
            Box::pin(async move {
                let disk = timed(&env, Duration::from_secs(5));
                let (pool, mut follower) = filled(&env, &disk).await;
                agree(&pool, &mut follower);
                hang_once(&disk);
                pool.begin_turn();
                let start = env.now();
                assert!(!served(&pool, 3), "a disk that hangs serves nothing");
                let waited = (env.now() - start).0;
                assert!((0.1..0.2).contains(&waited), "{waited} s");
                assert!(!pool.has_disk());
                agree(&pool, &mut follower);
                let stats = pool.stats();
                assert!(stats.ssd_out.is_some() && (stats.ssd_outages, stats.bad) == (1, 0), "{stats:?}");
                // The pool does not wait for it again.
                let start = env.now();
                for key in 0..100 {
                    pool.begin_turn();
                    put(&pool, key);
                }
                assert_eq!(env.now(), start);
                assert_eq!(pool.stats().ssd_outages, 1);
                agree(&pool, &mut follower);
                env.sleep(Duration::from_secs(6)).await;
                assert!(pool.has_disk() && pool.stats().ssd_out.is_none());
                agree(&pool, &mut follower);
                let known: Vec<u64> = pool.snapshot().ssd.iter().map(|hash| hash.0).collect();
                for &key in &known {
                    pool.begin_turn();
                    assert!(served(&pool, key), "block {key}");
                }
                agree(&pool, &mut follower);
                (known, env.now().0.to_bits())
            })
        })
    };
    let (known, end) = history(1);
    assert!(known.len() >= 8, "{known:?}");
    assert_eq!(history(1), (known, end), "equal seeds, equal histories");
}

#[test]
fn a_write_that_arrives_after_the_disk_was_given_up_does_no_harm() {
    for write in 0..12 {
        at_work(write, move |env| {
            Box::pin(async move {
                let disk = timed(&env, Duration::from_secs(2));
                let (pool, mut follower) = filled(&env, &disk).await;
                let struck = disk.operations() + write;
                disk.set_plan(FaultPlan::exactly(Fault::Hang, struck, struck + 1));
                for key in 20..30 {
                    pool.begin_turn();
                    put(&pool, key);
                }
                assert!(!pool.has_disk(), "it hung in operation {write}");
                env.sleep(Duration::from_secs(4)).await;
                agree(&pool, &mut follower);
                assert!(pool.has_disk());
                for BlockHash(key) in pool.snapshot().ssd {
                    pool.begin_turn();
                    assert!(served(&pool, key), "operation {write}, block {key}");
                }
                assert_eq!(pool.stats().bad, 0);
            })
        });
    }
}

#[test]
fn a_slow_disk_holds_a_turn_up_for_less_than_twice_its_timeout_and_stays() {
    at_work(1, |env| {
        Box::pin(async move {
            let disk = timed(&env, Duration::from_secs(5));
            let pool = open(config(12, Some(ssd_config(&disk)))).expect("a new pool");
            start_disk(&pool, &disk, &env);
            env.sleep(TIMEOUT).await;
            for key in 0..30 {
                pool.begin_turn();
                put(&pool, key);
            }
            disk.set_plan(FaultPlan::at_rate(Fault::Slow { times: 60 }, 1.0, 1));
            let chain: Vec<u64> = (0..8).collect();
            let mut lens = Vec::new();
            for _ in 0..2 {
                pool.begin_turn();
                let start = env.now();
                let lease = super::support::lease(&pool, &chain);
                // Blocks that are written to the disk in the same turn are dropped.
                let lost = pool.stats().lost;
                lens.push(lease.len());
                drop(lease);
                put(&pool, 100);
                assert!(pool.stats().lost >= lost);
                let waited = (env.now() - start).0;
                assert!(waited < 0.2, "{waited} s in a turn");
            }
            assert!(lens[0] > 0 && lens[0] < lens[1] && lens[1] < 8, "{lens:?} of 8 blocks came");
            assert!(pool.has_disk() && pool.stats().bad == 0, "{:?}", pool.stats());
        })
    });
}

#[test]
fn a_disk_that_hangs_again_and_again_is_tried_ever_less_often() {
    at_work(1, |env| {
        Box::pin(async move {
            let disk = timed(&env, Duration::from_secs(1));
            let (pool, mut follower) = filled(&env, &disk).await;
            let from = disk.operations();
            // Opening succeeds, and the first use hangs.
            let mut outages = Vec::new();
            for _ in 0..1000 {
                if pool.has_disk() {
                    hang_once(&disk);
                    pool.begin_turn();
                    assert!(!served(&pool, 3));
                    outages.push(env.now().0);
                }
                env.sleep(TIMEOUT).await;
            }
            agree(&pool, &mut follower);
            assert!(disk.operations() > from && (4..12).contains(&outages.len()), "{outages:?}");
            let pauses: Vec<f64> = outages.windows(2).map(|pair| pair[1] - pair[0]).collect();
            assert!(pauses.windows(2).all(|pair| pair[0] < pair[1] + 0.2), "{pauses:?}");
        })
    });
}

#[test]
fn a_disk_that_cannot_be_opened_later_is_left_out_and_tried_again() {
    at_work(1, |env| {
        Box::pin(async move {
            let disk = timed(&env, Duration::from_secs(1));
            disk.set_plan(FaultPlan::at_rate(Fault::Fail, 1.0, 1));
            let pool = open(config(DRAM_BLOCKS, None)).expect("host memory alone");
            start_disk(&pool, &disk, &env);
            env.sleep(Duration::from_secs(1)).await;
            put(&pool, 1);
            let stats = pool.stats();
            assert!(served(&pool, 1) && !pool.has_disk());
            assert!(stats.ssd_outages > 0 && stats.ssd_out.is_some(), "{stats:?}");
            disk.set_plan(FaultPlan::default());
            pool.changed().await;
            while !pool.has_disk() {
                pool.changed().await;
            }
            assert!(pool.stats().ssd_out.is_none() && env.now().0 < 60.0);
        })
    });
}

/// A disk whose writes do not return before they are released.
#[derive(Clone)]
struct Stuck {
    disk: SimDisk,
    /// Whether it blocks, and the number of calls in it.
    state: Arc<(Mutex<(bool, usize)>, Condvar)>,
}

impl Stuck {
    fn pass(&self) {
        let (state, changed) = &*self.state;
        state.lock().expect("sound").1 += 1;
        drop(changed.wait_while(state.lock().expect("sound"), |(stuck, _)| *stuck).expect("sound"));
        state.lock().expect("sound").1 -= 1;
    }

    fn set(&self, stuck: bool) {
        self.state.0.lock().expect("sound").0 = stuck;
        self.state.1.notify_all();
    }

    fn inside(&self) -> usize {
        self.state.0.lock().expect("sound").1
    }
}

impl Disk for Stuck {
    fn names(&self) -> io::Result<Vec<String>> {
        self.disk.names()
    }
    fn len(&self, file: &str) -> io::Result<Option<u64>> {
        self.disk.len(file)
    }
    fn read_at(&self, file: &str, offset: u64, data: &mut [u8]) -> io::Result<usize> {
        self.pass();
        self.disk.read_at(file, offset, data)
    }
    fn write_at(&self, file: &str, offset: u64, data: &[u8]) -> io::Result<()> {
        self.pass();
        self.disk.write_at(file, offset, data)
    }
    fn cut(&self, file: &str, bytes: u64) -> io::Result<()> {
        self.disk.cut(file, bytes)
    }
    fn sync(&self, file: &str) -> io::Result<()> {
        self.disk.sync(file)
    }
    fn sync_names(&self) -> io::Result<()> {
        self.disk.sync_names()
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.disk.rename(from, to)
    }
    fn remove(&self, file: &str) -> io::Result<()> {
        self.disk.remove(file)
    }
}

fn comes(pool: &Pool) {
    let start = Instant::now();
    while !pool.has_disk() {
        assert!(start.elapsed() < Duration::from_secs(60), "the disk does not come");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_thread_that_hangs_in_the_operating_system_is_left_alone_and_used_again_when_it_returns() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_time().build().expect("a runtime");
    let env: SharedEnv = Arc::new(RealEnv::new(runtime.handle().clone()));
    let disk = Stuck { disk: SimDisk::default(), state: Arc::default() };
    let tier = SsdConfig { timeout: REAL_TIMEOUT, ..ssd(disk.clone(), SSD_BLOCKS) };
    let pool = open(config(DRAM_BLOCKS, None)).expect("a new pool");
    pool.start_disk(tier, Box::pin(ready(Some(5))), "disk", &env).expect("a thread");
    comes(&pool);
    for key in 0..10 {
        pool.begin_turn();
        put(&pool, key);
    }
    disk.set(true);
    assert!(!served(&pool, 3), "a disk that hangs serves nothing");
    assert!(!pool.has_disk());
    (20..200).for_each(|key| {
        put(&pool, key);
    });
    assert_eq!((disk.inside(), pool.stats().ssd_outages), (1, 1), "one thread hangs, and no other");
    disk.set(false);
    comes(&pool);
    pool.begin_turn();
    assert!(served(&pool, 3), "it is used again");
}

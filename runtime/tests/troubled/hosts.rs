//! Hosts, whose clocks drift and whose threads run out.

use super::World;
use futures_util::future::BoxFuture;
use mixfleet_hal::units::Seconds;
use mixfleet_runtime::env::{Env, Listener, Task};
use mixfleet_simulated::SimulatedClock;
use std::io;
use std::time::Duration;

/// Maximum offset of a clock, and its maximum relative error: ten times that of quartz.
const AHEAD_S_MAX: f64 = 7200.0;
const DRIFT_MAX: f64 = 1e-3;

/// The host of a process, as the process sees it.
#[derive(Clone)]
pub(super) struct Host {
    world: World,
    ahead_s: f64,
    rate: f64,
}

impl World {
    /// The host of a new process.
    pub(super) fn host(&self) -> Host {
        if !self.workload.odd_clocks {
            return Host { world: self.clone(), ahead_s: 0.0, rate: 1.0 };
        }
        self.count("clocks off", 1);
        let either = || self.unit() * 2.0 - 1.0;
        Host { world: self.clone(), ahead_s: AHEAD_S_MAX * self.unit(), rate: 1.0 + DRIFT_MAX * either() }
    }
}

impl Host {
    /// Converts a span of this host's clock to the environment's.
    fn span(&self, span: Duration) -> Duration {
        span.div_f64(self.rate)
    }
}

impl Env for Host {
    fn now(&self) -> Seconds {
        Seconds(self.world.env.now().0 * self.rate + self.ahead_s)
    }

    fn unix_time(&self) -> Seconds {
        self.world.env.unix_time() + (Env::now(self) - self.world.env.now())
    }

    fn sleep(&self, span: Duration) -> Task {
        self.world.env.sleep(self.span(span))
    }

    fn spawn(&self, task: Task) {
        self.world.env.spawn(task);
    }

    fn spawn_worker(&self, name: &str, task: Task) -> io::Result<()> {
        if self.world.strikes(self.world.workload.threads_refused) {
            self.world.count("threads refused", 1);
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.world.env.spawn_worker(name, task)
    }

    fn block_on(&self, done: BoxFuture<'_, ()>, limit: Duration) -> bool {
        self.world.env.block_on(done, self.span(limit))
    }

    fn random(&self) -> u64 {
        self.world.env.random()
    }

    fn listen(&self, address: &str) -> BoxFuture<'static, io::Result<Box<dyn Listener>>> {
        self.world.env.listen(address)
    }
}

impl SimulatedClock for Host {
    fn now(&self) -> Seconds {
        Env::now(self)
    }

    fn wait_until(&self, time: Seconds) {
        self.world.env.block_until(Seconds((time.0 - self.ahead_s) / self.rate));
    }

    fn dilation(&self) -> f64 {
        1.0
    }
}

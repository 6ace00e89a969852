//! Devices lent to an instance by separate processes: they fail, hang, are lost with their content, and come
//! back.
//!
//! The engine sees a lent device like one of another process (`backends/remote`): once its connection has
//! ended every call fails until `Device::queue` makes a new one; weights are then restored, and the content
//! of other buffers is arbitrary.

use super::World;
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{
    Buffer, BufferUsage, Cmd, Device, Elapsed, Error, ErrorKind, Graph, Queue, Result, Slice, Ticket,
};
use mixfleet_runtime::env::Env;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

/// A device of another process.
#[derive(Clone)]
pub(super) struct LentMember(Arc<Lender>);

struct Lender {
    inner: Arc<dyn Device>,
    world: World,
    /// Whether others of its instance come before it.
    is_other: bool,
    state: Mutex<LenderState>,
}

#[derive(Default)]
struct LenderState {
    /// The number of the connection, and whether it has ended.
    connection: u64,
    ended: bool,
    /// The time until which it does not answer.
    away_until: Seconds,
    /// Submitted batches that have not been waited for yet.
    running: usize,
    /// Allocations on it, beside weights.
    buffers: Vec<Weak<dyn Buffer>>,
}

/// How a process is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MemberLoss {
    /// It ends, and another one takes its place after this time.
    Death(Duration),
    /// Its connection ends.
    Cut,
}

impl LentMember {
    pub(super) fn new(inner: Arc<dyn Device>, world: World, is_other: bool) -> Self {
        LentMember(Arc::new(Lender { inner, world, is_other, state: Mutex::default() }))
    }

    /// Loses the process, in the middle of anything.
    pub(super) fn lose(&self, how: MemberLoss) {
        let world = &self.0.world;
        let (was_lost, is_busy) = {
            let mut state = self.0.state();
            if let MemberLoss::Death(span) = how {
                let back = world.env.now() + Seconds(span.as_secs_f64());
                state.away_until = state.away_until.max(back);
            }
            (std::mem::replace(&mut state.ended, true), state.running > 0)
        };
        if was_lost {
            return;
        }
        world.count(if how == MemberLoss::Cut { "members cut off" } else { "members that died" }, 1);
        if is_busy {
            world.count("members lost in the middle of a step", 1);
        }
        if self.0.is_other {
            world.count("members lost that are not the first", 1);
        }
    }

    /// Lets a process answer from now on.
    pub(super) fn come_back(&self) {
        self.0.state().away_until = Seconds::ZERO;
    }
}

impl Lender {
    fn state(&self) -> MutexGuard<'_, LenderState> {
        self.state.lock().unwrap()
    }

    /// Checks that this connection has not ended.
    fn check(&self, connection: u64) -> Result<()> {
        let state = self.state();
        if state.connection == connection && !state.ended {
            return Ok(());
        }
        Err(Error::new(ErrorKind::DeviceLost, "the connection to the device's process ended"))
    }

    fn check_now(&self) -> Result<()> {
        let connection = self.state().connection;
        self.check(connection)
    }

    /// Makes a new connection if the last one has ended; what the buffers hold afterwards is anything.
    fn renew(&self) -> Result<u64> {
        let buffers: Vec<Arc<dyn Buffer>> = {
            let mut state = self.state();
            if !state.ended {
                return Ok(state.connection);
            }
            if state.away_until > self.world.env.now() {
                return Err(Error::new(ErrorKind::DeviceLost, "no process answers there"));
            }
            (state.ended, state.running) = (false, 0);
            state.connection += 1;
            state.buffers.retain(|buffer| buffer.strong_count() > 0);
            state.buffers.iter().filter_map(Weak::upgrade).collect()
        };
        let mut rng = Stream::new(self.world.env.random());
        let is_blank = rng.below(2) == 0;
        for buffer in buffers {
            let slice = Slice::whole(buffer);
            let mut bytes = vec![0; slice.bytes as usize];
            if !is_blank {
                // as of activations, whose values say nothing of where they come from
                let values = bytes.chunks_exact_mut(4);
                values.for_each(|four| {
                    four.copy_from_slice(&(rng.below(2001) as f32 / 1e3 - 1.0).to_le_bytes());
                });
            }
            self.inner.write(&slice, &bytes)?;
        }
        self.world.count("members that came back", 1);
        Ok(self.state().connection)
    }
}

impl Device for LentMember {
    mixfleet_hal::forward_device!(self => self.0.inner; info, limits, support, import, reaches, pin, memory_free, health);

    fn alloc(&self, bytes: u64, usage: BufferUsage) -> Result<Slice> {
        self.0.check_now()?;
        let slice = self.0.inner.alloc(bytes, usage)?;
        if usage != BufferUsage::Weights {
            self.0.state().buffers.push(Arc::downgrade(&slice.buffer));
        }
        Ok(slice)
    }

    fn write(&self, to: &Slice, data: &[u8]) -> Result<()> {
        self.0.check_now()?;
        self.0.inner.write(to, data)
    }

    fn read(&self, from: &Slice, data: &mut [u8]) -> Result<()> {
        self.0.check_now()?;
        self.0.inner.read(from, data)
    }

    fn queue(&self) -> Result<Box<dyn Queue>> {
        let connection = self.0.renew()?;
        let inner = self.0.inner.queue()?;
        let (lender, broken, running) = (self.0.clone(), None, Vec::new());
        Ok(Box::new(LentQueue { inner, lender, connection, broken, running }))
    }
}

struct LentQueue {
    inner: Box<dyn Queue>,
    lender: Arc<Lender>,
    connection: u64,
    /// The first batch that does not end as it should, and how.
    broken: Option<(Ticket, Trouble)>,
    /// Batches that are not known to have ended.
    running: Vec<Ticket>,
}

#[derive(Clone, Copy)]
enum Trouble {
    Fails,
    Hangs,
}

impl LentQueue {
    /// Counts the batches up to one as ended.
    fn ended(&mut self, until: Ticket) {
        let before = self.running.len();
        self.running.retain(|ticket| *ticket > until);
        let mut state = self.lender.state();
        if state.connection == self.connection {
            state.running = state.running.saturating_sub(before - self.running.len());
        }
    }

    /// What befalls a batch.
    fn trouble(&self) -> Option<Trouble> {
        let Lender { world, is_other, .. } = &*self.lender;
        let trouble = if world.strikes(world.workload.member_fail) {
            world.count("members that failed", 1);
            Trouble::Fails
        } else if world.strikes(world.workload.member_hang) {
            world.count("members that hung", 1);
            Trouble::Hangs
        } else {
            return None;
        };
        if *is_other {
            world.count("members that failed or hung and are not the first", 1);
        }
        Some(trouble)
    }
}

impl Drop for LentQueue {
    fn drop(&mut self) {
        self.ended(Ticket(u64::MAX));
    }
}

impl Queue for LentQueue {
    fn submit(&mut self, cmds: &[Cmd]) -> Result<Ticket> {
        self.lender.check(self.connection)?;
        let trouble = if self.broken.is_none() { self.trouble() } else { None };
        // what fails or hangs leaves its results as they were
        let runs = self.broken.is_none() && trouble.is_none();
        let ticket = self.inner.submit(if runs { cmds } else { &[] })?;
        if let Some(trouble) = trouble {
            self.broken = Some((ticket, trouble));
        }
        self.running.push(ticket);
        self.lender.state().running += 1;
        Ok(ticket)
    }

    fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<Elapsed> {
        let waited = match self.broken.filter(|(from, _)| ticket >= *from) {
            None => self.inner.wait(ticket, timeout),
            Some((_, Trouble::Fails)) => Err(Error::new(ErrorKind::Other, "a batch failed as planned")),
            Some((_, Trouble::Hangs)) => {
                let env = &self.lender.world.env;
                env.block_until(env.now() + Seconds(timeout.as_secs_f64()));
                Err(Error::new(ErrorKind::Timeout, "a batch hangs as planned"))
            }
        };
        // a lost process reports nothing any more
        self.lender.check(self.connection)?;
        if waited.is_ok() {
            self.ended(ticket);
        }
        waited
    }

    fn record(&mut self, cmds: &[Cmd]) -> Result<Arc<dyn Graph>> {
        self.inner.record(cmds)
    }

    fn replay(&mut self, _: &Arc<dyn Graph>) -> Result<Ticket> {
        Err(Error::unsupported("steps of several devices are not recorded"))
    }
}

//! A device whose times follow a known law, on a clock that only it advances, so that the profiler's results
//! can be compared with the law. Its results come from the oracle.

use mixfleet_hal::command::ClockKind;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{
    Cmd, Device, DeviceInfo, Elapsed, Graph, Health, OpSig, Queue, Result, Slice, Support, Ticket,
};
use mixfleet_hwtests::profile::TimeSource;
use mixfleet_hwtests::reference::ReferenceDevice;
use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Arithmetic rate in FLOP/s.
pub(crate) const COMPUTE: f64 = 2e12;
/// Bandwidth beyond the cache in bytes/s.
pub(crate) const BANDWIDTH: f64 = 100e9;
/// Speed-up of cached data.
pub(crate) const CACHE_SPEED: f64 = 4.0;
/// Size of the cache in bytes.
pub(crate) const CACHE_BYTES: f64 = 1.0 * 1024.0 * 1024.0;
/// Minimum time of a command on the device's clock.
pub(crate) const COMMAND_S: f64 = 2e-6;
/// Time of a batch on the host's clock, in addition to its commands.
pub(crate) const LAUNCH_S: f64 = 30e-6;
/// Time of a host copy: per transfer, and per byte.
pub(crate) const COPY_S: (f64, f64) = (5e-6, 1.0 / 10e9);
/// Share of the speed that remains under sustained load.
pub(crate) const TIRED: f64 = 0.8;
/// Seconds of work after which the device slows down.
pub(crate) const TIRED_AFTER_S: f64 = 1.0;
/// Batches with more commands are only timed: the oracle is slow.
const COMPUTED_MAX: usize = 3;

/// Nanoseconds.
#[derive(Debug, Default)]
pub(crate) struct TestClock(AtomicU64);

impl TimeSource for TestClock {
    fn seconds(&self) -> f64 {
        self.0.load(Ordering::Relaxed) as f64 * 1e-9
    }
}

impl TestClock {
    fn advance(&self, seconds: f64) {
        self.0.fetch_add((seconds * 1e9).round() as u64, Ordering::Relaxed);
    }
}

/// The flaw of a [`LawDevice`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Flaw {
    /// No flaw.
    #[default]
    None,
    /// Lacks this operation.
    Lacks(&'static str),
    /// Returns wrong results for this operation.
    Wrong(&'static str),
    /// Every other batch takes twice as long.
    Noisy,
    /// Slows down under long load.
    Tires,
    /// No flaw: launches a command together with the one before it if that is of another kind.
    Joins,
}

/// The device.
pub(crate) struct LawDevice {
    inner: ReferenceDevice,
    info: DeviceInfo,
    pub(crate) clock: Arc<TestClock>,
    flaw: Flaw,
    /// How many times slower than the law.
    pub(crate) slowness: f64,
}

impl LawDevice {
    pub(crate) fn new(flaw: Flaw) -> Self {
        let inner = ReferenceDevice::default();
        let info = DeviceInfo { id: "law".into(), name: "a law".into(), ..inner.info().clone() };
        LawDevice { inner, info, clock: Arc::default(), flaw, slowness: 1.0 }
    }
}

/// Seconds of one command beyond [`COMMAND_S`], when its operands are in no cache.
pub(crate) fn law(sig: &OpSig) -> f64 {
    (sig.flops() / COMPUTE).max(sig.bytes() / BANDWIDTH)
}

/// The same, when they are in the cache.
pub(crate) fn cached(sig: &OpSig) -> f64 {
    (sig.flops() / COMPUTE).max(sig.bytes() / BANDWIDTH / CACHE_SPEED)
}

impl Device for LawDevice {
    mixfleet_hal::forward_device!(self => self.inner; limits, alloc, import, reaches, pin, memory_free);

    fn info(&self) -> &DeviceInfo {
        &self.info
    }
    fn support(&self, sig: &OpSig) -> Support {
        if self.flaw == Flaw::Lacks(sig.name()) { Support::No } else { Support::Native }
    }
    fn write(&self, to: &Slice, data: &[u8]) -> Result<()> {
        self.clock.advance(COPY_S.0 + COPY_S.1 * data.len() as f64);
        self.inner.write(to, data)
    }
    fn read(&self, from: &Slice, data: &mut [u8]) -> Result<()> {
        self.clock.advance(COPY_S.0 + COPY_S.1 * data.len() as f64);
        self.inner.read(from, data)
    }
    fn queue(&self) -> Result<Box<dyn Queue>> {
        let state = Mutex::new(State::default());
        let (clock, flaw, slowness) = (self.clock.clone(), self.flaw, self.slowness);
        Ok(Box::new(LawQueue { inner: self.inner.queue()?, clock, flaw, slowness, state }))
    }
    fn health(&self) -> Health {
        Health { clock_mhz: Some(2000.0), ..Health::default() }
    }
}

/// What the last command was, and where its operands began.
#[derive(Default)]
struct State {
    last: Option<(OpSig, Vec<u64>)>,
    times: Vec<f64>,
    busy_s: f64,
}

struct LawQueue {
    inner: Box<dyn Queue>,
    clock: Arc<TestClock>,
    flaw: Flaw,
    slowness: f64,
    state: Mutex<State>,
}

struct Recorded(Vec<Cmd>);

impl Graph for Recorded {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn memory_bytes(&self) -> u64 {
        0
    }
}

impl LawQueue {
    fn seconds(&self, cmds: &[Cmd], state: &mut State) -> f64 {
        let mut total = 0.0;
        for cmd in cmds {
            let sig = *cmd.sig();
            let places: Vec<u64> = cmd.args().iter().map(|arg| arg.offset).collect();
            let alike = state.last.as_ref().is_none_or(|(last, _)| *last == sig);
            let again = state.last.as_ref() == Some(&(sig, places.clone()));
            state.last = Some((sig, places));
            let hot = again && sig.bytes() <= CACHE_BYTES;
            let joined = self.flaw == Flaw::Joins && !alike;
            total += if joined { 0.0 } else { COMMAND_S } + if hot { cached(&sig) } else { law(&sig) };
        }
        let odd = state.times.len() % 2 == 1;
        let factor = match self.flaw {
            Flaw::Noisy if odd => 2.0,
            Flaw::Tires if state.busy_s > TIRED_AFTER_S => 1.0 / TIRED,
            _ => 1.0,
        };
        total * factor * self.slowness
    }
}

impl Queue for LawQueue {
    fn submit(&mut self, cmds: &[Cmd]) -> Result<Ticket> {
        let wrong = cmds.iter().any(|cmd| self.flaw == Flaw::Wrong(cmd.sig().name()));
        if cmds.len() <= COMPUTED_MAX && !wrong {
            let ticket = self.inner.submit(cmds)?;
            self.inner.wait(ticket, Duration::from_secs(60))?;
        }
        let mut state = self.state.lock().unwrap();
        let seconds = self.seconds(cmds, &mut state);
        state.busy_s += seconds;
        state.times.push(seconds);
        self.clock.advance(LAUNCH_S + seconds);
        Ok(Ticket(state.times.len() as u64 - 1))
    }
    fn wait(&mut self, ticket: Ticket, _: Duration) -> Result<Elapsed> {
        let time = Seconds(self.state.lock().unwrap().times[ticket.0 as usize]);
        Ok(Elapsed { time, clock: ClockKind::Device })
    }
    fn record(&mut self, cmds: &[Cmd]) -> Result<Arc<dyn Graph>> {
        Ok(Arc::new(Recorded(cmds.to_vec())))
    }
    fn replay(&mut self, graph: &Arc<dyn Graph>) -> Result<Ticket> {
        let recorded = graph.as_any().downcast_ref::<Recorded>().expect("its own graph");
        self.submit(&recorded.0.clone())
    }
}

//! A device with injected faults, which proves that the suite detects what it should.
//!
//! Operations are counted over all queues, and a [`FaultPlan`] determines which of them fail. An operation is
//! a command or, after [`FaultyDevice::striking_transfers`], also a host `write` or `read`.

use crate::shadow::Shadow;
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::fault::{Fault, FaultPlan};
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{
    Cmd, Device, Elapsed, Error, ErrorKind, Graph, OperandAccess, Queue, Result, Slice, Ticket,
};
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Timeout for the wrapped device to finish before its memory is changed.
const SETTLE: Duration = Duration::from_secs(60);

/// Maximum number of affected batches whose pieces are remembered, which bounds memory in long runs.
const BATCHES_MAX: usize = 1024;

/// A device whose operations suffer the faults of a plan.
pub struct FaultyDevice {
    inner: Arc<dyn Device>,
    ordered: Arc<FaultyDeviceState>,
}

/// State shared by a device and its queues.
struct FaultyDeviceState {
    plan: FaultPlan,
    transfers: bool,
    real_time: bool,
    operations: AtomicU64,
    struck: AtomicU64,
    /// Previous contents of memory, kept only for plans with stale faults.
    shadow: Option<Mutex<Shadow>>,
}

impl FaultyDeviceState {
    fn next(&self) -> (u64, Option<Fault>) {
        let index = self.operations.fetch_add(1, Ordering::Relaxed);
        (index, self.plan.at(index))
    }

    fn strike(&self) {
        self.struck.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the error of an operation that fails or hangs.
    fn refuse(&self, index: u64, fault: Option<Fault>) -> Error {
        self.strike();
        match fault {
            Some(Fault::Hang) => {
                Error::new(ErrorKind::Timeout, format!("operation {index} hangs as planned"))
            }
            _ => Error::new(ErrorKind::Other, format!("operation {index} failed as planned")),
        }
    }

    /// Records the contents of `slice`, which is about to be written.
    fn remember(&self, device: &dyn Device, slice: &Slice) -> Result<()> {
        if let Some(shadow) = &self.shadow
            && slice.bytes > 0
        {
            let mut old = vec![0; to_usize(slice.bytes)];
            device.read(slice, &mut old)?;
            shadow.lock().unwrap_or_else(PoisonError::into_inner).remember(slice, old);
        }
        Ok(())
    }

    /// Returns a part of `slice` that changed in its last write, with its previous bytes.
    fn stale(&self, device: &dyn Device, slice: &Slice) -> Result<Option<(Slice, Vec<u8>)>> {
        let Some(shadow) = &self.shadow else { return Ok(None) };
        let candidates = shadow.lock().unwrap_or_else(PoisonError::into_inner).before(slice);
        for (part, old) in candidates {
            let mut now = vec![0; old.len()];
            device.read(&part, &mut now)?;
            if now != old {
                return Ok(Some((part, old)));
            }
        }
        Ok(None)
    }
}

impl FaultyDevice {
    /// Wraps `inner` with `plan`. A slow command lengthens the time that its batch reports, and a hang
    /// reports a timeout at once, so that tests are quick.
    pub fn new(inner: Arc<dyn Device>, plan: FaultPlan) -> Self {
        let shadow = plan.mentions(Fault::Stale).then(Mutex::default);
        let (operations, struck) = Default::default();
        let ordered =
            FaultyDeviceState { plan, transfers: false, real_time: false, operations, struck, shadow };
        FaultyDevice { inner, ordered: Arc::new(ordered) }
    }

    /// Counts the host's reads and writes as operations too.
    pub fn striking_transfers(self) -> Self {
        self.with(|ordered| ordered.transfers = true)
    }

    /// Makes slow batches really take their time.
    pub fn in_real_time(self) -> Self {
        self.with(|ordered| ordered.real_time = true)
    }

    fn with(mut self, change: impl FnOnce(&mut FaultyDeviceState)) -> Self {
        if let Some(ordered) = Arc::get_mut(&mut self.ordered) {
            change(ordered);
        }
        self
    }

    /// Returns the number of operations so far, which is the plan's index of the next one.
    pub fn commands(&self) -> u64 {
        self.ordered.operations.load(Ordering::Relaxed)
    }

    /// Returns the number of operations affected so far; a stale read of bytes that never changed does not
    /// count.
    pub fn struck(&self) -> u64 {
        self.ordered.struck.load(Ordering::Relaxed)
    }

    /// Returns the fault that affects a host transfer, if any.
    fn transfer(&self) -> (u64, Option<Fault>) {
        if self.ordered.transfers { self.ordered.next() } else { (0, None) }
    }
}

impl Device for FaultyDevice {
    mixfleet_hal::forward_device!(self => self.inner;
        info, limits, support, alloc, import, reaches, pin, memory_free, health);

    fn write(&self, to: &Slice, data: &[u8]) -> Result<()> {
        self.ordered.remember(&*self.inner, to)?;
        let (index, fault) = self.transfer();
        match fault {
            Some(Fault::BitFlip) if !data.is_empty() => {
                self.ordered.strike();
                let mut changed = data.to_vec();
                flip(&self.ordered.plan, index, &mut changed);
                self.inner.write(to, &changed)
            }
            Some(Fault::Drop) => {
                self.ordered.strike();
                Ok(())
            }
            Some(Fault::Fail | Fault::Hang) => Err(self.ordered.refuse(index, fault)),
            // a write has no input on the device, and reports no time
            None | Some(Fault::BitFlip | Fault::Stale | Fault::Slow { .. }) => self.inner.write(to, data),
        }
    }

    fn read(&self, from: &Slice, data: &mut [u8]) -> Result<()> {
        let (index, fault) = self.transfer();
        match fault {
            Some(Fault::Drop) => {
                self.ordered.strike();
                return Ok(());
            }
            Some(Fault::Fail | Fault::Hang) => return Err(self.ordered.refuse(index, fault)),
            _ => self.inner.read(from, data)?,
        }
        match fault {
            Some(Fault::BitFlip) if !data.is_empty() => {
                self.ordered.strike();
                flip(&self.ordered.plan, index, data);
            }
            Some(Fault::Stale) => {
                if let Some((part, old)) = self.ordered.stale(&*self.inner, from)? {
                    self.ordered.strike();
                    data[to_usize(part.offset - from.offset)..][..old.len()].copy_from_slice(&old);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn queue(&self) -> Result<Box<dyn Queue>> {
        Ok(Box::new(FaultyQueue {
            inner: self.inner.queue()?,
            device: self.inner.clone(),
            ordered: self.ordered.clone(),
            batches: BTreeMap::new(),
            broken: None,
        }))
    }
}

fn flip(plan: &FaultPlan, index: u64, bytes: &mut [u8]) {
    let bit = plan.bit(index, bytes.len() as u64);
    bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
}

struct FaultyQueue {
    inner: Box<dyn Queue>,
    device: Arc<dyn Device>,
    ordered: Arc<FaultyDeviceState>,
    /// Batches that had to be split: their pieces, each with the factor on its time.
    batches: BTreeMap<Ticket, Vec<(Ticket, u32)>>,
    /// The first ticket for which every wait fails, and the error.
    broken: Option<(Ticket, Error)>,
}

/// Replayed command by command, so that each repetition gets its own faults.
struct FaultyRecording(Vec<Cmd>);

impl Graph for FaultyRecording {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn memory_bytes(&self) -> u64 {
        0
    }
}

impl FaultyQueue {
    /// Runs one command to completion.
    fn settle(&mut self, cmd: &Cmd) -> Result<Ticket> {
        let ticket = self.inner.submit(std::slice::from_ref(cmd))?;
        self.inner.wait(ticket, SETTLE)?;
        Ok(ticket)
    }

    /// Flips a bit of the last operand that `cmd` wrote.
    fn flip(&self, index: u64, cmd: &Cmd) -> Result<()> {
        let operands = cmd.sig().operands();
        let written = (0..operands.len()).rfind(|&i| operands[i].access != OperandAccess::Read);
        let Some(slice) = written.map(|i| &cmd.args()[i]).filter(|slice| slice.bytes > 0) else {
            return Ok(());
        };
        let mut bytes = vec![0; to_usize(slice.bytes)];
        self.device.read(slice, &mut bytes)?;
        flip(&self.ordered.plan, index, &mut bytes);
        self.ordered.strike();
        self.device.write(slice, &bytes)
    }

    /// Runs `cmd` while one of its inputs holds its previous contents. An input that is only read is restored
    /// afterwards.
    fn run_on_stale_input(&mut self, index: u64, cmd: &Cmd) -> Result<Ticket> {
        let operands = cmd.sig().operands();
        let inputs: Vec<usize> =
            (0..operands.len()).filter(|&i| operands[i].access != OperandAccess::Write).collect();
        let first = to_usize(self.ordered.plan.pick(index, inputs.len() as u64));
        for turn in 0..inputs.len() {
            let i = inputs[(first + turn) % inputs.len()];
            let Some((part, old)) = self.ordered.stale(&*self.device, &cmd.args()[i])? else { continue };
            let mut now = vec![0; old.len()];
            self.device.read(&part, &mut now)?;
            self.device.write(&part, &old)?;
            self.ordered.strike();
            let ticket = self.settle(cmd)?;
            if operands[i].access == OperandAccess::Read {
                self.device.write(&part, &now)?;
            }
            return Ok(ticket);
        }
        self.settle(cmd)
    }

    /// Runs one command of a batch under `fault`; `Err` says how it ends the batch.
    fn struck(&mut self, index: u64, cmd: &Cmd, fault: Option<Fault>) -> Result<Option<(Ticket, u32)>> {
        let (device, ordered) = (self.device.clone(), self.ordered.clone());
        if ordered.shadow.is_some() && fault != Some(Fault::Drop) {
            for (operand, arg) in cmd.sig().operands().iter().zip(cmd.args()) {
                // paged KV that is read may be imported; written KV never is
                if operand.access != OperandAccess::Read {
                    ordered.remember(&*device, arg)?;
                }
            }
        }
        Ok(Some(match fault {
            None if ordered.shadow.is_some() => (self.settle(cmd)?, 1),
            None => (self.inner.submit(std::slice::from_ref(cmd))?, 1),
            Some(Fault::Stale) => (self.run_on_stale_input(index, cmd)?, 1),
            Some(Fault::Slow { times }) => {
                ordered.strike();
                (self.inner.submit(std::slice::from_ref(cmd))?, times.max(1))
            }
            Some(Fault::BitFlip) => {
                let ticket = self.settle(cmd)?;
                self.flip(index, cmd)?;
                (ticket, 1)
            }
            Some(Fault::Drop) => {
                ordered.strike();
                return Ok(None);
            }
            Some(Fault::Fail | Fault::Hang) => return Err(ordered.refuse(index, fault)),
        }))
    }
}

impl Queue for FaultyQueue {
    fn submit(&mut self, cmds: &[Cmd]) -> Result<Ticket> {
        let faults: Vec<(u64, Option<Fault>)> = cmds.iter().map(|_| self.ordered.next()).collect();
        if self.ordered.shadow.is_none() && faults.iter().all(|(_, fault)| fault.is_none()) {
            return self.inner.submit(cmds);
        }
        let (mut parts, mut failure) = (Vec::new(), None);
        for (cmd, (index, fault)) in cmds.iter().zip(faults) {
            match self.struck(index, cmd, fault) {
                Ok(part) => parts.extend(part),
                Err(error) => {
                    failure = Some(error);
                    break;
                }
            }
        }
        // an empty batch marks the end of this one
        let ticket = self.inner.submit(&[])?;
        parts.push((ticket, 1));
        if let (None, Some(error)) = (&self.broken, failure) {
            self.broken = Some((ticket, error));
        }
        self.batches.insert(ticket, parts);
        if self.batches.len() > BATCHES_MAX {
            self.batches.pop_first();
        }
        Ok(ticket)
    }

    fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<Elapsed> {
        if let Some((_, error)) = self.broken.as_ref().filter(|(from, _)| ticket >= *from) {
            return Err(error.clone());
        }
        let mut elapsed = self.inner.wait(ticket, timeout)?;
        let Some(parts) = self.batches.get(&ticket) else { return Ok(elapsed) };
        let (mut time, mut delay) = (Seconds::ZERO, Seconds::ZERO);
        for &(part, times) in parts {
            let own = self.inner.wait(part, timeout)?.time;
            time += own * f64::from(times);
            delay += own * f64::from(times - 1);
        }
        if self.ordered.real_time {
            std::thread::sleep(Duration::try_from_secs_f64(delay.0).unwrap_or_default().min(timeout));
        }
        elapsed.time = time;
        Ok(elapsed)
    }

    fn record(&mut self, cmds: &[Cmd]) -> Result<Arc<dyn Graph>> {
        Ok(Arc::new(FaultyRecording(cmds.to_vec())))
    }

    fn replay(&mut self, graph: &Arc<dyn Graph>) -> Result<Ticket> {
        let recorded = graph.as_any().downcast_ref::<FaultyRecording>();
        let recorded = recorded.ok_or_else(|| Error::invalid("the graph belongs to another device"))?;
        self.submit(&recorded.0)
    }
}

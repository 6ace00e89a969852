//! A device with faults on order: it proves that the suite sees what it is there to see.
//!
//! Commands are counted over all queues, and [`FaultPlan`] says which of them suffer.

use mixfleet_hal::fault::{Fault, FaultPlan};
use mixfleet_hal::{
    Access, Cmd, Device, DeviceInfo, Elapsed, Error, ErrorKind, Export, Graph, Health, HostMemory, Limits,
    OpSig, Queue, Result, Role, Slice, Support, Ticket,
};
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// For the wrapped device to finish before a bit of its result is flipped.
const SETTLE: Duration = Duration::from_secs(60);

/// A device whose commands suffer what a plan says.
pub struct FaultyDevice {
    inner: Arc<dyn Device>,
    plan: Arc<FaultPlan>,
    commands: Arc<AtomicU64>,
}

impl FaultyDevice {
    /// `inner`, under `plan`.
    pub fn new(inner: Arc<dyn Device>, plan: FaultPlan) -> Self {
        FaultyDevice { inner, plan: Arc::new(plan), commands: Arc::default() }
    }

    /// Commands seen so far: the index of the next one in the plan.
    pub fn commands(&self) -> u64 {
        self.commands.load(Ordering::Relaxed)
    }
}

impl Device for FaultyDevice {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn support(&self, sig: &OpSig) -> Support {
        self.inner.support(sig)
    }

    fn alloc(&self, bytes: u64, role: Role) -> Result<Slice> {
        self.inner.alloc(bytes, role)
    }

    fn import(&self, memory: Arc<dyn HostMemory>) -> Result<Slice> {
        self.inner.import(memory)
    }

    fn export(&self, slice: &Slice) -> Option<Export> {
        self.inner.export(slice)
    }

    fn write(&self, to: &Slice, data: &[u8]) -> Result<()> {
        self.inner.write(to, data)
    }

    fn read(&self, from: &Slice, data: &mut [u8]) -> Result<()> {
        self.inner.read(from, data)
    }

    fn queue(&self) -> Result<Box<dyn Queue>> {
        Ok(Box::new(FaultyQueue {
            inner: self.inner.queue()?,
            device: self.inner.clone(),
            plan: self.plan.clone(),
            commands: self.commands.clone(),
            broken: None,
        }))
    }

    fn health(&self) -> Health {
        self.inner.health()
    }
}

struct FaultyQueue {
    inner: Box<dyn Queue>,
    device: Arc<dyn Device>,
    plan: Arc<FaultPlan>,
    commands: Arc<AtomicU64>,
    /// From which ticket on every wait fails, and how.
    broken: Option<(Ticket, Error)>,
}

/// Replayed command by command, so that each repetition is struck anew.
struct Recorded(Vec<Cmd>);

impl Graph for Recorded {
    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl FaultyQueue {
    /// Changes a bit of the last operand that `cmd` writes.
    fn flip(&self, index: u64, cmd: &Cmd) -> Result<()> {
        let operands = cmd.sig().operands();
        let written = (0..operands.len()).rfind(|&i| operands[i].access != Access::Read);
        let Some(slice) = written.map(|i| &cmd.args()[i]).filter(|slice| slice.bytes > 0) else {
            return Ok(());
        };
        let mut bytes = vec![0; slice.bytes as usize];
        self.device.read(slice, &mut bytes)?;
        let bit = self.plan.bit(index, slice.bytes);
        bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
        self.device.write(slice, &bytes)
    }
}

impl Queue for FaultyQueue {
    fn submit(&mut self, cmds: &[Cmd]) -> Result<Ticket> {
        let mut failure = None;
        for cmd in cmds {
            let index = self.commands.fetch_add(1, Ordering::Relaxed);
            let fault = self.plan.at(index);
            match fault {
                None => drop(self.inner.submit(std::slice::from_ref(cmd))?),
                Some(Fault::Drop) => {}
                Some(Fault::BitFlip) => {
                    let ticket = self.inner.submit(std::slice::from_ref(cmd))?;
                    self.inner.wait(ticket, SETTLE)?;
                    self.flip(index, cmd)?;
                }
                Some(Fault::Fail) => {
                    failure =
                        Some(Error::new(ErrorKind::Other, format!("command {index} failed as planned")));
                }
                Some(Fault::Stale | Fault::Slow { .. }) => {
                    failure = Some(Error::unsupported("this wrapper has no stale reads and no slowness yet"));
                }
                Some(Fault::Hang) => {
                    failure =
                        Some(Error::new(ErrorKind::Timeout, format!("command {index} hangs as planned")));
                }
            }
            if failure.is_some() {
                break;
            }
        }
        // an empty batch marks the end of this one
        let ticket = self.inner.submit(&[])?;
        if let (None, Some(error)) = (&self.broken, failure) {
            self.broken = Some((ticket, error));
        }
        Ok(ticket)
    }

    /// A hang reports its timeout at once: what a caller learns is the same, and tests stay quick.
    fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<Elapsed> {
        match &self.broken {
            Some((from, error)) if ticket >= *from => Err(error.clone()),
            _ => self.inner.wait(ticket, timeout),
        }
    }

    fn record(&mut self, cmds: &[Cmd]) -> Result<Arc<dyn Graph>> {
        Ok(Arc::new(Recorded(cmds.to_vec())))
    }

    fn replay(&mut self, graph: &Arc<dyn Graph>) -> Result<Ticket> {
        let recorded = graph.as_any().downcast_ref::<Recorded>();
        let recorded = recorded.ok_or_else(|| Error::invalid("the graph belongs to another device"))?;
        self.submit(&recorded.0)
    }
}

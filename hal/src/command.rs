//! Commands, and the queue that runs them.

use crate::meeting::MeetingSeat;
use crate::op::{Extent, Operand};
use crate::units::Seconds;
use crate::{Error, OpSig, OperandAccess, Result, Slice};
use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

/// An operation bound to its operands, which were checked against each other.
#[derive(Clone, Debug)]
pub struct Cmd {
    sig: OpSig,
    args: Vec<Slice>,
}

impl Cmd {
    /// Binds `args` to `sig`, in the order of [`OpSig::operands`].
    ///
    /// # Errors
    /// `Invalid` when the shape is impossible, an argument is missing, misaligned or of the wrong
    /// length, or a written argument overlaps another.
    pub fn new(sig: OpSig, args: &[Slice]) -> Result<Self> {
        // an impossible shape has no operands
        sig.check().map_err(Error::invalid)?;
        Cmd::with_operands(sig, &sig.operands(), args)
    }

    /// The same for a caller that has the [operands](OpSig::operands) of `sig` already.
    ///
    /// # Errors
    /// As of [`new`](Self::new).
    pub fn with_operands(sig: OpSig, operands: &[Operand], args: &[Slice]) -> Result<Self> {
        sig.check().map_err(Error::invalid)?;
        if operands.len() != args.len() {
            let message = format!("{}: {} operands, expected {}", sig.name(), args.len(), operands.len());
            return Err(Error::invalid(message));
        }
        for (operand, arg) in operands.iter().zip(args) {
            let element_bytes = operand.dtype.size_bytes();
            let fits = match operand.extent {
                Extent::Exactly(n) => n.checked_mul(element_bytes) == Some(arg.bytes),
                Extent::PagesOf(n) => {
                    arg.bytes > 0 && arg.bytes.is_multiple_of(n.saturating_mul(element_bytes).max(1))
                }
            };
            let inside = arg.offset.checked_add(arg.bytes).is_some_and(|end| end <= arg.buffer.size_bytes());
            if !fits || !inside || !arg.offset.is_multiple_of(element_bytes) {
                return Err(Error::invalid(format!(
                    "{}: operand '{}' has {} bytes at offset {}, expected {:?} of {}",
                    sig.name(),
                    operand.name,
                    arg.bytes,
                    arg.offset,
                    operand.extent,
                    operand.dtype
                )));
            }
        }
        for (i, operand) in operands.iter().enumerate() {
            let clash = operand.access != OperandAccess::Read
                && args.iter().enumerate().any(|(j, other)| i != j && args[i].overlaps(other));
            if clash {
                return Err(Error::invalid(format!(
                    "{}: operand '{}' is written and overlaps another operand",
                    sig.name(),
                    operand.name
                )));
            }
        }
        Ok(Cmd { sig, args: args.to_vec() })
    }

    /// Returns the operation.
    pub fn sig(&self) -> &OpSig {
        &self.sig
    }

    /// Returns the operands, in the order of [`OpSig::operands`].
    pub fn args(&self) -> &[Slice] {
        &self.args
    }
}

/// A point on one queue's timeline, which covers all commands submitted up to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// Which clock timed a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClockKind {
    /// The device's own events, such as GPU timestamps.
    Device,
    /// The host's clock, read around the work.
    Host,
}

/// The execution time of a batch, excluding time spent queued.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Elapsed {
    /// Time from the start of the first command to the end of the last one.
    pub time: Seconds,
    /// The clock that measured it.
    pub clock: ClockKind,
}

/// Commands prepared once for many runs (a CUDA graph, a resolved list); valid only on the queue that
/// recorded it.
pub trait Graph: Send + Sync {
    /// Allows a backend to downcast to its own type.
    fn as_any(&self) -> &dyn Any;

    /// Returns the memory of the device that it takes for as long as it exists.
    fn memory_bytes(&self) -> u64;
}

/// A point on a queue's timeline that queues of other devices can wait for; valid for as long as it exists.
pub trait QueuePoint: Send + Sync {
    /// Allows a backend to downcast to its own type.
    fn as_any(&self) -> &dyn Any;
}

/// An in-order stream of work on one device.
///
/// Commands of one queue run in the order of submission and each sees what the earlier ones wrote. Two queues
/// are ordered only by a `wait` between their submissions. A failed batch fails its ticket and all later
/// ones, until the queue is dropped.
pub trait Queue: Send {
    /// Submits a batch and returns immediately.
    fn submit(&mut self, cmds: &[Cmd]) -> Result<Ticket>;

    /// Submits a batch whose `results` are read next, once it is done. A device behind a connection, or one
    /// that maps memory to be read, sends the results with the batch's completion; for other devices this is
    /// [`submit`](Self::submit).
    fn submit_for(&mut self, cmds: &[Cmd], results: &[Slice]) -> Result<Ticket> {
        let _ = results;
        self.submit(cmds)
    }

    /// Whether a thread of this process runs the batches, which can go to a meeting after one.
    fn can_meet(&self) -> bool {
        false
    }

    /// Submits a batch after which the thread that runs it goes to a meeting; the batch is done when that is.
    /// If it fails, or an earlier one has, the meeting is ended.
    ///
    /// # Errors
    /// Those of [`submit`](Self::submit), and `Unsupported` unless [`can_meet`](Self::can_meet).
    fn submit_then_meet(&mut self, cmds: &[Cmd], seat: MeetingSeat) -> Result<Ticket> {
        let _ = (cmds, seat);
        Err(Error::unsupported("no thread of this process runs this queue's batches"))
    }

    /// Returns the end of all batches submitted so far, for queues of other devices to
    /// [`follow`](Self::follow).
    ///
    /// # Errors
    /// Those of the device, and `Unsupported` where [`Device::reaches`](crate::Device::reaches) is never
    /// true.
    fn end(&mut self) -> Result<Arc<dyn QueuePoint>> {
        Err(Error::unsupported("no other device can wait for this queue"))
    }

    /// Delays later submissions until `point` of another device's queue is reached, and returns at once: the
    /// devices wait for each other, and the host for neither. A failure before `point` is not reported here,
    /// and later batches then run on undefined data; so wait for the tickets of both queues before using
    /// results.
    ///
    /// # Errors
    /// Those of the device, and `Unsupported` for a point that is not from its backend.
    fn follow(&mut self, point: &dyn QueuePoint) -> Result<()> {
        let _ = point;
        Err(Error::unsupported("this queue can wait for no other device"))
    }

    /// Blocks until everything up to `ticket` is done or `timeout` has passed, and returns the time of
    /// `ticket`'s own batch.
    fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<Elapsed>;

    /// Prepares a batch for repeated runs; the operands' addresses are fixed, their contents are not.
    fn record(&mut self, cmds: &[Cmd]) -> Result<Arc<dyn Graph>>;

    /// Submits a recorded batch.
    fn replay(&mut self, graph: &Arc<dyn Graph>) -> Result<Ticket>;
}

//! Commands, and the queue that runs them.

use crate::op::Extent;
use crate::units::Seconds;
use crate::{Error, OpSig, OperandAccess, Result, Slice};
use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

/// An operation with its operands, checked against each other.
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
        sig.check().map_err(Error::invalid)?;
        let operands = sig.operands();
        if operands.len() != args.len() {
            let message = format!("{}: {} operands, expected {}", sig.name(), args.len(), operands.len());
            return Err(Error::invalid(message));
        }
        for (operand, arg) in operands.iter().zip(args) {
            let element_bytes = operand.dtype.size_bytes();
            let fits = match operand.extent {
                Extent::Exactly(n) => n.checked_mul(element_bytes) == Some(arg.bytes),
                Extent::PagesOf(n) => arg.bytes > 0 && arg.bytes.is_multiple_of((n * element_bytes).max(1)),
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

    /// The operation.
    pub fn sig(&self) -> &OpSig {
        &self.sig
    }

    /// The operands, in the order of [`OpSig::operands`].
    pub fn args(&self) -> &[Slice] {
        &self.args
    }
}

/// A point on one queue's timeline: all commands submitted up to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// Whose clock timed a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClockKind {
    /// The device's own events.
    Device,
    /// The host's clock around the work.
    Host,
}

/// Time that a batch took, without the wait in the queue.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Elapsed {
    /// From the first command's start to the last one's end.
    pub time: Seconds,
    /// Whose clock said so.
    pub clock: ClockKind,
}

/// Commands prepared once for many runs (a CUDA graph, a resolved list). Belongs to its queue.
pub trait Graph: Send + Sync {
    /// For the backend to find its own type again.
    fn as_any(&self) -> &dyn Any;
}

/// An in-order stream of work on one device.
///
/// Commands of one queue run in the order of submission and each sees what the earlier ones wrote.
/// Nothing orders two queues but a `wait` in between. A failed batch fails its ticket and all later
/// ones, until the queue is dropped.
pub trait Queue: Send {
    /// Hands over a batch and returns at once.
    fn submit(&mut self, cmds: &[Cmd]) -> Result<Ticket>;

    /// Blocks until everything up to `ticket` is done, or `timeout` is over. The time is that of
    /// `ticket`'s own batch.
    fn wait(&mut self, ticket: Ticket, timeout: Duration) -> Result<Elapsed>;

    /// Prepares a batch for repeated runs. The operands' addresses are fixed, their bytes are not.
    fn record(&mut self, cmds: &[Cmd]) -> Result<Arc<dyn Graph>>;

    /// Submits a recorded batch.
    fn replay(&mut self, graph: &Arc<dyn Graph>) -> Result<Ticket>;
}

//! The vocabulary of mixfleet: what a device is, what it can be asked to do, and what that costs.
//!
//! Nothing here does anything. A backend turns these words into work, the scheduler turns them into
//! decisions, and neither sees the other. The one key that everything shares is [`OpSig`]: support
//! queries, costs, conformance cases, trace lines and simulation all speak of an operation by it, so
//! their lists cannot drift apart.
//!
//! What is absent: any backend's word, any thread, clock, file or socket.

#![forbid(unsafe_code)]

pub mod catalog;
pub mod command;
pub mod device;
pub mod dtype;
pub mod economics;
pub mod error;
pub mod fault;
pub mod memory;
pub mod op;
pub mod profile;
pub mod random;
pub mod transport;
pub mod units;

pub use command::{Cmd, Elapsed, Graph, Queue, Ticket};
pub use device::{Absent, Backend, Device, DeviceInfo, DeviceKind, DeviceLimits, Health, Support};
pub use dtype::DType;
pub use error::{Error, ErrorKind, Result};
pub use memory::{Buffer, BufferUsage, Export, FileMapper, HostMemory, Slice};
pub use op::{OpSig, Operand, OperandAccess, Scalar};

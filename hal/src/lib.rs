//! The vocabulary of mixfleet: what a device is, what it can be asked to do, and what that costs.
//!
//! This crate does nothing itself. Backends turn its types into work, the scheduler turns them into
//! decisions, and neither depends on the other. Everything refers to an operation by its [`OpSig`]: support
//! queries, costs, conformance cases, trace lines and simulation share that one key, so their lists cannot
//! drift apart.
//!
//! Absent from this crate: backend-specific terms, threads, clocks, files and sockets.

#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![forbid(unsafe_code)]

pub mod cast;
pub mod catalog;
pub mod collective;
pub mod command;
pub mod device;
pub mod dtype;
pub mod economics;
pub mod error;
pub mod fault;
pub mod files;
pub mod format;
pub mod meeting;
pub mod memory;
mod mixture;
pub mod op;
mod op_check;
mod op_counts;
mod op_fields;
mod operand;
pub mod outside;
pub mod printable;
pub mod profile;
pub mod quantised;
pub mod random;
pub mod sample;
mod scalar;
pub mod scaled;
pub mod transport;
pub mod units;

pub use collective::{AttendedPart, Collective, MatrixPart, MemberSlice};
pub use command::{Cmd, Elapsed, Graph, Queue, QueuePoint, Ticket};
pub use device::{Absent, Backend, Device, DeviceInfo, DeviceKind, DeviceLimits, Health, Support};
pub use dtype::DType;
pub use error::{Error, ErrorKind, Result};
pub use format::{StoredAs, WeightFormat};
pub use meeting::{BatchMemory, Meeting, MeetingSeat};
pub use memory::{Buffer, BufferUsage, FileMapper, HostMemory, Slice};
pub use op::{
    ColumnsOf, ExpertRouting, GroupedRows, KvShape, LatentKv, OpSig, Operand, OperandAccess, RotaryPart,
    Scalar, Scoring,
};
pub use op_fields::FieldCodec;
pub use quantised::{CodeKind, MatrixKind, Quantised, ScaleKind, ZeroKind};

//! Device, queue and transport failures as values.

use serde::{Deserialize, Serialize};

/// Result of a device, queue or transport call.
pub type Result<T> = std::result::Result<T, Error>;

/// The class of a failure, which tells the caller how to react.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ErrorKind {
    /// The device or the host is out of memory; free some or ask for less.
    OutOfMemory,
    /// The device cannot run this operation at all; use another device.
    Unsupported,
    /// The device is gone and every later call on it fails too; replay its work elsewhere.
    DeviceLost,
    /// The deadline passed, although the work may still complete.
    Timeout,
    /// The caller broke the contract: a wrong shape, an out-of-range id, overlapping operands.
    Invalid,
    /// The bytes that arrived are not the bytes that were sent.
    Corrupt,
    /// The peer went away, or the transfer was cancelled.
    Closed,
    /// Any other failure, described by the detail text.
    Other,
}

/// A failure and its cause.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("{detail}")]
pub struct Error {
    /// The class of the failure.
    pub kind: ErrorKind,
    /// The cause in plain text and, where known, what to do about it.
    pub detail: String,
}

impl Error {
    /// Creates an error of the given kind with a description of its cause.
    pub fn new(kind: ErrorKind, detail: impl Into<String>) -> Self {
        Error { kind, detail: detail.into() }
    }

    /// Creates an error for a caller that broke the contract.
    pub fn invalid(detail: impl Into<String>) -> Self {
        Error::new(ErrorKind::Invalid, detail)
    }

    /// Creates an error for something that the device cannot do.
    pub fn unsupported(detail: impl Into<String>) -> Self {
        Error::new(ErrorKind::Unsupported, detail)
    }

    /// Returns the same failure with its location prefixed to the detail.
    pub fn context(self, place: impl std::fmt::Display) -> Self {
        Error { kind: self.kind, detail: format!("{place}: {}", self.detail) }
    }
}

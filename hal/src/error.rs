//! What can go wrong on a device, as a value.

use serde::{Deserialize, Serialize};

/// Result of a device, queue or transport call.
pub type Result<T> = std::result::Result<T, Error>;

/// The class of a failure: what a caller may do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ErrorKind {
    /// The device or host has too little memory. Free some, or ask for less.
    OutOfMemory,
    /// The device cannot run this operation at all. Ask another device.
    Unsupported,
    /// The device is gone; every later call on it fails too. Replay its work elsewhere.
    DeviceLost,
    /// The deadline passed. The work may still complete.
    Timeout,
    /// The caller broke the contract: a wrong shape, an id out of range, an overlap.
    Invalid,
    /// Bytes arrived that are not the bytes that were sent.
    Corrupt,
    /// The other end went away, or the transfer was cancelled.
    Closed,
    /// Anything else; the detail says what.
    Other,
}

/// A failure with its cause in words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("{detail}")]
pub struct Error {
    /// The class of the failure.
    pub kind: ErrorKind,
    /// The cause, and what to do where that is known.
    pub detail: String,
}

impl Error {
    /// An error of `kind` with its cause in words.
    pub fn new(kind: ErrorKind, detail: impl Into<String>) -> Self {
        Error { kind, detail: detail.into() }
    }

    /// The caller broke the contract.
    pub fn invalid(detail: impl Into<String>) -> Self {
        Error::new(ErrorKind::Invalid, detail)
    }

    /// The device cannot do this.
    pub fn unsupported(detail: impl Into<String>) -> Self {
        Error::new(ErrorKind::Unsupported, detail)
    }

    /// The same failure, with where it happened put in front.
    pub fn context(self, place: impl std::fmt::Display) -> Self {
        Error { kind: self.kind, detail: format!("{place}: {}", self.detail) }
    }
}

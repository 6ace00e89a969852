//! What an owner answers to a peer that asks for a region.

use mixfleet_hal::transport::{Access, Descriptor};
use mixfleet_hal::{Error, ErrorKind, Result};

/// One byte on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Granted, for as much as the name says.
    Write = 1,
    Read = 2,
    ReadWrite = 3,
    /// No region has this key and epoch.
    Unknown = 4,
    /// The question was not understood.
    Version = 5,
    /// The owner lacks something: descriptors, memory, threads.
    Exhausted = 6,
}

impl Answer {
    /// The answer to a peer that may have a region for `access`.
    pub(crate) fn granted(access: Access) -> Self {
        match access {
            Access::Write => Answer::Write,
            Access::Read => Answer::Read,
            Access::ReadWrite => Answer::ReadWrite,
        }
    }

    pub(crate) fn decode(byte: u8) -> Option<Self> {
        use Answer::{Exhausted, Read, ReadWrite, Unknown, Version, Write};
        [Write, Read, ReadWrite, Unknown, Version, Exhausted].into_iter().find(|&answer| answer as u8 == byte)
    }

    /// What the peer may do.
    ///
    /// # Errors
    /// `Closed` when there is no such region, `Unsupported` when it speaks otherwise, `OutOfMemory` when it has no room.
    pub(crate) fn access(self, region: &Descriptor) -> Result<Access> {
        match self {
            Answer::Write => Ok(Access::Write),
            Answer::Read => Ok(Access::Read),
            Answer::ReadWrite => Ok(Access::ReadWrite),
            Answer::Unknown => {
                let detail = format!("{region:?} is not registered under this key and epoch");
                Err(Error::new(ErrorKind::Closed, detail))
            }
            Answer::Version => Err(Error::unsupported("the owner speaks another version of the protocol")),
            Answer::Exhausted => {
                Err(Error::new(ErrorKind::OutOfMemory, "the owner has no room for another peer; try later"))
            }
        }
    }
}

//! The owner's reply to a peer that requests a region.

use mixfleet_hal::transport::{Descriptor, RemoteAccess};
use mixfleet_hal::{Error, ErrorKind, Result};

/// The reply, encoded as one byte on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GrantStatus {
    /// Access was granted, as the name says.
    Write = 1,
    Read = 2,
    ReadWrite = 3,
    /// No region has this key and epoch.
    Unknown = 4,
    /// The request was not understood.
    Version = 5,
    /// The owner has run out of descriptors, memory or threads.
    Exhausted = 6,
}

impl GrantStatus {
    /// Returns the reply for a peer that may have a region for `access`.
    pub(crate) fn granted(access: RemoteAccess) -> Self {
        match access {
            RemoteAccess::Write => GrantStatus::Write,
            RemoteAccess::Read => GrantStatus::Read,
            RemoteAccess::ReadWrite => GrantStatus::ReadWrite,
        }
    }

    pub(crate) fn decode(byte: u8) -> Option<Self> {
        use GrantStatus::{Exhausted, Read, ReadWrite, Unknown, Version, Write};
        [Write, Read, ReadWrite, Unknown, Version, Exhausted].into_iter().find(|&answer| answer as u8 == byte)
    }

    /// Returns the access that was granted.
    ///
    /// # Errors
    /// `Closed` if there is no such region, `Unsupported` on a version mismatch, `OutOfMemory` if the owner
    /// is out of resources.
    pub(crate) fn access(self, region: &Descriptor) -> Result<RemoteAccess> {
        match self {
            GrantStatus::Write => Ok(RemoteAccess::Write),
            GrantStatus::Read => Ok(RemoteAccess::Read),
            GrantStatus::ReadWrite => Ok(RemoteAccess::ReadWrite),
            GrantStatus::Unknown => {
                let detail = format!("{region:?} is not registered under this key and epoch");
                Err(Error::new(ErrorKind::Closed, detail))
            }
            GrantStatus::Version => {
                Err(Error::unsupported("the owner speaks another version of the protocol"))
            }
            GrantStatus::Exhausted => {
                Err(Error::new(ErrorKind::OutOfMemory, "the owner has no room for another peer; try later"))
            }
        }
    }
}

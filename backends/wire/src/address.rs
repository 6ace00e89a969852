//! Where a process is reached by others.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// What stands before a path.
const UNIX: &str = "unix:";

/// The address of a process: a port of a host, or a socket file of this host, over which pages are shared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkAddress {
    /// A port.
    Tcp(SocketAddr),
    /// A socket file.
    Unix(PathBuf),
}

impl LinkAddress {
    /// The path after `unix:`, if the text begins so.
    pub fn path_in(text: &str) -> Option<&Path> {
        text.strip_prefix(UNIX).map(Path::new)
    }
}

impl std::fmt::Display for LinkAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LinkAddress::Tcp(address) => address.fmt(f),
            LinkAddress::Unix(path) => write!(f, "{UNIX}{}", path.display()),
        }
    }
}

impl From<SocketAddr> for LinkAddress {
    fn from(address: SocketAddr) -> Self {
        LinkAddress::Tcp(address)
    }
}

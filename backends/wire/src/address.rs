//! Where a process is reached by others.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// What stands before a path.
const UNIX: &str = "unix:";
/// What stands before a port at which the ends of RDMA meet.
const RDMA: &str = "rdma:";

/// The address of a process, which says how bytes go to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkAddress {
    /// A port, over TCP.
    Tcp(SocketAddr),
    /// A port over TCP, where both ends agree on RDMA.
    Rdma(SocketAddr),
    /// A socket file of this host, over which pages are shared.
    Unix(PathBuf),
}

impl LinkAddress {
    /// The path after `unix:`, if the text begins so.
    pub fn path_in(text: &str) -> Option<&Path> {
        text.strip_prefix(UNIX).map(Path::new)
    }

    /// The port after `rdma:`, if the text begins so.
    pub fn rdma_port_in(text: &str) -> Option<&str> {
        text.strip_prefix(RDMA)
    }

    /// The port, if it is one.
    pub fn port(&self) -> Option<&SocketAddr> {
        match self {
            LinkAddress::Tcp(port) | LinkAddress::Rdma(port) => Some(port),
            LinkAddress::Unix(_) => None,
        }
    }
}

impl std::fmt::Display for LinkAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LinkAddress::Tcp(port) => port.fmt(f),
            LinkAddress::Rdma(port) => write!(f, "{RDMA}{port}"),
            LinkAddress::Unix(path) => write!(f, "{UNIX}{}", path.display()),
        }
    }
}

impl From<SocketAddr> for LinkAddress {
    fn from(port: SocketAddr) -> Self {
        LinkAddress::Tcp(port)
    }
}

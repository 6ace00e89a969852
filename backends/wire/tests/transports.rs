//! Every transport against the same demands.

mod conformance;

use conformance::Pair;

conformance!(memory, || super::Pair::one(mixfleet_wire::Memory::new()));

#[cfg(target_os = "linux")]
conformance!(shm, || super::Pair::one(mixfleet_wire::Shm::new().unwrap()));

#[cfg(unix)]
conformance!(tcp, || super::Pair::one(
    mixfleet_wire::Tcp::new(mixfleet_wire::TcpConfig::loopback()).unwrap()
));

//! Runs every transport against the same requirements.

#[cfg(feature = "tls")]
#[path = "../authority/mod.rs"]
mod authority;
#[path = "../conformance/mod.rs"]
mod conformance;
#[cfg(target_os = "linux")]
mod processes;
#[cfg(feature = "tls")]
mod tls;

use conformance::Pair;

conformance!(memory, || super::Pair::one(mixfleet_wire::InProcessTransport::new()));

#[cfg(target_os = "linux")]
conformance!(shm, || super::Pair::one(mixfleet_wire::Shm::new().unwrap()));

#[cfg(unix)]
conformance!(tcp, || super::Pair::one(
    mixfleet_wire::Tcp::new(mixfleet_wire::TcpConfig::loopback()).unwrap()
));

// as between hosts
#[cfg(unix)]
conformance!(tcp_two_streams, || {
    let config = mixfleet_wire::TcpConfig { streams: 2, ..mixfleet_wire::TcpConfig::loopback() };
    super::Pair::one(mixfleet_wire::Tcp::new(config).unwrap())
});

#[cfg(feature = "tls")]
conformance!(tcp_tls, || {
    // One for all: members of two fleets do not reach each other.
    static FLEET: std::sync::LazyLock<super::tls::FleetAuthority> =
        std::sync::LazyLock::new(super::tls::FleetAuthority::new);
    super::Pair { owner: FLEET.member("mixfleet"), user: FLEET.member("mixfleet") }
});

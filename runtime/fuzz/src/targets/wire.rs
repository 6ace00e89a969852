//! Parsers of the messages that peers exchange around KV transfers, and of their certificates.

use super::{parts, refused};
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::{Descriptor, RemoteAccess, Transport};
use mixfleet_wire::{
    HostRegion, InProcessTransport, Tcp, TcpConfig, TlsIdentity, TlsMemberKind, TlsPem, fuzzed,
};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

pub(super) fn words(bytes: &[u8]) -> bool {
    fuzzed::words(bytes);
    true
}

const REGION_BYTES: usize = 64;

/// An owner of memory that peers may write, and of memory that they may only read.
struct Owner {
    tcp: Tcp,
    written: Descriptor,
    read_only: Descriptor,
    constant: Arc<HostRegion>,
}

static OWNER: LazyLock<Owner> = LazyLock::new(|| {
    let tcp = Tcp::new(TcpConfig::loopback()).expect("loopback can be listened on");
    let region = || Arc::new(HostRegion::new(REGION_BYTES).expect("room for 64 bytes"));
    let constant = region();
    let written = tcp.register(region(), RemoteAccess::ReadWrite).expect("a new region");
    let read_only = tcp.register(constant.clone(), RemoteAccess::Read).expect("a new region");
    Owner { tcp, written, read_only, constant }
});

/// Sends a stream to an owner. Its first byte selects the beginning: a greeting for either region, or none.
pub(super) fn tcp_stream(bytes: &[u8]) -> bool {
    let Some((begin, rest)) = bytes.split_first() else { return false };
    let owner = &*OWNER;
    let region = [Some(&owner.written), Some(&owner.read_only), None][usize::from(begin % 3)];
    let mut socket = TcpStream::connect(owner.tcp.listens_on()).expect("the owner listens");
    socket.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout above zero");
    let greeting = region.map(fuzzed::tcp_greeting).unwrap_or_default();
    // It may close before it has read everything.
    let _ = socket.write_all(&[&greeting, rest].concat());
    let _ = socket.shutdown(Shutdown::Write);
    let mut said = Vec::new();
    if let Err(error) = socket.read_to_end(&mut said) {
        // A reset is an end too: the owner closed before it had read everything.
        assert!(error.kind() == std::io::ErrorKind::ConnectionReset, "the owner does not close: {error}");
    }
    let mut left = [1; REGION_BYTES];
    owner
        .constant
        .view(0, REGION_BYTES as u64, &mut |now| left.copy_from_slice(now))
        .expect("the whole region");
    assert_eq!(left, [0; REGION_BYTES], "memory was written that may only be read");
    said.first().is_some_and(|answer| *answer < 4)
}

/// Parses a descriptor of a peer's memory. Connections are attempted only within this process.
pub(super) fn descriptor(bytes: &[u8]) -> bool {
    let Ok(region) = serde_json::from_slice::<Descriptor>(bytes) else { return false };
    let text = serde_json::to_vec(&region).expect("a descriptor is JSON");
    assert_eq!(serde_json::from_slice::<Descriptor>(&text).ok().as_ref(), Some(&region));
    let memory = InProcessTransport::new();
    let local = Arc::new(HostRegion::new(REGION_BYTES).expect("room for 64 bytes"));
    assert!(memory.connect(local, &region).is_err_and(|error| !refused(&error)));
    let others: [&dyn Transport; 2] = [&memory, &OWNER.tcp];
    for transport in others {
        if region.address != OWNER.written.address && region.address != OWNER.read_only.address {
            let _ = transport.deregister(&region).map_err(|error| refused(&error));
        }
    }
    true
}

/// Parses an authority, a member's certificates, its key and its revocation list.
pub(super) fn certificates(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    let [authority, certificates, key, revoked] = parts(&text);
    let pem = TlsPem { authority, certificates, key, revoked, fleet: "mixfleet" };
    match TlsIdentity::new(&pem) {
        Ok(identity) => {
            let _ = (identity.control_server(), identity.control_client(), identity.server_name());
            assert!(!identity.is_of(&bytes.into(), TlsMemberKind::Router), "text is no certificate");
            true
        }
        Err(error) => refused(&error),
    }
}

//! Only members of the fleet can read and write.

use crate::authority::{Authority, SERIAL};
use crate::conformance::{content, piece, read, region, write};
use mixfleet_hal::ErrorKind;
use mixfleet_hal::transport::{Descriptor, RemoteAccess, Transport};
use mixfleet_wire::{Security, Tcp, TcpConfig, TlsFiles, TlsIdentity, TlsPem};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const FLEET: &str = "mixfleet";

/// An authority, and what it gives to members.
pub(crate) struct FleetAuthority(Authority);

impl FleetAuthority {
    pub(crate) fn new() -> Self {
        FleetAuthority(Authority::new())
    }

    /// Returns the identity of a member with a certificate for `name`.
    fn identity(&self, name: &str) -> Arc<TlsIdentity> {
        let (authority, (certificates, key)) = (self.0.pem(), self.0.signs(&[name]));
        let pem = TlsPem {
            authority: &authority,
            certificates: &certificates,
            key: &key,
            revoked: "",
            fleet: FLEET,
        };
        Arc::new(TlsIdentity::new(&pem).unwrap())
    }

    /// Certificate and key of `names`, and what the authority takes back.
    fn files(&self, directory: &Path, names: &[&str], revoked: &[u64]) -> TlsFiles {
        std::fs::create_dir_all(directory).unwrap();
        let (certificate, key) = self.0.signs(names);
        let write = |name: &str, text: String| {
            let path = directory.join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        TlsFiles {
            authority: write("ca.pem", self.0.pem()),
            certificates: write("member.pem", certificate),
            key: write("member.key", key),
            revoked: Some(write("crl.pem", self.0.revokes(revoked))),
            fleet: FLEET.into(),
        }
    }

    pub(crate) fn member(&self, name: &str) -> Arc<dyn Transport> {
        transport(Security::Tls(self.identity(name)))
    }
}

fn transport(security: Security) -> Arc<dyn Transport> {
    let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    Arc::new(Tcp::new(TcpConfig { streams: 2, ..TcpConfig::new(listen, security) }).unwrap())
}

/// Tries everything that a non-member could do with a leaked descriptor.
fn is_refused(stranger: &dyn Transport, descriptor: &Descriptor) {
    let here = region(&[9; 4]);
    match stranger.connect(here.clone(), descriptor) {
        Err(error) => assert_eq!(error.kind, ErrorKind::Closed, "{error}"),
        Ok(mut way) => {
            assert!(write(&mut *way, &[piece(0, 0, 4)]).is_err());
            assert!(read(&mut *way, &[piece(0, 0, 4)]).is_err());
        }
    }
    assert_eq!(content(&here), [9; 4]);
}

#[test]
fn strangers_neither_read_nor_write() {
    let (fleet, others) = (FleetAuthority::new(), FleetAuthority::new());
    let (owner, secret) = (fleet.member(FLEET), region(&[1, 2, 3, 4]));
    let descriptor = owner.register(secret.clone(), RemoteAccess::ReadWrite).unwrap();
    is_refused(&*transport(Security::Insecure), &descriptor);
    is_refused(&*others.member(FLEET), &descriptor);
    assert_eq!(content(&secret), [1, 2, 3, 4]);
    let here = region(&[0; 4]);
    let mut way = fleet.member(FLEET).connect(here.clone(), &descriptor).unwrap();
    read(&mut *way, &[piece(0, 0, 4)]).unwrap();
    assert_eq!(content(&here), [1, 2, 3, 4]);
}

#[test]
fn a_member_gives_nothing_to_an_owner_that_is_none() {
    let (fleet, others) = (FleetAuthority::new(), FleetAuthority::new());
    let member = fleet.member(FLEET);
    for owner in [others.member(FLEET), fleet.member("another-name"), transport(Security::Insecure)] {
        let there = region(&[0; 4]);
        let descriptor = owner.register(there.clone(), RemoteAccess::ReadWrite).unwrap();
        is_refused(&*member, &descriptor);
        assert_eq!(content(&there), [0; 4]);
    }
}

#[test]
fn certificates_that_do_not_fit_are_named() {
    let (fleet, others) = (FleetAuthority::new(), FleetAuthority::new());
    let (authority, key) = (fleet.0.pem(), others.0.key());
    let good =
        TlsPem { authority: &authority, certificates: &authority, key: &key, revoked: "", fleet: FLEET };
    let wrong = [
        ("certificate and key", TlsPem { ..good }),
        ("member's key", TlsPem { key: "nothing", ..good }),
        ("fleet's name", TlsPem { fleet: "no name!", key: &fleet.0.key(), ..good }),
        ("authority's certificate", TlsPem { authority: "", ..good }),
    ];
    for (what, pem) in wrong {
        let error = TlsIdentity::new(&pem).unwrap_err();
        assert!(error.kind == ErrorKind::Invalid && error.detail.contains(what), "{what}: {error}");
    }
}

#[test]
fn nothing_leaves_the_host_in_the_clear() {
    let wide = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
    let config = TcpConfig {
        advertise: vec![SocketAddr::from((Ipv4Addr::LOCALHOST, 1))],
        ..TcpConfig::new(wide, Security::LoopbackOnly)
    };
    assert_eq!(Tcp::new(config).err().unwrap().kind, ErrorKind::Unsupported);
    let here = Tcp::new(TcpConfig::loopback()).unwrap();
    let key = "0".repeat(32);
    let away =
        Descriptor { transport: "tcp".into(), address: format!("{key}@192.0.2.1:9"), epoch: 0, bytes: 1 };
    assert_eq!(here.connect(region(&[0]), &away).err().unwrap().kind, ErrorKind::Unsupported);
}

fn scratch(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("mixfleet-wire-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&path);
    path
}

fn of_files(files: &TlsFiles) -> Arc<dyn Transport> {
    transport(Security::Tls(Arc::new(TlsIdentity::of_files(files.clone(), Box::new(|_| {})).unwrap())))
}

#[test]
fn who_calls_shows_a_workers_certificate_too() {
    let fleet = FleetAuthority::new();
    let owner = fleet.member(FLEET);
    let memory = region(&[0; 4]);
    let descriptor = owner.register(memory.clone(), RemoteAccess::ReadWrite).unwrap();
    for name in ["other", "router.mixfleet", "mixfleet.other"] {
        is_refused(&*fleet.member(name), &descriptor);
    }
    assert_eq!(content(&memory), [0; 4]);
    for name in [FLEET, "worker.mixfleet"] {
        let peer = fleet.member(name);
        assert!(peer.connect(region(&[9; 4]), &descriptor).is_ok(), "{name}");
    }
}

#[test]
fn who_is_called_may_show_a_workers_certificate_but_no_routers() {
    let fleet = FleetAuthority::new();
    let peer = fleet.member(FLEET);
    for (name, is_let) in [("worker.mixfleet", true), ("router.mixfleet", false)] {
        let owner = fleet.member(name);
        let descriptor = owner.register(region(&[0; 4]), RemoteAccess::ReadWrite).unwrap();
        assert_eq!(peer.connect(region(&[9; 4]), &descriptor).is_ok(), is_let, "{name}");
    }
}

/// Ends because files are looked at each second.
fn until(mut what: impl FnMut() -> bool) {
    let begun = std::time::Instant::now();
    while !what() {
        assert!(begun.elapsed().as_secs() < 60);
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

#[test]
fn a_renewed_certificate_is_shown_without_a_new_start() {
    let (fleet, directory) = (FleetAuthority::new(), scratch("renewed"));
    let unreadable = Arc::new(AtomicBool::new(false));
    let said = unreadable.clone();
    let on_renewal = Box::new(move |read: Result<_, _>| said.store(read.is_err(), Ordering::Relaxed));
    let files = fleet.files(&directory, &["other"], &[]);
    let owner = transport(Security::Tls(Arc::new(TlsIdentity::of_files(files, on_renewal).unwrap())));
    let peer = fleet.member(FLEET);
    let descriptor = owner.register(region(&[0; 4]), RemoteAccess::ReadWrite).unwrap();
    let is_let = || peer.connect(region(&[9; 4]), &descriptor).is_ok();
    assert!(!is_let());
    fleet.files(&directory, &[FLEET], &[]);
    until(is_let);
    // What cannot be read leaves the old one in use.
    std::fs::write(directory.join("member.pem"), "half").unwrap();
    until(|| {
        assert!(is_let());
        unreadable.load(Ordering::Relaxed)
    });
    assert!(is_let());
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn a_certificate_that_was_taken_back_is_refused_without_a_new_start() {
    let (fleet, ours, theirs) = (FleetAuthority::new(), scratch("revoking"), scratch("revoked"));
    let owner = of_files(&fleet.files(&ours, &[FLEET], &[]));
    let peer = of_files(&fleet.files(&theirs, &[FLEET], &[]));
    let descriptor = owner.register(region(&[0; 4]), RemoteAccess::ReadWrite).unwrap();
    assert!(peer.connect(region(&[9; 4]), &descriptor).is_ok());
    let own = std::fs::read(ours.join("member.pem")).unwrap();
    let key = std::fs::read(ours.join("member.key")).unwrap();
    fleet.files(&ours, &[FLEET], &[SERIAL]);
    std::fs::write(ours.join("member.pem"), own).unwrap();
    std::fs::write(ours.join("member.key"), key).unwrap();
    until(|| peer.connect(region(&[9; 4]), &descriptor).is_err());
    for directory in [ours, theirs] {
        std::fs::remove_dir_all(directory).unwrap();
    }
}

#[test]
fn kv_goes_no_further_when_a_list_names_the_certificate_of_either_end() {
    for of_caller in [true, false] {
        let (fleet, ours, theirs) = (FleetAuthority::new(), scratch("ending"), scratch("ended"));
        let owner = of_files(&fleet.files(&ours, &[FLEET], &[]));
        let peer = of_files(&fleet.files(&theirs, &[FLEET], &[]));
        let there = region(&[0; 4]);
        let descriptor = owner.register(there.clone(), RemoteAccess::ReadWrite).unwrap();
        let mut way = peer.connect(region(&[9; 4]), &descriptor).unwrap();
        write(&mut *way, &[piece(0, 0, 4)]).unwrap();
        assert_eq!(content(&there), [9; 4]);
        let doubting = if of_caller { &ours } else { &theirs };
        std::fs::write(doubting.join("crl.pem"), fleet.0.revokes(&[SERIAL])).unwrap();
        until(|| write(&mut *way, &[piece(0, 0, 4)]).is_err());
        for directory in [ours, theirs] {
            std::fs::remove_dir_all(directory).unwrap();
        }
    }
}

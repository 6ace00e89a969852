//! Who is not of the fleet neither reads nor writes.

use crate::conformance::{content, piece, read, region, write};
use mixfleet_hal::ErrorKind;
use mixfleet_hal::transport::{Access, Descriptor, Transport};
use mixfleet_wire::{Identity, Pem, Security, Tcp, TcpConfig};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

const FLEET: &str = "mixfleet";

/// An authority.
pub(crate) struct Fleet {
    authority: CertifiedIssuer<'static, KeyPair>,
}

impl Fleet {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Fleet { authority: CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap() }
    }

    /// What a member has whose certificate is of `name`.
    fn identity(&self, name: &str) -> Arc<Identity> {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.authority).unwrap();
        let pem = Pem {
            authority: &self.authority.as_ref().pem(),
            certificates: &certificate.pem(),
            key: &key.serialize_pem(),
            fleet: FLEET,
        };
        Arc::new(Identity::new(&pem).unwrap())
    }

    pub(crate) fn member(&self, name: &str) -> Arc<dyn Transport> {
        transport(Security::Tls(self.identity(name)))
    }
}

fn transport(security: Security) -> Arc<dyn Transport> {
    let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    Arc::new(Tcp::new(TcpConfig { streams: 2, ..TcpConfig::new(listen, security) }).unwrap())
}

/// Tries all that a stranger could with a descriptor that it should not have.
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
    let (fleet, others) = (Fleet::new(), Fleet::new());
    let (owner, secret) = (fleet.member(FLEET), region(&[1, 2, 3, 4]));
    let descriptor = owner.register(secret.clone(), Access::ReadWrite).unwrap();
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
    let (fleet, others) = (Fleet::new(), Fleet::new());
    let member = fleet.member(FLEET);
    for owner in [others.member(FLEET), fleet.member("another-name"), transport(Security::Insecure)] {
        let there = region(&[0; 4]);
        let descriptor = owner.register(there.clone(), Access::ReadWrite).unwrap();
        is_refused(&*member, &descriptor);
        assert_eq!(content(&there), [0; 4]);
    }
}

#[test]
fn certificates_that_do_not_fit_are_named() {
    let (fleet, others) = (Fleet::new(), Fleet::new());
    let authority = fleet.authority.as_ref().pem();
    let key = others.authority.key().serialize_pem();
    let good = Pem { authority: &authority, certificates: &authority, key: &key, fleet: FLEET };
    let wrong = [
        ("certificate and key", Pem { ..good }),
        ("member's key", Pem { key: "nothing", ..good }),
        ("fleet's name", Pem { fleet: "no name!", key: &fleet.authority.key().serialize_pem(), ..good }),
        ("authority's certificate", Pem { authority: "", ..good }),
    ];
    for (what, pem) in wrong {
        let error = Identity::new(&pem).unwrap_err();
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

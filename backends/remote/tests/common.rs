//! A lent device, and a proxy to its user that counts bytes and can be cut.

use mixfleet_hal::{Cmd, DType, Device, OpSig, Slice};
use mixfleet_remote::{DeviceAccess, RemoteDevice, SharedSecret, Shown, serve};
use mixfleet_wire::{LinkAddress, Security};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// A secret that is shown as it is.
pub(crate) struct Word(pub(crate) &'static str);

impl SharedSecret for Word {
    fn prove(&self, _: &LinkAddress, _: &[u8]) -> Option<Shown> {
        let word = self.0;
        let is_answered = Box::new(move |answer: &[u8]| answer == word.as_bytes());
        Some(Shown { proof: word.as_bytes().to_vec(), is_answered })
    }

    fn admit(&self, proof: &[u8], _: &LinkAddress, _: &[u8]) -> Option<Vec<u8>> {
        (proof == self.0.as_bytes()).then(|| self.0.as_bytes().to_vec())
    }
}

pub(crate) fn access(word: &'static str) -> DeviceAccess {
    DeviceAccess { security: Security::LoopbackOnly, secret: Some(Arc::new(Word(word))) }
}

pub(crate) fn here() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 0))
}

/// Lends a device at a port.
pub(crate) fn lend(device: Arc<dyn Device>) -> SocketAddr {
    let LinkAddress::Tcp(port) = serve(&here().into(), device, access("word")).unwrap() else {
        unreachable!("the address is a port")
    };
    port
}

/// Lends a device at a socket file, which is then removed: existing connections go on.
pub(crate) fn lend_pages(device: Arc<dyn Device>, name: &str) -> (LinkAddress, SocketFile) {
    let path = std::env::temp_dir().join(format!("mixfleet-remote-{}-{name}", std::process::id()));
    let file = SocketFile(path.clone());
    (serve(&LinkAddress::Unix(path), device, access("word")).unwrap(), file)
}

/// A socket file that is removed.
pub(crate) struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

pub(crate) fn open(address: impl Into<LinkAddress>) -> RemoteDevice {
    RemoteDevice::open("remote:test", address.into(), access("word")).unwrap()
}

/// Bytes that crossed in both directions, and whether connections are let through.
#[derive(Default)]
pub(crate) struct Crossed {
    pub(crate) out: AtomicU64,
    pub(crate) back: AtomicU64,
    is_cut: AtomicBool,
    open: Mutex<Vec<TcpStream>>,
}

impl Crossed {
    pub(crate) fn bytes(&self) -> (u64, u64) {
        (self.out.load(Ordering::SeqCst), self.back.load(Ordering::SeqCst))
    }

    /// Ends all connections, and lets further ones through or not.
    pub(crate) fn cut(&self, for_good: bool) {
        self.is_cut.store(for_good, Ordering::SeqCst);
        for socket in self.open.lock().unwrap().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

/// A wire to `to`.
pub(crate) fn wire(to: SocketAddr) -> (SocketAddr, Arc<Crossed>) {
    let listener = TcpListener::bind(here()).unwrap();
    let (address, crossed) = (listener.local_addr().unwrap(), Arc::new(Crossed::default()));
    let all = crossed.clone();
    std::thread::spawn(move || {
        for from in listener.incoming().map_while(Result::ok) {
            if all.is_cut.load(Ordering::SeqCst) {
                continue;
            }
            let to = TcpStream::connect(to).unwrap();
            for socket in [&from, &to] {
                socket.set_nodelay(true).unwrap();
                all.open.lock().unwrap().push(socket.try_clone().unwrap());
            }
            let (out, back) = ((from.try_clone().unwrap(), to.try_clone().unwrap()), (to, from));
            for ((mut from, mut to), which) in [(out, 0), (back, 1)] {
                let all = all.clone();
                std::thread::spawn(move || {
                    let mut buffer = vec![0; 1 << 16];
                    while let Ok(bytes @ 1..) = from.read(&mut buffer) {
                        let count = if which == 0 { &all.out } else { &all.back };
                        count.fetch_add(bytes as u64, Ordering::SeqCst);
                        if to.write_all(&buffer[..bytes]).is_err() {
                            break;
                        }
                    }
                    let _ = to.shutdown(Shutdown::Both);
                });
            }
        }
    });
    (address, crossed)
}

/// `to = a + b`.
pub(crate) fn add(a: &Slice, b: &Slice, to: &Slice) -> Cmd {
    let sig = OpSig::Add { elements: a.bytes / 4, x: DType::F32 };
    Cmd::new(sig, &[a.clone(), b.clone(), to.clone()]).unwrap()
}

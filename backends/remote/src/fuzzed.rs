//! Ends that send any bytes, for tests and fuzzing.

use crate::fetched::BufferRange;
use crate::frame::FrameReader;
use crate::protocol::FRAME_BYTES_MAX;
use crate::served::Served;
use crate::session::RemoteSession;
use mixfleet_hal::{Device, Error, ErrorKind, Result};
use mixfleet_wire::{Duplex, DuplexListener, LinkAddress, Security};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

/// Only ends what hangs.
const LONG: Duration = Duration::from_secs(60);

/// Bytes of the result that a user waits for.
const RESULT_BYTES: usize = 8;

/// A port of this host.
pub fn port() -> LinkAddress {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()
}

/// The calling and the called end of a connection by `address`.
fn pair(address: &LinkAddress) -> Result<(Duplex, Duplex)> {
    let listener = DuplexListener::bind(address, Security::LoopbackOnly, LONG)?;
    let deadline = Instant::now() + LONG;
    std::thread::scope(|scope| {
        let calling =
            scope.spawn(|| Duplex::call(listener.address(), &Security::LoopbackOnly, LONG, deadline));
        let welcomed = listener.accept().and_then(|caller| caller.welcome(deadline));
        let calling = calling.join().expect("nothing panics")?;
        let (called, _) = welcomed.map_err(|error| Error::new(ErrorKind::Other, error.to_string()))?;
        Ok((calling, called))
    })
}

/// Sends `bytes` and nothing more, and collects the answer until the other end closes.
fn send_all(link: &Duplex, bytes: &[u8]) {
    let mut answers = vec![0; 1 << 16];
    let mut drain = || link.receive(&mut answers, Some(Instant::now())).map(|came| came.is_some());
    // it may be cut off before it has sent all
    let _ = link.send(&[bytes], LONG, &mut drain);
    link.end_sending();
    let deadline = Instant::now() + LONG;
    while link.receive(&mut answers, Some(deadline)).is_ok_and(|came| came.is_some()) {}
}

/// Serves `device` to a user that sends these bytes once it was admitted at `address`, takes what it is
/// answered, and leaves.
///
/// # Errors
/// Why the user was cut off.
///
/// # Panics
/// If serving does.
pub fn served(device: &dyn Device, address: &LinkAddress, bytes: &[u8]) -> Result<()> {
    let (user, link) = pair(address)?;
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| {
            let outcome = Served::new(device, &link).run(FrameReader::new(FRAME_BYTES_MAX));
            link.close();
            outcome
        });
        send_all(&user, bytes);
        serving.join().expect("nothing panics")
    })
}

/// Uses a device of a process that answers every batch with these bytes, and then leaves.
///
/// # Errors
/// Why the batch has no end, or no result.
///
/// # Panics
/// If using it does.
pub fn told(bytes: &[u8]) -> Result<()> {
    const QUEUE: u64 = 1;
    let (link, server) = pair(&port())?;
    let session = RemoteSession::over(link, FrameReader::new(FRAME_BYTES_MAX));
    let place = || BufferRange { buffer: 1, offset: 0, bytes: RESULT_BYTES as u64 };
    session.assume_queue(QUEUE);
    session.expect(QUEUE, &[place()], vec![place()]);
    std::thread::scope(|scope| {
        scope.spawn(|| send_all(&server, bytes));
        let ended = session.wait(QUEUE, 1, LONG);
        let mut result = [0; RESULT_BYTES];
        let is_here = session.take_fetched(&place(), &mut result);
        // what else was sent, up to the end of the connection
        let _ = session.wait(QUEUE, u64::MAX, LONG);
        assert!(session.failure().is_some(), "the other process has left");
        session.fail(Error::new(ErrorKind::Closed, "enough"));
        ended?;
        is_here.then_some(()).ok_or_else(|| Error::invalid("a batch ended without its result"))
    })
}

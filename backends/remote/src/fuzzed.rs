//! A user that sends any bytes.

use crate::frame::FrameReader;
use crate::protocol::FRAME_BYTES_MAX;
use crate::served::Served;
use mixfleet_hal::{Device, Error, ErrorKind, Result};
use mixfleet_wire::{Duplex, DuplexListener, Security};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

/// Only ends what hangs.
const LONG: Duration = Duration::from_secs(60);

/// Serves `device` to a user that sends these bytes once it was admitted, takes what it is answered, and
/// leaves.
///
/// # Errors
/// Why the user was cut off.
///
/// # Panics
/// If serving does.
pub(crate) fn served(device: &dyn Device, bytes: &[u8]) -> Result<()> {
    let failed = |error: std::io::Error| Error::new(ErrorKind::Other, error.to_string());
    let here = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let listener = DuplexListener::bind(here, Security::LoopbackOnly, LONG)?;
    let deadline = Instant::now() + LONG;
    let user = Duplex::call(listener.address(), &Security::LoopbackOnly, LONG, deadline)?;
    let (link, _pending) = listener.accept().and_then(|caller| caller.welcome(deadline)).map_err(failed)?;
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| {
            let outcome = Served::new(device, &link).run(FrameReader::new(FRAME_BYTES_MAX));
            link.close();
            outcome
        });
        let mut answers = vec![0; 1 << 16];
        let mut drain = || user.receive(&mut answers, Some(Instant::now())).map(|came| came.is_some());
        // it may be cut off before it has sent all
        let _ = user.send(&[bytes], LONG, &mut drain);
        user.end_sending();
        while user.receive(&mut answers, Some(deadline)).is_ok_and(|came| came.is_some()) {}
        serving.join().expect("nothing panics")
    })
}

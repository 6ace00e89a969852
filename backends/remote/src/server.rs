//! Lending a device of this process to others.

use crate::frame::FrameReader;
use crate::hello::{self, DeviceAccess};
use crate::protocol::{FRAME_BYTES_MAX, HELLO_BYTES_MAX, HELLO_TIMEOUT, SILENCE};
use crate::served::Served;
use mixfleet_hal::{Device, Error, ErrorKind, Result};
use mixfleet_wire::{DuplexCaller, DuplexListener, LinkAddress};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Users of a device at a time.
const USERS_MAX: usize = 16;

/// Pause after a failed accept, most likely for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// Lends a device at an address.
pub struct DeviceServer {
    listener: DuplexListener,
    lent: Arc<LentDevice>,
}

struct LentDevice {
    device: Arc<dyn Device>,
    access: DeviceAccess,
    users: AtomicUsize,
}

impl DeviceServer {
    /// Listens at `address`; port 0 picks a free port. At a socket file, data goes through shared pages.
    ///
    /// # Errors
    /// `Unsupported` if others could use the device or see what it computes, `Other` if the address cannot be
    /// bound.
    pub fn bind(address: &LinkAddress, device: Arc<dyn Device>, access: DeviceAccess) -> Result<Self> {
        access.check()?;
        let listener = DuplexListener::bind(address, access.security.clone(), SILENCE)?;
        Ok(DeviceServer {
            listener,
            lent: Arc::new(LentDevice { device, access, users: AtomicUsize::new(0) }),
        })
    }

    /// Returns the bound address, including the actual port.
    pub fn address(&self) -> &LinkAddress {
        self.listener.address()
    }

    /// Serves users, each on its own thread, for the life of the process.
    pub fn run(&self) -> ! {
        loop {
            match self.listener.accept() {
                Ok(caller) => {
                    let lent = self.lent.clone();
                    let spawned = std::thread::Builder::new().name("lend".into()).spawn(move || {
                        let outcome = catch_unwind(AssertUnwindSafe(|| lent.welcome(caller)));
                        match outcome {
                            Ok(Ok(())) => {}
                            Ok(Err(error)) => tracing::warn!(%error, "a user of the device has gone"),
                            Err(_) => {
                                tracing::error!("what a user sent led to a panic; the user was cut off")
                            }
                        }
                    });
                    if let Err(error) = spawned {
                        tracing::warn!(%error, "no thread is left for a user of the device");
                    }
                }
                Err(_) => std::thread::sleep(ACCEPT_PAUSE),
            }
        }
    }
}

/// Lends `device` at `address` on a new thread; returns the bound address.
///
/// # Errors
/// As for [`DeviceServer::bind`], and when there is no thread.
pub fn serve(address: &LinkAddress, device: Arc<dyn Device>, access: DeviceAccess) -> Result<LinkAddress> {
    let server = DeviceServer::bind(address, device, access)?;
    let address = server.address().clone();
    let run = move || server.run();
    let spawned = std::thread::Builder::new().name("lend-accept".into()).spawn(run);
    spawned.map_err(|error| Error::new(ErrorKind::Other, error.to_string()))?;
    Ok(address)
}

/// One user of the device.
struct User<'a>(&'a AtomicUsize);

impl Drop for User<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl LentDevice {
    fn welcome(&self, caller: DuplexCaller) -> Result<()> {
        let deadline = Instant::now() + HELLO_TIMEOUT;
        let failed = |error: std::io::Error| Error::new(ErrorKind::Closed, error.to_string());
        let (link, pending) = caller.welcome(deadline).map_err(failed)?;
        let mut reader = FrameReader::new(HELLO_BYTES_MAX);
        let (info, limits) = (self.device.info(), self.device.limits());
        hello::welcome(&link, &mut reader, &self.access, info, &limits, deadline)?;
        let peer = link.peer();
        let before = self.users.fetch_add(1, Ordering::Relaxed);
        let _user = User(&self.users);
        if before >= USERS_MAX {
            return Err(Error::new(
                ErrorKind::OutOfMemory,
                format!("{peer}: {USERS_MAX} others use the device"),
            ));
        }
        drop(pending);
        reader.allow(FRAME_BYTES_MAX);
        tracing::info!(peer, device = %self.device.info().id, "a process uses the device");
        let outcome = Served::new(&*self.device, &link).run(reader);
        match outcome {
            Ok(()) => {
                tracing::info!(peer, "it has left, and what it had is freed");
                Ok(())
            }
            Err(error) => Err(error.context(peer)),
        }
    }
}

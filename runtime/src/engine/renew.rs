//! The life of an instance: it ends with its device, and begins again when that answers.

use super::messages::FromWorker;
use super::worker::Worker;
use futures_util::FutureExt;
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Cmd, Error, ErrorKind, OpSig, Result};
use mixfleet_scheduler::batch::Instance;
use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

/// Between two tries to reach a device that failed.
const BACKOFF_MIN: Duration = Duration::from_secs(1);
const BACKOFF_MAX: Duration = Duration::from_secs(60);

/// An instance that works for so long after it failed has recovered.
const RECOVERED: Seconds = Seconds(300.0);

/// A device that does not answer for so long is given up: whoever watches the process may start it anew.
const GIVEN_UP: Seconds = Seconds(600.0);

/// What a device that failed must copy before it is used again, and in what time.
const PROBE_BYTES: usize = 64;
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

impl Worker {
    /// Works until nobody wants it any more. If its device fails, so does the instance; it is opened again,
    /// with back-off, where the device answers.
    pub(super) async fn run(mut self) {
        let mut backoff = BACKOFF_MIN;
        loop {
            let began = self.env.now();
            let Err(error) = self.live().await else { return };
            let device = self.device.info().id.clone();
            tracing::error!(device, %error, "the instance is down");
            self.report(FromWorker::Down(error));
            if (self.env.now() - began).0 > RECOVERED.0 {
                backoff = BACKOFF_MIN;
            }
            if !self.reopen(&mut backoff).await {
                return;
            }
            tracing::warn!(device, "the device answers: the instance is opened again");
            self.report(self.up.clone());
        }
    }

    /// Serves; a panic is a failure of this instance.
    async fn live(&mut self) -> Result<()> {
        let served = AssertUnwindSafe(self.serve()).catch_unwind().await;
        served.unwrap_or_else(|panic| {
            self.metrics.worker_panics.inc();
            Err(Error::new(ErrorKind::Other, format!("the worker panicked: {}", text(&*panic))))
        })
    }

    /// Waits for the device. False if nobody wants the instance any more, or the device is given up.
    async fn reopen(&mut self, backoff: &mut Duration) -> bool {
        let (began, mut said) = (self.env.now(), false);
        loop {
            tokio::select! {
                biased;
                () = self.reports.closed() => return false,
                () = self.env.sleep(*backoff) => {}
            }
            *backoff = (2 * *backoff).min(BACKOFF_MAX);
            // What came meanwhile is of the life that ended: whoever sent it hears so.
            while self.orders.try_recv().is_ok() {}
            while self.words.try_recv().is_ok() {}
            if self.orders.is_closed() {
                return false;
            }
            let Err(error) = self.renew() else { return true };
            let device = &self.device.info().id;
            if (self.env.now() - began).0 > GIVEN_UP.0 {
                tracing::error!(device, %error, "the device does not answer and is given up: start the process anew");
                return false;
            }
            if !std::mem::replace(&mut said, true) {
                tracing::warn!(device, %error, "the device does not answer; it is asked again, less and less often");
            }
        }
    }

    /// A failed batch fails all that come after it in its queue.
    pub(super) fn renew_queue(&mut self) -> Result<()> {
        // What belongs to the queue goes before it.
        self.recorded.clear();
        self.queue = self.device.queue()?;
        Ok(())
    }

    /// The device takes bytes, copies them and gives them back.
    fn probe(&mut self) -> Result<()> {
        let sent: [u8; PROBE_BYTES] = std::array::from_fn(|at| at as u8 ^ self.env.random() as u8);
        let half = PROBE_BYTES as u64;
        let place = |at: u64| self.staging.landing.range(at * half, half);
        let (source, target) = (place(0), place(1));
        self.device.write(&source, &sent)?;
        self.device.write(&target, &[0; PROBE_BYTES])?;
        let copy = Cmd::new(OpSig::Copy { bytes: half }, &[source, target.clone()])?;
        let ticket = self.queue.submit(&[copy])?;
        self.queue.wait(ticket, PROBE_TIMEOUT)?;
        let mut came = [0; PROBE_BYTES];
        self.device.read(&target, &mut came)?;
        if came == sent {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Corrupt, "the device gives back other bytes than it was given"))
    }

    /// An instance as it was at first, if the device computes.
    fn renew(&mut self) -> Result<()> {
        self.renew_queue()?;
        self.probe()?;
        self.active.clear();
        self.outgoing.clear();
        self.courier.forget_all();
        self.machine = Instance::new(self.limits).predicted_by(self.cost.clone());
        Ok(())
    }
}

/// What a panic said.
fn text(panic: &(dyn Any + Send)) -> &str {
    let literal = panic.downcast_ref::<&str>().copied();
    literal.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("it does not say why")
}

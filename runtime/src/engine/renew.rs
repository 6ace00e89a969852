//! Reopening an instance whose device failed, once the device answers again.

use super::messages::FromWorker;
use super::worker::Worker;
use futures_util::FutureExt;
use mixfleet_hal::cast::{low_u8, to_u8};
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Cmd, Error, ErrorKind, OpSig, Result};
use mixfleet_scheduler::batch::Instance;
use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

/// Interval between attempts to reach a failed device.
const BACKOFF_MIN: Duration = Duration::from_secs(1);
const BACKOFF_MAX: Duration = Duration::from_secs(60);

/// Time without a failure after which an instance counts as recovered.
const RECOVERED: Seconds = Seconds(300.0);

/// Time without an answer after which a device is given up; the process may then be restarted.
const GIVEN_UP: Seconds = Seconds(600.0);

/// Bytes that a failed device must copy before it is used again, and the time limit.
pub(super) const PROBE_BYTES: usize = 64;
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

impl Worker {
    /// Works until the instance is no longer needed. If its device fails, so does the instance; it is
    /// reopened with back-off once the device answers.
    pub(super) async fn run(mut self) {
        let mut backoff = BACKOFF_MIN;
        loop {
            let began = self.env.now();
            let Err(error) = self.live().await else { return };
            let device = self.steps.device.info().id.clone();
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

    /// Serves; a panic becomes a failure of this instance.
    async fn live(&mut self) -> Result<()> {
        let served = AssertUnwindSafe(self.serve()).catch_unwind().await;
        served.unwrap_or_else(|panic| {
            self.metrics.worker_panics.inc();
            Err(Error::new(ErrorKind::Other, format!("the worker panicked: {}", text(&*panic))))
        })
    }

    /// Waits for the device. False if the instance is no longer needed, or the device is given up.
    async fn reopen(&mut self, backoff: &mut Duration) -> bool {
        let (began, mut said) = (self.env.now(), false);
        loop {
            tokio::select! {
                biased;
                () = self.reports.closed() => return false,
                () = self.env.sleep(*backoff) => {}
            }
            *backoff = (2 * *backoff).min(BACKOFF_MAX);
            // Messages that came in between belong to the earlier life, and their senders are notified.
            while self.orders.try_recv().is_ok() {}
            while self.words.try_recv().is_ok() {}
            if self.orders.is_closed() {
                return false;
            }
            let Err(error) = self.renew() else { return true };
            let device = &self.steps.device.info().id;
            if (self.env.now() - began).0 > GIVEN_UP.0 {
                tracing::error!(device, %error, "the device does not answer and is given up: restart the process");
                return false;
            }
            if !std::mem::replace(&mut said, true) {
                tracing::warn!(device, %error, "the device does not answer; retrying with backoff");
            }
        }
    }

    /// Checks that the device stores, copies and returns bytes.
    fn probe(&mut self) -> Result<()> {
        let sent: [u8; PROBE_BYTES] = std::array::from_fn(|at| to_u8(at) ^ low_u8(self.env.random()));
        let half = PROBE_BYTES as u64;
        let place = |at: u64| self.probed.range(at * half, half);
        let (source, target) = (place(0), place(1));
        self.steps.device.write(&source, &sent)?;
        self.steps.device.write(&target, &[0; PROBE_BYTES])?;
        let copy = Cmd::new(OpSig::Copy { bytes: half }, &[source, target.clone()])?;
        let ticket = self.steps.queue.submit(&[copy])?;
        self.steps.queue.wait(ticket, PROBE_TIMEOUT)?;
        let mut came = [0; PROBE_BYTES];
        self.steps.device.read(&target, &mut came)?;
        if came == sent {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Corrupt, "the device returns other bytes than were written"))
    }

    /// Resets the instance to its initial state, if the device computes.
    fn renew(&mut self) -> Result<()> {
        self.steps.renew_queue()?;
        self.steps.renew_copies()?;
        self.probe()?;
        self.active.clear();
        self.receiver.clear();
        self.sender.clear();
        self.postponed.clear();
        self.loads.clear();
        self.machine = Instance::new(self.limits.clone()).predicted_by(self.cost.clone());
        Ok(())
    }
}

/// The message of a panic.
fn text(panic: &(dyn Any + Send)) -> &str {
    let literal = panic.downcast_ref::<&str>().copied();
    literal.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("it does not say why")
}

//! Converts failures that wgpu reports by callback or panic into values.

use mixfleet_hal::{Error, ErrorKind, Result};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use wgpu::{Device, ErrorFilter};

/// Errors that wgpu reported outside of our own calls.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// Why the device is gone.
    lost: Mutex<Option<String>>,
    /// An error that no scope caught, which the next call reports.
    stray: Mutex<Option<Error>>,
}

fn of_wgpu(place: &str, error: &wgpu::Error) -> Error {
    let kind = match error {
        wgpu::Error::OutOfMemory { .. } => ErrorKind::OutOfMemory,
        _ => ErrorKind::Other,
    };
    Error::new(kind, format!("wgpu: {place}: {error}"))
}

impl Faults {
    /// Installs listeners on `device`; without them wgpu panics.
    pub(crate) fn listen(device: &Device) -> Arc<Faults> {
        let faults = Arc::new(Faults::default());
        let on_error = faults.clone();
        device.on_uncaptured_error(Arc::new(move |error| {
            let mut stray = on_error.stray.lock().unwrap_or_else(PoisonError::into_inner);
            stray.get_or_insert(of_wgpu("outside of a call", &error));
        }));
        let on_loss = faults.clone();
        device
            .set_device_lost_callback(move |reason, message| on_loss.lose(format!("{reason:?}: {message}")));
        faults
    }

    fn lose(&self, reason: String) {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(reason);
    }

    /// Returns `DeviceLost` once the device is lost.
    pub(crate) fn alive(&self) -> Result<()> {
        match &*self.lost.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(reason) => {
                Err(Error::new(ErrorKind::DeviceLost, format!("wgpu: the device is lost: {reason}")))
            }
            None => Ok(()),
        }
    }

    /// Runs calls of wgpu and returns their result or the first failure: their own, one reported since the
    /// last call, or the loss of the device, which explains all others.
    pub(crate) fn guard<T>(&self, device: &Device, place: &str, run: impl FnOnce() -> T) -> Result<T> {
        self.alive()?;
        let filters = [ErrorFilter::Internal, ErrorFilter::Validation, ErrorFilter::OutOfMemory];
        let scopes = filters.map(|filter| device.push_error_scope(filter));
        let done = catch_unwind(AssertUnwindSafe(run));
        let mut failure = None;
        for scope in scopes.into_iter().rev() {
            let caught = pollster::block_on(scope.pop());
            failure = caught.map(|error| of_wgpu(place, &error)).or(failure);
        }
        if done.is_err() {
            // wgpu-core panics if a driver fails in `poll`, and is unusable from then on
            self.lose(format!("wgpu panicked in {place}"));
        }
        self.alive()?;
        let stray = self.stray.lock().unwrap_or_else(PoisonError::into_inner).take();
        match (done, failure.or(stray)) {
            (_, Some(error)) => Err(error),
            (Ok(value), None) => Ok(value),
            (Err(_), None) => Err(Error::new(ErrorKind::DeviceLost, format!("wgpu: a panic in {place}"))),
        }
    }
}

//! What a failure concerns: the narrowest thing that ends with it.

use crate::request::{Failure, FailureKind};
use mixfleet_hal::{Error, ErrorKind};
use mixfleet_scheduler::batch::RequestId;
use mixfleet_scheduler::fleet::InstanceId;

/// What ends with a failure, from small to large. A process ends only where its own `main` says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    /// One request; the others go on.
    Request(RequestId),
    /// The way for KV from another instance, for one request: that one is placed anew.
    Link(RequestId, InstanceId),
    /// The instance: its requests go on elsewhere, and it is opened again.
    Instance,
}

/// A failure and what it concerns.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{error}")]
pub(super) struct Fault {
    pub(super) scope: Scope,
    pub(super) error: Error,
}

/// Result of an instance's work.
pub(super) type Outcome<T> = std::result::Result<T, Fault>;

/// What nobody narrows is the device's.
impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Fault { scope: Scope::Instance, error }
    }
}

impl Fault {
    pub(super) fn of_request(request: RequestId, error: Error) -> Self {
        Fault { scope: Scope::Request(request), error }
    }

    pub(super) fn of_link(request: RequestId, peer: InstanceId, error: Error) -> Self {
        Fault { scope: Scope::Link(request, peer), error }
    }
}

/// Whether a device that says this of a step may still compute other steps.
pub(super) fn is_about_what_was_asked(error: &Error) -> bool {
    matches!(error.kind, ErrorKind::Invalid | ErrorKind::Unsupported | ErrorKind::OutOfMemory)
}

/// The failure of a request, for its client.
pub(super) fn failure(error: &Error) -> Failure {
    let kind = match error.kind {
        ErrorKind::Invalid | ErrorKind::Unsupported => FailureKind::Request,
        ErrorKind::OutOfMemory => FailureKind::Exhausted,
        _ => FailureKind::Engine,
    };
    Failure { kind, message: error.detail.clone() }
}

//! The scope of a failure: the smallest unit that ends with it.

use crate::request::{Failure, FailureKind};
use mixfleet_hal::{Error, ErrorKind};
use mixfleet_scheduler::batch::RequestId;
use mixfleet_scheduler::fleet::InstanceId;

/// The unit that ends with a failure, from small to large. A process ends only where its own `main` says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    /// One request; the others continue.
    Request(RequestId),
    /// The link for KV from another instance, for one request, which is placed again.
    Link(RequestId, InstanceId),
    /// The instance: its requests continue elsewhere, and it is reopened.
    Instance,
}

/// A failure and its scope.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{error}")]
pub(super) struct Fault {
    pub(super) scope: Scope,
    pub(super) error: Error,
}

/// The result of an instance's work.
pub(super) type Outcome<T> = std::result::Result<T, Fault>;

/// An error without a narrower scope concerns the instance.
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

/// Whether a device may still compute other steps after this error of a step.
pub(super) fn concerns_step_only(error: &Error) -> bool {
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

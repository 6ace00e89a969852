//! Measures what a device really does: serving-shaped operations, bandwidth by working set, copies,
//! launches, long runs; and says how far each number can be trusted.
//!
//! [`run()`] makes a [`ProfileDocument`]; [`ProfileDocument::device_profile`] is what the scheduler and
//! simulated devices take from it. [`measure()`] runs single points by name, to check a claim.
//!
//! ```
//! use mixfleet_hwtests::profile::{ProfileLevel, ProfileOptions, measure};
//! use mixfleet_hwtests::reference::ReferenceDevice;
//! let options = ProfileOptions { cold_bytes: 1 << 20, ..ProfileOptions::new(ProfileLevel::Quick) };
//! let points = measure(&ReferenceDevice::default(), &["rms_norm.bf16.t1.h64"], &options);
//! assert!(points[0].is_ok() && points[0].seconds.as_ref().unwrap().median > 0.0);
//! ```
//!
//! Absent by design: any number without a correct result, any wall-clock date (the caller gives it), any
//! claim of a vendor.

mod budget;
mod card;
mod check;
pub mod compare;
mod conform;
pub mod control;
pub mod document;
pub mod explain;
mod fit;
mod ground;
mod measure;
mod measured;
mod missing;
mod page;
pub mod plan;
mod run;
mod sampler;
mod stats;
pub mod work;

pub use card::{card, points};
pub use conform::{Conformance, conform, device_profile_schema};
pub use document::{Fact, Flag, PointResult, PointStatus, ProfileDocument, Tool};
pub use measured::measured;
pub use page::page;
pub use plan::{ProfileLevel, plan};
pub use run::{ProfileOptions, ProfileProgress, measure, run};
pub use sampler::{HostClock, TimeSource};
pub use stats::SampleStats;
pub use work::{PointGroup, WorkItem};

use mixfleet_hal::{Error, ErrorKind};

/// Why a point has no number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Problem {
    /// The device does not support it.
    Unsupported(String),
    /// It is skipped.
    Skip(String),
    /// It is skipped for lack of time, and tried again if any is left over.
    Late(String),
    /// It failed.
    Failed(String),
    /// The device hangs or is lost and cannot be used any further.
    Gone(String),
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        match error.kind {
            ErrorKind::Unsupported => Problem::Unsupported(error.detail),
            ErrorKind::OutOfMemory => Problem::Skip(format!("out of memory: {}", error.detail)),
            ErrorKind::Timeout => Problem::Gone(format!("no answer in time: {}", error.detail)),
            ErrorKind::DeviceLost => Problem::Gone(format!("device lost: {}", error.detail)),
            _ => Problem::Failed(error.detail),
        }
    }
}

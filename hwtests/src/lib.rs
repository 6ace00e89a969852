//! Trusts no device until it has checked it, and reports what it could not check.
//!
//! [`run`] tries every operation on a [`mixfleet_hal::Device`]: random operands at edge shapes, between
//! guards, against the float64 [`oracle`] within [`bounds`] that are known beforehand; each command
//! twice, bit by bit the same. [`reference::ReferenceDevice`] tests the suite without hardware.
//!
//! ```
//! use mixfleet_hwtests::{SuiteLevel, SuiteOptions, SuiteVerdict, reference::ReferenceDevice, run};
//! let mut options = SuiteOptions::new(SuiteLevel::Quick);
//! options.only = vec!["rms_norm".to_owned()];
//! let report = run(&ReferenceDevice::default(), &options, &mut |_| {});
//! assert_eq!(report.verdict(), SuiteVerdict::Pass, "{report}");
//! ```
//!
//! Absent by design: any backend, any clock in a verdict, any tolerance fitted to a device.

#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![forbid(unsafe_code)]

mod bench;
pub mod bounds;
pub mod cases;
mod checked;
mod checks;
mod datasheet;
mod draws;
mod experts;
mod ids;
mod inputs;
pub mod links;
pub mod oracle;
mod paged;
pub mod profile;
mod quantised;
pub mod reference;
pub mod report;
mod roofline;
mod scaled;
mod suite;
pub mod validate;

pub use cases::SuiteLevel;
pub use report::{CaseReport, CheckCounts, CheckOutcome, ConformanceReport, SuiteVerdict};
pub use suite::{SuiteEntry, SuiteOptions, attempt, entries, run};

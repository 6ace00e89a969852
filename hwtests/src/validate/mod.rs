//! Validation of a part: levels of cases in child processes, the vendor's claims, a mandatory list, a report.
//!
//! [`groups`] lists what a [`ValidationPlan`] runs; [`runner::run`] runs it in children of a [`Start`], each
//! of which calls [`child::serve`]; [`Validation::new`] judges the outcome; [`package::write`] writes the
//! folder.
//!
//! ```
//! use mixfleet_hwtests::reference::ReferenceDevice;
//! use mixfleet_hwtests::validate::{StartInProcess, Validation, ValidationPlan, ValidationVerdict, runner};
//! use std::sync::Arc;
//! let only = vec!["l0".to_owned(), "l1.fill".to_owned()];
//! let plan = ValidationPlan { only, ..ValidationPlan::new("reference") };
//! let start = StartInProcess { open: Box::new(|_| Ok(Arc::new(ReferenceDevice::default()))) };
//! let outcome = runner::run(&plan, &start, &[], &mut |_| {});
//! let report = Validation::new(&plan, outcome, None, "2026-11-20");
//! assert_eq!(report.verdict, ValidationVerdict::Partial, "{:?}", report.remarks);
//! ```
//!
//! Absent by design: any backend, any network, any opinion on what a part should cost.

pub mod case;
mod charts;
pub mod child;
mod conformance;
mod datasheet;
pub mod detect;
pub mod diff;
mod diff_page;
mod digest;
mod discover;
pub mod document;
pub mod levels;
mod memory;
pub mod metered;
pub mod mustpass;
pub mod package;
mod page;
pub mod part;
pub mod performance;
pub mod protocol;
pub mod runner;
mod soak;
pub mod start;
mod template;
mod turns;

pub use case::{CaseResult, CaseStatus};
pub use datasheet::{DatasheetRow, DatasheetShares};
pub use detect::{Detection, DetectionTrial, FaultyTrial, detect};
pub use diff::{ReadReport, ValidationDiff};
pub use diff_page::diff_page;
pub use digest::sha256;
pub use document::{Validation, ValidationVerdict};
pub use package::Environment;
pub use part::PartFile;
pub use protocol::{DeviceFact, MemoryAsked, Settings, ValidationEffort};
pub use runner::{Record, RunOutcome, ValidationPlan, cases_of, groups};
pub use soak::{Baseline, SoakPhase, SoakSample};
pub use start::{Open, Processes, Start, StartInProcess};
pub use template::{PartSketch, part_template};
pub use turns::MeasuringTurns;

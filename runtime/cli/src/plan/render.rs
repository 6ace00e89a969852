//! A plan as text, as a document and as a page.

pub(super) mod document;
pub(super) mod page;
pub(super) mod table;
mod words;

use super::args::PlanArgs;
use super::load::PlanLoad;
use super::offers::PlanOffers;
use mixfleet_hal::StoredAs;
use mixfleet_planner::found::PlanFound;
use mixfleet_planner::hours::HourPlan;
use mixfleet_planner::prices::Repriced;
use mixfleet_scheduler::models::KnownModel;
use mixfleet_scheduler::plan::break_even::BreakEven;
use mixfleet_scheduler::plan::market::PlannedPool;
use std::path::Path;
use words::pools_words;
pub(super) use words::progress_words;

/// Everything that the command prints.
pub(super) struct Planned<'a> {
    pub(super) args: &'a PlanArgs,
    pub(super) model: &'static KnownModel,
    /// The dtypes to choose from.
    pub(super) stored: &'a [StoredAs],
    pub(super) load: &'a PlanLoad,
    /// The directory for files.
    pub(super) out: Option<&'a Path>,
    pub(super) offers: &'a PlanOffers,
    pub(super) outcome: &'a PlanFound,
    /// What each hour takes; empty for less than two hours.
    pub(super) hours: &'a [HourPlan],
    /// For each part; `None` where the program contradicts the simulations.
    pub(super) break_evens: &'a [Option<BreakEven>],
    pub(super) repriced: &'a [Repriced],
}

impl Planned<'_> {
    /// The model and the dtypes in words.
    fn model_words(&self) -> String {
        let names: Vec<&str> = self.stored.iter().map(|stored| stored.name()).collect();
        format!("{} in {}, engine {}", self.model.name, names.join(" or "), self.args.engine.name)
    }

    /// A fleet in words, with its dtype where there are several to choose from.
    fn words(&self, pools: &[PlannedPool], stored: StoredAs) -> String {
        let pools = pools_words(&self.offers.parts, pools);
        if self.stored.len() > 1 { format!("{pools}, {stored}") } else { pools }
    }
}

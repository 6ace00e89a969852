//! Implements `mixfleet plan`: the cheapest fleet for a model, a load and objectives.

mod args;
mod deploy;
mod load;
mod offers;
mod render;
mod run;
mod several;
mod tiers;

pub(crate) use args::PlanArgs;
pub(crate) use run::run;

//! `mixfleet compare`: what a dollar buys on each part, and what each is cheapest at.

mod args;
mod comparison;
mod devices;
mod render;
mod run;

pub(crate) use args::CompareArgs;
pub(crate) use run::run;

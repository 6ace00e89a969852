//! Implements `mixfleet simulate`: a trace on a fleet that need not exist.

mod additions;
mod answers;
mod args;
mod capacity;
mod closed_loop;
mod history;
mod opened;
mod page;
mod run;
mod side_by_side;
mod subject;
mod table;
mod timeline;
mod unmet;
mod watch;

pub(crate) use args::SimulateArgs;
pub(crate) use run::run;

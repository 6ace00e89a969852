//! The cheapest fleet for a load at given prices.
//!
//! [`program`] finds how many instances of which kinds carry a load ([`linear`] is what a solver sees of it,
//! `branching` such a solver), [`candidates`] says what an instance carries, whose devices share the model
//! in [`layouts`], [`load`] makes classes of a trace's requests, [`margin`] says how wrong times may be,
//! [`offer`] is a part at a price, [`offered`] what its instances carry of a load, [`regions`] where parts
//! stand, [`market`] puts these together, fleet by fleet of the [`forms`] that there are, [`bound`] says what
//! no fleet costs less than, [`break_even`] at which price a part would be in the fleet, and [`shortfall`]
//! why there is none. [`attention`] finds the cheapest fleets in which devices of their own attend, and
//! [`spare`] the cheapest in which devices that compute prompts attend too.
//!
//! What is absent: clocks, limits of time, a solver of its own, simulation. A plan is as good as the rates
//! that it is given.

pub mod attention;
pub mod bound;
#[cfg(any(test, feature = "microlp"))]
pub mod branching;
pub mod break_even;
pub mod candidates;
pub mod forms;
pub mod layouts;
pub mod linear;
pub mod load;
pub mod margin;
pub mod market;
pub mod offer;
pub mod offered;
pub mod program;
pub mod regions;
pub mod shortfall;
pub mod spare;
pub mod tiers;

#[cfg(test)]
mod candidates_tests;
#[cfg(test)]
mod layouts_tests;
#[cfg(test)]
mod market_tests;
#[cfg(test)]
mod program_tests;
#[cfg(test)]
mod spare_tests;

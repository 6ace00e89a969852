//! The cheapest fleet for a load at given prices.
//!
//! [`program`] finds how many instances of which kinds carry a load ([`linear`] is its form for a solver,
//! `branching` such a solver). Its inputs: [`candidates`] computes the load that an instance carries,
//! [`layouts`] how its devices share the model, [`load`] groups a trace's requests into classes, [`margin`]
//! bounds the error of times, [`offer`] is a part at a price, [`offered`] the load that its instances carry,
//! [`regions`] the parts' locations. [`market`] combines these, fleet by fleet of the [`forms`]; [`bound`] is
//! a lower bound on the rent, [`break_even`] the price at which a part joins the fleet, and [`shortfall`]
//! explains why there is no fleet. [`attention`] finds the cheapest fleets with attention offload, and
//! [`spare`] the cheapest in which prefill devices also run attention.
//!
//! Absent by design: clocks, limits of time, a solver of its own, simulation. A plan is as good as the rates
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

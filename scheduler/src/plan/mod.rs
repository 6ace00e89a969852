//! The cheapest fleet for a load at given prices.
//!
//! [`program`] finds how many instances of which kinds carry a load ([`linear`] is what a solver sees of it,
//! `branching` such a solver), [`candidates`] says what an instance carries, [`apart`] prices the attention
//! of decode steps on devices of its own, and [`remote`] divides prompts by length between two clusters.
//!
//! What is absent: clocks, limits of time, a solver of its own, simulation. A plan is as good as the rates
//! that it is given.

pub mod apart;
#[cfg(any(test, feature = "microlp"))]
pub mod branching;
pub mod candidates;
pub mod linear;
pub mod program;
pub mod remote;

#[cfg(test)]
mod candidates_tests;
#[cfg(test)]
mod program_tests;

//! Traces of requests, and simulations of fleets that serve them.

#![forbid(unsafe_code)]

pub mod capacity;
pub mod fleet_file;
pub mod simulate;
pub mod trace;

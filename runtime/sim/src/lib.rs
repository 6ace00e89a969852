//! Traces of requests, and what a fleet would do with them.

#![forbid(unsafe_code)]

pub mod capacity;
pub mod fleet_file;
pub mod simulate;
pub mod trace;

//! Simulated and faulty devices from outside.

mod answers;
mod common;
mod conformance;
mod detection;
mod faults;
mod parts;
mod time;

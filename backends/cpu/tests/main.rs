//! The CPU backend from outside.

mod common;
mod conformance;
mod ops;
mod queue;

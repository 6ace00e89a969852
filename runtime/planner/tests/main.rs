//! Integration tests of the planner.

#[path = "../../sim/tests/common/drawn.rs"]
mod common;
mod repair;

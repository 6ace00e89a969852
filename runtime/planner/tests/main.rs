//! Integration tests of the planner.

mod common;
mod repair;

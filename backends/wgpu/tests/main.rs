//! The wgpu backend from outside.

mod absence;
mod conformance;
mod conversions;
mod queue;
mod steps;

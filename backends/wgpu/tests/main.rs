//! The wgpu backend from outside.

mod absence;
mod conformance;
mod conversions;
mod kept;
mod queue;
mod steps;

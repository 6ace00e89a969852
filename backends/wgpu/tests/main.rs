//! The wgpu backend from outside.

mod absence;
mod conformance;
mod conversions;
mod kept;
mod matrices;
mod queue;
mod steps;

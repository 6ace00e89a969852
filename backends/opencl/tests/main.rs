//! The OpenCL backend from outside.

mod absence;
mod conformance;
mod queue;

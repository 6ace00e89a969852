//! Devices of other processes, over loopback within one process.

mod attention;
mod common;
mod conformance;
mod lost;
mod results;

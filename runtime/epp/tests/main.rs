//! The picker over real gRPC, asked as an Envoy asks.

mod cluster;
mod double;
mod kubernetes;
mod passing;
mod protocol;

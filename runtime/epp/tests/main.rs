//! The picker over real gRPC, asked as an Envoy asks.

mod double;
mod passing;
mod protocol;

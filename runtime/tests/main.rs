//! The runtime from outside. `memory.rs` is a binary of its own: it counts what the whole process allocates.

mod api;
mod chaos;
mod engine;
mod fleet;
mod naive;
mod pool;
#[cfg(feature = "fleet")]
mod rpc;
mod troubled;

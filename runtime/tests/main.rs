//! Integration tests of the runtime. `memory.rs` is a binary of its own: it measures the whole process's
//! memory.

mod api;
mod chaos;
mod engine;
mod fleet;
mod naive;
mod pool;
#[cfg(feature = "fleet")]
mod rpc;
mod troubled;

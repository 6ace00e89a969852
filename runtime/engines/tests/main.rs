//! Engines over real sockets, against one that can die, stall, lie and cut.

mod answers;
#[cfg(feature = "tls")]
#[path = "../../../backends/wire/tests/authority/mod.rs"]
mod authority;
mod fake;
#[cfg(feature = "tls")]
mod https;
mod kv_follow;
mod publisher;
mod recorded;
mod shared;

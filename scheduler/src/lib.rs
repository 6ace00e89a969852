//! Decides everything from numbers; touches nothing.
//!
//! Three state machines, all pure: the fleet's (placement, admission), the instance's (batch
//! formation, chunking, preemption, eviction) and that of KV transfers between instances (hand-off,
//! pull, copy, replay). Events and the time come in, actions go out. The same machines run under the
//! simulator's clock and under the server's.
//!
//! Absent by design: clocks, threads, files, sockets, devices, tokens' meaning, unseeded randomness.

#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![forbid(unsafe_code)]

pub mod batch;
pub mod canary;
pub mod classes;
pub mod cost;
pub mod engines;
pub mod fleet;
mod ids;
pub mod kv;
pub mod layers;
pub mod models;
pub mod places;
pub mod plan;
pub mod quarantine;
pub mod scale;
pub mod sizing;
pub mod table;
pub mod transfer;

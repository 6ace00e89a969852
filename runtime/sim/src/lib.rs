//! Traces of requests, and simulations of fleets that serve them.

#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![forbid(unsafe_code)]

pub mod against;
pub mod bottleneck;
pub mod capacity;
pub mod engine_profile;
pub mod fleet_file;
pub mod import;
pub mod simulate;
pub mod trace;

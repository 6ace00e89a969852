//! Carries decisions to devices and answers to clients.
//!
//! [`api`] parses and tokenises a request, and the [`engine`] has the scheduler place it, runs prefill and
//! decode on the devices and streams tokens back; the [`gateway`] relays requests to external engines
//! instead, and the [`picker`] only chooses the engine. [`model`] turns a checkpoint into commands. Time,
//! spawning, network and randomness come from [`mod@env`] alone.
//!
//! Absent: choices of placement or batch (those are the scheduler's), backend names (devices and transports
//! come in as hal traits), clocks or threads that `env` did not provide.

#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![forbid(unsafe_code)]

pub mod api;
pub mod budget;
pub mod engine;
pub mod env;
pub mod events;
pub mod fleet;
mod front;
pub mod gateway;
pub mod grammar;
pub mod kv_exchange;
pub mod mailbox;
pub mod metrics;
pub mod model;
pub mod picker;
mod placements;
pub mod pool;
pub mod request;
pub mod sampling;
pub mod text;
pub mod trace;

//! Carries decisions to devices and answers to clients.
//!
//! A request's way: [`api`] parses and tokenises it, the [`engine`] asks the scheduler where it goes,
//! runs prefill and decode on the devices and streams tokens back. [`model`] turns a checkpoint into
//! commands. Time, spawning, network and randomness come from [`mod@env`] alone.
//!
//! What is absent: any choice of placement or batch (the scheduler's), any backend's name (devices and
//! transports come in as hal traits), any clock or thread that `env` did not hand out.

#![forbid(unsafe_code)]

pub mod api;
pub mod budget;
pub mod engine;
pub mod env;
pub mod fleet;
pub mod mailbox;
pub mod metrics;
pub mod model;
pub mod pool;
pub mod request;
pub mod sampling;
pub mod text;

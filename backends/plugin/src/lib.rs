//! Third-party backends in shared libraries, through the C interface of [`abi`] and [`shapes`]
//! (`include/mixfleet.h`).
//!
//! A library is code of this process: what it breaks here is broken. What it says is checked all the same, so
//! that one that is only wrong gives an error.

#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![allow(unsafe_code)]

pub mod abi;
mod backend;
mod device;
mod library;
mod opened;
mod operation;
mod queue;
pub mod shapes;

pub use backend::PluginBackend;

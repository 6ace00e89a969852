//! Properties that must hold of every parser of outside bytes, for any bytes.
//!
//! [`TARGETS`] has a function for each parser, which panics if a property does not hold. They are called by
//! the test in `tests/fuzz.rs` with the inputs of `corpus/` and mutations of them, always the same ones, and
//! by libFuzzer (`libfuzzer/`, with a nightly compiler), which searches for inputs that reach new code.
//!
//! Absent: parsers, and clocks; the caller detects inputs that take too long.

#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![forbid(unsafe_code)]

pub mod campaign;
pub mod libfuzzer;
mod mutate;
mod targets;

/// A function that runs one parser.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// The name of its corpus.
    pub name: &'static str,
    /// Whether the parser accepts these bytes. Panics if a property does not hold of them.
    pub check: fn(&[u8]) -> bool,
    /// Number of mutated inputs per test run: together they take a few seconds.
    pub cases: u64,
}

/// All targets.
pub const TARGETS: &[Target] = targets::ALL;

/// The target with that name.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

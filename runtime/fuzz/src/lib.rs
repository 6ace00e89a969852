//! What must hold of every parser of bytes from outside, whatever the bytes are.
//!
//! [`TARGETS`] has a function for each parser; it panics where something does not hold. Two things call them: the test in `tests/fuzz.rs`
//! with the inputs of `corpus/` and mutations of them, the same ones each time, and libFuzzer (`libfuzzer/`, with a nightly compiler), which
//! looks for inputs that reach new code.
//!
//! What is absent: any parser, and any clock: an input that takes too long is seen by who waits for it.

#![forbid(unsafe_code)]

pub mod campaign;
pub mod libfuzzer;
mod mutate;
mod targets;

/// What tries one parser.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// The name of its corpus.
    pub name: &'static str,
    /// Whether the parser takes these bytes. Panics where something does not hold of them.
    pub check: fn(&[u8]) -> bool,
    /// Mutated inputs for each change of the program: together they take some seconds.
    pub cases: u64,
}

/// Every target.
pub const TARGETS: &[Target] = targets::ALL;

/// The target of that name.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}

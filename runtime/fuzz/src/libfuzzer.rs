//! The interface between targets and libFuzzer.

#![allow(clippy::print_stderr, reason = "what libFuzzer shows")]

use crate::{TARGETS, Target, target};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{abort, exit};

/// Environment variable that selects the target.
const VARIABLE: &str = "MIXFLEET_FUZZ_TARGET";

/// The target that the environment selects; ends the process if it selects none.
pub fn chosen() -> &'static Target {
    let name = std::env::var(VARIABLE).unwrap_or_default();
    target(&name).unwrap_or_else(|| {
        let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
        eprintln!("{VARIABLE}='{name}' is no target; there are {}", names.join(", "));
        exit(2)
    })
}

/// Replaces libFuzzer's panic hook, which ends the process at every panic, including those that a parser
/// catches from a library.
pub fn forgive_caught_panics() {
    std::panic::set_hook(Box::new(|panic| eprintln!("{panic}")));
}

/// Ends the process if a property does not hold of `bytes`.
pub fn check(target: &Target, bytes: &[u8]) {
    if catch_unwind(AssertUnwindSafe(|| (target.check)(bytes))).is_err() {
        abort();
    }
}

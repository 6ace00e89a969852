//! Libraries in C, compiled here, against the conformance suite; one of them misbehaves.

#![allow(clippy::print_stdout, reason = "a skip is said aloud")]

mod header;
mod hostile;
mod loops;
mod made;

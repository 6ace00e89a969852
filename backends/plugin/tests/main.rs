//! Libraries in C, compiled here, against the suite that checks all devices; and one that lies.

#![allow(clippy::print_stdout, reason = "a skip is said aloud")]

mod header;
mod hostile;
mod loops;
mod made;

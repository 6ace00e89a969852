//! Serves large language models on the cheapest mix of hardware.

#![forbid(unsafe_code)]

fn main() {}

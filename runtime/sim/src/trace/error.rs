//! What can be wrong with a trace.

use super::Format;

/// Why a trace cannot be read, where, and what was expected.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be opened, read or decompressed.
    #[error("cannot read {name}{}: {cause}", after(*line))]
    Read {
        /// The trace.
        name: String,
        /// Lines that were read before.
        line: u64,
        /// What the system or the decompressor says.
        #[source]
        cause: std::io::Error,
    },
    /// A line does not say what a line of this format must say.
    #[error("{name}, line {line}: {cause}; a line of {format} is {}", .format.example())]
    Line {
        /// The trace.
        name: String,
        /// From 1, blank lines and the header counted.
        line: u64,
        /// What is wrong with it.
        cause: String,
        /// What the file was recognised as.
        format: Format,
    },
    /// The first line is of no known format.
    #[error(
        "{name} is not a trace of a known format ({cause}); supported, also as .zst and .gz:\n{}",
        Format::list()
    )]
    UnknownFormat {
        /// The trace.
        name: String,
        /// What was seen.
        cause: String,
    },
    /// There is no request in it.
    #[error("{name} holds no request")]
    Empty {
        /// The trace.
        name: String,
    },
}

fn after(line: u64) -> String {
    if line == 0 { String::new() } else { format!(" after line {line}") }
}

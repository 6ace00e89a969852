//! What can be wrong with a trace.

use super::{Format, TIME_S_MAX};

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
    /// Something happens later than times can be told apart.
    #[error("{what} {at_s:e} s after the trace's start; times up to {TIME_S_MAX:e} s can be told apart")]
    Late {
        /// What happens.
        what: &'static str,
        /// When.
        at_s: f64,
    },
    /// A timeline without end.
    #[error("the timeline has more than {0} samples; a longer --timeline-interval-s takes fewer")]
    Samples(u64),
    /// There is no request in it.
    #[error("{name} holds no request")]
    Empty {
        /// The trace.
        name: String,
    },
}

impl TraceError {
    /// An error unless `at_s` is a time that can be told apart from others.
    pub(crate) fn unless_late(what: &'static str, at_s: f64) -> Result<(), TraceError> {
        if at_s <= TIME_S_MAX { Ok(()) } else { Err(TraceError::Late { what, at_s }) }
    }
}

fn after(line: u64) -> String {
    if line == 0 { String::new() } else { format!(" after line {line}") }
}

//! Errors in a trace.

use super::{Format, TIME_S_MAX};

/// Why a trace cannot be read: the place and the expected input.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be opened, read or decompressed.
    #[error("cannot read {name}{}: {cause}", after(*line))]
    Read {
        /// The trace's name.
        name: String,
        /// Number of lines that were read before.
        line: u64,
        /// The error of the operating system or the decompressor.
        #[source]
        cause: std::io::Error,
    },
    /// A line does not conform to the format.
    #[error("{name}, line {line}: {cause}; a line of {format} is {}", .format.example())]
    Line {
        /// The trace's name.
        name: String,
        /// Line number from 1, including blank lines and the header.
        line: u64,
        /// The fault of the line.
        cause: String,
        /// The detected format of the file.
        format: Format,
    },
    /// The first line matches no known format.
    #[error(
        "{name} is not a trace of a known format ({cause}); supported, also as .zst and .gz:\n{}",
        Format::list()
    )]
    UnknownFormat {
        /// The trace's name.
        name: String,
        /// A description of the line.
        cause: String,
    },
    /// A time is so large that times can no longer be distinguished.
    #[error("{what} {at_s:e} s after the trace's start; times up to {TIME_S_MAX:e} s can be distinguished")]
    Late {
        /// The event.
        what: &'static str,
        /// Its time in seconds.
        at_s: f64,
    },
    /// A timeline with too many samples.
    #[error("the timeline has more than {0} samples; a longer --timeline-interval-s takes fewer")]
    Samples(u64),
    /// The trace contains no requests.
    #[error("{name} holds no request")]
    Empty {
        /// The trace's name.
        name: String,
    },
}

impl TraceError {
    /// Returns an error if `at_s` is too large to be distinguished from other times.
    pub(crate) fn unless_late(what: &'static str, at_s: f64) -> Result<(), TraceError> {
        if at_s <= TIME_S_MAX { Ok(()) } else { Err(TraceError::Late { what, at_s }) }
    }
}

fn after(line: u64) -> String {
    if line == 0 { String::new() } else { format!(" after line {line}") }
}

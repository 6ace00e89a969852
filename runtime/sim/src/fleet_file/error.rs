//! Errors in a fleet file.

use mixfleet_hal::catalog::closest_names;
use std::path::PathBuf;

/// Why a fleet file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FleetFileError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// The text is not valid TOML, lacks a key, or has a key that is unknown or of another type; the message
    /// shows the line.
    #[error("{0}")]
    Syntax(String),
    /// A value is not allowed, or contradicts others.
    #[error("{place}: {cause}")]
    Value {
        /// The table and key.
        place: String,
        /// The value, and the allowed values.
        cause: String,
    },
}

impl FleetFileError {
    pub(super) fn value(place: impl Into<String>, cause: impl Into<String>) -> Self {
        FleetFileError::Value { place: place.into(), cause: cause.into() }
    }

    /// The parser's message, and the known name closest to a misspelt one.
    pub(super) fn syntax(error: &toml::de::Error) -> Self {
        let text = error.to_string();
        let mut names = error.message().split('`').skip(1).step_by(2);
        let unknown = error.message().starts_with("unknown ").then(|| names.next()).flatten();
        let nearest = unknown.and_then(|unknown| closest_names(unknown, names).first().copied());
        let is_table = error.message().contains("invalid type: map, expected a sequence");
        FleetFileError::Syntax(match nearest {
            None if is_table => {
                format!("{}; a table that may occur several times is written [[like this]]", text.trim_end())
            }
            Some(nearest) => format!("{}; did you mean `{nearest}`?", text.trim_end()),
            None => text.trim_end().to_owned(),
        })
    }
}

/// Returns `: did you mean a, b?`, or nothing if no known name is similar to `wanted`.
pub(super) fn suggestion<'a>(wanted: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let closest = closest_names(wanted, known);
    if closest.is_empty() { String::new() } else { format!("; closest: {}", closest.join(", ")) }
}

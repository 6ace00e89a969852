//! Number formatting for people.

use super::document::{Rate, Unit};
use crate::numbers::scaled;
use mixfleet_hal::cast::to_usize;

/// Formats a rate: `41.2 GB/s`, `412 GFLOP/s`.
pub fn rate(rate: Rate) -> String {
    let unit = match rate.unit {
        Unit::Flop => "FLOP/s",
        Unit::Byte => "B/s",
    };
    scaled(rate.value, unit)
}

/// Formats a size: `23.5 GiB`.
pub fn gibibytes(bytes: f64) -> String {
    format!("{:.1} GiB", bytes / f64::from(1 << 30))
}

/// Draws a share of one as a bar of `width` characters.
pub fn bar(share: f64, width: usize) -> String {
    let filled = to_usize((share.clamp(0.0, 1.0) * width as f64).round());
    format!("{}{}", "#".repeat(filled), ".".repeat(width - filled))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_shows_a_share_of_one() {
        assert_eq!(bar(0.5, 10), "#####.....");
        assert_eq!(bar(7.0, 3), "###");
    }
}

//! Number formatting for people.

use super::document::{Rate, Unit};

/// Formats with three digits and an SI prefix: `41.2 GB/s`, `812 us`.
pub fn scaled(value: f64, unit: &str) -> String {
    const STEPS: [(f64, &str); 8] =
        [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "u")];
    let magnitude = value.abs();
    // rounding to three digits may carry into the next prefix
    let step = STEPS.iter().find(|(scale, _)| magnitude >= scale * 0.9995);
    let &(scale, prefix) = match (step, magnitude) {
        (_, 0.0) => &(1.0, ""),
        (Some(step), _) => step,
        (None, _) => &(1e-9, "n"),
    };
    let shown = value / scale;
    let digits = match shown.abs() {
        s if s >= 99.95 => 0,
        s if s >= 9.995 => 1,
        _ => 2,
    };
    format!("{shown:.digits$} {prefix}{unit}")
}

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
    let filled = (share.clamp(0.0, 1.0) * width as f64).round() as usize;
    format!("{}{}", "#".repeat(filled), ".".repeat(width - filled))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits() {
        for (value, want) in [
            (41.23e9, "41.2 GB/s"),
            (999.96e9, "1.00 TB/s"),
            (412e9, "412 GB/s"),
            (0.0, "0.00 B/s"),
            (1.5e-6, "1.50 uB/s"),
            (3e-11, "0.03 nB/s"),
            (-2500.0, "-2.50 kB/s"),
        ] {
            assert_eq!(scaled(value, "B/s"), want);
        }
        assert_eq!(bar(0.5, 10), "#####.....");
        assert_eq!(bar(7.0, 3), "###");
    }
}

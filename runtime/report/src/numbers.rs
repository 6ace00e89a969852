//! Numbers as people read them.

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

/// Formats a size: `64KiB`, `3MiB`, `1000B`.
pub fn size(bytes: u64) -> String {
    for (unit, shift) in [("GiB", 30), ("MiB", 20), ("KiB", 10)] {
        if bytes > 0 && bytes.is_multiple_of(1 << shift) {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    format!("{bytes}B")
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
    }
}

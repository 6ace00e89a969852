//! Sizes, bars and histograms in plain text.

use mixfleet_hal::cast::to_usize;

/// Formats a size: `23.5 GiB`.
pub fn gibibytes(bytes: f64) -> String {
    format!("{:.1} GiB", bytes / f64::from(1 << 30))
}

/// Draws a share of one as a bar of `width` characters.
pub fn bar(share: f64, width: usize) -> String {
    let filled = to_usize((share.clamp(0.0, 1.0) * width as f64).round());
    format!("{}{}", "#".repeat(filled), ".".repeat(width - filled))
}

/// Draws how often values lie in each of `bins` equal ranges from the least to the greatest; a point is a
/// range without values.
pub fn histogram(values: &[f64], bins: usize) -> String {
    const HEIGHTS: [char; 8] =
        ['\u{2581}', '\u{2582}', '\u{2583}', '\u{2584}', '\u{2585}', '\u{2586}', '\u{2587}', '\u{2588}'];
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let width = values.iter().copied().fold(f64::NEG_INFINITY, f64::max) - least;
    let mut counts = vec![0_u32; bins];
    for value in values.iter().filter(|value| value.is_finite()) {
        let share = if width > 0.0 { (value - least) / width } else { 0.0 };
        counts[to_usize(share * bins as f64).min(bins - 1)] += 1;
    }
    let most = f64::from(counts.iter().copied().max().unwrap_or(0).max(1));
    let height = |count: u32| match count {
        0 => '.',
        count => HEIGHTS[to_usize((f64::from(count) / most * 8.0).ceil()).clamp(1, 8) - 1],
    };
    counts.into_iter().map(height).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_has_a_bar_for_each_range() {
        assert_eq!(histogram(&[1.0, 1.1, 1.2, 1.3, 5.0, 5.0], 4), "\u{2588}..\u{2584}");
        assert_eq!(histogram(&[2.0, 2.0], 3), "\u{2588}..");
        assert_eq!(histogram(&[], 2), "..");
    }

    #[test]
    fn a_bar_shows_a_share_of_one() {
        assert_eq!(bar(0.5, 10), "#####.....");
        assert_eq!(bar(7.0, 3), "###");
    }
}

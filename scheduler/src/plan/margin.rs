//! How much slower than predicted the devices of a plan may be.

/// Likely error of times if their error is unknown: kernels reach 40 to 95 % of the datasheet.
pub const ERROR_UNKNOWN: f64 = 0.3;

/// The probability that times are no longer than predicted and the likely error more: four in five lie within
/// it, half of the others above.
const LIKELY: f64 = 0.9;

/// The factor on predicted times that the true ones exceed with a probability of no more than 1 -
/// `confidence`, which is from 0.5 (the times as predicted) to below 1. Errors are taken as logistic, which
/// have more large ones than a normal distribution.
pub fn slower(likely_error: Option<f64>, confidence: f64) -> f64 {
    let odds = |probability: f64| (probability / (1.0 - probability)).ln();
    1.0 + likely_error.unwrap_or(ERROR_UNKNOWN) * odds(confidence.clamp(0.5, 0.9999)) / odds(LIKELY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_likely_error_is_exceeded_once_in_ten_and_more_confidence_takes_more() {
        assert_eq!(slower(Some(0.2), 0.5), 1.0);
        assert!((slower(Some(0.2), 0.9) - 1.2).abs() < 1e-12);
        assert!((slower(None, 0.9) - 1.3).abs() < 1e-12);
        let (some, more) = (slower(Some(0.2), 0.8), slower(Some(0.2), 0.99));
        assert!(1.1 < some && some < 1.2 && 1.4 < more && more < 1.45, "{some} {more}");
        assert!(slower(Some(0.2), 1.0).is_finite());
    }
}

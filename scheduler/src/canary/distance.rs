//! How far two answers to one prompt are apart.

use mixfleet_hal::outside::{DrawnToken, RankedToken};

/// Log-probabilities below this are equal: engines write the impossible as some very small number.
const LEAST_LOGPROB: f64 = -30.0;

/// The largest difference of a token's log-probability, in nats, over the tokens up to the first one in which
/// the two answers differ; after it their contexts differ. If only one answer lists a token, the other's
/// value is taken to be at most that of its last listed token. None if nothing can be compared.
pub fn distance(one: &[DrawnToken], other: &[DrawnToken]) -> Option<f64> {
    let mut largest = None;
    for (here, there) in one.iter().zip(other) {
        let apart = beyond(&here.ranked, &there.ranked)?.max(beyond(&there.ranked, &here.ranked)?);
        largest = Some(f64::max(apart, largest.unwrap_or(0.0)));
        if here.token != there.token {
            break;
        }
    }
    largest
}

/// The largest difference over the tokens in `listed`. None if a list is empty.
fn beyond(listed: &[RankedToken], others: &[RankedToken]) -> Option<f64> {
    let value = |ranked: &RankedToken| match ranked.logprob.is_nan() {
        true => LEAST_LOGPROB,
        false => ranked.logprob.clamp(LEAST_LOGPROB, 0.0),
    };
    let last = others.iter().map(value).reduce(f64::min)?;
    let apart = |ranked: &RankedToken| match others.iter().find(|other| other.token == ranked.token) {
        Some(other) => (value(ranked) - value(other)).abs(),
        None => (value(ranked) - last).max(0.0),
    };
    listed.iter().map(apart).reduce(f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(token: &str, ranked: &[(&str, f64)]) -> DrawnToken {
        let one = |at: &(&str, f64)| RankedToken { token: at.0.into(), logprob: at.1 };
        DrawnToken { token: token.into(), ranked: ranked.iter().map(one).collect() }
    }

    #[test]
    fn only_tokens_with_the_same_context_are_compared() {
        let one = [drawn("a", &[("a", -0.1), ("b", -2.0)]), drawn("c", &[("c", -0.5), ("d", -1.0)])];
        let other = [drawn("a", &[("a", -0.2), ("b", -2.5)]), drawn("d", &[("d", -0.1), ("c", -9.0)])];
        assert_eq!(distance(&one[..1], &other), Some(0.5));
        assert_eq!(distance(&one, &other), Some(8.5), "at the first difference they still have one context");
        let apart = [drawn("b", &[("b", -0.1), ("a", -2.0)]), drawn("x", &[("x", 0.0)])];
        assert_eq!(distance(&one, &apart), Some(1.9), "and none behind it");
    }

    #[test]
    fn tokens_that_one_list_lacks_count_by_its_bound() {
        let one = [drawn("a", &[("a", -0.1), ("b", -3.0)])];
        let other = [drawn("a", &[("a", -0.1), ("c", -3.2)])];
        let apart = distance(&one, &other).unwrap();
        assert!((apart - 0.2).abs() < 1e-9, "b is at most -3.2 there: {apart}");
    }

    #[test]
    fn what_cannot_be_compared_is_no_distance() {
        let one = [drawn("a", &[("a", -0.1)])];
        assert_eq!(distance(&one, &[]), None);
        assert_eq!(distance(&one, &[drawn("a", &[])]), None);
        assert_eq!(distance(&one, &[drawn("a", &[("a", f64::NEG_INFINITY)])]), Some(29.9));
        assert_eq!(distance(&one, &[drawn("a", &[("a", f64::NAN)])]), Some(29.9));
    }
}

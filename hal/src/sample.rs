//! The arithmetic of [`OpSig::Sample`](crate::OpSig::Sample), which draws a token from a row of logits.
//!
//! Weights are integers: a token's is [`weight`] of its distance to the best logit, with [`ONE`] for the best
//! token. Their sums are exact in any order, so that all devices draw the same token from the same logits,
//! whichever way they look for it.
//!
//! A row is drawn in this order:
//! 1. Where log-probabilities are wanted: the sum of `weight(logit - best logit, LOG2_E)`, and the best
//!    tokens.
//! 2. Penalties: each token of the row's history has its logit multiplied by the repetition penalty (by its
//!    inverse if the logit is above 0), and then lowered by what the entry says; the logit as it was is left
//!    in the entry.
//! 3. A logit that is NaN or +infinity ends the row, with that token (the lowest such one) and NaN; so does a
//!    row that is all -infinity, with [`NO_TOKEN`] and -infinity. Such a row lists no best tokens.
//! 4. A scale of 0 takes the best token: the largest logit, the lowest id on a tie.
//! 5. The first `top_k` tokens in that order are kept; of these the shortest run whose sum is at least
//!    [`part`]`(sum, top_p)`, and at least one; of these the tokens that weigh at least `min_p` of the best.
//! 6. The token is the first one, by id, at which the cumulated weight of the kept ones exceeds `part(sum,
//!    uniform)`.
//!
//! Every step of the f32 arithmetic is rounded on its own: a backend must not contract a product and a sum.
//! Both zeros are equal, and the distance of equal logits is +0. Subnormal numbers may count as 0.

use crate::cast::{to_u32, to_u64};
use bytemuck::{Pod, Zeroable};

/// The weight of the best token.
pub const ONE: u64 = 1 << 40;
/// The base-2 logarithm of e, the scale of probabilities at temperature 1.
pub const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// The token of a row in which no token is possible.
pub const NO_TOKEN: u32 = u32::MAX;
/// The fraction that keeps everything.
pub const WHOLE: u32 = u32::MAX;
/// Words of a row's parameters, in the order of [`Parameters`].
pub const PARAMETER_WORDS: u32 = 8;
/// Words of a row's result, in the order of [`Drawn`].
pub const DRAWN_WORDS: u32 = 4;
/// Coefficients of `2^f - 1` for f in [-0.5, 0.5], from f^1 to f^6: a minimax fit of the relative error,
/// which is 1e-7 after rounding.
pub const EXP2: [f32; 6] =
    [std::f32::consts::LN_2, 0.240_226_48, 0.055_503_324, 0.009_618_437, 0.001_339_887_5, 0.000_153_533_62];
/// Exponents at or below this weigh nothing.
pub const EXPONENT_MIN: f32 = -41.0;
/// The largest scale; a smaller temperature gives the best token anyway.
pub const SCALE_MAX: f32 = 1e30;

/// How a row is drawn, as the device reads it.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub struct Parameters {
    /// log2(e) / temperature, at most [`SCALE_MAX`]; 0 takes the best token.
    pub scale: f32,
    /// Number of tokens to keep; 0 keeps all.
    pub top_k: u32,
    /// The weight to keep, as a fraction of 2^32; [`WHOLE`] keeps all.
    pub top_p: u32,
    /// The least weight, as a fraction of the best token's, from 0 to 1.
    pub min_p: f32,
    /// Factor of logits up to 0 of tokens in the history.
    pub repetition: f32,
    /// Factor of logits above 0 of tokens in the history.
    pub repetition_inverse: f32,
    /// The draw, as a fraction of 2^32.
    pub uniform: u32,
    /// 1 if log-probabilities are wanted, else 0.
    pub logprobs: u32,
}

impl Parameters {
    /// Takes the best token.
    pub const GREEDY: Parameters = Parameters {
        scale: 0.0,
        top_k: 0,
        top_p: WHOLE,
        min_p: 0.0,
        repetition: 1.0,
        repetition_inverse: 1.0,
        uniform: 0,
        logprobs: 0,
    };
}

/// A row's result, as the device writes it.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Drawn {
    /// The token; [`NO_TOKEN`] if none is possible.
    pub id: u32,
    /// Its logit before penalties, minus the largest one before penalties; NaN if the row holds no numbers.
    pub below_best: f32,
    /// The sum of weights at scale [`LOG2_E`] before penalties, low word first, if log-probabilities are
    /// wanted; else 0.
    pub sum: [u32; 2],
}

impl Drawn {
    /// Natural logarithm of the probability of a token whose logit is `below_best` from the best; meaningful
    /// if log-probabilities were wanted.
    pub fn logprob(&self, below_best: f32) -> f64 {
        let sum = u64::from(self.sum[1]) << 32 | u64::from(self.sum[0]);
        f64::from(below_best) - (sum as f64 / ONE as f64).ln()
    }
}

/// Returns the weight of a token whose logit is `difference` (at most 0) from the best: 2^(difference *
/// scale), in units of 1 / [`ONE`].
pub fn weight(difference: f32, scale: f32) -> u64 {
    let exponent = difference * scale;
    if exponent.is_nan() || exponent <= EXPONENT_MIN {
        return 0;
    }
    let whole = (exponent + 0.5).floor();
    let rest = exponent - whole;
    let power = EXP2.iter().rev().fold(0.0, |sum, coefficient| (sum + coefficient) * rest) + 1.0;
    // exact, since it is a power of two
    let scale = f64::from_bits((1023 + to_u64(whole + 41.0) - 1) << 52);
    to_u64(f64::from(power) * scale)
}

/// Returns the weight of a share of the best token's.
pub fn weight_of(share: f32) -> u64 {
    to_u64(f64::from(share) * ONE as f64)
}

/// Returns `total * fraction / 2^32`, rounded down.
pub fn part(total: u64, fraction: u32) -> u64 {
    let (high, low) = (total >> 32, total & u64::from(u32::MAX));
    high * u64::from(fraction) + ((low * u64::from(fraction)) >> 32)
}

/// Returns `share`, from 0 to 1, as a fraction of 2^32; 1 is [`WHOLE`].
pub fn fraction(share: f64) -> u32 {
    to_u32((share * 4_294_967_296.0).clamp(0.0, f64::from(WHOLE)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Stream;

    #[test]
    fn weights_are_powers_of_two_to_seven_digits_and_the_best_token_has_the_largest() {
        assert_eq!((weight(0.0, LOG2_E), weight(-1.0, 1.0), weight(-40.0, 1.0)), (ONE, ONE / 2, 1));
        assert_eq!([-41.0, -1e9, f32::NEG_INFINITY, f32::NAN].map(|d| weight(d, 1.0)), [0; 4]);
        assert_eq!((weight(0.0, SCALE_MAX), weight(-1e10, SCALE_MAX)), (ONE, 0));
        let mut stream = Stream::new(1);
        for _ in 0..100_000 {
            let difference = crate::cast::to_f32(-20.0 * stream.next_unit());
            let (got, exact) = (weight(difference, 1.0) as f64, f64::from(difference).exp2() * ONE as f64);
            assert!((got - exact).abs() <= 2e-7 * exact + 1.0, "2^{difference}: {got} for {exact}");
            assert!(got <= ONE as f64);
        }
    }

    #[test]
    fn parts_are_exact_and_below_the_whole() {
        let mut stream = Stream::new(2);
        for _ in 0..10_000 {
            let (total, fraction) = (stream.next_u64() >> 1, (stream.next_u64() >> 32) as u32);
            let exact = (u128::from(total) * u128::from(fraction)) >> 32;
            assert_eq!(u128::from(part(total, fraction)), exact);
        }
        assert_eq!((fraction(0.0), fraction(0.5), fraction(1.0), fraction(7.0)), (0, 1 << 31, WHOLE, WHOLE));
        assert_eq!((fraction(-1.0), fraction(f64::NAN)), (0, 0));
    }

    #[test]
    fn a_log_probability_comes_from_the_sum() {
        let sum = 3 * ONE;
        let drawn = Drawn { id: 1, below_best: -1.0, sum: [sum as u32, (sum >> 32) as u32] };
        assert!((drawn.logprob(drawn.below_best) - (-1.0 - 3f64.ln())).abs() < 1e-12);
    }
}

//! Requests of one size at a steady rate.

use super::{Request, TOKENS_MAX};
use mixfleet_hal::random::Stream;
use mixfleet_hal::units::Seconds;

/// Requests of one size that arrive independently of each other. Their prompts share nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SteadyLoad {
    /// Mean requests per second, above 0.
    pub rate: f64,
    /// Number of requests.
    pub requests: u64,
    /// Tokens of a prompt.
    pub prompt_tokens: u32,
    /// Tokens of an answer.
    pub output_tokens: u32,
    /// Seed of the arrivals.
    pub seed: u64,
}

impl SteadyLoad {
    /// The requests; the first arrives at 0.
    pub fn requests(self) -> impl Iterator<Item = Request> {
        let (mut random, mut at_s) = (Stream::new(self.seed), 0.0);
        (0..self.requests).map(move |id| {
            let request = Request {
                id,
                at: Seconds(at_s),
                prompt_tokens: self.prompt_tokens.clamp(1, TOKENS_MAX),
                output_tokens: self.output_tokens.clamp(1, TOKENS_MAX),
                chain: Vec::new(),
                session: None,
                class: None,
            };
            at_s -= (1.0 - random.next_unit()).ln() / self.rate;
            request
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrivals_have_their_rate_and_the_variation_of_a_poisson_process() {
        let load = SteadyLoad { rate: 8.0, requests: 100_000, prompt_tokens: 9, output_tokens: 3, seed: 1 };
        let times: Vec<f64> = load.requests().map(|request| request.at.0).collect();
        assert_eq!(times[0], 0.0);
        let gaps: Vec<f64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let deviation = (gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64).sqrt();
        assert!(
            (mean * 8.0 - 1.0).abs() < 0.02 && (deviation / mean - 1.0).abs() < 0.02,
            "{mean} {deviation}"
        );
        assert!(load.requests().eq(load.requests()));
    }
}

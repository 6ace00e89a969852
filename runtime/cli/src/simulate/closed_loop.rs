//! Options of a closed loop, in place of a trace.

use crate::numbers::{count, seconds};
use clap::Args;
use mixfleet_hal::units::Seconds;
use mixfleet_sim::trace::{ClosedLoop, TOKENS_MAX};

/// Requests of each client, unless the number of all is given; benchmarks of engines commonly use as many.
const REQUESTS_PER_CLIENT: u64 = 10;

#[derive(Debug, Args)]
pub(super) struct ClosedLoopArgs {
    /// In place of --trace: clients that wait for their answers (docs/how-to/simulate-a-fleet.md)
    #[arg(long, value_name = "CLIENTS", conflicts_with_all = ["trace", "against", "capacity", "speedup", "jitter", "limit"])]
    #[arg(value_parser = crate::numbers::count::<u32>(1..=1 << 20))]
    closed_loop: Option<u32>,
    /// Requests of all clients together [default: 10 a client]
    #[arg(long, value_name = "N", requires = "closed_loop", conflicts_with = "trace", value_parser = crate::numbers::count::<u64>(1..=1 << 32))]
    requests: Option<u64>,
    /// Length of their prompts, or least and most
    #[arg(long, value_name = "N|LEAST..MOST", requires = "closed_loop", conflicts_with = "trace", default_value = "1024", value_parser = lengths)]
    input_tokens: TokenRange,
    /// Length of their answers, or least and most
    #[arg(long, value_name = "N|LEAST..MOST", requires = "closed_loop", conflicts_with = "trace", default_value = "1024", value_parser = lengths)]
    output_tokens: TokenRange,
    /// Time from an answer to the client's next request
    #[arg(long, value_name = "SECONDS", requires = "closed_loop", conflicts_with = "trace", value_parser = seconds, hide = true)]
    think_s: Option<f64>,
    /// Time over which the clients' first requests are spread
    #[arg(long, value_name = "SECONDS", requires = "closed_loop", conflicts_with = "trace", value_parser = seconds, hide = true)]
    ramp_s: Option<f64>,
}

/// Least and most tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
struct TokenRange([u32; 2]);

fn lengths(text: &str) -> Result<TokenRange, String> {
    let (least, most) = text.split_once("..").unwrap_or((text, text));
    let number = |text: &str| count::<u32>(1..=TOKENS_MAX.into())(text).ok();
    let both = number(least).zip(number(most)).filter(|(least, most)| least <= most);
    let (least, most) = both.ok_or_else(|| {
        format!("expected a number of tokens from 1 to {TOKENS_MAX}, or two, as in 820..1024")
    })?;
    Ok(TokenRange([least, most]))
}

impl ClosedLoopArgs {
    /// The load, if there is to be one in place of a trace.
    pub(super) fn load(&self, seed: u64) -> Option<ClosedLoop> {
        let clients = self.closed_loop?;
        Some(ClosedLoop {
            clients,
            requests: self.requests.unwrap_or(u64::from(clients) * REQUESTS_PER_CLIENT),
            prompt_tokens: self.input_tokens.0,
            output_tokens: self.output_tokens.0,
            think: Seconds(self.think_s.unwrap_or(0.0)),
            ramp: Seconds(self.ramp_s.unwrap_or(0.0)),
            seed,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_one_number_or_two() {
        assert_eq!(lengths("7"), Ok(TokenRange([7, 7])));
        assert_eq!(lengths("1k..2k"), Ok(TokenRange([1000, 2000])));
        assert_eq!(lengths("820..1024"), Ok(TokenRange([820, 1024])));
        for wrong in ["", "0", "7..", "9..8", "x", "1..99999999999"] {
            assert!(lengths(wrong).unwrap_err().contains("820..1024"), "{wrong}");
        }
    }
}

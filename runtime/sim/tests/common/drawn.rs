//! Fleets and requests of tests, here and in the planner.

use mixfleet_hal::random::Stream;
use mixfleet_hal::units::Seconds;
use mixfleet_sim::fleet_file::FleetFile;
use mixfleet_sim::trace::Request;
use std::path::Path;

/// The fleet that `text` describes, without profiles.
pub(crate) fn fleet_from(text: &str) -> FleetFile {
    let none = |path: &Path| Err(format!("{} is not needed here", path.display()));
    FleetFile::parse(text, Path::new(""), &none).unwrap_or_else(|error| panic!("{error}"))
}

/// Requests that arrive at random until `until_s`, `per_s` per second, with the prompt and output tokens that
/// `tokens` draws.
pub(crate) fn at_random(
    seed: u64,
    until_s: f64,
    per_s: f64,
    tokens: impl Fn(&mut Stream) -> (u64, u64),
) -> Vec<Request> {
    let mut random = Stream::new(seed);
    let (mut at_s, mut requests) = (0.0f64, Vec::new());
    while at_s < until_s {
        let (prompt_tokens, output_tokens) = tokens(&mut random);
        requests.push(Request {
            id: requests.len() as u64,
            at: Seconds(at_s),
            prompt_tokens: prompt_tokens as u32,
            output_tokens: output_tokens as u32,
            chain: Vec::new(),
            session: None,
            class: None,
        });
        at_s -= (1.0 - random.next_unit()).ln() / per_s;
    }
    requests
}

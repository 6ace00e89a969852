//! Parsers for numbers on the command line: implausible values are refused before anything is loaded.

use std::num::NonZeroUsize;

/// Minimum plausible price, so that what a dollar buys stays finite.
pub(crate) const USD_PER_HOUR_MIN: f64 = 1e-6;

/// Maximum prompt tokens of one step: the longest context of any model. Like the other limits it is well
/// above useful values, and low enough that nothing computed from it overflows.
pub(crate) const CHUNK_MAX: i64 = 1 << 20;
/// Maximum sequences in progress on a device.
pub(crate) const SEQUENCES_MAX: i64 = 1 << 16;
const REQUESTS_MAX: usize = 1 << 20;
const GIB_MAX: f64 = 1e6;
const SECONDS_MAX: f64 = 1e9;

/// Parses an amount of memory in GiB.
pub(crate) fn gib(text: &str) -> Result<f64, String> {
    let gib = text.parse().ok().filter(|gib: &f64| *gib > 0.0 && *gib <= GIB_MAX);
    gib.ok_or_else(|| format!("it is not an amount of memory: expected GiB above 0 and up to {GIB_MAX}"))
}

/// Parses a duration in seconds.
pub(crate) fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds: &f64| *seconds > 0.0 && *seconds <= SECONDS_MAX);
    seconds.ok_or_else(|| format!("expected a positive number of seconds, up to {SECONDS_MAX}"))
}

/// Parses a factor or a time; values outside these bounds are useless for any trace.
pub(crate) fn positive(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|value: &f64| (1e-9..=1e9).contains(value));
    value.ok_or_else(|| "expected a number above 0, from 1e-9 to 1e9".into())
}

/// Parses a share of requests.
pub(crate) fn share(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|value: &f64| *value > 0.0 && *value <= 1.0);
    value.ok_or_else(|| "expected a share above 0, at most 1".into())
}

/// Parses a number of requests in progress.
pub(crate) fn requests(text: &str) -> Result<NonZeroUsize, String> {
    let requests = text.parse().ok().filter(|requests: &NonZeroUsize| requests.get() <= REQUESTS_MAX);
    requests.ok_or_else(|| format!("expected a whole number from 1 to {REQUESTS_MAX}"))
}

#[cfg(test)]
mod tests {
    use crate::command_line::Cli;
    use clap::Parser;

    fn error(words: &[&str]) -> Option<String> {
        Cli::try_parse_from(["mixfleet"].iter().chain(words)).err().map(|error| error.to_string())
    }

    /// Checks that every command that loads a model refuses these values.
    fn refused_everywhere(flag: &str, values: &[&str], said: &str) {
        for command in commands(flag) {
            for value in values {
                let flag = format!("{flag}={value}");
                let words: Vec<&str> = command.iter().copied().chain([flag.as_str()]).collect();
                let error = error(&words).unwrap_or_else(|| panic!("{words:?} was taken"));
                assert!(error.contains(said), "{words:?}: {error}");
            }
        }
    }

    fn commands(flag: &str) -> Vec<Vec<&'static str>> {
        let generate = vec!["generate", "--prompt", "x"];
        let mut all = vec![vec!["serve"]];
        if matches!(flag, "--chunk" | "--kv-memory") {
            all.push(generate);
        }
        if cfg!(feature = "fleet")
            && !matches!(flag, "--ttft-slo" | "--tbt-slo" | "--flex-deadline-s" | "--requests")
        {
            all.push(vec!["worker", "--etcd", "http://127.0.0.1:1"]);
        }
        all
    }

    #[test]
    fn a_chunk_or_number_of_sequences_that_does_nothing_is_a_usage_error() {
        refused_everywhere("--chunk", &["0", "-1", "1048577", "4294967296", "nan", "1.5"], "invalid value");
        refused_everywhere("--sequences", &["0", "-1", "65537", "4294967295", "inf"], "invalid value");
        refused_everywhere("--requests", &["0", "-1", "18446744073709551615"], "from 1 to");
        assert_eq!(error(&["serve", "--chunk", "1", "--sequences", "1", "--requests", "1"]), None);
    }

    #[test]
    fn memory_that_is_no_amount_is_a_usage_error() {
        let wrong = ["0", "-1", "nan", "inf", "-inf", "1e308", "1e-400", "lots", ""];
        refused_everywhere("--kv-memory", &wrong, "is not an amount of memory");
        refused_everywhere("--kv-dram", &wrong, "is not an amount of memory");
        refused_everywhere("--kv-ssd-gib", &wrong, "is not an amount of memory");
        assert_eq!(error(&["serve", "--kv-memory", "0.001", "--kv-dram", "1000000"]), None);
    }

    #[test]
    fn a_time_that_nobody_can_keep_to_is_a_usage_error() {
        let wrong = ["0", "-1", "nan", "inf", "1e300", "soon"];
        for flag in ["--ttft-slo", "--tbt-slo", "--flex-deadline-s"] {
            refused_everywhere(flag, &wrong, "a positive number of seconds");
        }
        assert_eq!(
            error(&["serve", "--ttft-slo", "1e-3", "--tbt-slo", "0.02", "--flex-deadline-s", "9"]),
            None
        );
    }
}

//! Parsers for numbers with units on the command line: implausible values are refused before loading.

use mixfleet_hal::units::GIB;
use std::num::NonZeroUsize;
use std::ops::RangeInclusive;

/// Minimum plausible price, so that what a dollar buys stays finite.
pub(crate) const USD_PER_HOUR_MIN: f64 = 1e-6;

/// Maximum prompt tokens of one step: the longest context of any model. Like the other limits it is well
/// above useful values, and low enough that nothing computed from it overflows.
pub(crate) const CHUNK_MAX: u64 = 1 << 20;
/// Maximum sequences in progress on a device.
pub(crate) const SEQUENCES_MAX: u64 = 1 << 16;
const REQUESTS_MAX: u64 = 1 << 20;
const GIB_MAX: f64 = 1e6;
const SECONDS_MAX: f64 = 1e9;

/// Units in lower case with their factors.
type Units = [(&'static str, f64)];

const TIMES: &Units =
    &[("us", 1e-6), ("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("min", 60.0), ("h", 3600.0), ("d", 86_400.0)];
/// Units of memory, in bytes; those with an `i` are powers of 1024.
const SIZES: &Units = &[
    ("b", 1.0),
    ("kb", 1e3),
    ("mb", 1e6),
    ("gb", 1e9),
    ("tb", 1e12),
    ("ki", 1024.0),
    ("kib", 1024.0),
    ("mi", 1_048_576.0),
    ("mib", 1_048_576.0),
    ("gi", 1_073_741_824.0),
    ("gib", 1_073_741_824.0),
    ("ti", 1_099_511_627_776.0),
    ("tib", 1_099_511_627_776.0),
];
const COUNTS: &Units = &[("k", 1e3), ("m", 1e6), ("ki", 1024.0), ("mi", 1_048_576.0)];
const SHARES: &Units = &[("%", 0.01)];
const RATES: &Units = &[("k", 1e3), ("/s", 1.0), ("/min", 1.0 / 60.0), ("/h", 1.0 / 3600.0)];

/// Reads a number with one of `units` behind it, in any case and with or without a space, or without a unit.
fn quantity(text: &str, units: &Units) -> Option<f64> {
    let lower = text.trim().to_ascii_lowercase();
    if let Ok(number) = lower.parse::<f64>() {
        return Some(number);
    }
    let of = |(unit, factor): &(&str, f64)| {
        let number: f64 = lower.strip_suffix(*unit)?.trim_end().parse().ok()?;
        // divided by a whole number, so that 57 % is 0.57
        Some(if *factor < 1.0 { number / (1.0 / factor).round() } else { number * factor })
    };
    units.iter().find_map(of)
}

/// Parses an amount of memory in GiB, or in the unit behind it.
pub(crate) fn gib(text: &str) -> Result<f64, String> {
    let gib = match text.trim().parse() {
        Ok(number) => Some(number),
        Err(_) => bytes(text).map(|bytes| bytes / GIB as f64),
    };
    let gib = gib.filter(|gib: &f64| *gib > 0.0 && *gib <= GIB_MAX);
    gib.ok_or_else(|| {
        format!("it is not an amount of memory: expected GiB above 0 and up to {GIB_MAX}, or a unit as in 512MiB or 4GB")
    })
}

/// Reads an amount of memory with its unit, in bytes.
pub(crate) fn bytes(text: &str) -> Option<f64> {
    let is_plain = text.trim().parse::<f64>().is_ok();
    quantity(text, SIZES).filter(|_| !is_plain)
}

/// Parses a duration in seconds, or in the unit behind it.
pub(crate) fn seconds(text: &str) -> Result<f64, String> {
    let seconds = quantity(text, TIMES).filter(|seconds| *seconds > 0.0 && *seconds <= SECONDS_MAX);
    seconds.ok_or_else(|| {
        format!("expected a positive number of seconds, up to {SECONDS_MAX}, or a unit as in 500ms, 90s, 10m or 2h")
    })
}

/// Parses a duration that may be none.
pub(crate) fn seconds_or_none(text: &str) -> Result<f64, String> {
    if quantity(text, TIMES) == Some(0.0) { Ok(0.0) } else { seconds(text) }
}

/// Parses a factor; values outside these bounds are useless for any trace.
pub(crate) fn positive(text: &str) -> Result<f64, String> {
    let value = quantity(text, COUNTS).filter(|value| (1e-9..=1e9).contains(value));
    value.ok_or_else(|| "expected a number above 0, from 1e-9 to 1e9".into())
}

/// Parses requests per second, or in the unit behind them.
pub(crate) fn per_second(text: &str) -> Result<f64, String> {
    let value = quantity(text, RATES).filter(|value| (1e-9..=1e9).contains(value));
    value.ok_or_else(|| {
        "expected requests per second above 0, from 1e-9 to 1e9, or a unit as in 90/min".into()
    })
}

/// Parses a share of requests.
pub(crate) fn share(text: &str) -> Result<f64, String> {
    let value = quantity(text, SHARES).filter(|value| *value > 0.0 && *value <= 1.0);
    value.ok_or_else(|| "expected a share above 0, at most 1, as in 0.99 or 99%".into())
}

/// Reads a share or a percentage.
pub(crate) fn share_or_percent(text: &str) -> Option<f64> {
    quantity(text, SHARES)
}

/// Parses whole numbers of a range, with `k` for thousands and `Ki` for 1024.
pub(crate) fn count<T: TryFrom<u64>>(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text: &str| {
        let whole = |number: f64| (number.fract() == 0.0 && number >= 0.0).then_some(number);
        let exact = text.trim().parse::<u64>().ok();
        let read = || quantity(text, COUNTS).and_then(whole).map(mixfleet_hal::cast::to_u64);
        let value = exact.or_else(read).filter(|value| range.contains(value));
        let most = *range.end();
        let bounds = match most {
            most if most >= u64::from(u32::MAX) => format!("from {}", range.start()),
            most => format!("from {} to {most}", range.start()),
        };
        value
            .and_then(|value| T::try_from(value).ok())
            .ok_or_else(|| format!("expected a whole number {bounds}, as in 512 or 4k"))
    }
}

/// Parses a number of requests in progress.
pub(crate) fn requests(text: &str) -> Result<NonZeroUsize, String> {
    let requests: usize = count(1..=REQUESTS_MAX)(text)?;
    NonZeroUsize::new(requests).ok_or_else(|| format!("expected a whole number from 1 to {REQUESTS_MAX}"))
}

#[cfg(test)]
mod tests {
    use super::*;
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
    fn units_are_read_in_any_case_with_and_without_a_space() {
        assert_eq!(
            ["500ms", "0.5 s", "1.5m", "2h", "90"].map(seconds),
            [0.5, 0.5, 90.0, 7200.0, 90.0].map(Ok)
        );
        assert_eq!(["4", "4GiB", "4 gib", "4096Mi", "4294967296 B"].map(gib), [4.0; 5].map(Ok));
        assert_eq!(gib("4GB"), Ok(4e9 / GIB as f64));
        assert_eq!(["0.99", "99%", "99 %"].map(share), [0.99; 3].map(Ok));
        assert_eq!(["1000", "1k", "1 K", "0.001M"].map(count::<u32>(1..=4096)), [1000; 4].map(Ok));
        assert_eq!(count::<u32>(1..=4096)("4Ki"), Ok(4096));
        assert_eq!(["2", "2/s", "120/min", "7200 /h"].map(per_second), [2.0; 4].map(Ok));
        for wrong in ["", "ms", "1 parsec", "1e", "nans", "-1s", "0ms", "1.5.2s", "1e400h"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
        for wrong in ["1.5", "5k", "1kk", "k", "-1", "1e9999k"] {
            assert!(count::<u32>(1..=4000)(wrong).is_err(), "{wrong}");
        }
        assert_eq!(count::<u64>(1..=u64::MAX)("18446744073709551615"), Ok(u64::MAX));
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

//! Parsers for values on the command line.

use crate::numbers;
use mixfleet_hal::cast::to_u64;
use mixfleet_hwtests::validate::MemoryAsked;

/// Parses an amount of memory: `512MiB`, `4GB` or `80%`.
pub(crate) fn memory(text: &str) -> Result<MemoryAsked, String> {
    let wrong = || format!("'{text}' is not an amount of memory such as 512MiB, 4GB or 80%");
    if text.contains('%') {
        return numbers::share(text).map(MemoryAsked::Share).map_err(|_| wrong());
    }
    let bytes = numbers::bytes(text).filter(|bytes| bytes.is_finite() && *bytes >= 1.0);
    bytes.map(|bytes| MemoryAsked::Bytes(to_u64(bytes))).ok_or_else(wrong)
}

/// Parses a duration, `90s`, `10m` or `24h`, into seconds. A unit is required, since a number may mean
/// minutes.
pub(crate) fn seconds(text: &str) -> Result<f64, String> {
    let wrong = || format!("'{text}' is not a time such as 30s, 10m or 24h");
    // A month is longer than any soak.
    let is_time = |seconds: &f64| *seconds < 31.0 * 86_400.0 && text.trim().parse::<f64>().is_err();
    numbers::seconds(text).ok().filter(is_time).ok_or_else(wrong)
}

/// Parses a level: `4` or `L4`.
pub(crate) fn level(text: &str) -> Result<u8, String> {
    let digits = text.strip_prefix(['L', 'l']).unwrap_or(text);
    let known = digits.parse().ok().filter(|level| *level <= 6);
    known.ok_or_else(|| format!("'{text}' is not a level from 0 to 6"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hal::units::MIB;

    #[test]
    fn levels_are_read_with_and_without_their_letter() {
        assert_eq!(["0", "L4", "l6"].map(level), [Ok(0), Ok(4), Ok(6)]);
        for wrong in ["7", "L", "-1", "LL4", ""] {
            assert!(level(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn amounts_and_times_are_read() {
        assert_eq!(memory("512MiB"), Ok(MemoryAsked::Bytes(512 * MIB)));
        assert_eq!(memory("1.5GiB"), Ok(MemoryAsked::Bytes(1536 * MIB)));
        assert_eq!(memory("80%"), Ok(MemoryAsked::Share(0.8)));
        for wrong in ["512", "512Mb/s", "-1GiB", "101%", "0%", "%", "", "NaN%"] {
            assert!(memory(wrong).is_err(), "{wrong}");
        }
        assert_eq!((seconds("90s"), seconds("10m"), seconds("1.5h")), (Ok(90.0), Ok(600.0), Ok(5400.0)));
        for wrong in ["10", "40d", "m", "-5s", "0s", "1e9h"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }
}

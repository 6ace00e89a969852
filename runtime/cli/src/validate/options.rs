//! Parsers for values on the command line.

use mixfleet_hal::cast::to_u64;
use mixfleet_hal::units::{GIB, MIB};
use mixfleet_hwtests::validate::MemoryAsked;

/// Parses an amount of memory: `512MiB`, `4GiB` or `80%`.
pub(crate) fn memory(text: &str) -> Result<MemoryAsked, String> {
    let wrong = || format!("'{text}' is not an amount of memory such as 512MiB, 4GiB or 80%");
    let number =
        |digits: &str| digits.parse::<f64>().ok().filter(|n| n.is_finite() && *n > 0.0).ok_or_else(wrong);
    if let Some(percent) = text.strip_suffix('%') {
        let percent = number(percent)?;
        return if percent <= 100.0 { Ok(MemoryAsked::Share(percent / 100.0)) } else { Err(wrong()) };
    }
    let bytes = match (text.strip_suffix("MiB"), text.strip_suffix("GiB")) {
        (Some(mib), _) => number(mib)? * MIB as f64,
        (_, Some(gib)) => number(gib)? * GIB as f64,
        _ => return Err(wrong()),
    };
    Ok(MemoryAsked::Bytes(to_u64(bytes)))
}

/// Parses a duration, `90s`, `10m` or `24h`, into seconds.
pub(crate) fn seconds(text: &str) -> Result<f64, String> {
    let wrong = || format!("'{text}' is not a time such as 30s, 10m or 24h");
    let at = text.find(|c: char| c.is_ascii_alphabetic()).ok_or_else(wrong)?;
    let unit = match &text[at..] {
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err(wrong()),
    };
    let number = text[..at].parse::<f64>().map_err(|_| wrong())?;
    // A month is longer than any soak.
    let seconds = number * unit;
    if seconds.is_finite() && seconds > 0.0 && seconds < 31.0 * 86_400.0 { Ok(seconds) } else { Err(wrong()) }
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
        for wrong in ["512", "512MB", "-1GiB", "101%", "0%", "%", "", "NaN%"] {
            assert!(memory(wrong).is_err(), "{wrong}");
        }
        assert_eq!((seconds("90s"), seconds("10m"), seconds("1.5h")), (Ok(90.0), Ok(600.0), Ok(5400.0)));
        for wrong in ["10", "10d", "m", "-5s", "0s", "1e9h"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }
}

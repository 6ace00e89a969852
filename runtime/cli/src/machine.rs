//! What the operating system reports about the machine on which a profile is measured. Facts that it does not
//! report are left out.

use mixfleet_hal::units::MIB;
use mixfleet_hwtests::profile::Fact;
use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Buffers rotate over this many times the last-level cache.
const CACHES: u64 = 8;
/// Share of busy time before a measurement above which a machine is not quiet.
const BUSY_SHARE: f64 = 0.1;
const LOOK: Duration = Duration::from_millis(300);

/// The current time in UTC, RFC 3339.
pub(crate) fn now() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    rfc3339(seconds)
}

/// Converts days to a date as in Hinnant, "chrono-compatible low-level date algorithms" (2013).
fn rfc3339(seconds: u64) -> String {
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let shifted = days + 719_468; // days since 0000-03-01
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month_shifted + 2) / 5 + 1;
    let month = if month_shifted < 10 { month_shifted + 3 } else { month_shifted - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

fn line(path: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    Some(text.lines().next()?.trim().to_owned()).filter(|line| !line.is_empty())
}

/// Kernel, governor and load: the conditions of a measurement.
pub(crate) fn facts() -> Vec<Fact> {
    let known = mixfleet_discover::conditions(Path::new("/")).pairs();
    known.into_iter().map(|(name, value)| Fact::new(name, value)).collect()
}

/// Bytes that exceed the caches of this machine's cores, at least `least`.
pub(crate) fn cold_bytes(least: u64) -> u64 {
    let size = |index: usize| {
        let text = line(&format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size"))?;
        text.strip_suffix('K').and_then(|kib| kib.parse::<u64>().ok()).map(|kib| kib << 10)
    };
    let largest = (0..8).filter_map(size).max().unwrap_or(0);
    // A virtual machine may report only part of its caches, so this never goes below the default.
    (CACHES * largest).max(least).min(least.max(4096 * MIB))
}

/// Whether other processes use this machine's cores now.
pub(crate) fn busy() -> bool {
    let ticks = || {
        let text = line("/proc/stat")?;
        let ticks: Vec<u64> = text.split_whitespace().skip(1).filter_map(|t| t.parse().ok()).collect();
        let idle = ticks.get(3)? + ticks.get(4)?;
        Some((ticks.iter().take(8).sum::<u64>(), idle))
    };
    let Some((total, idle)) = ticks() else { return false };
    std::thread::sleep(LOOK);
    let Some((total_after, idle_after)) = ticks() else { return false };
    let (total, idle) = (total_after.saturating_sub(total), idle_after.saturating_sub(idle));
    total > 0 && (total - idle.min(total)) as f64 > BUSY_SHARE * total as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_become_dates() {
        for (seconds, want) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_795_132_800, "2026-11-20T00:00:00Z"),
        ] {
            assert_eq!(rfc3339(seconds), want);
        }
    }
}

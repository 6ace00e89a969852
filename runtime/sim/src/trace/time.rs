//! Parsing of the dates in logs.

use toml::value::{Date, Datetime, Offset};

/// Nanoseconds since 1970 of `2023-11-16 18:15:46.6805900`, in UTC unless an offset such as `+02:00` follows.
pub(super) fn utc_nanoseconds(text: &str) -> Option<i64> {
    let Datetime { date: Some(date), time: Some(time), offset } = text.parse().ok()? else { return None };
    let offset_minutes = match offset {
        Some(Offset::Custom { minutes }) => i64::from(minutes),
        Some(Offset::Z) | None => 0,
    };
    let minutes = i64::from(time.hour) * 60 + i64::from(time.minute) - offset_minutes;
    let seconds = days(date) * 86_400 + minutes * 60 + i64::from(time.second?);
    seconds.checked_mul(1_000_000_000)?.checked_add(i64::from(time.nanosecond.unwrap_or(0)))
}

/// Days from 1970-01-01 to a date of the Gregorian calendar.
fn days(date: Date) -> i64 {
    const BEFORE: [i64; 12] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
    let year = i64::from(date.year);
    // Leap days up to a year's end, from year 1 on. A year's own counts from March on.
    let leap_days = |year: i64| year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    let leap_year = if date.month > 2 { year } else { year - 1 };
    (year - 1970) * 365 + leap_days(leap_year) - leap_days(1969)
        + BEFORE[usize::from(date.month) - 1]
        + i64::from(date.day)
        - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_dates() {
        // The expected values come from `date -u -d ... +%s`.
        for (text, seconds) in [
            ("1970-01-01 00:00:00", 0),
            ("2000-02-29 23:59:59", 951_868_799),
            ("2000-03-01 00:00:00", 951_868_800),
            ("2023-11-16 18:15:46", 1_700_158_546),
            ("2024-05-10T00:00:00Z", 1_715_299_200),
            ("2024-05-10 02:00:00+02:00", 1_715_299_200),
            ("2024-05-09 18:30:00-05:30", 1_715_299_200),
            ("2100-03-01 00:00:00", 4_107_542_400),
        ] {
            assert_eq!(utc_nanoseconds(text), Some(seconds * 1_000_000_000), "{text}");
        }
        assert_eq!(utc_nanoseconds("1970-01-01 00:00:01.6805900"), Some(1_680_590_000));
        assert_eq!(utc_nanoseconds("1970-01-01 00:00:00.1234567899"), Some(123_456_789));
    }

    #[test]
    fn what_is_no_date() {
        for text in [
            "",
            "2023-11-16",
            "2023-13-16 00:00:00",
            "2023-02-29 00:00:00",
            "2023-04-31 00:00:00",
            "2023-04-00 00:00:00",
            "2023-04-01 24:00:00",
            "2023-04-01 00:60:00",
            "2023-04-01 00:00",
            "2023-04-01 00:00:00.x",
            "2023-04-01 00:00:00+1",
            "+023-04-01 00:00:00",
            "2023-04-01 00:00:00é",
        ] {
            assert_eq!(utc_nanoseconds(text), None, "{text}");
        }
    }
}

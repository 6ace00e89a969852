//! Parsing of the dates in logs.

/// Nanoseconds since 1970 of `2023-11-16 18:15:46.6805900`, in UTC unless an offset such as `+02:00` follows.
pub(super) fn utc_nanoseconds(text: &str) -> Option<i64> {
    let (date, rest) = text.split_once([' ', 'T'])?;
    let (clock, offset_s) = split_offset(rest)?;
    let mut date = date.splitn(3, '-');
    let (year, month, day) = (number(date.next()?, 4)?, number(date.next()?, 2)?, number(date.next()?, 2)?);
    let (clock, fraction) = clock.split_once('.').unwrap_or((clock, ""));
    let mut clock = clock.splitn(3, ':');
    let (hour, minute) = (number(clock.next()?, 2)?, number(clock.next()?, 2)?);
    let second = number(clock.next()?, 2)?;
    // A second of 60 is a leap second.
    if hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    let seconds = days(year, month, day)? * 86_400 + hour * 3_600 + minute * 60 + second - offset_s;
    seconds.checked_mul(1_000_000_000)?.checked_add(nanoseconds(fraction)?)
}

/// Splits `18:15:46.68+02:00` into the time and the offset in seconds.
fn split_offset(text: &str) -> Option<(&str, i64)> {
    if let Some(clock) = text.strip_suffix('Z') {
        return Some((clock, 0));
    }
    let Some(place) = text.find(['+', '-']) else { return Some((text, 0)) };
    let (clock, offset) = text.split_at(place);
    let (hours, minutes) = offset[1..].split_once(':')?;
    let offset_s = number(hours, 2)? * 3_600 + number(minutes, 2)? * 60;
    Some((clock, if offset.starts_with('-') { -offset_s } else { offset_s }))
}

fn number(text: &str, digits: usize) -> Option<i64> {
    let right = text.len() == digits && text.bytes().all(|byte| byte.is_ascii_digit());
    right.then(|| text.parse().ok()).flatten()
}

/// Nanoseconds of the digits after the decimal point; those beyond the ninth are dropped.
fn nanoseconds(fraction: &str) -> Option<i64> {
    if !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let digits = fraction.bytes().chain(std::iter::repeat(b'0')).take(9);
    Some(digits.fold(0, |sum, digit| sum * 10 + i64::from(digit - b'0')))
}

/// Days from 1970-01-01 to a date of the Gregorian calendar.
fn days(year: i64, month: i64, day: i64) -> Option<i64> {
    const BEFORE: [i64; 13] = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334, 365];
    if !(1..=12).contains(&month) {
        return None;
    }
    let leap = i64::from(year % 4 == 0 && (year % 100 != 0 || year % 400 == 0));
    let length = BEFORE[month as usize] - BEFORE[month as usize - 1] + if month == 2 { leap } else { 0 };
    if !(1..=length).contains(&day) {
        return None;
    }
    // Leap days of all years before this one, from year 1 on.
    let leap_days = |years: i64| years.div_euclid(4) - years.div_euclid(100) + years.div_euclid(400);
    let whole_years = (year - 1970) * 365 + leap_days(year - 1) - leap_days(1969);
    Some(whole_years + BEFORE[month as usize - 1] + if month > 2 { leap } else { 0 } + day - 1)
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

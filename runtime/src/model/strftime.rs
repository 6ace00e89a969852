//! Date formatting for chat templates.

use mixfleet_hal::cast::to_usize;

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
const DAY_S: u64 = 86_400;

/// The day of a time in seconds since 1970, in UTC, as 2026-11-30.
pub fn utc_day(unix_s: u64) -> String {
    strftime("%F", unix_s)
}

/// Formats `now_s` seconds since 1970 in UTC, with the codes that Python shares with C: Y y m d e j H I M S p
/// B b h A a F T D Z z % and `-` for no leading zero. Unknown codes are left as they are.
pub(super) fn strftime(format: &str, now_s: u64) -> String {
    let (year, month, day) = civil(now_s / DAY_S);
    let second = now_s % DAY_S;
    let (hour, minute) = (second / 3600, second / 60 % 60);
    let month_name = MONTHS[to_usize(month) - 1];
    let day_name = DAYS[(now_s / DAY_S % 7) as usize];
    let mut out = String::with_capacity(format.len() + 16);
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut code = chars.next();
        let bare = code == Some('-');
        if bare {
            code = chars.next();
        }
        let two = |n: u64| if bare { n.to_string() } else { format!("{n:02}") };
        let text = match code {
            Some('Y') => year.to_string(),
            Some('y') => two(year % 100),
            Some('m') => two(month),
            Some('d') => two(day),
            Some('e') => format!("{day:2}"),
            Some('j') => format!("{:03}", day_of_year(year, month, day)),
            Some('H') => two(hour),
            Some('I') => two((hour + 11) % 12 + 1),
            Some('M') => two(minute),
            Some('S') => two(second % 60),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.into(),
            Some('B') => month_name.into(),
            Some('b' | 'h') => month_name[..3].into(),
            Some('A') => day_name.into(),
            Some('a') => day_name[..3].into(),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('T') => format!("{hour:02}:{minute:02}:{:02}", second % 60),
            Some('D') => format!("{month:02}/{day:02}/{:02}", year % 100),
            Some('Z') => "UTC".into(),
            Some('z') => "+0000".into(),
            Some('%') => "%".into(),
            Some(other) => format!("%{other}"),
            None => "%".into(),
        };
        out.push_str(&text);
    }
    out
}

/// Year, month and day of a day counted from 1970-01-01, in the Gregorian calendar, by Howard Hinnant's
/// `civil_from_days`.
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468; // from 0000-03-01
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153; // counted from March
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year + u64::from(month <= 2), month, day)
}

fn day_of_year(year: u64, month: u64, day: u64) -> u64 {
    let leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
    before[to_usize(month) - 1] + day + u64::from(leap && month > 2)
}

#[cfg(test)]
mod tests {
    use super::strftime;

    #[test]
    fn known_moments() {
        let all = "%Y-%m-%d %H:%M:%S %a %A %b %B %j %y %I %p %-d %e %F %T %D %Z%z %% %Q";
        assert_eq!(
            strftime(all, 0),
            "1970-01-01 00:00:00 Thu Thursday Jan January 001 70 12 AM 1  1 1970-01-01 00:00:00 01/01/70 UTC+0000 % %Q"
        );
        assert_eq!(strftime("%d %b %Y %j %I%p", 951_868_799 - 86_400), "28 Feb 2000 059 11PM");
        assert_eq!(strftime("%d %B %Y %j", 951_782_400), "29 February 2000 060");
        assert_eq!(strftime("%A, %-d %B %Y %T", 1_795_180_271), "Friday, 20 November 2026 13:11:11");
        assert_eq!(strftime("%", 0), "%");
    }
}

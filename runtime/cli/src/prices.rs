//! Reads dated offers from a CSV file.

use crate::machine;
use anyhow::{Context, Result, anyhow};
use csv::StringRecord;
use mixfleet_hal::cast::to_usize;
use mixfleet_hal::catalog;
use mixfleet_hal::economics::{Offer, Price};
use mixfleet_hal::files::{self, TEXT_BYTES_MAX};
use mixfleet_hal::units::UsdPerHour;
use std::path::Path;

const COLUMNS: &str = "device_id, price_hourly and/or spot_hourly; optional: gpu_count, cloud, region, \
                       instance, tier, date, source";

/// Rents of machines that can be meant, in $/h.
const PRICES: std::ops::RangeInclusive<f64> = 1e-4..=1e5;

/// Age in days beyond which a price is marked as old.
pub(crate) const OLD_DAYS: i64 = 120;

/// Age in days of a price's newest offer, today; none without a date.
pub(crate) fn age_days(price: &Price) -> Option<i64> {
    Some(day_number(&machine::now())? - day_number(price.date.as_deref()?)?)
}

/// Days since 1970-01-01 of a text that begins with `YYYY-MM-DD`; Hinnant, "chrono-compatible low-level date
/// algorithms" (2013).
fn day_number(date: &str) -> Option<i64> {
    let mut fields = date.get(..10)?.split('-').map(str::parse::<i64>);
    let [year, month, day] = [fields.next()?.ok()?, fields.next()?.ok()?, fields.next()?.ok()?];
    let valid = (1..=12).contains(&month) && (1..=31).contains(&day);
    let year = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    valid.then(|| era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468)
}

/// The offers of a file, and the line at which each device was first named.
#[derive(Debug, Default)]
pub(crate) struct PriceList {
    pub(crate) offers: Vec<Offer>,
    file: String,
    rows: Vec<(u64, String)>,
}

impl PriceList {
    /// Warnings about rows without effect, those whose device is neither a part of
    /// the catalog nor one of `others`. A device is reported once, with its first line.
    pub(crate) fn warnings(&self, others: &[&str]) -> Vec<String> {
        let file = &self.file;
        let known = |name: &str| {
            catalog::part(name).is_some_and(|part| part.id.eq_ignore_ascii_case(name))
                || others.iter().any(|other| other.eq_ignore_ascii_case(name))
        };
        let mut warnings = Vec::new();
        let mut told: Vec<&str> = Vec::new();
        for (line, name) in self.rows.iter().filter(|(_, name)| !known(name)) {
            if told.iter().any(|other| other.eq_ignore_ascii_case(name)) {
                continue;
            }
            told.push(name);
            let more = self.rows.iter().filter(|(_, other)| other.eq_ignore_ascii_case(name)).count() - 1;
            let rows = if more == 0 { String::new() } else { format!(" (and {more} rows more)") };
            let closest = catalog::closest(name);
            let hint = match closest.first() {
                Some(closest) => format!("closest: {closest}"),
                None => "'mixfleet parts' lists the catalog".to_owned(),
            };
            warnings.push(format!(
                "{file}:{line}: no part is called '{name}'{rows}, its price is not used; {hint}"
            ));
        }
        warnings
    }
}

/// Reads a file. Rows without a device id (machines without accelerators) are skipped.
pub(crate) fn read(path: &Path) -> Result<PriceList> {
    let file = path.display().to_string();
    let bytes =
        files::read(path, TEXT_BYTES_MAX).with_context(|| format!("cannot read the prices in {file}"))?;
    parse(&file, &bytes)
}

fn parse(file: &str, bytes: &[u8]) -> Result<PriceList> {
    let mut reader = csv::ReaderBuilder::new().trim(csv::Trim::All).comment(Some(b'#')).from_reader(bytes);
    let columns = PriceColumns(reader.headers().map_err(|error| malformed(file, &error))?.clone());
    let has = |column| columns.at(column).is_some();
    if !has("device_id") || !(has("price_hourly") || has("spot_hourly")) {
        return Err(anyhow!("{file}:1: the header lacks columns; needed are {COLUMNS}"));
    }
    let is_twice =
        |name: &&str| columns.0.iter().filter(|column| column.eq_ignore_ascii_case(name)).count() > 1;
    let read = ["device_id", "price_hourly", "spot_hourly", "gpu_count", "currency", "unit"];
    if let Some(twice) = read.iter().find(|name| is_twice(name)) {
        return Err(anyhow!("{file}:1: the header has the column '{twice}' twice"));
    }
    let mut list = PriceList { file: file.to_owned(), ..PriceList::default() };
    for record in reader.records() {
        if let Some(start) = record.as_ref().map_or_else(csv::Error::position, StringRecord::position)
            && swallows_the_rest(bytes, start)
        {
            return Err(anyhow!("{file}:{}: a quote is opened and never closed", start.line()));
        }
        let record = record.map_err(|error| malformed(file, &error))?;
        let line = record.position().map_or(0, csv::Position::line);
        let row = PriceRow { file, line, columns: &columns, record: &record };
        let offers = row.offers()?;
        if !offers.is_empty() {
            list.rows.push((line, row.text("device_id").to_owned()));
        }
        list.offers.extend(offers);
    }
    if list.offers.is_empty() {
        return Err(anyhow!(
            "{file}: no offers below the header; add a row, or leave the file away for the built-in prices"
        ));
    }
    Ok(list)
}

/// Whether a field that begins with a quote on the row at `start` extends to the end of the file: the row has
/// an odd number of quotes, and so has the file from there on.
fn swallows_the_rest(bytes: &[u8], start: &csv::Position) -> bool {
    let odd = |text: &[u8]| text.iter().filter(|byte| **byte == b'"').count() % 2 == 1;
    let rest = bytes.get(to_usize(start.byte())..).unwrap_or_default();
    let line = rest.trim_ascii_start().split(|byte| *byte == b'\n').next().unwrap_or_default();
    let quoted = line.split(|byte| *byte == b',').any(|field| field.trim_ascii_start().starts_with(b"\""));
    quoted && odd(line) && odd(rest)
}

fn malformed(file: &str, error: &csv::Error) -> anyhow::Error {
    let line = error.position().map_or(1, csv::Position::line);
    match error.kind() {
        csv::ErrorKind::UnequalLengths { expected_len, len, .. } => anyhow!(
            "{file}:{line}: the row has {len} fields and the header {expected_len}; quote fields that hold a comma"
        ),
        csv::ErrorKind::Utf8 { .. } => anyhow!("{file}:{line}: not UTF-8; save the file as UTF-8"),
        other => anyhow!("{file}:{line}: not CSV: {other:?}"),
    }
}

struct PriceColumns(StringRecord);

impl PriceColumns {
    fn at(&self, name: &str) -> Option<usize> {
        self.0.iter().position(|column| column.eq_ignore_ascii_case(name))
    }
}

struct PriceRow<'a> {
    file: &'a str,
    line: u64,
    columns: &'a PriceColumns,
    record: &'a StringRecord,
}

impl PriceRow<'_> {
    /// The offers of a row: one on-demand offer, one spot offer, both, or none.
    fn offers(&self) -> Result<Vec<Offer>> {
        let device = self.text("device_id");
        if device.is_empty() {
            return Ok(Vec::new());
        }
        let date = self.date()?;
        let devices = self.devices()?;
        self.check_units()?;
        let mut offers = Vec::new();
        for (column, spot) in [("price_hourly", false), ("spot_hourly", true)] {
            let Some(price) = self.price(column)? else { continue };
            offers.push(Offer {
                device: device.into(),
                price: UsdPerHour(price / devices),
                spot,
                provider: self.text("cloud").into(),
                tier: self.text("tier").into(),
                region: self.text("region").into(),
                source: self.source(),
                date: date.clone(),
            });
        }
        if offers.is_empty() {
            let what = "a device without a price; fill in price_hourly or spot_hourly, or drop the row";
            return Err(self.error("price_hourly", what));
        }
        Ok(offers)
    }

    fn text(&self, column: &str) -> &str {
        self.columns.at(column).and_then(|at| self.record.get(at)).unwrap_or_default()
    }

    fn source(&self) -> String {
        match self.text("source") {
            "" => self.file.into(),
            source => source.into(),
        }
    }

    /// Number of devices of a row, whose price is that of the whole machine.
    fn devices(&self) -> Result<f64> {
        match self.text("gpu_count") {
            "" => Ok(1.0),
            text => match text.parse::<u32>() {
                Ok(count) if count > 0 => Ok(f64::from(count)),
                _ => Err(self.error("gpu_count", &format!("'{text}' is not a count of devices; 1 or more"))),
            },
        }
    }

    fn price(&self, column: &str) -> Result<Option<f64>> {
        let text = self.text(column);
        if text.is_empty() {
            return Ok(None);
        }
        match text.parse::<f64>() {
            Ok(price) if PRICES.contains(&price) => Ok(Some(price)),
            Ok(price) if price.is_finite() && price > 0.0 => {
                Err(self.error(column, &format!("'{text}' is no rent; write $/h between 0.0001 and 100,000")))
            }
            _ => Err(self.error(column, &format!("'{text}' is not a price; write $/h as in 2.69"))),
        }
    }

    /// Refuses prices in another currency, or for another time than an hour.
    fn check_units(&self) -> Result<()> {
        let known = [
            ("currency", &["USD", "$", "US$"][..]),
            ("unit", &["hour", "hourly", "h", "hr", "hrs", "1 hour", "$/h", "USD/h", "USD/hour"]),
        ];
        for (column, values) in known {
            let text = self.text(column);
            if !text.is_empty() && !values.iter().any(|value| value.eq_ignore_ascii_case(text)) {
                return Err(self.error(column, &format!("'{text}'; write prices in US dollars per hour")));
            }
        }
        Ok(())
    }

    fn date(&self) -> Result<Option<String>> {
        let text = self.text("date");
        match text {
            "" => Ok(None),
            _ if is_date(text) => Ok(Some(text.into())),
            _ => Err(self.error("date", &format!("'{text}' is not a date; write YYYY-MM-DD"))),
        }
    }

    fn error(&self, column: &str, what: &str) -> anyhow::Error {
        anyhow!("{}:{}: column {column}: {what}", self.file, self.line)
    }
}

/// Whether `text` is a day of the Gregorian calendar as YYYY-MM-DD.
fn is_date(text: &str) -> bool {
    let shape = text.len() == 10
        && text
            .bytes()
            .enumerate()
            .all(|(at, b)| if at == 4 || at == 7 { b == b'-' } else { b.is_ascii_digit() });
    if !shape {
        return false;
    }
    let number = |at: std::ops::Range<usize>| text[at].parse::<u32>().unwrap_or(0);
    let (year, month, day) = (number(0..4), number(5..7), number(8..10));
    let leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    let days = match month {
        4 | 6 | 9 | 11 => 30,
        2 => 28 + u32::from(leap),
        1..=12 => 31,
        _ => 0,
    };
    (1..=days).contains(&day)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_hal::economics::{REFERENCE_OFFERS, Selection};

    fn error(text: &str) -> String {
        parse("offers.csv", text.as_bytes()).unwrap_err().to_string()
    }

    #[test]
    fn a_row_is_divided_by_its_devices_and_may_be_two_offers() {
        let text = "cloud,device_id,gpu_count,price_hourly,spot_hourly,date\n\
                    aws,H100-SXM-80GB,8,55.04,16,2026-07-20\n\
                    aws,,0,2.32,,2026-07-20\n\
                    acme,L4,,0.5,,\n";
        let offers = parse("offers.csv", text.as_bytes()).unwrap().offers;
        let prices: Vec<(&str, f64, bool)> =
            offers.iter().map(|offer| (offer.device.as_str(), offer.price.0, offer.spot)).collect();
        assert_eq!(
            prices,
            [("H100-SXM-80GB", 6.88, false), ("H100-SXM-80GB", 2.0, true), ("L4", 0.5, false)]
        );
        assert_eq!((offers[0].date.as_deref(), offers[2].date.as_deref()), (Some("2026-07-20"), None));
        assert_eq!(offers[2].source, "offers.csv");
    }

    #[test]
    fn mistakes_are_told_with_file_line_column_and_remedy() {
        let head = "device_id,gpu_count,price_hourly,date\n";
        for (row, wanted) in [
            (
                "L4,1,cheap,",
                "offers.csv:2: column price_hourly: 'cheap' is not a price; write $/h as in 2.69",
            ),
            ("L4,1,-1,", "column price_hourly: '-1'"),
            ("L4,1,2.69e9,", "offers.csv:2: column price_hourly: '2.69e9' is no rent"),
            ("L4,1,1e-9,", "column price_hourly: '1e-9' is no rent"),
            ("L4,1,NaN,", "column price_hourly: 'NaN'"),
            ("L4,0,1,", "column gpu_count: '0'"),
            ("L4,1,,", "fill in price_hourly"),
            ("L4,1,1,May 2026", "column date: 'May 2026' is not a date; write YYYY-MM-DD"),
            ("L4,1,1,2026-02-31", "column date: '2026-02-31' is not a date"),
            ("L4,1,1,2025-02-29", "column date: '2025-02-29' is not a date"),
            ("L4,1,1,2026-13-01", "column date: '2026-13-01' is not a date"),
            ("L4,1,1,\"2026\nL4,1,1,\nL4,1,1,", "offers.csv:2: a quote is opened and never closed"),
            ("L4,\"1,1,\nL4,1,1,", "offers.csv:2: a quote is opened and never closed"),
            ("L4,1", "offers.csv:2: the row has 2 fields and the header 4"),
        ] {
            let error = error(&format!("{head}{row}\n"));
            assert!(error.contains(wanted), "{error}");
        }
        assert!(error(&format!("{head}L4,1,1,\nL4,1,x,\n")).starts_with("offers.csv:3:"));
        assert!(error("id,price\nL4,1\n").contains("offers.csv:1: the header lacks columns"));
        assert!(error("").contains("the header lacks columns"));
        let twice = error("device_id,price_hourly,Price_Hourly\nL4,1,2\n");
        assert!(twice.contains("offers.csv:1: the header has the column 'price_hourly' twice"), "{twice}");
        for (column, value) in [("currency", "EUR"), ("unit", "month")] {
            let error = error(&format!("device_id,price_hourly,{column}\nL4,1,{value}\n"));
            assert!(error.contains(&format!("offers.csv:2: column {column}: '{value}'")), "{error}");
        }
        assert!(parse("offers.csv", b"device_id,price_hourly,currency,unit\nL4,1,usd,Hour\n").is_ok());
        let latin = parse("offers.csv", b"device_id,price_hourly\nL4\xe9,1\n").unwrap_err().to_string();
        assert!(latin.contains("offers.csv:2: not UTF-8"), "{latin}");
    }

    #[test]
    fn what_has_no_effect_is_told_with_its_line_and_the_closest_part() {
        let warnings = |rows: &str, others: &[&str]| {
            let text = format!("device_id,price_hourly,date\n{rows}");
            parse("offers.csv", text.as_bytes()).unwrap().warnings(others)
        };
        let told = warnings("l4,1,\nrtx4099,1,\nmine,1,2024-02-29\nRTX4099,2,\n", &["mine"]);
        assert_eq!(told.len(), 1, "{told:?}");
        assert!(
            told[0].starts_with("offers.csv:3: no part is called 'rtx4099' (and 1 rows more)"),
            "{told:?}"
        );
        assert!(told[0].ends_with("closest: RTX-4090"), "{told:?}");
        let empty = parse("offers.csv", b"device_id,price_hourly,date\n").unwrap_err().to_string();
        assert!(empty.contains("no offers below the header"), "{empty}");
        assert_eq!(warnings("L4,\"1\",\n", &[]), Vec::<String>::new());
        assert_eq!(PriceList::default().warnings(&[]), Vec::<String>::new());
    }

    #[test]
    fn days_are_counted_over_leap_years_and_bad_dates_have_none() {
        for (date, days) in [("1970-01-01", 0), ("2000-02-29", 11_016), ("2026-05-24T10:00:00Z", 20_597)] {
            assert_eq!(day_number(date), Some(days), "{date}");
        }
        assert_eq!(day_number("2026-03-01").unwrap() - day_number("2026-02-28").unwrap(), 1);
        for bad in ["", "2026", "2026-13-01", "2026-00-10", "spring 2026", "2026-0a-01"] {
            assert_eq!(day_number(bad), None, "{bad}");
        }
    }

    /// The built-in prices follow from the documented rule and their source collection, up to how that
    /// collection weighed several offers of one provider.
    #[test]
    fn the_rule_reproduces_the_built_in_prices() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/gpu-prices.csv");
        if !path.exists() {
            eprintln!("SKIPPED: ../shared/data/gpu-prices.csv is absent; rule not compared");
            return;
        }
        let offers = read(&path).unwrap().offers;
        assert!(offers.len() > 1000, "{}", offers.len());
        let mut compared = 0;
        for reference in REFERENCE_OFFERS {
            let Some(price) = Selection::default().price(reference.id, &offers) else { continue };
            let ratio = price.usd_per_hour.0 / reference.usd_per_hour;
            assert!((0.85..=1.15).contains(&ratio), "{}: {price:?} against {reference:?}", reference.id);
            compared += 1;
        }
        assert!(compared >= 30, "{compared}");
    }
}
